"""The float32 reference text to compare a bundle's back ends with, stored or computed now."""

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

# Chunk size in tokens for the reference text of a bundle whose graphs have no chunk sizes.
_CHUNK = 128


@contextmanager
def float_reference(
    bundle: Bundle, *, progress: ProgressCallback | None = None
) -> Iterator[Reference]:
    """Yield the float32 reference of a bundle; computed from the checkpoint if it stores none.

    Bundles without graphs of chunks store none.

    Args:
        progress: see `Progress`.

    Raises:
        SourceError: the bundle stores none, and its checkpoint is gone or changed.
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
