"""Log probabilities of tokens in OpenAI's forms."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from edgellm.results import Piece
from edgellm.text.tokenizer import Tokenizer


def chat_logprobs(tokenizer: Tokenizer, pieces: Iterable[Piece]) -> dict[str, Any]:
    """Return a chat's log probabilities: each token, its bytes, and the most likely tokens."""
    return {"content": [_entry(tokenizer, piece) for piece in pieces if piece.token is not None]}


def _entry(tokenizer: Tokenizer, piece: Piece) -> dict[str, Any]:
    assert piece.token is not None
    top = piece.top_logprobs or {}
    return {
        **token_logprob(tokenizer, piece.token, piece.logprob),
        "top_logprobs": [token_logprob(tokenizer, id, value) for id, value in top.items()],
    }


def token_logprob(tokenizer: Tokenizer, token: int, logprob: float | None) -> dict[str, Any]:
    """Return a token's text, log probability and bytes."""
    data = tokenizer.bytes_of(token)
    return {
        "token": data.decode(errors="replace"),
        "logprob": logprob,
        "bytes": list(data),
    }


def completion_logprobs(
    tokenizer: Tokenizer, pieces: Sequence[Piece], *, offset: int = 0
) -> dict[str, Any]:
    """Return a completion's log probabilities, as parallel lists over its tokens.

    Args:
        offset: number of characters of the answer before these pieces.
    """
    sampled = [piece for piece in pieces if piece.token is not None]
    texts, tops, offsets = [], [], []
    for piece in sampled:
        assert piece.token is not None
        text = tokenizer.bytes_of(piece.token).decode(errors="replace")
        top = (piece.top_logprobs or {}).items()
        texts.append(text)
        tops.append({tokenizer.bytes_of(id).decode(errors="replace"): lp for id, lp in top})
        offsets.append(offset)
        offset += len(text)
    return {
        "tokens": texts,
        "token_logprobs": [piece.logprob for piece in sampled],
        "top_logprobs": tops,
        "text_offset": offsets,
    }
