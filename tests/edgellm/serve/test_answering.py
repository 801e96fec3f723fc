"""Events of an answer whose tokens come several at once."""

from __future__ import annotations

from edgellm.engine.samples import SamplePieces
from edgellm.results import Piece
from edgellm.serve.answering import deltas
from edgellm.tool_use import ToolCallDelta

_BEGUN = ToolCallDelta(0, "call_1", "turn")
_MIDDLE, _CLOSE = ToolCallDelta(0, arguments='{"on": '), ToolCallDelta(0, arguments="true}")


def told(*pieces: Piece) -> list[str | ToolCallDelta]:
    """Reasoning, text and calls in the order in which dialects write them."""
    parts: list[str | ToolCallDelta] = []
    for delta in deltas(SamplePieces(0, pieces)):
        parts += [text for text in (delta.reasoning, delta.text) if text]
        parts += delta.calls
    return parts


def test_a_batch_without_another_order_is_one_delta() -> None:
    pieces = (
        Piece("", 1, reasoning="Hm"),
        Piece("a", 2),
        Piece("b", 3),
        Piece("", 4, tool_calls=(_BEGUN, _MIDDLE)),
    )
    (delta,) = deltas(SamplePieces(2, pieces))
    assert (delta.sample, delta.text, delta.pieces) == (2, "ab", pieces)
    assert (delta.reasoning, delta.calls) == ("Hm", (_BEGUN, _MIDDLE))


def test_text_behind_a_call_stays_there() -> None:
    call = Piece("", 1, tool_calls=(_MIDDLE,))
    assert told(call, Piece("", 2, tool_calls=(_CLOSE,)), Piece("then", 3)) == [
        _MIDDLE,
        _CLOSE,
        "then",
    ]
    again = ToolCallDelta(1, "call_2", "turn")
    assert told(call, Piece("x", 2, tool_calls=(_CLOSE, again)), Piece("y", 3)) == [
        _MIDDLE,
        _CLOSE,
        "x",
        again,
        "y",
    ]


def test_reasoning_behind_text_stays_there() -> None:
    assert told(Piece("a", 1), Piece("", 2, reasoning="b"), Piece("c", 3)) == ["a", "b", "c"]


def test_all_tokens_are_in_the_deltas() -> None:
    pieces = (Piece("", 1, tool_calls=(_BEGUN,)), Piece("a", 2), Piece("", 3), Piece("b"))
    parts = deltas(SamplePieces(0, pieces))
    assert [piece for delta in parts for piece in delta.pieces] == list(pieces)
    assert deltas(SamplePieces(0, (Piece("", finish_reason="length"),))) == []
