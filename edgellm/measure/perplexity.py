"""Perplexity of a text under a loaded model, through prefill or through decode."""

from __future__ import annotations

import math
import threading
from collections.abc import Generator, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgellm.engine.engine import Engine
from edgellm.engine.one_sequence import Hooks, compute_prompt, compute_tokens
from edgellm.engine.sampling import log_softmax
from edgellm.errors import OptionError
from edgellm.progress import Progress, ProgressCallback

Floats = NDArray[np.float32]
PATHS = ("prefill", "decode")
# Rows that go through the LM head at a time: other work waits for them, and a row takes 400 KB.
_HEAD_ROWS = 64


@dataclass(frozen=True)
class PerplexityResult:
    """Perplexity of a text, and the settings that it was measured with.

    Attributes:
        perplexity: exp of the mean negative log-likelihood of the scored tokens.
        tokens: number of scored tokens.
        windows: number of windows.
        window: tokens of a window.
        through: path of the tokens, prefill or decode.
        precision: precision of the weights on that path.
    """

    perplexity: float
    tokens: int
    windows: int
    window: int
    through: str
    precision: str
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
    progress: ProgressCallback | None = None,
) -> PerplexityResult:
    """Score a text in windows that do not overlap, each on an empty cache.

    The first token of a window is context only; a begin token is put before each window if the
    model asks for one. A remainder shorter than a window is left out, unless it is all there is.

    Raises:
        OptionError: the window has fewer than 2 tokens or is longer than the context, or the text
            is too short.
    """
    windows = text_windows(engine, text, window=window, max_windows=max_windows, through=through)
    total, count = 0.0, 0
    for done, tokens in enumerate(windows, 1):
        for begin, logits in window_logits(engine, tokens, through=through):
            total += float(next_logprobs(log_softmax(logits), tokens, begin).sum())
            count += len(logits)
        if progress is not None:
            progress(Progress("windows", done, len(windows)))
    return PerplexityResult(
        math.exp(-total / count),
        count,
        len(windows),
        window,
        through,
        precision_of(engine, through),
        engine.options.kv_text,
    )


def text_windows(
    engine: Engine, text: str, *, window: int, max_windows: int | None, through: str
) -> list[list[int]]:
    """Cut a text into windows of tokens for `perplexity`, begin tokens included.

    Raises:
        OptionError: see `perplexity`.
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
    tokens = tokenizer.encode(text, add_bos=False)
    return [[*bos, *part] for part in _parts(tokens, window - len(bos), max_windows)]


def window_logits(
    engine: Engine, tokens: Sequence[int], *, through: str
) -> Iterator[tuple[int, Floats]]:
    """Compute the logits after each token of a window but the last, on an empty KV cache.

    Yields:
        Position of the first row, and logits `[rows, V]`, some rows at a time; the engine is free
        for others between them.
    """
    if through == "decode":
        yield from _decode_logits(engine, tokens)
        return
    states = _prefill_hidden(engine, tokens)
    for begin in range(0, len(states), _HEAD_ROWS):
        part = states[begin : begin + _HEAD_ROWS]
        yield begin, engine.thread.call(partial(engine.prefill.logits, part))


def next_logprobs(
    logprobs: NDArray[np.float64], tokens: Sequence[int], begin: int
) -> NDArray[np.float64]:
    """Return the log-probability of each actual next token, from `logprobs` `[rows, V]`.

    Args:
        begin: index of the token that the first row follows.
    """
    rows = np.arange(len(logprobs))
    chosen: NDArray[np.float64] = logprobs[rows, tokens[begin + 1 : begin + 1 + len(rows)]]
    return chosen


def precision_of(engine: Engine, through: str) -> str:
    """Return the precision of the weights on one of `PATHS`."""
    return engine.prefill.precision if through == "prefill" else engine.decoder.precision


def _parts(tokens: list[int], size: int, limit: int | None) -> list[list[int]]:
    whole = [tokens[i : i + size] for i in range(0, len(tokens) - size + 1, size)]
    if not whole and len(tokens) >= 2:
        whole = [tokens]
    if not whole:
        raise OptionError(f"the text has {len(tokens)} tokens; at least 2 are needed")
    return whole[:limit]


def _prefill_hidden(engine: Engine, tokens: Sequence[int]) -> Floats:
    """Return the hidden states `[n - 1, E]` after all tokens but the last, through prefill."""
    hidden: list[Floats] = []
    stop = threading.Event()
    hooks = Hooks(cancel=stop, on_hidden=lambda rows: hidden.append(rows.copy()))

    def compute() -> None:
        sequence = engine.cache.sequence()
        try:
            compute_prompt(engine.prefill, tokens, sequence, hooks)
        finally:
            sequence.truncate(0)

    engine.thread.call(compute, stop=stop)
    return np.concatenate(hidden)[: len(tokens) - 1]


def _decode_logits(engine: Engine, tokens: Sequence[int]) -> Iterator[tuple[int, Floats]]:
    """Compute logits through the decode back end, one token at a time; see `window_logits`."""

    def compute() -> Generator[tuple[int, Floats], None, None]:
        sequence, lists = engine.cache.sequence(), engine.shortlists()
        decode = partial(
            compute_tokens, engine.decoder, sequence=sequence, answers=True, shortlists=lists
        )
        try:
            for begin in range(0, len(tokens) - 1, _HEAD_ROWS):
                part = tokens[begin : min(begin + _HEAD_ROWS, len(tokens) - 1)]
                rows = [decode([token]) for token in part]
                yield begin, np.concatenate(rows)
        finally:
            sequence.truncate(0)

    return engine.thread.each(compute())
