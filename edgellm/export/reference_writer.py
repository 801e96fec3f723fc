"""Writer of the float32 reference of a text, and the error of an exported precision against it.

Both work segment by segment, so that a model whose weights do not fit into memory can be exported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgellm.backends.batch import softcapped
from edgellm.backends.providers import CPU, open_session
from edgellm.backends.segments import read_shadows
from edgellm.errors import ExportError
from edgellm.export.calibrate import default_text
from edgellm.export.float_segments import float_segments, layer_embeddings, next_inputs
from edgellm.export.window_attention import WindowAttention, shared_name
from edgellm.graphs import contract
from edgellm.graphs.builder import WeightFile
from edgellm.graphs.checkpoint import Checkpoint
from edgellm.graphs.config import ModelConfig
from edgellm.graphs.contract import HOST_TOKENS, Part, StoredArray, part_file
from edgellm.quantize.calibration import ShadowLinear
from edgellm.quantize.error import worst_row_error
from edgellm.store.manifest import PrecisionEntry
from edgellm.store.reference import (
    FOLDER,
    PROMPT,
    ROWS,
    Reference,
    Run,
    array_name,
    error_name,
    joined,
    read_rotation,
    segment_error,
)
from edgellm.text.tokenizer import Tokenizer

Floats = NDArray[np.float32]
OnSegment = Callable[[int], None]
# Characters to encode for each token wanted; enough in any vocabulary.
_CHARACTERS_PER_TOKEN = 20


def reference_tokens(tokenizer: Tokenizer, config: ModelConfig, *, chunk: int) -> list[int]:
    """Return the reference text's tokens: `HOST_TOKENS` and two chunks, or the model's context."""
    count = min(HOST_TOKENS + 2 * chunk, config.context_length)
    return tokenizer.encode(default_text()[: _CHARACTERS_PER_TOKEN * count])[:count]


def store_reference(
    checkpoint: Checkpoint, tokens: Sequence[int], root: Path, *, on_segment: OnSegment
) -> dict[str, StoredArray]:
    """Compute a text in float32, and write its reference into the bundle at `root`.

    `open_reference` reads the arrays that are returned.

    Args:
        tokens: token ids of the text.
        on_segment: called with the number of each segment that is done.

    Raises:
        ExportError: a value is infinite or not a number.
    """
    ids = np.asarray(tokens, np.int64)
    table = checkpoint.tensor("embedding").float32()
    (root / FOLDER).mkdir()
    with WeightFile(root / FOLDER) as file:
        file.add("tokens", ids)
        file.add("embedded", table[ids])
        hidden = _store_segments(checkpoint, tokens, table[ids], file, root, on_segment=on_segment)
        file.add("hidden", hidden)
        head = table if checkpoint.config.tied_embedding else checkpoint.tensor("head").float32()
        logits = softcapped(hidden[-1:] @ head.T, checkpoint.config.logit_softcap)
        file.add("logits", logits)
    return file.arrays


def _store_segments(
    checkpoint: Checkpoint,
    tokens: Sequence[int],
    embedded: Floats,
    file: WeightFile,
    root: Path,
    *,
    on_segment: OnSegment,
) -> Floats:
    """Run a text through all segments, and store the first rows of their inputs and outputs.

    Args:
        embedded: embeddings `[n, E]` of the text.
        root: folder for the temporary weights file of one segment at a time.

    Returns:
        The hidden states `[n, E]` after the final norm.
    """
    attention = WindowAttention.of(checkpoint, len(embedded))
    inputs = _first_inputs(checkpoint, tokens, embedded)

    def keep(index: int, name: str, rows: Floats) -> None:
        file.add(array_name(index, name), rows[: HOST_TOKENS + ROWS])

    with closing(float_segments(checkpoint, root=root)) as segments:
        for index, run in enumerate(segments):
            outputs = run(inputs)
            _check_finite("f32", index, outputs.values())
            for name in contract.part_outputs(checkpoint.config, Part(index)):
                keep(index, name, outputs[name])
            for name in inputs if index == 0 else (contract.ATTENTION,):
                keep(index, name, inputs[name])
            inputs = next_inputs(index, outputs, attention)
            on_segment(index)
    return outputs[contract.HIDDEN]


def _first_inputs(
    checkpoint: Checkpoint, tokens: Sequence[int], embedded: Floats
) -> dict[str, Floats]:
    """Return what the first segment reads of a text."""
    if checkpoint.config.layer_embedding is None:
        return {contract.X: embedded}
    (rows,) = layer_embeddings(checkpoint, [tokens])
    return {contract.X: embedded, contract.LAYER_ROWS: rows}


def measure_errors(
    checkpoint: Checkpoint,
    reference: Reference,
    precision: str,
    entry: PrecisionEntry,
    root: Path,
    *,
    on_segment: OnSegment,
) -> dict[str, float]:
    """Measure the errors of a precision in the bundle at `root` on the CPU provider.

    Returns:
        The error of each segment against float32 (see `segment_error`) by its three digits, and
        the error of the worst hidden state of the whole text, in which those of all segments add
        up.

    Raises:
        ExportError: a value is infinite or not a number.
    """
    host, shadows = entry.host_tokens, read_shadows(root, entry)
    rotation = read_rotation(root, entry)
    attention = WindowAttention.of(checkpoint, len(reference.tokens))
    config = checkpoint.config
    inputs = _first_inputs(checkpoint, reference.tokens[host:], reference.embedded[host:])
    errors, known = {}, dict[str, Floats]()
    for index, rows in enumerate(reference.segments):
        run = _opened(root / precision, index, shadows.get(index))
        errors[error_name(index)] = segment_error(rows, run, rotation)
        given = dict(zip(contract.part_outputs(config, Part(index)), run(inputs), strict=True))
        _check_finite(precision, index, given.values())
        if index < config.layer_count:
            qkv = np.concatenate([reference.host_qkv[index][:host], given[contract.QKV]])
            if index in config.sources:
                known[shared_name(index)] = qkv
            known |= given
            known[contract.ATTENTION] = attention(index, qkv, known)[host:]
            known[contract.RESIDUAL] = given[contract.RESIDUAL_OUT]
            inputs = {x: known[x] for x in contract.part_inputs(config, Part(index + 1))}
        on_segment(index)
    errors[PROMPT] = worst_row_error(reference.hidden[host:], given[contract.HIDDEN])
    return {name: round(error, 4) for name, error in errors.items()}


def _check_finite(precision: str, index: int, outputs: Iterable[Floats]) -> None:
    if not all(np.isfinite(rows).all() for rows in outputs):
        raise ExportError(
            f"{precision}: segment {index} gives a value that is infinite or not a number: the "
            "weights are damaged, or their activations are too large for this precision"
        )


def _opened(folder: Path, index: int, shadow: ShadowLinear | None) -> Run:
    def opened(part: Part) -> Run:
        session, _ = open_session(folder / part_file(part, None), provider=CPU)
        return partial(session.run, None)

    if shadow is None:
        return opened(Part(index))
    return joined(opened(Part(index, "up")), opened(Part(index, "down")), shadow)
