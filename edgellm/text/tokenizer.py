"""The tokenizer of a bundle, from text to token ids and back, at run time."""

from __future__ import annotations

import base64
import json
import re
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, cached_property
from operator import itemgetter
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as HFTokenizer

from edgellm.errors import EdgeLLMError, TokenizerError
from edgellm.store.manifest import TOKENIZER, TokenizerEntry

_REPLACEMENT = "\ufffd"
# From this number of characters or tokens on, functions of `tokenizers` are called that release
# Python's lock: encoding a text of 1 MiB holds it for 0.5 s, and all other threads wait.
_LONG = 1 << 12


class Tokenizer:
    """A bundle's tokenizer.

    Args:
        folder: the bundle's folder.
        entry: special tokens from the bundle's manifest.
        rows: rows of the model's embedding; None without a model. The exporter has checked every
            token of the vocabulary, which takes a third of the time to load; here only tokens in
            use are checked.

    Raises:
        TokenizerError: the file is damaged, or a begin or end token has no row in the embedding.
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
        # added tokens, special or not, are taken out of a text before it is split
        self.added_tokens: Mapping[str, int] = {t.content: i for i, t in added.items()}
        self.special_texts = tuple(
            sorted((t.content for t in added.values() if t.special), key=len, reverse=True)
        )

    @cached_property
    def special_pattern(self) -> re.Pattern[str] | None:
        """Pattern of any special token's text, the longest first; None without special tokens."""
        texts = [re.escape(text) for text in self.special_texts if text]
        return re.compile("|".join(texts)) if texts else None

    @property
    def vocab_size(self) -> int:
        return self._tokenizer.get_vocab_size()

    @cached_property
    def vocabulary(self) -> Mapping[str, int]:
        """Id of every token by its text."""
        return self._tokenizer.get_vocab()

    @cached_property
    def longest(self) -> int:
        """Number of characters of the longest token."""
        return max(map(len, self.vocabulary))

    def encode(
        self, text: str, *, add_bos: bool | None = None, parse_special: bool = False
    ) -> list[int]:
        """Encode a text as token ids.

        Args:
            add_bos: whether to start with the begin token, which is never doubled; None: as the
                model asks for.
            parse_special: whether a special token's text is encoded as that token, instead of as
                plain text.

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
        """Decode token ids to text; bytes that are not UTF-8 become U+FFFD."""
        ids = list(tokens)
        with tokenizer_errors("the tokenizer failed on these tokens"):
            if len(ids) < _LONG:
                return self._tokenizer.decode(ids, skip_special_tokens=skip_special)
            with self._lock:  # `encode` changes a setting that this must not read meanwhile
                (text,) = self._tokenizer.decode_batch([ids], skip_special_tokens=skip_special)
            return str(text)

    def text_of(self, token: int) -> str:
        """Return a token's vocabulary entry, for display; "" for an unknown id."""
        return self._tokenizer.id_to_token(token) or ""

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes of a token by itself, which may be a part of a character."""
        return self._token_bytes.bytes_of(self.text_of(token))

    @cached_property
    def _token_bytes(self) -> TokenBytes:
        return TokenBytes(json.loads(self.to_json()))

    def to_json(self) -> str:
        """Return the content of tokenizer.json."""
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
        template: whether to check the template of begin and end tokens, needed to encode with
            special tokens; see `check_description`.

    Raises:
        TokenizerError: the file is damaged.
    """
    with tokenizer_errors(str(path)):
        content = path.read_bytes()
        check_description(content, template=template)
        return HFTokenizer.from_buffer(content)


@contextmanager
def tokenizer_errors(what: str) -> Iterator[None]:
    """Turn errors of the `tokenizers` library in the block into TokenizerErrors.

    A tokenizer.json can hold combinations that the library does not expect, and a panic of Rust's
    is no Exception to Python. UnicodeEncodeError and TypeError, for a text that is not Unicode, are
    left to the caller.

    Args:
        what: beginning of the error's message.
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
    """Refuse a vocabulary with a token that has no row in the embedding; more rows are padding.

    Raises:
        TokenizerError: the largest id has no row; the message names the token.
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
    """Streaming decoder from tokens to text, which holds back unfinished characters.

    Only the tokens since the last complete text are decoded, after those of the step before:
    decoders drop a space at the very beginning, where the earlier tokens stand.

    Args:
        context: tokens before the first one of the stream.
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
        """Take a token, and return the text that it completes; "" if it completes none."""
        if token in self._shown_special:
            return self.finish() + self._tokenizer.text_of(token)
        self._pending.append(token)
        text = self._new_text()
        if not text or text.endswith(_REPLACEMENT):
            return ""
        self._shown, self._pending = self._pending, []
        return text

    def finish(self) -> str:
        """Return the text that was held back; bytes of an unfinished character become U+FFFD."""
        text = self._new_text()
        self._shown, self._pending = [*self._shown, *self._pending], []
        return text

    def _new_text(self) -> str:
        known = self._tokenizer.decode(self._shown)
        return self._tokenizer.decode([*self._shown, *self._pending])[len(known) :]

    def _complete_end(self, context: Sequence[int]) -> list[int]:
        """Return the fewest last tokens of a context, up to 8, that are whole characters."""
        for length in range(1, min(len(context), 8) + 1):
            end = list(context[-length:])
            text = self._tokenizer.decode(end)
            if text and _REPLACEMENT not in text:
                return end
        return []


_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes:
    """The notation of bytes in a vocabulary, found from its tokenizer.json.

    Args:
        description: content of tokenizer.json.
    """

    def __init__(self, description: Mapping[str, Any]) -> None:
        kinds = json.dumps(description.get("decoder"))
        self._byte_level = '"ByteLevel"' in kinds
        self._added = {entry["content"] for entry in description.get("added_tokens") or ()}

    def bytes_of(self, text: str) -> bytes:
        """Return the bytes that a token, given as its vocabulary entry, stands for."""
        if text in self._added:
            return text.encode(errors="replace")
        if self._byte_level:
            letters = _letters()
            if all(letter in letters for letter in text):
                return bytes(letters[letter] for letter in text)
            return text.encode(errors="replace")
        if byte := _BYTE.fullmatch(text):
            return bytes([int(byte[1], 16)])
        return text.replace("\u2581", " ").encode(errors="replace")


@cache
def _letters() -> Mapping[str, int]:
    """Return the byte of each of GPT-2's letters.

    A printable byte is its own character; the others are characters from 256 on.
    """
    seen = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(seen)]
    return {chr(b): b for b in seen} | {chr(256 + i): b for i, b in enumerate(others)}


# Names of dangerous parts; letters may be written as escapes. Encoding runs no TemplateProcessing.
# Each is looked for by itself: one expression for all takes twice as long.
_SUSPECT = (b"Precompiled", b"FixedLength")
_ESCAPED_LETTERS = tuple(rb"\u00%d" % digit for digit in range(4, 8))


def check_description(content: bytes, *, template: bool) -> None:
    """Refuse a tokenizer.json with parts known to end in a panic or in gigabytes of memory.

    Args:
        template: whether to check the template of begin and end tokens as well, for which the whole
            vocabulary has to be read.

    Raises:
        ValueError: a part is refused; the message names it.
    """
    suspect: tuple[bytes, ...] = _SUSPECT
    if rb"\u00" in content:  # most have none, and one search of 2 MB takes a millisecond
        suspect += _ESCAPED_LETTERS
    if template or any(part in content for part in suspect):
        json.loads(content, object_hook=_checked)


def _checked(part: dict[str, Any]) -> dict[str, Any]:
    kind = part.get("type")
    if kind == "Precompiled":
        _check_charsmap(part.get("precompiled_charsmap"))
    elif kind == "FixedLength" and part.get("length") == 0:
        raise ValueError("a FixedLength pre-tokenizer has the length 0")
    elif kind == "TemplateProcessing":
        _check_template(part)
    return part


def _check_charsmap(text: object) -> None:
    """Compare the trie's size, in the first four bytes, with the bytes that follow."""
    content = base64.b64decode(text) if isinstance(text, str) else b""
    size = int.from_bytes(content[:4], "little")
    if not 4 <= size <= len(content) - 4:
        raise ValueError(
            f"precompiled_charsmap has {len(content)} bytes, and says that {size} of them are its "
            "trie"
        )


def _check_template(part: Mapping[str, Any]) -> None:
    known = part.get("special_tokens")
    for side in (part.get("single"), part.get("pair")):
        for piece in side if isinstance(side, list) else ():
            token = piece.get("SpecialToken") if isinstance(piece, dict) else None
            name = token.get("id") if isinstance(token, dict) else None
            if isinstance(name, str) and not (isinstance(known, dict) and name in known):
                raise ValueError(f"TemplateProcessing has no special token {name!r}")
