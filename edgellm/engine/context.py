"""The tokens of a session or an answer, and their place in the KV cache."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgellm.cache.session_file import SavedSession, read_session, write_session
from edgellm.checks import check_token_ids
from edgellm.engine.engine import Engine
from edgellm.engine.prefill import Hooks
from edgellm.errors import CacheFullError, ContextOverflowError, OptionError, SessionFileError
from edgellm.kernels.sampling import Logits


class Context:
    """What a session and its answers work on; every change to the KV cache takes the engine's lock.

    Attributes:
        tokens: everything appended and generated, for others to read.
        sequence: the tokens that are in the KV cache: the first ones of `tokens`, and behind them
            for a while those of a draft.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.tokens: list[int] = []
        self.sequence = engine.cache.sequence()

    @property
    def cached(self) -> int:
        """How many of the tokens are in the KV cache."""
        return len(self.sequence)

    def set(self, tokens: list[int]) -> None:
        """Become another list of tokens; of the KV cache, what both begin with stays."""
        with self.engine.lock:
            self.engine.cache.collect()
            self._truncate_to(tokens)
        self.tokens = tokens

    def append(self, name: str, text: str | SequenceOf[int], *, parse_special: bool) -> None:
        """Add what a caller gave for the parameter `name`; see `Session.append`."""
        if isinstance(text, str):
            add_bos = None if not self.tokens else False
            text = self.engine.tokenizer.encode(text, add_bos=add_bos, parse_special=parse_special)
        self.set([*self.tokens, *self.checked(name, text)])

    def replace(self, tokens: SequenceOf[int]) -> None:
        """As `set` with what a caller gave; what was behind a gap (`make_room`) does not stay,
        because it remembers what stood there."""
        ids = self.checked("tokens", tokens)
        with self.engine.lock:
            self.engine.cache.collect()
            self.sequence.truncate(len(self.sequence.tokens[: self.sequence.shareable]))
        self.set(ids)

    def fork(self) -> Context:
        """Another one with the same tokens; nothing is copied before one of them grows."""
        other = Context(self.engine)
        other.tokens = list(self.tokens)
        with self.engine.lock:
            self.engine.cache.collect()
            other.sequence = self.sequence.fork()
        return other

    def make_room(self, keep: int) -> int:
        """Forget the oldest half of what a full context can hold behind its first `keep` tokens.

        What is in the KV cache is not computed again, unless a window had passed what it would see
        or keys cannot be moved. Returns how many tokens were forgotten.

        Raises:
            OptionError: `keep` leaves no room.
            CacheFullError: open sessions hold the whole cache.
        """
        engine = self.engine
        window = (engine.ctx_size - keep) // 2
        if window < 1:
            raise OptionError(
                f"`keep` is {keep}; in a context of {engine.ctx_size} tokens 0 to "
                f"{engine.ctx_size - 2} is allowed"
            )
        end = len(self.tokens) - window
        if end <= keep:
            return 0
        try:
            with engine.lock:
                engine.cache.collect()
                if len(self.sequence) > end:
                    self._shift(keep, end - keep)
        except CacheFullError:
            self.set(self.tokens)
            raise
        self.set(self.tokens[:keep] + self.tokens[end:])
        return end - keep

    def _shift(self, keep: int, discard: int) -> None:
        """Have the cache forget tokens, and compute again what it could not move up."""
        sequence = self.sequence
        tokens = sequence.tokens[:keep] + sequence.tokens[keep + discard :]
        sequence.shift(keep=keep, discard=discard)
        if len(sequence) < len(tokens):
            self.engine.prefill.run(tokens[len(sequence) :], sequence)

    def save(self, path: Path) -> None:
        """Write tokens and KV cache to a file; see `Session.save`."""
        engine = self.engine
        with engine.lock:
            engine.cache.collect()
            computed, shareable = len(self.sequence), self.sequence.shareable
            firsts, blocks = engine.cache.pack(self.sequence)
        saved = SavedSession(
            model=engine.bundle.manifest.name,
            fingerprint=engine.fingerprint,
            kv_format=engine.options.kv_format,
            tokens=self.tokens,
            computed=computed,
            shareable=shareable,
            arithmetic=engine.arithmetic,
            firsts=firsts,
        )
        write_session(path, saved, blocks)

    def restore(self, path: Path) -> None:
        """Become a saved session; see `LLM.load_session`."""
        engine = self.engine
        saved, data = read_session(
            path, fingerprint=engine.fingerprint, kv_format=engine.options.kv_format
        )
        try:
            tokens = self.checked("tokens", saved.tokens)
        except OptionError as error:
            raise SessionFileError(f"{path}: {error}") from None
        if not engine.cache.can_begin(saved.firsts, saved.computed):
            raise SessionFileError(f"{path}: its header is damaged; save the session again")
        with engine.lock:
            engine.cache.collect()
            self.sequence.truncate(0)
            with self.sequence.reserved(saved.computed, windowed=False):
                self.sequence.open_seen(saved.computed, saved.firsts)
                if not engine.cache.unpack(self.sequence, data):
                    raise SessionFileError(f"{path}: damaged or truncated; save the session again")
                # another back end's bits are for this session, and not for others to find
                same = saved.arithmetic == engine.arithmetic
                self.sequence.shareable = saved.shareable if same else 0
                self.sequence.commit(tokens[: saved.computed])
        self.tokens = tokens

    def close(self) -> None:
        """Give the memory back. Others can still find the prefix until it is needed."""
        self.tokens = []
        self.engine.cache.soon(self.sequence.close)

    def find_prefix(self) -> int:
        """Take over the longest cached prefix, the last token left out; gives its length."""
        engine = self.engine
        if not self.tokens:
            raise OptionError("the prompt is empty; give at least one token")
        if len(self.tokens) > engine.ctx_size:
            raise ContextOverflowError(
                f"the prompt has {len(self.tokens)} tokens, but the context holds "
                f"{engine.ctx_size}; shorten it, raise `ctx_size` (the model was trained for "
                f"{engine.config.context_length}) or take `context_policy` shift"
            )
        with engine.lock:
            engine.cache.collect()
            prefix = self.tokens[:-1]
            if engine.cache.cached_prefix(prefix) > len(self.sequence):
                self.sequence.close()
                self.sequence = engine.cache.sequence(prefix)
            self.sequence.truncate(min(len(self.sequence), len(prefix)))
        return len(self.sequence)

    def prefill(self, hooks: Hooks) -> NDArray[np.float32]:
        """Compute the tokens that are not cached; gives the logits after the last one, `[V]`."""
        new = self.tokens[len(self.sequence) :]
        with self.engine.lock:
            return self.engine.prefill.run(new, self.sequence, hooks)

    def steps(self, tokens: SequenceOf[int]) -> NDArray[np.float32]:
        """Compute tokens that come next; gives the logits after each, `[n, V]`."""
        with self.engine.lock:
            return self.engine.decoder.steps(tokens, self.sequence)

    def best(self, token: int) -> Logits | None:
        """Compute a token that comes next; see `DecodeBackend.best`."""
        with self.engine.lock:
            return self.engine.decoder.best(token, self.sequence)

    def forget(self, count: int) -> None:
        """Take the last `count` computed tokens out of the KV cache."""
        with self.engine.lock:
            self.sequence.truncate(len(self.sequence) - count)

    def extend(self, token: int) -> None:
        """Count a token that was sampled."""
        self.tokens.append(token)

    def settle(self, *, dropped: bool) -> None:
        """End an answer: let go what was computed of a draft and not sampled; the rest goes to the
        cache on disk.

        Args:
            dropped: nobody asked for its end: perhaps it is the garbage collector that calls, in
                the middle of a change to the cache, so it is done with the next one.
        """
        if dropped:
            self.engine.cache.soon(partial(self._settle, list(self.tokens)))
        else:
            with self.engine.lock:
                self._settle(self.tokens)

    def _settle(self, tokens: list[int]) -> None:
        self._truncate_to(tokens)
        self.engine.cache.keep(self.sequence)

    def _truncate_to(self, tokens: list[int]) -> None:
        """Keep what the sequence shares with `tokens`."""
        shared = 0
        for a, b in zip(tokens, self.sequence.tokens, strict=False):
            if a != b:
                break
            shared += 1
        self.sequence.truncate(shared)

    def checked(self, name: str, tokens: object) -> list[int]:
        """Token ids that a caller gave for the parameter `name`, as a list."""
        return check_token_ids(name, tokens, vocab_size=self.engine.config.vocab_size)
