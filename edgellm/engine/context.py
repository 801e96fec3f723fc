"""Tokens of a session or an answer, and their sequence in the KV cache."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from functools import partial
from pathlib import Path
from typing import Protocol

from edgellm.cache.kv_cache import PackedBlocks
from edgellm.cache.prefix_index import CacheEnd, Root, common_prefix
from edgellm.cache.sequence import Sequence
from edgellm.cache.session_file import SavedSession, read_session, write_session
from edgellm.checks import check_token_ids
from edgellm.engine.adapters import NEVER, LoadedAdapter
from edgellm.engine.loaded_model import LoadedModel
from edgellm.errors import ContextOverflowError, OptionError, SessionFileError
from edgellm.generation_options import FullContext
from edgellm.kernels.head_blocks import blocks_for


class Answering(Protocol):
    """An answer on its way, of which the reader has not taken `unread` tokens."""

    @property
    def unread(self) -> int: ...


class Context:
    """Tokens of a session and its answers, and their sequence in the KV cache.

    Methods for a session change the KV cache in the engine's thread. Methods for an answer on its
    way, from `begin` to `extend`, are called there.

    Attributes:
        tokens: all tokens appended and generated, for others to read.
        changes: number of changes by the session; each ends an answer on its way.
        answering: answer that has claimed the context, from its check until its reader has the
            end.
        unsettled: token of the last command that is to change `tokens`, or the withdrawn answer
            that is to leave; None: no change is on its way.
        shifts: whether an answer may forget tokens where the context is full.
        adapter: adapter that K and V are computed with; None: none.
        sequence: tokens that are in the KV cache: the first ones of `tokens`, and behind them for a
            while those of a draft.
    """

    def __init__(
        self,
        engine: LoadedModel,
        tokens: SequenceOf[int] = (),
        *,
        salt: str = "",
        adapter: LoadedAdapter | None = None,
    ) -> None:
        """Begin with no token in the KV cache.

        Args:
            salt: only contexts with the same salt find each other's tokens in the KV cache.
        """
        self.engine = engine
        self.tokens = list(tokens)
        self.changes = 0
        self.answering: Answering | None = None
        self.unsettled: object | None = None
        self.shifts = False
        self.adapter = adapter
        self._salt = salt
        self.sequence = engine.cache.sequence(root=self._root_of(adapter, NEVER))
        self._aside: PackedBlocks | None = None  # blocks that were taken out of the KV cache
        self._busy: object | None = None  # the answer that needs the blocks
        self._seen = False  # whether the engine's thread may take the blocks

    @property
    def salt(self) -> str:
        """Salt of the names of blocks; K and V of an adapter are for no other one to find."""
        return self._salted(self.adapter)

    def _salted(self, adapter: LoadedAdapter | None) -> str:
        return self._salt if adapter is None else f"{self._salt} {adapter.digest}"

    @property
    def adapter_start(self) -> int:
        """Position from which on the adapter, if any, changes the tokens."""
        activated = self.adapter is not None and self.adapter.invocation
        return self.sequence.root.start if activated else 0

    def _root_of(self, adapter: LoadedAdapter | None, start: int) -> Root:
        """Return the root of blocks that an adapter changes from a position on.

        One that changes all tokens has a root of its own.
        """
        index = self.engine.cache.index
        if adapter is None or not adapter.invocation:
            return index.salted_root(self._salted(adapter))
        return index.salted_root(self._salt, start=start, changed_by=adapter.weights.digest)

    def adapt(self, adapter: LoadedAdapter | None) -> None:
        """Change the adapter; tokens whose K and V it would compute otherwise leave the cache.

        The tokens are a prompt, in which it may begin. No answer may be on its way.
        """
        start = NEVER if adapter is None else adapter.start(self.tokens)
        root = self._root_of(adapter, start)
        if root == self.sequence.root:
            self.adapter = adapter  # perhaps under another name
        elif self._seen:
            self.engine.thread.call(partial(self._adapt, adapter, root))
        else:
            self._adapt(adapter, root)

    def _adapt(self, adapter: LoadedAdapter | None, root: Root) -> None:
        self._aside, self.adapter = None, adapter
        self.sequence.rename(root)

    @property
    def cached(self) -> int:
        """Number of tokens in the KV cache."""
        return len(self.sequence)

    @property
    def cache_end(self) -> CacheEnd:
        """Reason why no more of the tokens is in the KV cache."""
        return self.sequence.end_in(self.tokens[:-1])

    @property
    def findable(self) -> int:
        """Number of tokens that `begin` would take over."""
        cached = self.engine.cache.cached_prefix(self.tokens[:-1], root=self.sequence.root)
        return max(cached, min(self.cached, len(self.tokens) - 1))

    @property
    def needed(self) -> list[int]:
        """KV blocks of each cache group that it lacks for all tokens and one more."""
        cache, aside = self.engine.cache, self._aside
        lacking = cache.needed(self.sequence, len(self.tokens))
        heads = [] if aside is None else zip(cache.groups, aside.firsts, aside.heads, strict=False)
        for group, first, counts in heads:  # of a condensed context
            if counts is not None:
                lacking[group.number] += blocks_for(group.kv, counts) - first
        return lacking

    def set(self, tokens: list[int]) -> None:
        """Replace the tokens; the prefix that old and new ones share stays in the KV cache."""

        def change() -> None:
            self._begin_change()
            self._set(tokens)

        self.engine.thread.call(change)

    def catch_up(self) -> None:
        """Wait until `tokens` are settled, at most for a step."""
        if self.unsettled is not None:
            self.engine.thread.catch_up()

    def read(self) -> tuple[list[int], int]:
        """Return the tokens that a reader has, and the number of those in the KV cache."""

        def look() -> tuple[list[int], int]:
            tokens = self._read_tokens()
            return tokens, min(self.cached, len(tokens))

        if self.answering is None:
            self.catch_up()
            return look()
        return self.engine.thread.call(look)

    def _read_tokens(self) -> list[int]:
        """Return the tokens but those of an answer on its way that its reader has not taken."""
        unread = 0 if self.answering is None else self.answering.unread
        return self.tokens[: len(self.tokens) - unread]

    def _begin_change(self) -> None:
        """End an answer on its way."""
        self.changes += 1
        self.answering = None

    def _set(self, tokens: list[int]) -> None:
        self._truncate_to(tokens)
        self.tokens = tokens

    def append(self, name: str, text: str | SequenceOf[int], *, parse_special: bool) -> None:
        """Append text or tokens of a caller's parameter `name`; see `Session.append`."""
        tokens, _ = self.read()
        if isinstance(text, str):
            add_bos = None if not tokens else False
            text = self.engine.tokenizer.encode(text, add_bos=add_bos, parse_special=parse_special)
        self.set([*tokens, *self.checked(name, text)])

    def replace(self, tokens: SequenceOf[int]) -> None:
        """Replace the tokens by a caller's; those behind a gap (`make_room`) leave the KV cache, as
        their K and V depend on the tokens that stood there."""
        ids = self.checked("tokens", tokens)

        def change() -> None:
            self._begin_change()
            heads = self.sequence.heads if self._aside is None else self._aside.heads
            if not any(heads):  # a condensed context is as the session wanted it
                self.sequence.truncate(len(self.sequence.tokens[: self.sequence.shareable]))
                self._aside = None
            self.shifts = False
            self._set(ids)

        self.engine.thread.call(change)

    def fork(self) -> Context:
        """Return a context with the tokens that a reader has; no block is copied yet."""
        other = Context(self.engine, salt=self._salt, adapter=self.adapter)

        def share() -> None:
            other.tokens = self._read_tokens()
            other.sequence, other._aside = self.sequence.fork(), self._aside
            other.shifts = self.shifts
            other._truncate_to(other.tokens)
            other.rest()

        self.engine.thread.call(share)
        return other

    def save(self, path: Path) -> None:
        """Write tokens and KV cache to a file; see `Session.save`."""
        engine = self.engine
        tokens, packed = engine.thread.call(self._packed)
        saved = SavedSession(
            model=engine.bundle.manifest.name,
            fingerprint=engine.fingerprint,
            kv_format=engine.options.kv_text,
            tokens=tokens,
            computed=len(packed.tokens),
            shareable=packed.shareable,
            arithmetic=engine.arithmetic,
            firsts=packed.firsts,
            heads=packed.heads,
            adapter=digest_of(self.adapter),
            adapter_start=self.adapter_start,
            adapter_name="" if self.adapter is None else self.adapter.name,
        )
        write_session(path, saved, packed.data)

    def _packed(self) -> tuple[list[int], PackedBlocks]:
        """Return the tokens that a reader has, and the blocks of the first ones of them."""
        tokens, aside = self._read_tokens(), self._aside
        if aside is not None and aside.tokens == tokens[: len(aside.tokens)]:
            return tokens, aside
        kept = self.sequence.fork()
        if not len(kept):  # others may not have needed the blocks that it gave back
            kept = self.engine.cache.sequence(tokens, root=self.sequence.root)
        try:
            kept.truncate(common_prefix(tokens, kept.tokens))
            return tokens, self.engine.cache.pack(kept)
        finally:
            kept.close()

    def restore(self, path: Path) -> None:
        """Read tokens and KV cache of a saved session; see `LLM.load_session`."""
        engine = self.engine
        saved, data = read_session(
            path,
            fingerprint=engine.fingerprint,
            kv_format=engine.options.kv_text,
            adapter=digest_of(self.adapter),
        )
        try:
            tokens = self.checked("tokens", saved.tokens)
        except OptionError as error:
            raise SessionFileError(f"{path}: {error}") from None
        if any(saved.heads) and not engine.selection.native:
            raise SessionFileError(
                f"{path}: its context is condensed, which the C++ kernels alone read; load the "
                "model with `prefill` and `decode` native"
            )
        # K and V of another back end are for this session, and not for others to find
        shareable = saved.shareable if saved.arithmetic == engine.arithmetic else 0
        computed = tokens[: saved.computed]
        packed = PackedBlocks(computed, shareable, saved.firsts, saved.heads, data)
        if not engine.cache.can_begin(packed):
            raise SessionFileError(f"{path}: its header is damaged; save the session again")

        def fill() -> bool:
            self.sequence.truncate(0)
            self.sequence.rename(self._root_of(self.adapter, saved.adapter_start))
            if not engine.cache.unpack(self.sequence, packed):
                return False
            self.tokens = tokens
            self.rest()
            return True

        if not engine.thread.call(fill):
            raise SessionFileError(f"{path}: damaged or truncated; save the session again")

    def close(self) -> None:
        """Release the blocks; other contexts find the prefix until its memory is needed."""
        self.changes += 1
        self.unsettled = ticket = object()
        self.engine.thread.soon(partial(self._close, ticket))

    def _close(self, ticket: object) -> None:
        self.tokens = []
        self._aside = None
        self.sequence.close()
        self.settled(ticket)

    def close_now(self) -> None:
        """Close the context at the end of its answer; its full blocks go to the cache on disk."""
        self.engine.cache.keep(self.sequence)
        self._aside = self._busy = None
        self.sequence.close()

    def check_prompt(self) -> None:
        """Refuse tokens that no answer can begin with.

        Raises:
            OptionError: there are no tokens.
            ContextOverflowError: the tokens do not fit into the context.
        """
        engine = self.engine
        if not self.tokens:
            raise OptionError("the prompt is empty; give at least one token")
        if len(self.tokens) > engine.ctx_size:
            raise ContextOverflowError(
                f"the prompt has {len(self.tokens)} tokens, but the context holds "
                f"{engine.ctx_size}; shorten it, raise `ctx_size` (the model takes up to "
                f"{engine.config.context_length}) or take `context_policy` shift"
            )

    def begin(self) -> None:
        """Take over the longest cached prefix, without the last token."""
        cache, prefix = self.engine.cache, self.tokens[:-1]
        longer = cache.cached_prefix(prefix, root=self.sequence.root) > len(self.sequence)
        if longer and not self.sequence.heads:
            self.sequence.close()
            self.sequence = cache.sequence(prefix, root=self.sequence.root)
        self.sequence.truncate(min(len(self.sequence), len(prefix)))
        self.sequence.expect(len(self.tokens))

    def take_back(self) -> None:
        """Put blocks that `give_back` kept, if any, into the cache again, before any other change.

        Raises:
            CacheFullError: there is no room.
        """
        if self._aside is not None:
            self.sequence.truncate(0)
            self.engine.cache.unpack(self.sequence, self._aside)
            self._aside = None
            self._truncate_to(self.tokens)  # the session may have changed since

    def make_room(self, rule: FullContext, keep: int) -> int:
        """Forget tokens behind the first `keep`, as many as a rule says.

        Tokens in the KV cache are not computed again, unless a window had passed what it would see
        or keys cannot be moved. Returns the number of forgotten tokens.

        Raises:
            OptionError: `keep` leaves no room.
            CacheFullError: there is no room to move them; nothing has changed.
        """
        count = rule.forgotten(len(self.tokens), ctx_size=self.engine.ctx_size, keep=keep)
        end = keep + count
        if not count:
            return 0
        root = self.sequence.root.shifted(keep=keep, discard=count)
        if len(self.sequence) > end:
            self.sequence.shift(keep=keep, discard=count)
        self._set(self.tokens[:keep] + self.tokens[end:])
        self.sequence.rename(root)
        return count

    def become(self, other: Context) -> None:
        """Share the computed tokens of another context, and drop all others."""
        self.sequence.close()
        self.sequence = other.sequence.fork()
        self.tokens = list(self.sequence.tokens)

    def take_over(self, sequence: Sequence) -> None:
        """Attach the sequence of a `Growth`, which has more of the tokens computed."""
        self.sequence, before = sequence, self.sequence
        before.truncate(0)

    def wake(self, answer: object) -> None:
        """Keep the blocks for an answer that begins, until it calls `rest`."""
        self._busy, self._seen = answer, True
        self.engine.cache.wake(self)

    def rest(self, answer: object = None) -> None:
        """Let others have the blocks, if no answer but this one needs them."""
        if self._busy in (None, answer):
            self._busy, self._seen = None, True
            self.engine.cache.rest(self)

    @property
    def recomputable(self) -> bool:
        """Whether K and V in the KV cache, if any, would get the same bits if computed again.

        Not so are those of another kernel, those that depend on tokens that a full context has
        forgotten, and those that a shift would move: beyond half of the context, as more than half
        of it is never forgotten at once.
        """
        sequence, ctx_size = self.sequence, self.engine.ctx_size
        exact = self.engine.recomputes_exactly and sequence.shareable is None
        moved = len(sequence) > ctx_size // 2 if self.shifts else len(self.tokens) > ctx_size
        return len(sequence) > 0 and exact and not moved

    def give_back(self) -> None:
        """Release the blocks until `begin`; what is not `recomputable` is kept elsewhere."""
        engine, sequence = self.engine, self.sequence
        engine.cache.keep(sequence)
        if len(sequence) and not self.recomputable:
            self._aside = engine.cache.pack(sequence)
        sequence.close()
        self.sequence = engine.cache.sequence(root=self.sequence.root)

    def forget(self, count: int) -> None:
        """Take the last `count` computed tokens out of the KV cache."""
        if count:
            self.sequence.truncate(len(self.sequence) - count)

    def cut(self, count: int) -> None:
        """Remove the last `count` sampled tokens."""
        if count:
            self._set(self.tokens[:-count])

    def extend(self, token: int) -> None:
        """Append a sampled token."""
        self.tokens.append(token)

    def settle(self) -> None:
        """Soon drop draft tokens not sampled, and write the rest to the cache on disk."""
        self.unsettled = ticket = object()
        self.engine.thread.soon(partial(self._settle, ticket))

    def _settle(self, ticket: object) -> None:
        self._truncate_to(self.tokens)
        if self.engine.cache.has_states:
            self.sequence.enter_end()  # the next turn, or another one in its place, begins there
        self.engine.cache.keep(self.sequence)
        self.settled(ticket)

    def settled(self, ticket: object) -> None:
        """Note that a change has been made; a later one may still be on its way."""
        if self.unsettled is ticket:
            self.unsettled = None

    def _truncate_to(self, tokens: list[int]) -> None:
        """Truncate the sequence to the prefix that it shares with `tokens`."""
        self.sequence.truncate(common_prefix(tokens, self.sequence.tokens))

    def checked(self, name: str, tokens: object) -> list[int]:
        """Check token ids that a caller gave for the parameter `name`; returns them as a list."""
        return check_token_ids(name, tokens, vocab_size=self.engine.config.vocab_size)


def digest_of(adapter: LoadedAdapter | None) -> str:
    """Return the digest of an adapter; "" for none."""
    return "" if adapter is None else adapter.digest
