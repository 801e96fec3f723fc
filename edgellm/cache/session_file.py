"""File format of a saved session: its tokens and their KV blocks.

20 bytes   magic and version
32 bytes   SHA-256 of all bytes after it
 4 bytes   length of the header, little-endian
header     JSON: model, KV format, tokens, number of tokens in the blocks
the rest   the blocks, see `pack` in `block_store.py`
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from edgellm.errors import OptionError, SessionFileError
from edgellm.kernels.kv_blocks import KV_FORMATS
from edgellm.store.home import delete_abandoned, replacing_file

MAGIC = b"edgellm session 3".ljust(20, b"\0")
_DIGEST = 32


@dataclass(frozen=True)
class SavedSession:
    """The header of a session file.

    Attributes:
        model: name of the model, for people.
        fingerprint: hash of the model's weights and the KV format.
        tokens: token ids of the session.
        computed: number of leading tokens whose K and V are in the blocks.
        shareable: see `Sequence`.
        firsts, heads: see `PackedBlocks`.
        adapter: digest of the adapter that K and V depend on; "": none.
        adapter_name: name that it had, for people.
        adapter_start: position of the first token that it changes.
        arithmetic: arithmetic of the back end that computed the blocks (`Engine.arithmetic`).
    """

    model: str
    fingerprint: str
    kv_format: str
    tokens: list[int]
    computed: int
    shareable: int | None = None
    arithmetic: str = ""
    firsts: list[int] = field(default_factory=list)
    heads: list[list[int] | None] = field(default_factory=list)
    adapter: str = ""
    adapter_name: str = ""
    adapter_start: int = 0


def write_session(path: Path, saved: SavedSession, blocks: bytes | memoryview) -> None:
    """Write a session file, whole or not at all.

    Raises:
        OptionError: the file cannot be written at `path`.
    """
    header = json.dumps(asdict(saved)).encode()
    body = b"".join((len(header).to_bytes(4, "little"), header, blocks))
    delete_abandoned(path.parent, of=path.name)
    try:
        with replacing_file(path, private=True) as partial:
            partial.write_bytes(MAGIC + hashlib.sha256(body).digest() + body)
    except OSError as error:
        raise OptionError(f"{path}: {error.strerror}") from None


def read_session(
    path: Path, *, fingerprint: str, kv_format: str, adapter: str = ""
) -> tuple[SavedSession, memoryview]:
    """Read a saved session that fits a model and an adapter, and its packed blocks.

    Raises:
        SessionFileError: the file is no session, is damaged, or is of another model, KV format or
            adapter.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise SessionFileError(f"{path}: {error.strerror}") from None
    body = memoryview(data)[len(MAGIC) + _DIGEST :]
    if not data.startswith(MAGIC):
        raise SessionFileError(f"{path}: not a session that this edgellm saved")
    if hashlib.sha256(body).digest() != data[len(MAGIC) :][:_DIGEST]:
        raise SessionFileError(f"{path}: damaged or truncated; save the session again")
    end = 4 + int.from_bytes(body[:4], "little")
    saved = _header(path, bytes(body[4:end]))
    if saved.kv_format != kv_format:
        how = f"load the model with `kv_format` {saved.kv_format}"
        if saved.kv_format not in KV_FORMATS:
            how = f"allowed are {', '.join(KV_FORMATS)}, or its `kv_bits`. Compute its text again"
        raise SessionFileError(
            f"{path}: its KV cache is {saved.kv_format}, this one {kv_format}; {how}"
        )
    if saved.fingerprint != fingerprint:
        raise SessionFileError(
            f"{path}: saved with {saved.model}; this is another model, or has another `kv_budget` "
            "or `kv_bits`"
        )
    if saved.adapter != adapter:
        name = f"the adapter {saved.adapter_name!r}" if saved.adapter else "no adapter"
        raise SessionFileError(
            f"{path}: saved with {name}, and opened with {'another' if adapter else 'none'}; name "
            "the same one as `adapter`"
        )
    return saved, body[end:]


def _header(path: Path, text: bytes) -> SavedSession:
    """Parse the header of a session file, and check the type and range of its values.

    Raises:
        SessionFileError: the header is damaged.
    """
    try:
        saved = SavedSession(**json.loads(text))
    except (ValueError, TypeError, RecursionError):
        raise SessionFileError(f"{path}: its header is damaged; save the session again") from None
    words = [saved.model, saved.fingerprint, saved.kv_format, saved.arithmetic]
    words += [saved.adapter, saved.adapter_name]
    right = all(isinstance(word, str) for word in words) and isinstance(saved.tokens, list)
    right = right and type(saved.computed) is int and 0 <= saved.computed <= len(saved.tokens)
    right = right and type(saved.adapter_start) is int and saved.adapter_start >= 0
    right = right and isinstance(saved.firsts, list)
    right = right and all(type(first) is int and first >= 0 for first in saved.firsts)
    right = right and isinstance(saved.heads, list)
    for counts in saved.heads if right else ():
        right = right and (counts is None or isinstance(counts, list))
        right = right and all(type(count) is int and count > 0 for count in counts or ())
    if saved.shareable is not None:
        right = right and type(saved.shareable) is int and 0 <= saved.shareable <= saved.computed
    if not right:
        raise SessionFileError(f"{path}: its header is damaged; save the session again")
    return saved
