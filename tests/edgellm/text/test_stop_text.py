from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgellm.engine.answer import StopText


def test_nothing_of_a_split_stop_text_shows() -> None:
    stop = StopText(["\n\nUser:"])
    shown = [stop.add(piece) for piece in ("Hi", "\n", "\nUs", "er", ": more", "!")]
    assert shown == ["Hi", "", "", "", "", ""]
    assert stop.stopped


def test_held_back_text_comes_after_all() -> None:
    stop = StopText(["STOP"])
    assert stop.add("a ST") == "a "
    assert stop.add("ART") == "START"
    assert stop.add("S") == ""
    assert stop.finish() == "S"
    assert not stop.stopped


def test_the_earliest_stop_wins() -> None:
    stop = StopText(["bbb", "b"])
    assert stop.add("aabbb") == "aa"


@given(
    pieces=st.lists(st.text("ab", max_size=4), max_size=12),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
)
def test_pieces_make_no_difference(pieces: list[str], stops: list[str]) -> None:
    whole = "".join(pieces)
    stop = StopText(stops)
    shown = "".join(stop.add(piece) for piece in pieces) + stop.finish()
    # a stop text is found when it is complete, and the first complete one may begin later
    ends = [(whole.find(s) + len(s), whole.find(s)) for s in stops if s in whole]
    if not ends:
        assert shown == whole
        assert not stop.stopped
    else:
        assert stop.stopped
        assert whole.startswith(shown)
        assert not any(s in shown for s in stops)


def test_it_tells_which_one_it_was() -> None:
    stop = StopText(["three", "two"], min_indent=2)
    assert (stop.add("one tw"), stop.stop) == ("one ", None)
    assert (stop.add("o three"), stop.stop) == ("", "two")
    outdent = StopText(["two"], min_indent=2)
    assert (outdent.add("one\ntwo"), outdent.stopped, outdent.stop) == ("one", True, None)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("x\n    y\nz", "x\n    y"),
        ("x\n\n    y\n  z", "x\n\n    y"),
        ("x\n    y\n    z\n", "x\n    y\n    z\n"),
        ("x\n   ", "x\n   "),
        ("x\n\t\t\t\ty\n\tz", "x\n\t\t\t\ty"),
    ],
)
def test_a_line_that_is_indented_less_ends_it(text: str, shown: str) -> None:
    for size in (1, 2, 100):
        stop = StopText([], min_indent=4)
        pieces = [stop.add(text[i : i + size]) for i in range(0, len(text), size)]
        assert "".join(pieces) + stop.finish() == shown
        assert stop.stopped == (shown != text)


def test_which_text_stopped_it() -> None:
    stop = StopText(["END", "\n\n"], min_indent=1)
    stop.add("a\n")
    assert (stop.stopped, stop.stop) == (False, None)
    stop.add("\nEND")
    assert (stop.stopped, stop.stop) == (True, "\n\n")
    outdent = StopText(["END"], min_indent=1)
    outdent.add("a\nb END")
    assert (outdent.stopped, outdent.stop) == (True, None)
