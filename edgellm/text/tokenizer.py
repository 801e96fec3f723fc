"""Text to tokens and back, at run time."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from operator import itemgetter
from pathlib import Path

from tokenizers import Tokenizer as HFTokenizer

from edgellm.errors import EdgeLLMError, TokenizerError
from edgellm.store.manifest import TOKENIZER, TokenizerEntry
from edgellm.text.token_bytes import TokenBytes
from edgellm.text.tokenizer_check import check_description

_REPLACEMENT = "\ufffd"
# From so many characters or tokens on, those of `tokenizers` are called that let go of Python's
# lock: of a text of 1 MiB, encoding holds it for 0.5 s, and nothing else in the process goes on.
_LONG = 1 << 12


class Tokenizer:
    """A bundle's tokenizer.

    Args:
        rows: of the model's embedding; None where there is no model. The exporter has looked at
            every token of the vocabulary, which takes a third of the time to load; here those are
            looked at that are used.

    Raises:
        TokenizerError: a damaged file, or a begin or end token that the embedding has no row for.
    """

    def __init__(self, folder: Path, entry: TokenizerEntry, *, rows: int | None = None) -> None:
        self._tokenizer = read_tokenizer(folder / TOKENIZER)
        self._rows = rows
        self._lock = threading.Lock()
        self.bos = entry.bos
        self.eos = entry.eos
        self.bos_id = self._id(entry.bos) if entry.bos is not None else None
        self.eos_ids = frozenset(self._id(text) for text in entry.eos)
        self.fim = entry.fim
        self.adds_bos = entry.add_bos and self.bos_id is not None
        added = self._tokenizer.get_added_tokens_decoder()
        # special or not, they are taken out of a text before it is split
        self.added_tokens: Mapping[str, int] = {t.content: i for i, t in added.items()}
        self.special_texts = tuple(
            sorted((t.content for t in added.values() if t.special), key=len, reverse=True)
        )

    @cached_property
    def special_pattern(self) -> re.Pattern[str] | None:
        """Matches any special token's text, the longest where several begin."""
        texts = [re.escape(text) for text in self.special_texts if text]
        return re.compile("|".join(texts)) if texts else None

    @property
    def vocab_size(self) -> int:
        return self._tokenizer.get_vocab_size()

    @cached_property
    def vocabulary(self) -> Mapping[str, int]:
        """Every token's text and id."""
        return self._tokenizer.get_vocab()

    @cached_property
    def longest(self) -> int:
        """Characters of the longest token."""
        return max(map(len, self.vocabulary))

    def encode(
        self, text: str, *, add_bos: bool | None = None, parse_special: bool = False
    ) -> list[int]:
        """Token ids of a text.

        Args:
            add_bos: start with the begin token; None does what the model asks for. Never doubled.
            parse_special: whether a special token's text stands for the token or for itself.

        Raises:
            TokenizerError: the text is not valid Unicode, or the tokenizer fails on it, or a token
                has no row in the embedding.
        """
        try:
            with self._lock, tokenizer_errors("the tokenizer failed on this text"):
                self._tokenizer.encode_special_tokens = not parse_special
                ids = self._encoded(text)
        except (UnicodeEncodeError, TypeError) as error:
            raise TokenizerError(f"the text is not valid Unicode: {error}") from None
        self._check(max(ids, default=-1))
        wanted = self.adds_bos if add_bos is None else add_bos and self.bos_id is not None
        if wanted and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids = [self.bos_id, *ids]
        return ids

    def _encoded(self, text: str) -> list[int]:
        if len(text) < _LONG:
            encoding = self._tokenizer.encode(text, add_special_tokens=False)
        else:
            (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
        ids: list[int] = encoding.ids
        return ids

    def decode(self, tokens: Sequence[int], *, skip_special: bool = True) -> str:
        """The text of tokens; bytes that are not UTF-8 become U+FFFD."""
        ids = list(tokens)
        with tokenizer_errors("the tokenizer failed on these tokens"):
            if len(ids) < _LONG:
                return self._tokenizer.decode(ids, skip_special_tokens=skip_special)
            with self._lock:  # `encode` changes what others must not be reading meanwhile
                (text,) = self._tokenizer.decode_batch([ids], skip_special_tokens=skip_special)
            return str(text)

    def text_of(self, token: int) -> str:
        """A token as its vocabulary entry, for display."""
        return self._tokenizer.id_to_token(token) or ""

    def bytes_of(self, token: int) -> bytes:
        """The bytes of a token by itself, which may be a part of a character."""
        return self._token_bytes.bytes_of(self.text_of(token))

    @cached_property
    def _token_bytes(self) -> TokenBytes:
        return TokenBytes(json.loads(self.to_json()))

    def to_json(self) -> str:
        """The content of tokenizer.json."""
        return self._tokenizer.to_str()

    def _id(self, text: str) -> int:
        token = self._tokenizer.token_to_id(text)
        if token is None:
            raise TokenizerError(f"token {text!r} is not in the vocabulary")
        self._check(token)
        return token

    def _check(self, token: int) -> None:
        if self._rows is not None and token >= self._rows:
            raise no_row(self.text_of(token), token, self._rows)


def read_tokenizer(path: Path, *, template: bool = False) -> HFTokenizer:
    """Read a tokenizer.json.

    Args:
        template: see `check_description`; to encode with special tokens.

    Raises:
        TokenizerError: a damaged file.
    """
    with tokenizer_errors(str(path)):
        content = path.read_bytes()
        check_description(content, template=template)
        return HFTokenizer.from_buffer(content)


@contextmanager
def tokenizer_errors(what: str) -> Iterator[None]:
    """Whatever the `tokenizers` library raises becomes a TokenizerError that begins with `what`.

    A tokenizer.json can hold combinations that it does not expect, and a panic of Rust's is no
    Exception to Python. That a text is not Unicode is the caller's to tell.
    """
    try:
        yield
    except (EdgeLLMError, UnicodeEncodeError, TypeError, MemoryError):
        raise
    except BaseException as error:
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise TokenizerError(f"{what}: {error}") from None
        raise


def check_ids(tokenizer: HFTokenizer, rows: int, *, origin: str) -> None:
    """Refuse a token that the embedding has no row for; rows without a token are padding.

    Raises:
        TokenizerError: names the token.
    """
    text, largest = max(tokenizer.get_vocab().items(), key=itemgetter(1), default=("", -1))
    if largest >= rows:
        raise no_row(text, largest, rows, origin=f"{origin}: ")


def no_row(text: str, token: int, rows: int, *, origin: str = "") -> TokenizerError:
    return TokenizerError(
        f"{origin}token {text!r} has the id {token}, but the model's embedding has {rows} rows; "
        f"0 to {rows - 1} is allowed"
    )


class TextStream:
    """Turns tokens into text as they come, holding back unfinished characters.

    Only the tokens since the last complete text are decoded, behind those of the step before:
    decoders drop the space at the very beginning, and the earlier tokens take that place.

    Args:
        shown_special: ids of special tokens whose texts are shown as well.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        context: Sequence[int] = (),
        *,
        shown_special: Collection[int] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._shown_special = shown_special
        self._shown = self._complete_end(context)
        self._pending: list[int] = []

    def add(self, token: int) -> str:
        """The text that this token completes, possibly none."""
        if token in self._shown_special:
            return self.finish() + self._tokenizer.text_of(token)
        self._pending.append(token)
        text = self._new_text()
        if not text or text.endswith(_REPLACEMENT):
            return ""
        self._shown, self._pending = self._pending, []
        return text

    def finish(self) -> str:
        """The text that was held back; bytes that never became a character are U+FFFD."""
        text = self._new_text()
        self._shown, self._pending = [*self._shown, *self._pending], []
        return text

    def _new_text(self) -> str:
        known = self._tokenizer.decode(self._shown)
        return self._tokenizer.decode([*self._shown, *self._pending])[len(known) :]

    def _complete_end(self, context: Sequence[int]) -> list[int]:
        """The last few tokens of a context, from where a character begins."""
        for length in range(1, min(len(context), 8) + 1):
            end = list(context[-length:])
            text = self._tokenizer.decode(end)
            if text and _REPLACEMENT not in text:
                return end
        return []
