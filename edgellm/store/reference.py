"""What a model computes in float32 on a fixed text, kept beside its exported graphs.

The exporter measures how far each graph is from it (`export/reference_writer.py`), and the
self-test what is made of the graphs on the user's machine, where nothing in float32 need be.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgellm.graphs import contract
from edgellm.graphs.config import ModelConfig
from edgellm.graphs.contract import HOST_TOKENS, StoredArray
from edgellm.quantize.error import worst_line_error
from edgellm.quantize.shadow import ShadowLinear
from edgellm.store.manifest import PrecisionEntry, map_arrays

Floats = NDArray[np.float32]
# Runs one graph on inputs by name.
Run = Callable[[Mapping[str, Floats]], Sequence[Floats]]

FOLDER = "reference"
# Rows kept of each segment's inputs and outputs; 4 MB in all for SmolLM2-135M.
ROWS = 16
# The weight that takes embeddings to a basis of the precision's own.
ROTATION = "enter"
# What a whole text's error is called among those of segments.
PROMPT = "prompt"


@dataclass(frozen=True)
class SegmentRows:
    """What goes into a segment and comes out, `[ROWS, *]` by name, in float32's own basis."""

    inputs: Mapping[str, Floats]
    outputs: Mapping[str, Floats]


@dataclass(frozen=True)
class Reference:
    """A text in float32.

    Attributes:
        tokens: its n tokens.
        embedded: `[n, E]`.
        segments: their rows for the tokens after the first `HOST_TOKENS`.
        host_qkv: `[HOST_TOKENS, (H + 2 Hkv) * D]` of each layer, for the tokens before.
        hidden: `[n, E]`, after the final norm.
        logits: `[1, V]`, of the last token.
    """

    tokens: list[int]
    embedded: Floats
    segments: Sequence[SegmentRows]
    host_qkv: Sequence[Floats]
    hidden: Floats
    logits: Floats


def open_reference(root: Path, config: ModelConfig, arrays: Mapping[str, StoredArray]) -> Reference:
    """Map what `export/reference_writer.py` has stored in the bundle at `root`."""
    stored = map_arrays(root, arrays)
    rest = slice(HOST_TOKENS, None)
    segments = []
    for index in range(config.layer_count + 1):
        part = contract.Part(index)
        sources = {contract.RESIDUAL: array_name(index - 1, contract.RESIDUAL_OUT)}
        inputs, outputs = (
            {name: stored[sources.get(name, array_name(index, name))][rest] for name in names}
            for names in (contract.part_inputs(config, part), contract.part_outputs(config, part))
        )
        segments.append(SegmentRows(inputs, outputs))
    host_qkv = [
        stored[array_name(layer, contract.QKV)][:HOST_TOKENS] for layer in range(config.layer_count)
    ]
    return Reference(
        stored["tokens"].tolist(),
        stored["embedded"],
        segments,
        host_qkv,
        stored["hidden"],
        stored["logits"],
    )


def array_name(index: int, name: str) -> str:
    """Array of a segment's input or output; the input residual is the output of the one before."""
    return f"{index:03d}.{name}"


def error_name(index: int) -> str:
    """The key of a segment's error in the manifest."""
    return f"{index:03d}"


def read_rotation(root: Path, entry: PrecisionEntry) -> Floats | None:
    """`[E, E]` to the basis of a precision's residual, if it has one of its own."""
    enter = entry.arrays.get(ROTATION)
    return None if enter is None else map_arrays(root, {ROTATION: enter})[ROTATION]


def segment_error(rows: SegmentRows, run: Run, rotation: Floats | None) -> float:
    """How far a segment is from float32, on float32's own inputs: that of its worst row or column.

    Of a residual it is what the segment adds to it that counts: errors would hide behind the rest.

    Args:
        rows: with as many rows as `run` takes.
        rotation: `[E, E]` to the basis of the precision's residual, if it has one of its own.
    """
    inputs = {
        name: _rotated(value, rotation) if name == contract.RESIDUAL else value
        for name, value in rows.inputs.items()
    }
    errors = []
    for (name, exact), output in zip(rows.outputs.items(), run(inputs), strict=True):
        if name == contract.RESIDUAL_OUT:
            before = inputs.get(contract.RESIDUAL, np.float32(0))
            errors.append(worst_line_error(_rotated(exact, rotation) - before, output - before))
        else:
            errors.append(worst_line_error(exact, output))
    return max(errors)


def joined(up: Run, down: Run, shadow: ShadowLinear) -> Run:
    """The halves of a segment that is cut, and what the host does between them, as one."""

    def run(inputs: Mapping[str, Floats]) -> Sequence[Floats]:
        residual, activated = up(inputs)
        correction = shadow.correction(activated)
        added = residual if correction is None else residual + correction
        return down({contract.ACTIVATED: activated, contract.RESIDUAL: added})

    return run


def _rotated(residual: Floats, rotation: Floats | None) -> Floats:
    return residual if rotation is None else residual @ rotation
