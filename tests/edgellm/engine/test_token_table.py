"""The table of what followed before, in any answer."""

from __future__ import annotations

from engine_without_model import ask, finish, start

from edgellm.engine.prompt_lookup import TableDrafter, TokenTable

TEXT = [7 * i % 101 for i in range(60)]


def test_another_answer_is_drafted_to_its_end() -> None:
    table = TokenTable()
    assert TableDrafter(table, root=b"").evidence(TEXT) is None
    drafter = TableDrafter(table, root=b"")
    assert drafter.evidence(TEXT[:11]) is None  # too few tokens to know them by
    assert drafter.evidence(TEXT[:20]) is not None
    assert drafter.propose(TEXT[:20], 5) == TEXT[20:25]
    assert drafter.evidence(TEXT[:26]) is not None
    assert drafter.propose(TEXT[:26], 63) == TEXT[26:]
    assert drafter.evidence([200, *TEXT[:12]]) is not None  # what stands before is all the same


def test_the_last_of_several_is_drafted() -> None:
    table = TokenTable()
    for last in (1, 2):
        TableDrafter(table, root=b"").evidence([*TEXT[:20], last])
    drafter = TableDrafter(table, root=b"")
    assert drafter.evidence(TEXT[:20]) is not None
    assert drafter.propose(TEXT[:20], 3) == [2]


def test_owners_do_not_find_each_other_s_tokens() -> None:
    table = TokenTable()
    TableDrafter(table, root=b"a").evidence(TEXT)
    assert TableDrafter(table, root=b"b").evidence(TEXT[:20]) is None


def test_what_is_wrong_five_times_is_forgotten() -> None:
    table = TokenTable()
    TableDrafter(table, root=b"").evidence(TEXT)
    for times in range(5):
        assert table.find(hash((b"", *TEXT[:12]))) == TEXT[12], times
        drafter = TableDrafter(table, root=b"")
        drafter.evidence(TEXT[20:40])
        assert drafter.propose(TEXT[20:40], 4) == TEXT[40:44]
        drafter.evidence([*TEXT[20:40], 300 + times, 8])
        TableDrafter(table, root=b"").evidence(TEXT[20:44])
    assert table.find(hash((b"", *TEXT[:12]))) is None


def test_a_context_that_forgets_is_learnt_again() -> None:
    drafter = TableDrafter(TokenTable(), root=b"")
    drafter.evidence(TEXT)
    assert drafter.evidence(TEXT[:2] + TEXT[30:50]) is not None
    assert drafter.propose(TEXT[:2] + TEXT[30:50], 2) == TEXT[50:52]


def test_the_same_prompt_again_is_drafted() -> None:
    llm = start(256, blocks=8)
    prompt = [i % 50 for i in range(0, 200, 7)]
    (first,) = ask(llm, prompt, max_tokens=30)
    finish(llm, [first])
    (again,) = ask(llm, prompt, max_tokens=30)
    finish(llm, [again])
    assert again.context.tokens == first.context.tokens
    assert again.stats().drafts["table"].accepted > 0
