"""The precisions in which segments are exported.

f32    float32 weights and activations: the reference.
w8a8   int8 weights (a scale a channel) and int8 activations (a scale a row, found at run time).
       The residual stream is rotated and each run of inputs of down_proj is multiplied by a
       Hadamard matrix, so that no channel is an outlier (QuaRot, arXiv:2404.00456).
f16    float16 weights and inputs of linear layers, float32 between them, for GPUs.
w4a16  the same with int4 group-32 affine weights, as in `panels`.
int4   int4 group-32 affine weights for decoding one token at a time; Q4_0 and Q4_1 exactly.
panels the same weights for the native kernels instead of ONNX Runtime (see `panels.py`).

w8a16-qdq
       int8 weights (a scale a channel) and 16-bit activations with scales from a calibration run
       (see `calibrate.py`), for accelerators that want them known beforehand.
w8a8-qdq
       the same with 8-bit inputs of linear layers, the runs of inputs of o_proj and down_proj mixed
       as well. What their grids clip before down_proj is left out, or, in the layers where that
       saves most, computed by the host (`quantize/shadow.py`), with narrower grids. Not
       for Qualcomm's HTP, which multiplies 8 by 8 bits only to 8 bits, and those lose too much:
       outputs of down_proj alone cost 17 % perplexity (SmolLM2-135M, simulated).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgellm.bundle import PANELS
from edgellm.graphs.builder import WeightFile
from edgellm.graphs.checkpoint import Checkpoint
from edgellm.graphs.half_linear import HalfInt4Linear, HalfLinear
from edgellm.graphs.linear import (
    BiasedLinear,
    BlockRotatedLinear,
    ConcatLinear,
    FloatLinear,
    Int4Linear,
    Int8Linear,
    Int8PairLinear,
    Linear,
)
from edgellm.graphs.segment import Array, Mlp, Segment
from edgellm.graphs.static_linear import StaticLinear
from edgellm.kernels import hadamard
from edgellm.kernels.int4 import Int4Weight, concatenate, dequantize
from edgellm.quantize.error import relative_error
from edgellm.quantize.int4 import quantize_int4
from edgellm.quantize.int8 import quantize_channels
from edgellm.quantize.rotation import (
    random_rotation,
    rotate_input,
    rotate_input_blocks,
    rotate_output,
    spreading,
)
from edgellm.reference import ROTATION

Floats = NDArray[np.float32]
# Any seed gives a valid rotation; a fixed one makes two exports of a model the same.
_ROTATION_SEED = 0
# Runs of 64 mix nearly as well as longer ones (KL divergence 0.0049 against 0.0046 with runs of 512
# before down_proj, simulated for SmolLM2-135M) and are an eighth of their float product.
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


# Makes the segments of a checkpoint, first to last, and puts their weights into a file.
Authors = Callable[[Checkpoint, WeightFile, ImportReport], Iterator[Segment]]


@dataclass(frozen=True)
class Flavour:
    """A way to export segments.

    Attributes:
        description: one line for people.
        head: which LM head and embedding goes with it; None where they are part of it.
        token_by_token: exported at chunk size 1 alone, instead of at the bundle's sizes.
        segments: None where there are no graphs.
        calibrated_bits: of the inputs of linear layers, whose scales come from a calibration run;
            None where scales are found at run time or there are none.
        basic_norms: of its graphs of static size, see `author_segment`.
    """

    description: str
    head: str | None
    token_by_token: bool
    segments: Authors | None
    calibrated_bits: int | None = None
    basic_norms: bool = False


def _floats(kind: type[FloatLinear] | type[HalfLinear]) -> Authors:
    def segments(
        checkpoint: Checkpoint, file: WeightFile, report: ImportReport
    ) -> Iterator[Segment]:
        def linear(name: str, *parts: str) -> Linear:
            report.exact += len(parts)
            weights = [checkpoint.tensor(part).float32() for part in parts]
            return kind.store(file, name, np.concatenate(weights))

        return _plain(checkpoint, file, linear)

    return segments


def _int4(kind: type[Int4Linear] | type[HalfInt4Linear]) -> Authors:
    def segments(
        checkpoint: Checkpoint, file: WeightFile, report: ImportReport
    ) -> Iterator[Segment]:
        def linear(name: str, *parts: str) -> Linear:
            weights = [int4_weight(checkpoint, part, report) for part in parts]
            return kind.store(file, name, concatenate(weights))

        return _plain(checkpoint, file, linear)

    return segments


def int4_weight(checkpoint: Checkpoint, name: str, report: ImportReport) -> Int4Weight:
    """A tensor as int4 groups: as it is if it has them, else rounded."""
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
            else _biased(
                checkpoint,
                file,
                index,
                linear(f"{here}.qkv", f"{here}.q", f"{here}.k", f"{here}.v"),
            ),
        )


def _biased(checkpoint: Checkpoint, file: WeightFile, layer: int, qkv: Linear) -> Linear:
    bias = qkv_bias(checkpoint, layer)
    return qkv if bias is None else BiasedLinear(qkv, file.add(f"layers.{layer}.qkv_bias", bias))


def qkv_bias(checkpoint: Checkpoint, layer: int) -> Floats | None:
    """What a layer adds to Q, K and V, `[H*D + 2 Hkv*D]`, if anything."""
    if not checkpoint.config.qkv_bias:
        return None
    parts = (checkpoint.tensor(f"layers.{layer}.{name}_bias") for name in "qkv")
    return np.concatenate([part.float32() for part in parts])


def _w8a8(checkpoint: Checkpoint, file: WeightFile, report: ImportReport) -> Iterator[Segment]:
    return _rotated(checkpoint, _RotatedLayers(checkpoint, file, report, Int8Linear))


def _static(*, mixes_runs: bool) -> Authors:
    def segments(
        checkpoint: Checkpoint, file: WeightFile, report: ImportReport
    ) -> Iterator[Segment]:
        layers = _RotatedLayers(checkpoint, file, report, StaticLinear, mixes_runs=mixes_runs)
        return _rotated(checkpoint, layers)

    return segments


def _rotated(checkpoint: Checkpoint, layers: _RotatedLayers) -> Iterator[Segment]:
    """Norm weights move into the next layer, so that a norm commutes with R."""
    config = checkpoint.config
    for index in range(config.layers + 1):
        last = index == config.layers
        yield Segment(
            index,
            norm=layers.ones,
            output=layers.output(index - 1) if index else None,
            mlp=layers.mlp(index - 1) if index else None,
            qkv=None if last else layers.qkv(index),
            enter=None if index else layers.enter(),
            leave=layers.leave() if last else None,
        )


class _RotatedLayers:
    """Stores layers around a rotated residual stream: R after what writes it, before what reads."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        file: WeightFile,
        report: ImportReport,
        kind: type[Int8Linear] | type[StaticLinear],
        *,
        mixes_runs: bool = False,
    ) -> None:
        """`mixes_runs`: see `BlockRotatedLinear.across`. One grid for a whole input is the finer
        the more alike its channels are: KL divergence to float32 0.0058 against 0.0070 without
        (w8a8-qdq, SmolLM2-135M, 26,572 tokens), at the same speed. It needs shadows where a token
        is far larger than others (see quantize/README.md)."""
        self._checkpoint = checkpoint
        self._file = file
        self._report = report
        self._kind = kind
        self._mixes_runs = mixes_runs
        self._config = checkpoint.config
        self._rotation = random_rotation(self._config.hidden_size, seed=_ROTATION_SEED)
        self._matrices: dict[str, Array] = {}
        self.ones = file.add("ones", np.ones(self._config.hidden_size, np.float32))

    def enter(self) -> Array:
        return self._file.add(ROTATION, self._rotation.astype(np.float32))

    def leave(self) -> Array:
        back = self._rotation.T * self._floats("final_norm")
        return self._file.add("leave", back.astype(np.float32))

    def qkv(self, layer: int) -> Linear:
        """V in 16 bits: a third of all that rounding weights to 8 bits costs comes from it.

        (KL divergence to float32, SmolLM2-135M: V alone 0.0010, all weights together 0.0029.)
        """
        name = f"layers.{layer}"
        norm = f"{name}.attention_norm"
        value = self._reads(f"{name}.v", norm)
        codes, scale = quantize_channels(value)
        high = self._kind.store(self._file, f"{name}.v", codes, scale)
        rest = value - codes * scale[:, None]
        codes, scale = quantize_channels(rest)
        low = self._kind.store(self._file, f"{name}.v.low", codes, scale)
        error = np.linalg.norm(rest - codes * scale[:, None]) / np.linalg.norm(value)
        self._report.requantized[f"{name}.v"] = float(error)
        query_key = self._store(f"{name}.qk", self._reads(f"{name}.q", norm, f"{name}.k"))
        joined = ConcatLinear((query_key, Int8PairLinear(high, low)))
        return _biased(self._checkpoint, self._file, layer, joined)

    def output(self, layer: int) -> Linear:
        return self._block_rotated(f"layers.{layer}.o", self._config.attention_size)

    def mlp(self, layer: int) -> Mlp:
        name = f"layers.{layer}"
        norm = f"{name}.mlp_norm"
        return Mlp(
            norm=self.ones,
            gate=self._store(f"{name}.gate", self._reads(f"{name}.gate", norm)),
            up=self._store(f"{name}.up", self._reads(f"{name}.up", norm)),
            down=self._block_rotated(f"{name}.down", self._config.intermediate_size),
        )

    def _reads(self, first: str, norm: str, *more: str) -> Floats:
        """Weights that read the residual, the norm before them taken in."""
        weight = np.concatenate([self._floats(part) for part in (first, *more)])
        return rotate_input(weight * self._floats(norm), self._rotation)

    def _block_rotated(self, name: str, width: int) -> Linear:
        """A weight that writes the residual and whose own input goes through Hadamard blocks."""
        size = hadamard.power_of_two_factor(width, limit=_HADAMARD_LIMIT)
        block = hadamard.matrix(size)
        # an input of its own for Qualcomm's compiler, see BlockRotatedLinear; 64: exactly 1/8
        factor = size**-0.5 if self._kind is StaticLinear else None
        across = spreading(width // size) if self._mixes_runs else None
        weight = rotate_input_blocks(self._floats(name), block, across)
        layer = self._store(name, rotate_output(weight, self._rotation))
        stored = self._shared(f"hadamard.{size}", block if factor is None else block / factor)
        runs = None if across is None else self._shared(f"across.{width // size}", across)
        return BlockRotatedLinear(layer, stored, width, factor, runs)

    def _shared(self, name: str, matrix: NDArray[np.float64]) -> Array:
        """A matrix that several layers have in common."""
        if name not in self._matrices:
            self._matrices[name] = self._file.add(name, matrix.astype(np.float32))
        return self._matrices[name]

    def _store(self, name: str, weight: Floats) -> Linear:
        codes, scale = quantize_channels(weight)
        self._report.requantized[name] = relative_error(weight, codes * scale[:, None])
        return self._kind.store(self._file, name, codes, scale)

    def _floats(self, name: str) -> Floats:
        return self._checkpoint.tensor(name).float32()


FLAVOURS = {
    "f32": Flavour(
        "float32 weights and activations", "f32", False, _floats(FloatLinear), basic_norms=True
    ),
    "f16": Flavour(
        "float16 weights and inputs of linear layers, float32 between them",
        "int8",
        False,
        _floats(HalfLinear),
        basic_norms=True,
    ),
    "w4a16": Flavour(
        "int4 group-32 affine weights, float16 inputs of linear layers",
        "int8",
        False,
        _int4(HalfInt4Linear),
        basic_norms=True,
    ),
    "w8a8": Flavour(
        "int8 weights per channel (V: 16 bits), int8 activations per row, rotated residual, "
        "Hadamard blocks before o_proj and down_proj",
        "int8",
        False,
        _w8a8,
    ),
    "int4": Flavour(
        "int4 group-32 affine weights, int8 activations per group", "int8", True, _int4(Int4Linear)
    ),
    "w8a16-qdq": Flavour(
        "int8 weights per channel, 16-bit activations with calibrated scales",
        "int8",
        False,
        _static(mixes_runs=False),
        calibrated_bits=16,
    ),
    "w8a8-qdq": Flavour(
        "as w8a16-qdq with 8-bit inputs, shadow outliers before down_proj",
        "int8",
        False,
        _static(mixes_runs=True),
        calibrated_bits=8,
    ),
    PANELS: Flavour(
        "int4 group-32 affine weights, int8 activations per group, for the native kernels",
        None,
        True,
        None,
    ),
}
