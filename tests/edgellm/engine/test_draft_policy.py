"""Drafts from earlier tokens, and the policy of drafts, by themselves."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgellm.engine.draft_policy import Choice, DraftPolicy, Evidence, Kind, Purse, common_length
from edgellm.engine.prompt_lookup import LookupDrafter, PromptLookup, kind_of_match
from edgellm.engine.speculation import Speculation
from edgellm.errors import CacheFullError

MODEL = Kind("model", 0.7, most=3, keep=0.95, token_steps=0.4)


def chosen(policy: DraftPolicy, match: int) -> int:
    """Tokens that are drafted behind a match."""
    offers = [Evidence(kind_of_match(match))] if match else []
    choice = policy.choose(offers, most=63)
    return 0 if choice is None else choice.count


def teach(policy: DraftPolicy, seconds: float, *, match: int, drafted: int, accepted: int) -> None:
    choice = Choice(Evidence(kind_of_match(match)), drafted)
    policy.drafted(seconds, choice, drafted=drafted, accepted=accepted)


def lookup_of(tokens: list[int]) -> PromptLookup:
    lookup = PromptLookup(tokens)
    lookup.look_back(len(tokens))
    return lookup


@given(st.lists(st.integers(0, 3), max_size=60), st.integers(0, 60), st.integers(1, 20))
def test_a_text_may_be_entered_in_parts(tokens: list[int], begun: int, part: int) -> None:
    """The last part first, and beside new tokens: in the end it is as if all came one by one."""
    one_by_one, lookup = PromptLookup([]), PromptLookup(tokens[:begun])
    for token in tokens:
        one_by_one.add(token)
    for token in tokens[begun:]:
        lookup.look_back(part)
        lookup.add(token)
    for _ in range(0, begun, part):
        at, length = lookup.match()
        assert tokens[at - length : at] == tokens[len(tokens) - length :]
        lookup.look_back(part)
    assert lookup._after == one_by_one._after
    assert lookup.match() == one_by_one.match()


def test_a_step_enters_few_tokens_of_a_long_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """32,768 tokens at once were 0.2 s in which no other answer went on."""
    tokens = [*range(30_000), 7, 8, 9]
    entered, key = [0], PromptLookup._key

    def counted(self: PromptLookup, size: int, end: int) -> int:
        entered[0] += 1
        return key(self, size, end)

    monkeypatch.setattr(PromptLookup, "_key", counted)
    drafter = LookupDrafter(32_768)
    steps = 0
    while drafter.evidence(tokens) is None:
        steps += 1
        assert entered[0] <= 4 * 2048 + 4
        entered[0] = 0
    assert drafter.propose(tokens, 2) == [10, 11]
    assert steps == 30_003 // 2048


@given(st.lists(st.integers(0, 3), max_size=60))
def test_a_draft_stood_there_before(tokens: list[int]) -> None:
    lookup = lookup_of(tokens)
    at, length = lookup.match()
    earlier = [i for i in range(3, len(tokens)) if tokens[i - 3 : i] == tokens[-3:]]
    assert bool(length) == bool(earlier)
    if length:
        assert at < len(tokens)
        assert tokens[at - length : at] == tokens[-length:]
        assert length == at or tokens[at - length - 1] != tokens[-length - 1]
        following = lookup.following(at, 70)
        whole = tokens + following  # what repeats goes on
        assert following == whole[at : at + 70]


def test_the_longer_match_is_taken() -> None:
    file, other = list(range(20)), [99, 17, 18, 19, 98]
    at, length = lookup_of([*file, 50, 51, *other, *file]).match()
    assert (at, length) == (20, 20)
    at, length = lookup_of([*file[:12], 50, 51, 9, 10, 11, 77, *file[:12]]).match()
    assert (at, length) == (12, 12)


def test_tokens_of_the_same_hash_are_no_match(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PromptLookup, "_key", lambda *_: 0)
    assert lookup_of([1, 2, 3, 4, 5, 6, 7, 8]).match() == (8, 0)


def test_long_matches_lead_to_long_drafts() -> None:
    policy = DraftPolicy()
    assert chosen(policy, 64) == 0  # until it is known what a plain step takes
    policy.plain(1.0)
    lengths = [chosen(policy, match) for match in (0, 3, 4, 8, 16, 32, 64)]
    assert lengths[0] == 0 < lengths[1] <= 3
    assert lengths == sorted(lengths)
    assert lengths[-1] >= 31


def test_drafts_rest_when_they_do_not_pay() -> None:
    """Where each draft is wrong, a step in ten is one; where it is right again, more are."""
    policy = DraftPolicy()
    policy.plain(1.0)

    def drafts(steps: int, *, right: bool) -> int:
        count = 0
        for _ in range(steps):
            length = chosen(policy, 3)
            count += length > 0
            if length:
                seconds = 1 + length / 12
                teach(policy, seconds, match=3, drafted=length, accepted=length if right else 0)
        return count

    drafts(100, right=False)
    assert drafts(100, right=False) <= 10
    assert drafts(400, right=True) > 200


def test_slow_steps_make_drafts_short() -> None:
    policy = DraftPolicy()
    policy.plain(1.0)
    longest = chosen(policy, 64)
    for _ in range(30):
        length = chosen(policy, 64)
        teach(policy, float(length), match=64, drafted=length, accepted=length)
    assert 0 < chosen(policy, 64) < longest


def test_a_hiccup_is_forgotten() -> None:
    policy = DraftPolicy()
    policy.plain(1.0)
    for length in (1, 3, 7, 15, 31, 63):
        teach(policy, 500.0, match=64, drafted=length, accepted=length)
    assert any(chosen(policy, 64) for _ in range(1000))


def test_a_draft_that_was_cut_counts_as_its_size() -> None:
    policy = DraftPolicy()
    policy.plain(1.0)
    for _ in range(30):
        teach(policy, 40.0, match=64, drafted=20, accepted=20)
    assert chosen(policy, 64) != 31


class Simulation:
    """An answer whose steps take 1 + a tenth for each row, and what is drafted 0.4 a token."""

    def __init__(self, right: float, *, purse: Purse | None = None, prompt: int = 0) -> None:
        self.policy = DraftPolicy(purse)
        self.seconds = 0.0
        self.tokens = self.drafts = 0
        self._right, self._behind = right, prompt
        self._random = random.Random(0)

    def run(self, steps: int) -> Simulation:
        for _ in range(steps):
            self._step()
        return self

    @property
    def speed(self) -> float:
        """Tokens in the time of a plain step."""
        return self.tokens / self.seconds

    def _step(self) -> None:
        choice = self.policy.choose([Evidence(MODEL, self._behind + 1)], most=63)
        if choice is None:
            self.policy.plain(1.0)
            self._behind += 1
            return self._count(1, 1.0)
        count, accepted = choice.count, 0
        while accepted < count and self._random.random() < self._right:
            accepted += 1
        seconds = 1 + count / 10 + 0.4 * count + 0.05 * self._behind
        self.policy.drafted(seconds, choice, drafted=count, accepted=accepted)
        self._behind = 0
        self.drafts += 1
        self._count(1 + accepted, seconds)

    def _count(self, tokens: int, seconds: float) -> None:
        self.tokens += tokens
        self.seconds += seconds


@pytest.mark.parametrize("right", [0.0, 0.3, 0.5, 0.6])
@pytest.mark.parametrize("prompt", [0, 300])
def test_a_model_that_does_not_pay_costs_three_percent_at_most(right: float, prompt: int) -> None:
    purse = Purse()
    answers = [Simulation(right, purse=purse, prompt=prompt).run(200) for _ in range(40)]
    tokens = sum(each.tokens for each in answers)
    assert sum(each.seconds for each in answers) <= 1.03 * tokens + 64
    assert sum(each.drafts for each in answers[20:]) < 400  # of 4,000 steps
    assert answers[0].drafts > 0  # it was tried


def test_a_model_that_is_right_drafts_at_nearly_every_step() -> None:
    answer = Simulation(0.9).run(400)
    assert answer.drafts > 350
    assert answer.speed > 1.3


def test_a_model_that_gets_better_drafts_again() -> None:
    purse = Purse()
    Simulation(0.0, purse=purse).run(400)
    answers = [Simulation(0.95, purse=purse, prompt=20).run(400) for _ in range(8)]
    assert answers[-1].drafts > 350


def test_a_plain_step_now_and_then_shows_what_one_takes() -> None:
    policy, counts = DraftPolicy(), [0, 0]
    for _ in range(330):
        choice = policy.choose([Evidence(MODEL, 1)], most=63)
        counts[choice is not None] += 1
        if choice is None:
            policy.plain(1.0)
        else:
            policy.drafted(1.5, choice, drafted=choice.count, accepted=choice.count)
    assert 10 <= counts[0] <= 20


def test_a_process_that_was_stopped_for_a_while_empties_no_purse() -> None:
    purse = Purse()
    policy = DraftPolicy(purse)
    for _ in range(4):
        policy.plain(1.0)
    policy.drafted(500.0, Choice(Evidence(MODEL, 1), 3), drafted=3, accepted=3)
    assert purse.steps > 50


def test_a_prompt_that_costs_more_than_it_may_lose_is_left_alone() -> None:
    policy = DraftPolicy()
    for _ in range(10):
        policy.plain(1.0)
    assert policy.choose([Evidence(MODEL, 400)], most=63) is not None
    assert policy.choose([Evidence(MODEL, 2000)], most=63) is None


def test_a_long_match_goes_before_the_model_and_the_model_before_a_short_one() -> None:
    policy = DraftPolicy()
    for _ in range(4):
        policy.plain(1.0)
    fast = Kind("model", 0.7, most=3, token_steps=0.1)
    for match, drafter in ((32, "lookup"), (16, "lookup"), (3, "model")):
        choice = policy.choose([Evidence(kind_of_match(match)), Evidence(fast)], most=63)
        assert choice is not None
        assert choice.kind.drafter == drafter


def test_no_more_tokens_than_are_wanted() -> None:
    policy = DraftPolicy()
    policy.plain(1.0)
    for most in (0, 2, 5):
        choice = policy.choose([Evidence(kind_of_match(64))], most=most)
        assert (0 if choice is None else choice.count) == most


def test_an_answer_that_shifts_is_looked_up_anew() -> None:
    drafter = LookupDrafter(100)
    tokens = [1, 2, 3, 4, 5, 6, 1, 2, 3]
    assert drafter.evidence(tokens) == Evidence(kind_of_match(3))
    assert drafter.propose(tokens, 2) == [4, 5]
    assert drafter.evidence([1, 2, 3]) is None
    assert drafter.evidence([1, 2, 3, 9, 1, 2, 3]) is not None


@pytest.mark.parametrize("company", [1, 3, 4])
def test_the_more_sequences_the_surer_a_draft_has_to_be(company: int) -> None:
    policy = DraftPolicy()
    policy.plain(1.0, company=company)
    matches = (3, 4, 8, 16, 32)
    drafts = [
        policy.choose([Evidence(kind_of_match(match))], most=63, company=company)
        for match in matches
    ]
    first = next(i for i, choice in enumerate(drafts) if choice is not None)
    assert first == {1: 0, 3: 1, 4: 2}[company]


def test_models_draft_for_a_sequence_by_itself() -> None:
    policy = DraftPolicy()
    for company in (1, 2) * 4:
        policy.plain(1.0, company=company)
    free = Kind("model", 0.9, most=3, token_steps=0.01)
    assert policy.choose([Evidence(free)], most=63) is not None
    assert policy.choose([Evidence(free)], most=63, company=2) is None


def test_all_sequences_of_a_step_gain_or_none_drafts() -> None:
    some, more = (Choice(Evidence(MODEL), count) for count in (1, 3))
    assert common_length([some, more]) == 1
    assert common_length([more, None]) == common_length([]) == 0


def test_a_drafter_is_too_far_behind_where_catching_up_takes_more_than_may_be_lost() -> None:
    purse = Purse()
    policy = DraftPolicy(purse)
    most = int(purse.steps * 8 / MODEL.token_steps)
    assert not policy.too_far(Evidence(MODEL, behind=most))
    assert policy.too_far(Evidence(MODEL, behind=most + 1))
    assert not policy.too_far(Evidence(kind_of_match(3), behind=10**6))  # takes no time


class Scripted:
    """A drafter that always has evidence; its guesses raise `error` where there is one."""

    name = "model"

    def __init__(self, behind: int = 0) -> None:
        self.behind, self.closed = behind, 0
        self.error: Exception | None = None

    def evidence(self, tokens: Sequence[int]) -> Evidence:
        return Evidence(MODEL, behind=self.behind)

    def propose(self, tokens: Sequence[int], count: int) -> list[int]:
        if self.error is not None:
            raise self.error
        return [7] * count

    def close(self) -> None:
        self.closed += 1


def test_a_drafter_without_room_drafts_again_when_there_is_some() -> None:
    drafter = Scripted()
    drafts = Speculation([drafter], DraftPolicy(Purse()))
    for _ in range(4):
        drafts.computed([], seconds=1.0)
        drafts.settle()
    drafter.error = CacheFullError("full")
    choice = drafts.choose(9, [1, 2, 3], company=1)
    assert choice is not None
    assert drafts.draft(choice.count, [1, 2, 3]) == []
    assert drafter.closed == 1
    assert "no room" in drafts.failure
    drafter.error = None
    assert drafts.choose(9, [1, 2, 3], company=1) is not None
    assert drafts.draft(1, [1, 2, 3]) == [7]


def test_a_drafter_that_stays_out_is_told() -> None:
    drafts = Speculation([Scripted(behind=10_000)], DraftPolicy(Purse()))
    assert drafts.choose(9, [1, 2, 3], company=1) is None
    assert drafts.failure.startswith("model: 10000 tokens behind")
