"""The text in float32 that a bundle's back ends are compared with, kept there or computed now."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from edgellm.export.equalized import EqualizedCheckpoint
from edgellm.export.reference_writer import reference_tokens, store_reference
from edgellm.export.source_checkpoint import open_source
from edgellm.progress import Progress, ProgressCallback
from edgellm.store.bundle import Bundle
from edgellm.store.key_basis import open_key_basis
from edgellm.store.reference import Reference, open_reference
from edgellm.text.tokenizer import Tokenizer

# Tokens of a chunk of the text where no graphs have a chunk size.
_CHUNK = 128


@contextmanager
def float_reference(
    bundle: Bundle, *, progress: ProgressCallback | None = None
) -> Iterator[Reference]:
    """The reference of a bundle; one without graphs of chunks keeps none, and its checkpoint says.

    Args:
        progress: see `Progress`.

    Raises:
        SourceError: it keeps none and the checkpoint is gone, or changed.
    """
    config, manifest = bundle.config, bundle.manifest
    if manifest.reference:
        yield open_reference(bundle.path, config, manifest.reference)
        return
    basis = open_key_basis(bundle.path, manifest.keys)
    checkpoint = EqualizedCheckpoint(open_source(bundle, progress=progress), basis)
    tokenizer = Tokenizer(bundle.path, manifest.tokenizer, rows=config.vocab_size)
    tokens = reference_tokens(tokenizer, config, chunk=_CHUNK)

    def done(index: int) -> None:
        if progress is not None:
            label = f"computing in float32: segment {index}"
            progress(Progress(label, index + 1, config.layer_count + 1))

    with TemporaryDirectory() as folder:
        arrays = store_reference(checkpoint, tokens, Path(folder), on_segment=done)
        yield open_reference(Path(folder), config, arrays)
