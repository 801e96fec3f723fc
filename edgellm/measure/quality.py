"""Cost of rounding: difference of a loaded model from float32 on the weights of its own file.

The reference is the checkpoint in float32, computed one segment at a time, so that it takes little
memory beside the model. Its attention keeps K and V in float32. Log-probabilities are compared some
rows at a time.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgellm.backends.batch import softcapped
from edgellm.engine.engine import Engine
from edgellm.engine.sampling import log_softmax
from edgellm.errors import NumericError, OptionError
from edgellm.measure.perplexity import (
    PerplexityResult,
    next_logprobs,
    precision_of,
    text_windows,
    window_logits,
)
from edgellm.progress import Progress, ProgressCallback

# Chapters of the manual; none that models are calibrated on (see `export/calibrate.py`).
_TOPICS = ("typesseq", "objects", "exceptions", "formatstrings", "debugger")
_MODULES = (argparse, dataclasses)
# Characters after which prose and code alternate, some four windows of 512 tokens.
_PIECE = 8000


def sample_text() -> str:
    """Return prose and code in turn, some 200,000 characters; see `manual_text`."""
    return manual_text(_TOPICS, _MODULES, piece=_PIECE)


def manual_text(topics: Sequence[str], modules: Sequence[ModuleType], *, piece: int) -> str:
    """Return chapters of Python's manual and sources of its library in turn, `piece` characters of
    each; the text depends on Python's version.

    Raises:
        OptionError: this Python came without its manual or without the sources of its library.
    """
    try:
        from pydoc_data.topics import topics as manual  # large, and rarely needed

        prose = "\n\n".join(manual[name] for name in topics)
        code = "".join(map(inspect.getsource, modules))
    except (ImportError, KeyError, OSError):
        raise OptionError(
            "this Python came without the manual and sources that stand in for a text; give one"
        ) from None
    count = min(len(prose), len(code)) // piece
    starts = range(0, count * piece, piece)
    return "\n\n".join(text[i : i + piece] for i in starts for text in (prose, code))


Floats = NDArray[np.float32]


@dataclass(frozen=True)
class QualityResult(PerplexityResult):
    """Perplexity of a model, and its difference from float32 on the same tokens.

    Attributes:
        float_perplexity: perplexity of float32.
        kl_mean: Kullback-Leibler divergence D(float32 || model) of the next-token distributions,
            in nats, as the mean over all scored tokens.
        kl_mean_error: standard error of that mean.
        kl_99: divergence that 99 % of the scored tokens do not exceed.
        same_top: share of the scored tokens with the same likeliest token in both.
        text_sha256: SHA-256 of the text.
    """

    float_perplexity: float
    kl_mean: float
    kl_mean_error: float
    kl_99: float
    same_top: float
    text_sha256: str

    @property
    def perplexity_change(self) -> float:
        """Relative change of the perplexity from float32's."""
        return self.perplexity / self.float_perplexity - 1

    def to_json(self) -> dict[str, Any]:
        return {**super().to_json(), "perplexity_change": self.perplexity_change}


@dataclass(frozen=True)
class Comparison:
    """Comparison of a model with float32, for each scored token.

    Attributes:
        logprobs, exact_logprobs: log-probability of the actual token by the model and by float32.
        divergences: Kullback-Leibler divergences D(float32 || model), in nats.
        same_top: whether the likeliest token is the same in both.
    """

    logprobs: NDArray[np.float64]
    exact_logprobs: NDArray[np.float64]
    divergences: NDArray[np.float64]
    same_top: NDArray[np.bool_]

    @classmethod
    def of(cls, logits: Floats, exact: Floats, tokens: Sequence[int], begin: int) -> Comparison:
        """Compare logits of a model and of float32, after each of `tokens` from `begin` on.

        Args:
            logits, exact: logits of the model and of float32, `[rows, V]`.

        Raises:
            NumericError: a logit is not a number, or infinite.
        """
        logprobs, judge = log_softmax(logits), log_softmax(exact)
        divergences = (np.exp(judge) * (judge - logprobs)).sum(axis=-1)
        if not np.isfinite(divergences).all():
            raise NumericError(
                f"the logits after token {begin} or a little later are infinite or not a number; "
                "`edgellm doctor` says what is damaged"
            )
        return cls(
            next_logprobs(logprobs, tokens, begin),
            next_logprobs(judge, tokens, begin),
            np.maximum(divergences, 0.0),  # rounding may take a 0 below 0
            logits.argmax(axis=-1) == exact.argmax(axis=-1),
        )

    @classmethod
    def joined(cls, parts: Sequence[Comparison]) -> Comparison:
        return cls(
            np.concatenate([part.logprobs for part in parts]),
            np.concatenate([part.exact_logprobs for part in parts]),
            np.concatenate([part.divergences for part in parts]),
            np.concatenate([part.same_top for part in parts]),
        )


def quality(
    engine: Engine,
    text: str | None = None,
    *,
    window: int = 512,
    max_windows: int | None = 16,
    through: str = "prefill",
    progress: ProgressCallback | None = None,
) -> QualityResult:
    """Compare a loaded model with float32 on its checkpoint's own, dequantized weights.

    The text is cut into windows that do not overlap, each on an empty cache, as in `perplexity`. A
    begin token stands before each window if the model asks for one, and every token of a window but
    the first is scored. A remainder shorter than a window is left out, unless it is the whole text.
    (llama.cpp's `perplexity --kl-divergence` has the same windows and scores the second half of
    each, so its figures are a little lower.)

    Beside the model, memory holds the hidden states of all windows, one segment's weights in
    float32, and then those of the LM head.

    Args:
        text: text to measure; None: `sample_text`, which no model is calibrated on.
        window: tokens of a window.
        max_windows: largest number of windows; None: the whole text.
        through: path of the tokens, `prefill` or `decode`.
        progress: see `Progress`.

    Raises:
        OptionError: the window has fewer than 2 tokens or is longer than the context, or the text
            is too short.
        SourceError: the checkpoint is missing, or changed.
        NumericError: the model's logits are not numbers.
    """
    from edgellm.export.float_segments import float_hidden  # 0.4 s, and rarely needed
    from edgellm.export.source_checkpoint import open_source

    given = sample_text() if text is None else text
    windows = text_windows(engine, given, window=window, max_windows=max_windows, through=through)
    checkpoint = open_source(engine.bundle, progress=progress)
    segments = engine.config.layer_count + 1

    def step(label: str, done: int, total: int) -> None:
        if progress is not None:
            progress(Progress(label, done, total))

    hidden = float_hidden(
        checkpoint,
        windows,
        threads=engine.threads,
        on_segment=lambda i: step(f"float32: segment {i}", i + 1, segments),
    )
    tied = engine.config.tied_embedding
    head = checkpoint.tensor("embedding" if tied else "head").float32().T
    parts = []
    for done, (tokens, states) in enumerate(zip(windows, hidden, strict=True), 1):
        for begin, logits in window_logits(engine, tokens, through=through):
            exact = states[begin : begin + len(logits)] @ head
            exact = softcapped(exact, engine.config.logit_softcap)
            parts.append(Comparison.of(logits, exact, tokens, begin))
        step(f"comparing: window {done}", done, len(windows))
    return _result(Comparison.joined(parts), engine, given, len(windows), window, through)


def _result(
    comparison: Comparison, engine: Engine, text: str, windows: int, window: int, through: str
) -> QualityResult:
    count = len(comparison.divergences)
    return QualityResult(
        perplexity=math.exp(-comparison.logprobs.mean()),
        float_perplexity=math.exp(-comparison.exact_logprobs.mean()),
        kl_mean=float(comparison.divergences.mean()),
        kl_mean_error=float(comparison.divergences.std() / math.sqrt(count)),
        kl_99=float(np.quantile(comparison.divergences, 0.99)),
        same_top=float(comparison.same_top.mean()),
        tokens=count,
        windows=windows,
        window=window,
        through=through,
        precision=precision_of(engine, through),
        kv_format=engine.options.kv_text,
        text_sha256=hashlib.sha256(text.encode()).hexdigest(),
    )
