"""A session: tokens, their place in the KV cache, and the loop that generates more."""

from __future__ import annotations

import math
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgellm.disk_cache import pack, unpack
from edgellm.engine import Engine
from edgellm.errors import CancelledError, ContextOverflowError, OptionError, SessionFileError
from edgellm.kernels.sampling import log_sum_exp, top_k
from edgellm.memory import peak_memory_bytes
from edgellm.prefill import Hooks, Progress
from edgellm.results import Completion, FinishReason, Piece, Stats, completion
from edgellm.sampling import Sampler, SamplingOptions
from edgellm.session_file import SavedSession, read_session, write_session
from edgellm.stop_text import StopText
from edgellm.tokenizer import TextStream
from edgellm.trace import TaskRecord

# Sets the scores of tokens that must not come next to -inf; called with the tokens sampled so far.
LogitFilter = Callable[[NDArray[np.float32], SequenceOf[int]], None]


class Session:
    """A growing sequence of tokens.

    Sessions of one model share its KV cache: a prefix that any of them computed is not computed
    again. A session is not to be used from two threads at once; different sessions may be.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._tokens: list[int] = []
        self._sequence = engine.cache.sequence()
        self.stats: Stats | None = None

    @property
    def tokens(self) -> tuple[int, ...]:
        """Everything appended and generated."""
        return tuple(self._tokens)

    @property
    def cached(self) -> int:
        """How many of them are in the KV cache."""
        return len(self._sequence)

    def append(self, text: str | SequenceOf[int], *, parse_special: bool = False) -> None:
        """Add text or token ids; they are computed when the next answer needs them."""
        tokenizer = self._engine.tokenizer
        if isinstance(text, str):
            add_bos = None if not self._tokens else False
            text = tokenizer.encode(text, add_bos=add_bos, parse_special=parse_special)
        self._set([*self._tokens, *text])

    def replace(self, tokens: SequenceOf[int]) -> None:
        """Become another sequence of tokens, keeping what it shares with this one."""
        self._set(list(tokens))

    def fork(self) -> Session:
        """Another session with the same tokens; nothing is copied before one of them grows."""
        other = Session(self._engine)
        other._tokens = list(self._tokens)
        with self._engine.lock:
            other._sequence = self._sequence.fork()
        return other

    def rewind(self, length: int) -> None:
        """Forget all tokens from position `length` on."""
        if not 0 <= length <= len(self._tokens):
            raise OptionError(
                f"rewind to {length}: the session has {len(self._tokens)} tokens; "
                f"0 to {len(self._tokens)} is allowed"
            )
        self._set(self._tokens[:length])

    def save(self, path: str | Path) -> None:
        """Write tokens and KV cache to a file; `LLM.load_session` reads it.

        Raises:
            OptionError: it cannot be written there.
        """
        engine = self._engine
        with engine.lock:
            blocks = pack(self._sequence.blocks, self._sequence.table)
            computed = len(self._sequence)
        saved = SavedSession(
            model=engine.bundle.manifest.name,
            fingerprint=engine.fingerprint,
            kv_format=engine.options.kv_format,
            tokens=self._tokens,
            computed=computed,
        )
        write_session(Path(path), saved, blocks)

    def restore(self, path: Path) -> None:
        """Become a saved session; see `LLM.load_session`."""
        engine = self._engine
        saved, data = read_session(
            path, fingerprint=engine.fingerprint, kv_format=engine.options.kv_format
        )
        with engine.lock:
            self._sequence.truncate(0)
            with self._sequence.reserved(saved.computed):
                if not unpack(self._sequence.blocks, self._sequence.table, data):
                    raise SessionFileError(f"{path}: damaged or truncated; save the session again")
                self._sequence.commit(saved.tokens[: saved.computed])
        self._tokens = list(saved.tokens)

    def close(self) -> None:
        """Give the memory back. Other sessions can still find the prefix until it is needed."""
        with self._engine.lock:
            self._sequence.close()
        self._tokens = []

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def generate(
        self,
        options: SamplingOptions,
        *,
        cancel: threading.Event | None = None,
        progress: Progress | None = None,
        logit_filter: LogitFilter | None = None,
    ) -> Completion:
        """The whole answer at once; see `stream`."""
        pieces = self.stream(options, cancel=cancel, progress=progress, logit_filter=logit_filter)
        return completion(list(pieces))

    def stream(
        self,
        options: SamplingOptions,
        *,
        cancel: threading.Event | None = None,
        progress: Progress | None = None,
        logit_filter: LogitFilter | None = None,
    ) -> Iterator[Piece]:
        """Answer piece by piece; the last piece has a finish_reason and the stats.

        Args:
            cancel: set it from anywhere to stop, also in the middle of prefill; the session stays
                valid and keeps what was computed.
            progress: called during prefill with tokens done and in all.
            logit_filter: rules tokens out at each step.

        Raises:
            OptionError: the session is empty.
            ContextOverflowError: the tokens do not fit into the context.
            CacheFullError: open sessions hold the whole cache.
        """
        seed = secrets.randbits(32) if options.seed is None else options.seed
        answer = _Answer(self._engine, self, replace(options, seed=seed))
        try:
            for piece in answer.run(cancel, progress, logit_filter):
                last = piece.finish_reason is not None
                yield replace(piece, stats=answer.stats()) if last else piece
        finally:
            self.stats = answer.stats()
            with self._engine.lock:
                self._engine.cache.keep(self._sequence)

    def _set(self, tokens: list[int]) -> None:
        with self._engine.lock:
            shared = 0
            for a, b in zip(tokens, self._sequence.tokens, strict=False):
                if a != b:
                    break
                shared += 1
            self._sequence.truncate(shared)
        self._tokens = tokens

    def _find_prefix(self) -> int:
        """Take over the longest cached prefix, the last token left out; gives its length."""
        engine = self._engine
        if not self._tokens:
            raise OptionError("the prompt is empty; give at least one token")
        if len(self._tokens) > engine.ctx_size:
            raise ContextOverflowError(
                f"the prompt has {len(self._tokens)} tokens, but the context holds "
                f"{engine.ctx_size}; shorten it or raise --ctx-size (the model was trained for "
                f"{engine.config.context_length})"
            )
        with engine.lock:
            prefix = self._tokens[:-1]
            if engine.cache.cached_prefix(prefix) > len(self._sequence):
                self._sequence.close()
                self._sequence = engine.cache.sequence(prefix)
            self._sequence.truncate(min(len(self._sequence), len(prefix)))
        return len(self._sequence)

    def _prefill(self, hooks: Hooks) -> NDArray[np.float32]:
        """Compute the tokens that are not cached; gives the logits after the last one."""
        new = self._tokens[len(self._sequence) :]
        with self._engine.lock:
            return self._engine.prefill.run(new, self._sequence, hooks)

    def _step(self, token: int) -> NDArray[np.float32]:
        with self._engine.lock:
            return self._engine.decoder.step(token, self._sequence)

    def _extend(self, token: int) -> None:
        self._tokens.append(token)


class _Answer:
    """The state of one `stream` call."""

    def __init__(self, engine: Engine, session: Session, options: SamplingOptions) -> None:
        self._engine = engine
        self._session = session
        self._options = options
        self._ends = engine.tokenizer.eos_ids | set(options.stop_tokens)
        self._sampler = Sampler(options, banned=sorted(self._ends) if options.ignore_eos else ())
        self._stop = StopText(options.stop, min_indent=options.min_indent)
        self._text = TextStream(engine.tokenizer, session.tokens)
        self._start = time.perf_counter()
        self._prompt_tokens = len(session.tokens)
        self._cached = self._computed = 0
        self._prefill_s = self._decode_s = self._ttft_s = 0.0
        self._steps = 0
        self._sampled: list[int] = []
        self._places: dict[str, int] = {}
        self._tasks: list[TaskRecord] = []

    def run(
        self,
        cancel: threading.Event | None,
        progress: Progress | None,
        logit_filter: LogitFilter | None,
    ) -> Iterator[Piece]:
        cancel = _Limit(cancel, self._start, self._options.time_limit_ms)
        self._cached = self._session._find_prefix()
        began = time.perf_counter()
        try:
            hooks = Hooks(
                progress=progress,
                cancel=cancel,
                on_place=self._count,
                on_tasks=self._tasks.extend,
            )
            logits = self._session._prefill(hooks)
        except CancelledError:
            yield Piece("", finish_reason=cancel.reason)
            return
        finally:
            self._prefill_s = time.perf_counter() - began
            self._computed = self._session.cached - self._cached
        while True:
            reason = self._limit(cancel)
            if reason is not None:
                yield Piece(self._held_back(), finish_reason=reason)
                return
            piece = self._sample(logits, logit_filter)
            yield piece
            if piece.finish_reason is not None:
                return
            if self._limit(None) is None:
                began = time.perf_counter()
                logits = self._session._step(self._sampled[-1])
                self._decode_s += time.perf_counter() - began
                self._steps += 1

    def _count(self, place: str, tokens: int) -> None:
        self._places[place] = self._places.get(place, 0) + tokens

    def _limit(self, cancel: _Limit | None) -> FinishReason | None:
        if cancel is not None and cancel.is_set():
            return cancel.reason
        limit = self._options.max_tokens
        full = len(self._session.tokens) > self._engine.ctx_size
        return "length" if full or len(self._sampled) == limit else None

    def _sample(self, logits: NDArray[np.float32], logit_filter: LogitFilter | None) -> Piece:
        if logit_filter is not None:
            logits = logits.copy()
            logit_filter(logits, self._sampled)
        token = self._sampler.sample(logits, self._session.tokens)
        if not self._sampled:
            self._ttft_s = time.perf_counter() - self._start
        self._sampled.append(token)
        self._session._extend(token)
        total = log_sum_exp(logits)
        logprob = float(logits[token]) - total
        top = _top(logits, total, self._options.logprobs)
        if token in self._ends:
            return Piece(self._held_back(), token, logprob, top, "stop")
        text = self._stop.add(self._text.add(token))
        reason: FinishReason | None = "stop" if self._stop.found else None
        return Piece(text, token, logprob, top, reason)

    def _held_back(self) -> str:
        return self._stop.add(self._text.finish()) + self._stop.finish()

    def stats(self) -> Stats:
        return Stats(
            ttft_s=self._ttft_s,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached,
            prompt_tokens_per_second=_rate(self._computed, self._prefill_s),
            generation_tokens=len(self._sampled),
            generation_tokens_per_second=_rate(self._steps, self._decode_s),
            peak_memory_bytes=peak_memory_bytes(),
            prefill=self._places or {self._engine.prefill.placement.provider: 0},
            prefill_flavour=self._engine.prefill.flavour,
            decode=f"{self._engine.decoder.name} {self._engine.decoder.flavour}",
            seed=self._options.seed or 0,
            tasks=tuple(self._tasks),
        )


class _Limit(threading.Event):
    """Set when the caller's event is, or when the time is over."""

    def __init__(
        self, cancel: threading.Event | None, start: float, time_limit_ms: int | None
    ) -> None:
        super().__init__()
        self._cancel = cancel
        self._end = math.inf if time_limit_ms is None else start + time_limit_ms / 1000

    def is_set(self) -> bool:
        return self.reason == "cancelled" or time.perf_counter() >= self._end

    @property
    def reason(self) -> FinishReason:
        return "cancelled" if self._cancel is not None and self._cancel.is_set() else "time"


def _rate(count: int, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0


def _top(logits: NDArray[np.float32], total: float, count: int) -> dict[int, float] | None:
    if not count:
        return None
    return {int(i): float(logits[i]) - total for i in top_k(logits, count)}
