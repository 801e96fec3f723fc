"""Log probabilities of tokens in OpenAI's forms."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from edgellm.results import Piece, TokenLogprob
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
    tokenizer: Tokenizer, pieces: Sequence[Piece], *, echo: bool = False, offset: int = 0
) -> dict[str, Any]:
    """Return a completion's log probabilities, as parallel lists over its tokens.

    Args:
        echo: whether those of the prompt come first, where a piece has them.
        offset: number of characters of the answer before these pieces.
    """
    scored = [token for piece in pieces for token in piece.prompt_logprobs] if echo else []
    sampled = [
        TokenLogprob(piece.token, piece.logprob, top=piece.top_logprobs or {})
        for piece in pieces
        if piece.token is not None
    ]
    tokens = (*scored, *sampled)
    shown = {id: _text(tokenizer, id) for each in tokens for id in (each.token, *each.top)}
    texts, tops, offsets = [], [], []
    for number, each in enumerate(tokens):
        texts.append(shown[each.token])
        top: dict[str, float] = {}
        for id, logprob in each.top.items():
            top.setdefault(shown[id], logprob)  # of equal texts the most likely
        tops.append(None if each.logprob is None else top)
        offsets.append(offset)
        # a begin token is no part of the text
        begins = number == 0 and scored and each.token == tokenizer.bos_id
        offset += 0 if begins else len(shown[each.token])
    return {
        "tokens": texts,
        "token_logprobs": [each.logprob for each in tokens],
        "top_logprobs": tops,
        "text_offset": offsets,
    }


def prompt_logprobs(
    tokenizer: Tokenizer, scored: Iterable[TokenLogprob]
) -> list[dict[str, Any] | None]:
    """Return the log probabilities of a prompt in vLLM's form, by token ids."""
    return [None if each.logprob is None else _ranked(tokenizer, each) for each in scored]


def _ranked(tokenizer: Tokenizer, scored: TokenLogprob) -> dict[str, Any]:
    ranks = {id: rank for rank, id in enumerate(scored.top, 1)}
    return {
        str(id): {
            "logprob": logprob,
            "rank": ranks.get(id, scored.rank),
            "decoded_token": _text(tokenizer, id),
        }
        for id, logprob in {scored.token: scored.logprob, **scored.top}.items()
    }


def _text(tokenizer: Tokenizer, token: int) -> str:
    return tokenizer.bytes_of(token).decode(errors="replace")
