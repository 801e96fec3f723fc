"""The precisions in which segments are exported.

    f32    float32 weights and activations: the reference.
    w8a8   int8 weights (a scale a channel) and int8 activations (a scale a row, found at run time).
           The residual stream is rotated and each run of inputs of down_proj is multiplied by a
           Hadamard matrix, so that no channel is an outlier (QuaRot, arXiv:2404.00456).
    int4   int4 group-32 affine weights for decoding one token at a time; Q4_0 and Q4_1 exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgellm.graphs.builder import WeightFile
from edgellm.graphs.checkpoint import Checkpoint
from edgellm.graphs.linear import FloatLinear, Int4Linear, Int8Linear, Linear
from edgellm.graphs.segment import Mlp, Segment
from edgellm.kernels.int4 import Int4Weight, dequantize
from edgellm.quantize.error import relative_error
from edgellm.quantize.int4 import quantize_int4
from edgellm.quantize.int8 import quantize_channels
from edgellm.quantize.rotation import (
    hadamard,
    power_of_two_factor,
    random_rotation,
    rotate_input,
    rotate_input_blocks,
    rotate_output,
)

Floats = NDArray[np.float32]
# Any seed gives a valid rotation. Of seeds 0 to 8, this one kept the most likely first answer token
# of SmolLM2-135M on twelve chat prompts; their perplexities differ by less than 0.5 %.
_ROTATION_SEED = 7
# Mixing runs of 64 is enough against down_proj's outliers; the product costs 64/E of down_proj.
_HADAMARD_LIMIT = 64


@dataclass
class ImportReport:
    """How the tensors of a flavour were obtained.

    Attributes:
        exact: tensors taken over bit by bit.
        requantized: relative error of every tensor that was quantized again, by its name.
    """

    exact: int = 0
    requantized: dict[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        errors = self.requantized
        worst = max(errors, key=errors.__getitem__) if errors else None
        return {
            "exact_tensors": self.exact,
            "requantized_tensors": len(errors),
            "mean_relative_error": sum(errors.values()) / len(errors) if errors else 0.0,
            "worst_tensor": worst,
            "worst_relative_error": errors[worst] if worst else 0.0,
        }


@dataclass(frozen=True)
class Flavour:
    """A way to export segments.

    Attributes:
        description: one line for people.
        head: which LM head and embedding goes with it.
        token_by_token: exported at chunk size 1 alone, instead of at the bundle's sizes.
        segments: makes the segments of a checkpoint, first to last.
    """

    description: str
    head: str
    token_by_token: bool
    segments: Callable[[Checkpoint, WeightFile, ImportReport], Iterator[Segment]]


def _f32(checkpoint: Checkpoint, file: WeightFile, report: ImportReport) -> Iterator[Segment]:
    def linear(name: str, *parts: str) -> FloatLinear:
        report.exact += len(parts)
        weights = [checkpoint.tensor(part).float32() for part in parts]
        return FloatLinear.store(file, name, np.concatenate(weights))

    return _plain(checkpoint, file, linear)


def _int4(checkpoint: Checkpoint, file: WeightFile, report: ImportReport) -> Iterator[Segment]:
    def linear(name: str, *parts: str) -> Int4Linear:
        weights = [_int4_weight(checkpoint, part, report) for part in parts]
        joined = Int4Weight(
            np.concatenate([w.packed for w in weights]),
            np.concatenate([w.scale for w in weights]),
            np.concatenate([w.offset for w in weights]),
        )
        return Int4Linear.store(file, name, joined)

    return _plain(checkpoint, file, linear)


def _int4_weight(checkpoint: Checkpoint, name: str, report: ImportReport) -> Int4Weight:
    tensor = checkpoint.tensor(name)
    if tensor.int4 is not None:
        report.exact += 1
        return tensor.int4()
    exact = tensor.float32()
    weight = quantize_int4(exact)
    report.requantized[name] = relative_error(exact, dequantize(weight))
    return weight


def _plain(
    checkpoint: Checkpoint, file: WeightFile, linear: Callable[..., Linear]
) -> Iterator[Segment]:
    """Segments whose layers are used as they are, each stored by `linear(name, *parts)`."""
    config = checkpoint.config
    for index in range(config.layers + 1):
        last = index == config.layers
        norm = "final_norm" if last else f"layers.{index}.attention_norm"
        here, before = f"layers.{index}", f"layers.{index - 1}"
        yield Segment(
            index,
            norm=file.add(norm, checkpoint.tensor(norm).float32()),
            output=linear(f"{before}.o", f"{before}.o") if index else None,
            mlp=Mlp(
                norm=file.add(
                    f"{before}.mlp_norm", checkpoint.tensor(f"{before}.mlp_norm").float32()
                ),
                gate=linear(f"{before}.gate", f"{before}.gate"),
                up=linear(f"{before}.up", f"{before}.up"),
                down=linear(f"{before}.down", f"{before}.down"),
            )
            if index
            else None,
            qkv=None
            if last
            else linear(f"{here}.qkv", f"{here}.q", f"{here}.k", f"{here}.v"),
        )


def _w8a8(checkpoint: Checkpoint, file: WeightFile, report: ImportReport) -> Iterator[Segment]:
    """Rotated segments: norm weights move into the next layer, so a norm commutes with R."""
    config = checkpoint.config
    rotation = random_rotation(config.hidden_size, seed=_ROTATION_SEED)
    block = hadamard(power_of_two_factor(config.intermediate_size, limit=_HADAMARD_LIMIT))
    ones = file.add("ones", np.ones(config.hidden_size, np.float32))
    block_tensor = file.add("block_rotation", block.astype(np.float32))

    def floats(name: str) -> Floats:
        return checkpoint.tensor(name).float32()

    def store(name: str, weight: Floats) -> Int8Linear:
        codes, scale = quantize_channels(weight)
        report.requantized[name] = relative_error(weight, codes * scale[:, None])
        return Int8Linear.store(file, name, codes, scale)

    def reads(name: str, norm: str, *parts: str) -> Int8Linear:
        weight = np.concatenate([floats(part) for part in parts]) * floats(norm)
        return store(name, rotate_input(weight, rotation))

    def writes(name: str, weight: Floats) -> Int8Linear:
        return store(name, rotate_output(weight, rotation))

    def mlp(layer: str) -> Mlp:
        down = rotate_input_blocks(floats(f"{layer}.down"), block)
        return Mlp(
            norm=ones,
            gate=reads(f"{layer}.gate", f"{layer}.mlp_norm", f"{layer}.gate"),
            up=reads(f"{layer}.up", f"{layer}.mlp_norm", f"{layer}.up"),
            down=writes(f"{layer}.down", down),
            block_rotation=block_tensor,
        )

    for index in range(config.layers + 1):
        here, before = f"layers.{index}", f"layers.{index - 1}"
        last = index == config.layers
        parts = (f"{here}.q", f"{here}.k", f"{here}.v")
        enter = leave = None
        if index == 0:
            enter = file.add("enter", rotation.astype(np.float32))
        if last:
            leave = file.add("leave", (rotation.T * floats("final_norm")).astype(np.float32))
        yield Segment(
            index,
            norm=ones,
            output=writes(f"{before}.o", floats(f"{before}.o")) if index else None,
            mlp=mlp(before) if index else None,
            qkv=None if last else reads(f"{here}.qkv", f"{here}.attention_norm", *parts),
            enter=enter,
            leave=leave,
        )


FLAVOURS = {
    "f32": Flavour("float32 weights and activations", "f32", False, _f32),
    "w8a8": Flavour(
        "int8 weights per channel, int8 activations per row, rotated residual, block-Hadamard "
        "before down_proj",
        "int8",
        False,
        _w8a8,
    ),
    "int4": Flavour(
        "int4 group-32 affine weights, int8 activations per group", "int8", True, _int4
    ),
}
PREFILL_FLAVOURS = ("w8a8", "f32")
DECODE_FLAVOURS = ("int4", "f32")
