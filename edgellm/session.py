"""A session: tokens, and their place in the KV cache."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgellm.cache.session_file import SavedSession, read_session, write_session
from edgellm.checks import check_hooks, check_number, check_path, check_token_ids
from edgellm.engine.answer import Answer, LogitFilter
from edgellm.engine.engine import Engine
from edgellm.engine.prefill import Hooks, Progress
from edgellm.engine.sampling import GenerationOptions
from edgellm.errors import CacheFullError, ContextOverflowError, OptionError, SessionFileError
from edgellm.kernels.sampling import Logits
from edgellm.results import Completion, Piece, Stats, completion


class Session:
    """A growing sequence of tokens.

    Sessions of one model share its KV cache: a prefix that any of them computed is not computed
    again. A session is not to be used from two threads at once; different sessions may be.

    `close` gives its place in the cache back, as do `with` and, later, the garbage collector.
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
        """Add text or token ids; they are computed when the next answer needs them.

        Raises:
            OptionError: a token id that is not in the vocabulary.
        """
        tokenizer = self._engine.tokenizer
        if isinstance(text, str):
            add_bos = None if not self._tokens else False
            text = tokenizer.encode(text, add_bos=add_bos, parse_special=parse_special)
        self._set([*self._tokens, *self._checked("text", text)])

    def replace(self, tokens: SequenceOf[int]) -> None:
        """Become another sequence of tokens, keeping what it shares with this one.

        What was behind a gap (`make_room`) is not shared: it remembers what stood there.
        """
        ids = self._checked("tokens", tokens)
        with self._engine.lock:
            self._engine.cache.collect()
            self._sequence.truncate(len(self._sequence.tokens[: self._sequence.shareable]))
        self._set(ids)

    def fork(self) -> Session:
        """Another session with the same tokens; nothing is copied before one of them grows."""
        other = Session(self._engine)
        other._tokens = list(self._tokens)
        with self._engine.lock:
            self._engine.cache.collect()
            other._sequence = self._sequence.fork()
        return other

    def rewind(self, length: int) -> None:
        """Forget all tokens from position `length` on."""
        check_number("length", length, 0, len(self._tokens), whole=True)
        self._set(self._tokens[:length])

    def make_room(self, keep: int) -> int:
        """Forget the oldest half of what a full context can hold behind its first `keep` tokens.

        What is in the KV cache is not computed again. Gives how many tokens were forgotten.

        Raises:
            OptionError: `keep` leaves no room.
            CacheFullError: open sessions hold the whole cache.
        """
        engine = self._engine
        window = (engine.ctx_size - keep) // 2
        if window < 1:
            raise OptionError(
                f"`keep` is {keep}; in a context of {engine.ctx_size} tokens 0 to "
                f"{engine.ctx_size - 2} is allowed"
            )
        end = len(self._tokens) - window
        if end <= keep:
            return 0
        try:
            with engine.lock:
                engine.cache.collect()
                if len(self._sequence) > end:
                    self._shift(keep, end - keep)
        except CacheFullError:
            self._set(self._tokens)
            raise
        self._set(self._tokens[:keep] + self._tokens[end:])
        return end - keep

    def _shift(self, keep: int, discard: int) -> None:
        """Have the cache forget tokens, and compute again what it could not move up."""
        length = len(self._sequence) - discard
        tokens = self._sequence.tokens[:keep] + self._sequence.tokens[keep + discard :]
        self._sequence.shift(keep=keep, discard=discard)
        if len(self._sequence) < length:
            self._engine.prefill.run(tokens[len(self._sequence) :], self._sequence)

    def save(self, path: str | Path) -> None:
        """Write tokens and KV cache to a file; `LLM.load_session` reads it.

        Raises:
            OptionError: it cannot be written there.
        """
        engine, path = self._engine, check_path("path", path)
        with engine.lock:
            engine.cache.collect()
            computed, shareable = len(self._sequence), self._sequence.shareable
            blocks = engine.cache.pack(self._sequence)
        saved = SavedSession(
            model=engine.bundle.manifest.name,
            fingerprint=engine.fingerprint,
            kv_format=engine.options.kv_format,
            tokens=self._tokens,
            computed=computed,
            shareable=shareable,
            arithmetic=engine.arithmetic,
        )
        write_session(path, saved, blocks)

    def restore(self, path: Path) -> None:
        """Become a saved session; see `LLM.load_session`."""
        engine = self._engine
        saved, data = read_session(
            path, fingerprint=engine.fingerprint, kv_format=engine.options.kv_format
        )
        try:
            tokens = self._checked("tokens", saved.tokens)
        except OptionError as error:
            raise SessionFileError(f"{path}: {error}") from None
        with engine.lock:
            engine.cache.collect()
            self._sequence.truncate(0)
            with self._sequence.reserved(saved.computed, windowed=False):
                self._sequence.open(saved.computed, restoring=True)
                if not engine.cache.unpack(self._sequence, data):
                    raise SessionFileError(f"{path}: damaged or truncated; save the session again")
                # another back end's bits are for this session, and not for others to find
                same = saved.arithmetic == engine.arithmetic
                self._sequence.shareable = saved.shareable if same else 0
                self._sequence.commit(tokens[: saved.computed])
        self._tokens = tokens

    def close(self) -> None:
        """Give the memory back. Other sessions can still find the prefix until it is needed."""
        self._tokens = []
        self._engine.cache.soon(self._sequence.close)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def generate(
        self,
        options: GenerationOptions,
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
        options: GenerationOptions,
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
        check_hooks(cancel, progress, logit_filter)
        seed = secrets.randbits(32) if options.seed is None else options.seed
        answer, dropped = Answer(self._engine, self, replace(options, seed=seed)), False
        try:
            for piece in answer.run(cancel, progress, logit_filter):
                last = piece.finish_reason is not None
                yield replace(piece, stats=answer.stats()) if last else piece
        except GeneratorExit:  # perhaps the garbage collector's
            dropped = True
            raise
        finally:
            self.stats = answer.stats()
            if dropped:
                self._engine.cache.soon(partial(self._settle, list(self._tokens)))
            else:
                with self._engine.lock:
                    self._settle(self._tokens)

    def _settle(self, tokens: list[int]) -> None:
        """Let go what was computed of a draft and not sampled, and keep `tokens` on disk."""
        self._truncate_to(tokens)
        self._engine.cache.keep(self._sequence)

    def _set(self, tokens: list[int]) -> None:
        with self._engine.lock:
            self._engine.cache.collect()
            self._truncate_to(tokens)
        self._tokens = tokens

    def _truncate_to(self, tokens: list[int]) -> None:
        """Keep what the sequence shares with `tokens`."""
        shared = 0
        for a, b in zip(tokens, self._sequence.tokens, strict=False):
            if a != b:
                break
            shared += 1
        self._sequence.truncate(shared)

    def _checked(self, name: str, tokens: object) -> list[int]:
        return check_token_ids(name, tokens, vocab_size=self._engine.config.vocab_size)

    # what an answer does with its session, see `Decoding`

    def find_prefix(self) -> int:
        """Take over the longest cached prefix, the last token left out; gives its length."""
        engine = self._engine
        if not self._tokens:
            raise OptionError("the prompt is empty; give at least one token")
        if len(self._tokens) > engine.ctx_size:
            raise ContextOverflowError(
                f"the prompt has {len(self._tokens)} tokens, but the context holds "
                f"{engine.ctx_size}; shorten it, raise `ctx_size` (the model was trained for "
                f"{engine.config.context_length}) or take `context_policy` shift"
            )
        with engine.lock:
            engine.cache.collect()
            prefix = self._tokens[:-1]
            if engine.cache.cached_prefix(prefix) > len(self._sequence):
                self._sequence.close()
                self._sequence = engine.cache.sequence(prefix)
            self._sequence.truncate(min(len(self._sequence), len(prefix)))
        return len(self._sequence)

    def prefill(self, hooks: Hooks) -> NDArray[np.float32]:
        """Compute the tokens that are not cached; gives the logits after the last one."""
        new = self._tokens[len(self._sequence) :]
        with self._engine.lock:
            return self._engine.prefill.run(new, self._sequence, hooks)

    def steps(self, tokens: SequenceOf[int]) -> NDArray[np.float32]:
        with self._engine.lock:
            return self._engine.decoder.steps(tokens, self._sequence)

    def best(self, token: int) -> Logits | None:
        with self._engine.lock:
            return self._engine.decoder.best(token, self._sequence)

    def forget(self, count: int) -> None:
        with self._engine.lock:
            self._sequence.truncate(len(self._sequence) - count)

    def extend(self, token: int) -> None:
        self._tokens.append(token)
