"""The reference of a bundle: a fixed text computed in float32, kept beside the exported graphs.

The exporter measures how far each graph is from it (`export/reference_writer.py`). The self-test
measures the same for compiled graphs on the user's machine, which need not have float32 weights.
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
from edgellm.quantize.calibration import ShadowLinear
from edgellm.quantize.error import worst_line_error
from edgellm.store.manifest import PrecisionEntry, map_arrays

Floats = NDArray[np.float32]
# A function that runs one graph on inputs by name.
Run = Callable[[Mapping[str, Floats]], Sequence[Floats]]

FOLDER = "reference"
# Rows kept of each segment's inputs and outputs; 4 MB in all for SmolLM2-135M.
ROWS = 16
# Name of the weight `[E, E]` that takes embeddings to the basis of a precision's residual.
ROTATION = "enter"
# Key of the whole text's error among those of segments.
PROMPT = "prompt"


@dataclass(frozen=True)
class SegmentRows:
    """Inputs and outputs of a segment in float32, `[ROWS, *]` by name; no residual is rotated."""

    inputs: Mapping[str, Floats]
    outputs: Mapping[str, Floats]


@dataclass(frozen=True)
class Reference:
    """A text computed in float32.

    Attributes:
        tokens: ids of the text's n tokens.
        embedded: embeddings `[n, E]`.
        segments: rows of each segment for tokens after the first `HOST_TOKENS`.
        host_qkv: Q, K and V of each layer for those first tokens,
            `[HOST_TOKENS, (H + 2 Hkv) * D]`.
        hidden: hidden states `[n, E]` after the final norm.
        logits: logits `[1, V]` of the last token.
    """

    tokens: list[int]
    embedded: Floats
    segments: Sequence[SegmentRows]
    host_qkv: Sequence[Floats]
    hidden: Floats
    logits: Floats


def open_reference(root: Path, config: ModelConfig, arrays: Mapping[str, StoredArray]) -> Reference:
    """Map the reference that `export/reference_writer.py` has stored in the bundle at `root`."""
    stored = map_arrays(root, arrays)
    rest = slice(HOST_TOKENS, None)
    segments = []
    for index in range(config.layer_count + 1):
        part = contract.Part(index)
        embedded = contract.embedded_name(index - 1)
        sources = {
            contract.RESIDUAL: array_name(index - 1, contract.RESIDUAL_OUT),
            embedded: array_name(0, embedded),
        }
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
    """Return the array name of a segment's input or output.

    An input residual is stored once, as the output residual of the segment before.
    """
    return f"{index:03d}.{name}"


def error_name(index: int) -> str:
    """Return the key of a segment's error in the manifest."""
    return f"{index:03d}"


def read_rotation(root: Path, entry: PrecisionEntry) -> Floats | None:
    """Map the rotation `[E, E]` to the basis of a precision's residual; None without one."""
    enter = entry.arrays.get(ROTATION)
    return None if enter is None else map_arrays(root, {ROTATION: enter})[ROTATION]


def segment_error(
    rows: SegmentRows,
    run: Run,
    rotation: Floats | None,
    *,
    error: Callable[[Floats, Floats], float] = worst_line_error,
) -> float:
    """Measure a segment's error against float32, on float32 inputs: its worst row or column.

    For the residual, only the part that the segment adds is compared: errors would be small beside
    the rest.

    Args:
        rows: float32 inputs and outputs, with as many rows as `run` takes.
        run: the segment's graph.
        rotation: `[E, E]` to the basis of the precision's residual; None without a basis of its
            own.
        error: error of an output, given with the exact one.
    """
    inputs = {
        name: _rotated(value, rotation) if name == contract.RESIDUAL else value
        for name, value in rows.inputs.items()
    }
    errors = []
    for (name, exact), output in zip(rows.outputs.items(), run(inputs), strict=True):
        if name == contract.RESIDUAL_OUT:
            before = inputs.get(contract.RESIDUAL, np.float32(0))
            errors.append(error(_rotated(exact, rotation) - before, output - before))
        else:
            errors.append(error(exact, output))
    return max(errors)


def joined(up: Run, down: Run, shadow: ShadowLinear) -> Run:
    """Return one function for a segment in two halves, with the host's shadow between them."""

    def run(inputs: Mapping[str, Floats]) -> Sequence[Floats]:
        residual, activated = up(inputs)
        correction = shadow.correction(activated)
        added = residual if correction is None else residual + correction
        return down({contract.ACTIVATED: activated, contract.RESIDUAL: added})

    return run


def _rotated(residual: Floats, rotation: Floats | None) -> Floats:
    return residual if rotation is None else residual @ rotation
