"""Perplexity of a text: how surprised the model is, through prefill or through decode."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from edgellm.engine import Engine
from edgellm.errors import OptionError
from edgellm.prefill import Hooks
from edgellm.sampling import log_softmax

PATHS = ("prefill", "decode")
Progress = Callable[[int, int], None]
# Through the LM head at a time: an interrupt waits for no more, and a row takes 400 KB.
_HEAD_ROWS = 64


@dataclass(frozen=True)
class PerplexityResult:
    """The result and what it was measured with.

    Attributes:
        perplexity: exp of the mean negative log-likelihood of the scored tokens.
        tokens: how many were scored.
        through: prefill or decode.
        flavour: precision of that path.
    """

    perplexity: float
    tokens: int
    windows: int
    window: int
    through: str
    flavour: str
    kv_format: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def perplexity(
    engine: Engine,
    text: str,
    *,
    window: int = 512,
    max_windows: int | None = None,
    through: str = "prefill",
    progress: Progress | None = None,
) -> PerplexityResult:
    """Score a text in windows that do not overlap, each on an empty cache.

    The first token of a window is context only; a begin token is put before each window if the
    model asks for one. A remainder shorter than a window is left out, unless it is all there is.

    Raises:
        OptionError: a window of fewer than 2 tokens or longer than the context, or too short a
            text.
    """
    if through not in PATHS:
        raise OptionError(f"`through` is {through!r}: allowed are {', '.join(PATHS)}")
    if not 2 <= window <= engine.ctx_size:
        raise OptionError(
            f"`window` is {window}; allowed is 2 to the context size {engine.ctx_size}"
        )
    if max_windows is not None and max_windows < 1:
        raise OptionError(f"`max_windows` is {max_windows}; allowed is 1 or more")
    tokenizer = engine.tokenizer
    bos = [t for t in tokenizer.encode("")[:1] if t == tokenizer.bos_id]
    windows = _windows(tokenizer.encode(text, add_bos=False), window - len(bos), max_windows)
    score = _score_prefill if through == "prefill" else _score_decode
    total, count = 0.0, 0
    for done, tokens in enumerate(windows, 1):
        likelihoods = score(engine, [*bos, *tokens])[max(len(bos) - 1, 0) :]
        total += float(likelihoods.sum())
        count += likelihoods.size
        if progress is not None:
            progress(done, len(windows))
    flavour = engine.prefill.flavour if through == "prefill" else engine.decoder.flavour
    return PerplexityResult(
        math.exp(-total / count),
        count,
        len(windows),
        window,
        through,
        flavour,
        engine.options.kv_format,
    )


def _windows(tokens: list[int], size: int, limit: int | None) -> list[list[int]]:
    whole = [tokens[i : i + size] for i in range(0, len(tokens) - size + 1, size)]
    if not whole and len(tokens) >= 2:
        whole = [tokens]
    if not whole:
        raise OptionError(f"the text has {len(tokens)} tokens; at least 2 are needed")
    return whole[:limit]


def _score_prefill(engine: Engine, tokens: Sequence[int]) -> np.ndarray[Any, Any]:
    """Log-likelihood of each token but the first, teacher-forced through the prefill executor."""
    hidden: list[Any] = []
    sequence = engine.cache.sequence()
    with engine.lock:
        keep = Hooks(on_hidden=lambda rows: hidden.append(rows.copy()))
        try:
            engine.prefill.run(tokens, sequence, keep)
        finally:
            sequence.truncate(0)
        states, scores = np.concatenate(hidden)[: len(tokens) - 1], []
        for begin in range(0, len(states), _HEAD_ROWS):
            rows = states[begin : begin + _HEAD_ROWS]
            targets = tokens[begin + 1 : begin + 1 + len(rows)]
            logits = log_softmax(engine.prefill.logits(rows))
            scores.append(logits[np.arange(len(rows)), targets])
    return np.concatenate(scores)


def _score_decode(engine: Engine, tokens: Sequence[int]) -> np.ndarray[Any, Any]:
    """The same, one token at a time through the decode back end."""
    sequence = engine.cache.sequence()
    found = np.empty(len(tokens) - 1)
    with engine.lock:
        try:
            for i, token in enumerate(tokens[:-1]):
                found[i] = log_softmax(engine.decoder.step(token, sequence))[tokens[i + 1]]
        finally:
            sequence.truncate(0)
    return found
