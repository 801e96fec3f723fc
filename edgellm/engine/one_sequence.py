"""Computation of one sequence by itself, beside the loop, for measurements of the engine."""

from __future__ import annotations

import threading
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from edgellm.backends.batch import Backend, Span
from edgellm.backends.trace import TaskRecord
from edgellm.cache.sequence import Sequence
from edgellm.errors import CancelledError, OptionError
from edgellm.kernels.lora import AdapterWeights
from edgellm.kernels.sampling import Logits
from edgellm.kernels.sealed_blocks import Shortlists

Floats = NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class Hooks:
    """Callbacks between steps, and a signal to stop.

    Attributes:
        cancel: event that stops the prompt; finished steps stay in the sequence.
        on_hidden: called with each step's hidden states `[n, E]`, padding left out.
        on_tasks: called with records of the tasks that ran, some at a time.
        adapter: adapter of the tokens; None: none.
    """

    cancel: threading.Event | None = None
    on_hidden: Callable[[Floats], None] | None = None
    on_tasks: Callable[[SequenceOf[TaskRecord]], None] | None = None
    adapter: AdapterWeights | None = None


NO_HOOKS = Hooks()


def compute_prompt(
    backend: Backend, tokens: SequenceOf[int], sequence: Sequence, hooks: Hooks = NO_HOOKS
) -> Floats:
    """Compute `tokens` at the end of `sequence`, in the engine's thread.

    Returns:
        The logits after the last token, `[V]`; no other row goes through the LM head.

    Raises:
        OptionError: there are no tokens.
        ContextOverflowError, CacheFullError: the tokens do not fit.
        CancelledError: `hooks.cancel` was set.
    """
    if len(tokens) == 0:
        raise OptionError("there are no tokens to evaluate; prefill takes 1 or more")
    should_stop = None if hooks.cancel is None else hooks.cancel.is_set
    logits: SequenceOf[Logits] = []
    rows, chunks = backend.rows_at_once(sequence), 0
    for start in range(0, len(tokens), rows):
        part = tokens[start : start + rows]
        last, states = start + len(part) == len(tokens), hooks.on_hidden is not None
        span = Span(sequence, part, logit_rows=int(last), all_states=states, adapter=hooks.adapter)
        (computed,) = backend.run([span], should_stop=should_stop)
        logits = computed.logits
        if hooks.on_hidden is not None:
            hooks.on_hidden(computed.hidden)
        if hooks.on_tasks is not None:
            hooks.on_tasks([replace(task, chunk=chunks + task.chunk) for task in computed.tasks])
        chunks += 1 + max((task.chunk for task in computed.tasks), default=0)
    return logits[0].scores


def compute_tokens(
    backend: Backend,
    tokens: SequenceOf[int],
    sequence: Sequence,
    *,
    answers: bool = False,
    shortlists: Shortlists = (),
) -> Floats:
    """Compute tokens in one step; returns the logits after each, `[n, V]`.

    Args:
        answers, shortlists: see `Span`.
    """
    span = Span(sequence, tokens, logit_rows=len(tokens), answers=answers, shortlists=shortlists)
    (computed,) = backend.run([span])
    return np.stack([logits.scores for logits in computed.logits])


def best_next(backend: Backend, token: int, sequence: Sequence, hooks: Hooks = NO_HOOKS) -> int:
    """Compute a token; returns the most likely one after it.

    Raises:
        CancelledError: `hooks.cancel` was set.
    """
    if hooks.cancel is not None and hooks.cancel.is_set():
        raise CancelledError("stopped")
    span = Span(sequence, [token], logit_rows=1, candidates=1, answers=True, adapter=hooks.adapter)
    (computed,) = backend.run([span])
    return next(iter(computed.logits[0].best(1)))
