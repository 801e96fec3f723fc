"""Drafts from earlier tokens, and the policy of drafts, by themselves."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgellm.engine.draft_policy import Choice, DraftPolicy
from edgellm.engine.drafter import Evidence, Kind
from edgellm.engine.prompt_lookup import PromptLookup, kind_of_match

MODEL = Kind("model", 0.7, most=3, token_steps=0.4)


def chosen(policy: DraftPolicy, match: int) -> int:
    """Tokens that are drafted behind a match."""
    offers = [Evidence(kind_of_match(match))] if match else []
    choice = policy.choose(offers, most=63)
    return 0 if choice is None else choice.count


def teach(policy: DraftPolicy, seconds: float, *, match: int, drafted: int, accepted: int) -> None:
    choice = Choice(Evidence(kind_of_match(match)), drafted)
    policy.drafted(seconds, choice, drafted=drafted, accepted=accepted)


@given(st.lists(st.integers(0, 3), max_size=60))
def test_a_draft_stood_there_before(tokens: list[int]) -> None:
    lookup = PromptLookup(tokens)
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
    at, length = PromptLookup([*file, 50, 51, *other, *file]).match()
    assert (at, length) == (20, 20)
    at, length = PromptLookup([*file[:12], 50, 51, 9, 10, 11, 77, *file[:12]]).match()
    assert (at, length) == (12, 12)


def test_tokens_of_the_same_hash_are_no_match(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PromptLookup, "_key", lambda *_: 0)
    assert PromptLookup([1, 2, 3, 4, 5, 6, 7, 8]).match() == (8, 0)


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
