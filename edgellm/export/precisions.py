"""The precisions in which a model's segments are exported.

f32    float32 weights and activations: the reference.
w8a8   int8 weights (a scale per channel) and int8 activations (a scale per row, computed at run
       time), rotated so that no channel is an outlier (see `rotated.py`).
f16    float16 weights and inputs of linear layers, float32 between them, for GPUs.
w4a16  as f16, with int4 group-32 affine weights.
int4   quantized weights as the file has them, in 4 or 8 bits, for decoding one token at a time.
packed quantized weights as the file has them, for the native kernels instead of ONNX Runtime (see
       `packed_weights.py`).

w8a16-qdq
       int8 weights (a scale per channel) and 16-bit activations with scales from a calibration run
       (see `calibrate.py`), for accelerators that want static scales. Weights are rounded
       for the inputs of that run (`quantize/weights.py`).
w8a8-qdq
       as w8a16-qdq, with 8-bit inputs of linear layers, and the runs of inputs of o_proj and
       down_proj mixed with each other. Values that the grid before down_proj clips are lost, or, in
       the layers where that saves most, computed by the host (`quantize/calibration.py`), with
       narrower grids. Not for Qualcomm's HTP, which multiplies 8 by 8 bits only to 8 bits, too few:
       outputs of down_proj alone cost 17 % perplexity (SmolLM2-135M, simulated).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np

from edgellm.errors import OptionError
from edgellm.export.rotated import Observer, StaticSegments, dynamic_segments
from edgellm.export.weight_reader import WeightReader, as_int4_affine
from edgellm.graphs.altup import AltUp, Streams
from edgellm.graphs.builder import Array, Norm, WeightFile
from edgellm.graphs.checkpoint import qkv_bias
from edgellm.graphs.config import ModelConfig
from edgellm.graphs.latent_linear import (
    LatentQueries,
    LatentValues,
    LowRankLinear,
    head_matrices,
)
from edgellm.graphs.layer_config import Attention
from edgellm.graphs.linear import (
    BiasedLinear,
    ConcatLinear,
    FloatLinear,
    GroupLinear,
    HalfInt4Linear,
    HalfLinear,
    Linear,
    SplitLinear,
)
from edgellm.graphs.segment import (
    Experts,
    Laurel,
    LayerContexts,
    LayerInput,
    Mlp,
    Segment,
)
from edgellm.graphs.tensors import mixer_inputs, model_tensors
from edgellm.kernels.quantized import concatenate
from edgellm.quantize.error import relative_error
from edgellm.store.bundle_check import MAX_CHUNK
from edgellm.store.manifest import PACKED
from edgellm.store.precision_support import needs_host, why_not


class Authors(Protocol):
    """Author of a checkpoint's segments, first to last, that puts their weights into a file."""

    def __call__(
        self,
        reader: WeightReader,
        file: WeightFile,
        observer: Observer | None = None,
    ) -> Iterator[Segment]: ...


@dataclass(frozen=True)
class Precision:
    """A precision: a way to export a model's segments.

    Attributes:
        description: one line for people.
        head: kind of the LM head and embedding that go with it; None: they are part of it.
        token_by_token: whether it is exported at chunk size 1 alone, instead of the bundle's sizes.
        segments: author of the segments; None for a precision without graphs.
        calibrated_bits: bits of the inputs of linear layers, with scales from a calibration run;
            None if scales are computed at run time or there are none.
        basic_norms: whether graphs of static chunk size have basic norms, see `author_segment`.
    """

    description: str
    head: str | None
    token_by_token: bool
    segments: Authors | None
    calibrated_bits: int | None = None
    basic_norms: bool = False


def _float_linear(
    kind: type[FloatLinear] | type[HalfLinear],
    reader: WeightReader,
    file: WeightFile,
    name: str,
    *parts: str,
) -> Linear:
    weights = []
    for part in parts:
        tensor = reader.checkpoint.tensor(part)
        weights.append(tensor.float32())
        half = kind is HalfLinear
        error = relative_error(weights[-1], weights[-1].astype(np.float16)) if half else None
        reader.report.took(part, tensor.storage, "f16" if half else "f32", error)
    return kind.store(file, name, np.concatenate(weights))


def _half_int4_linear(
    reader: WeightReader,
    file: WeightFile,
    name: str,
    *parts: str,
) -> Linear:
    stack = [reader.int4(part) for part in parts]
    if len({weight.kind for weight in stack}) > 1:
        stack = [as_int4_affine(weight) for weight in stack]
    return HalfInt4Linear.store(file, name, concatenate(stack))


def _group_linear(
    reader: WeightReader,
    file: WeightFile,
    name: str,
    *parts: str,
) -> Linear:
    stack = [reader.linear(part) for part in parts]
    if len({weight.kind for weight in stack}) == 1:
        return GroupLinear.store(file, name, concatenate(stack))
    return ConcatLinear(
        tuple(GroupLinear.store(file, *each) for each in zip(parts, stack, strict=True))
    )


def _plain(
    store: Callable[..., Linear], heads: type[np.float32] | type[np.float16] = np.float32
) -> Authors:
    """Return an author of segments whose weights are not rotated.

    Args:
        store: function that stores a linear layer of one tensor, or of several stacked by rows.
        heads: type of the matrices that each head has around latents.
    """

    def segments(
        reader: WeightReader,
        file: WeightFile,
        observer: Observer | None = None,
    ) -> Iterator[Segment]:
        parts = _Parts(reader, file, partial(store, reader, file), heads)
        for index in range(reader.checkpoint.config.layer_count + 1):
            yield _plain_segment(index, reader.checkpoint.config, parts)

    return segments


def _plain_segment(index: int, config: ModelConfig, parts: _Parts) -> Segment:
    """Make a segment: the layer before from its o_proj on, and Q, K and V of layer `index`.

    Parts that the model lacks are None.
    """
    last = index == config.layer_count
    here, before = f"layers.{index}", f"layers.{index - 1}"
    experts = index > 0 and config.layers[index - 1].experts is not None
    return Segment(
        index,
        norm=parts.norm("final_norm" if last else f"{here}.attention_norm"),
        output=parts.output(index - 1) if index else None,
        output_norm=parts.norm(f"{before}.post_attention_norm"),
        mlp=parts.mlp(index - 1) if index and not experts else None,
        experts=parts.experts(index - 1) if experts else None,
        qkv=None if last else parts.qkv(index),
        contexts=parts.contexts() if index == 0 else None,
        layer_input=parts.layer_input(index - 1) if index else None,
        scale=parts.vector(f"{before}.layer_scale"),
        laurel=parts.laurel(before),
        streams=parts.streams(index),
    )


class _Parts:
    """Maker of parts of unrotated segments, by the names of `graphs/tensors.py`.

    A norm, bias or other vector that the model lacks is None.
    """

    def __init__(
        self,
        reader: WeightReader,
        file: WeightFile,
        linear: Callable[..., Linear],
        heads: type[np.float32] | type[np.float16],
    ) -> None:
        self._checkpoint = reader.checkpoint
        self._config = reader.checkpoint.config
        self._report = reader.report
        self._specs = model_tensors(reader.checkpoint.config)
        self._file = file
        self._linear = linear
        self._heads = heads

    def norm(self, name: str) -> Norm | None:
        weight = self.vector(name)
        return None if weight is None else Norm(weight, self.vector(f"{name}_bias"))

    def linear(self, name: str) -> Linear:
        return self._biased(self._linear(name, name), self.vector(f"{name}_bias"))

    def mlp(self, layer: int) -> Mlp:
        mlp, name = self._config.layers[layer].mlp, f"layers.{layer}"
        return Mlp(
            gate=self.linear(f"{name}.gate") if mlp.gated else None,
            up=self.linear(f"{name}.up"),
            down=self.linear(f"{name}.down"),
            norm=self.norm(f"{name}.mlp_norm"),
            post_norm=self.norm(f"{name}.post_mlp_norm"),
            activation=mlp.activation,
            cutoff=mlp.cutoff,
        )

    def experts(self, layer: int) -> Experts:
        """Store the norms around a layer's experts; an MLP beside them has norms on the host."""
        name, shared = f"layers.{layer}", self._config.layers[layer].shared
        beside = shared is not None and shared.beside
        return Experts(
            norm=None if beside else self.norm(f"{name}.mlp_norm"),
            post_norm=self.norm(f"{name}.post_mlp_norm"),
        )

    def contexts(self) -> LayerContexts | None:
        """Store what tokens' embeddings for layers are made of, besides themselves."""
        config, norm = self._config, self.norm("layer_embedding_norm")
        if config.layer_embedding is None or norm is None:
            return None
        names = (f"layers.{i}.layer_context" for i in range(config.layer_count))
        return LayerContexts(
            linear=self._linear("layer_context", *names),
            norm=norm,
            layers=config.layer_count,
            width=config.layer_embedding,
            hidden=config.hidden_size,
        )

    def layer_input(self, layer: int) -> LayerInput | None:
        """Store what a layer makes of tokens' embeddings for it."""
        name = f"layers.{layer}"
        norm = self.norm(f"{name}.post_layer_norm")
        if norm is None:
            return None
        return LayerInput(
            gate=self.linear(f"{name}.layer_gate"),
            output=self.linear(f"{name}.layer_output"),
            norm=norm,
            activation=self._config.layers[layer].mlp.activation,
        )

    def laurel(self, name: str) -> Laurel | None:
        """Store what stands beside the attention of a layer, by the layer's name."""
        norm, before = self.norm(f"{name}.laurel_norm"), self.norm(f"{name}.attention_norm")
        if norm is None or before is None:
            return None
        left, right = (self.linear(f"{name}.laurel_{x}") for x in ("left", "right"))
        return Laurel(before=before, left=left, right=right, norm=norm)

    def streams(self, index: int) -> Streams | None:
        """Store what a segment does with several residual streams."""
        config = self._config
        if config.streams is None:
            return None
        last = index == config.layer_count
        return Streams(
            count=config.streams,
            width=config.hidden_size,
            behind=self._altup(index - 1) if index else None,
            before=None if last else self._altup(index),
            enter=None if index else self.linear("streams_enter"),
            leave=self._of_heads("streams_leave", config.streams - 1) if last else None,
        )

    def _altup(self, layer: int) -> AltUp:
        name = f"layers.{layer}.altup_"
        norm = self.norm(f"{name}router_norm")
        assert norm is not None
        matrices = {
            part: self._file.add(name + part, self._checkpoint.tensor(name + part).float32().T)
            for part in ("router", "predict", "correct")
        }
        scale = self.vector(f"{name}scale")
        assert scale is not None
        return AltUp(norm=norm, **matrices, scale=scale)

    def qkv(self, layer: int) -> Linear:
        name, bias = f"layers.{layer}", qkv_bias(self._checkpoint, layer)
        parts = mixer_inputs(self._config, layer)
        latent = self._latent(layer)
        if latent is not None:
            keys = self._linear(f"{name}.kv", *(f"{name}.{part}" for part in parts[1:]))
            return ConcatLinear((self._queries(name, latent), keys))
        layers = self._linear(f"{name}.qkv", *(f"{name}.{part}" for part in parts))
        return self._biased(
            layers, None if bias is None else self._file.add(f"{name}.qkv_bias", bias)
        )

    def output(self, layer: int) -> Linear:
        """Store the output projections of a layer's mixers."""
        name, here, latent = f"layers.{layer}", self._config.layers[layer], self._latent(layer)
        own = self.linear(f"{name}.o")
        if latent is not None:
            return LatentValues(own, self._of_heads(f"{name}.value_up", latent.heads))
        if here.beside is None:
            return own
        beside = self.linear(f"{name}.mamba_o")
        return SplitLinear(((own, here.mixer.size), (beside, here.beside.size)))

    def _latent(self, layer: int) -> Attention | None:
        """Return the attention of a layer that has latents."""
        mixer = self._config.layers[layer].mixer
        return mixer if isinstance(mixer, Attention) and mixer.latent is not None else None

    def _queries(self, name: str, attention: Attention) -> Linear:
        """Store what makes the queries of a layer with latents."""
        norm, latent = self.norm(f"{name}.q_down_norm"), attention.latent
        assert latent is not None
        if norm is None:
            q = self.linear(f"{name}.q")
        else:
            down, up = self.linear(f"{name}.q_down"), self.linear(f"{name}.q_up")
            q = LowRankLinear(down, norm, up, latent.norm_eps)
        keys = self._of_heads(f"{name}.key_up", attention.heads)
        return LatentQueries(q, keys, attention.head_dim)

    def _of_heads(self, name: str, heads: int) -> Array:
        """Store the matrices of all heads in a floating type."""
        tensor = self._checkpoint.tensor(name)
        exact = tensor.float32()
        stored = exact.astype(self._heads)
        half = self._heads is np.float16
        error = relative_error(exact, stored.astype(np.float32)) if half else None
        self._report.took(name, tensor.storage, "f16" if half else "f32", error)
        return self._file.add(name, head_matrices(stored, heads))

    def vector(self, name: str) -> Array | None:
        if name not in self._specs:
            return None
        return self._file.add(name, self._checkpoint.tensor(name).float32())

    @staticmethod
    def _biased(layer: Linear, bias: Array | None) -> Linear:
        return layer if bias is None else BiasedLinear(layer, bias)


PRECISIONS = {
    "f32": Precision(
        "float32 weights and activations",
        "f32",
        False,
        _plain(partial(_float_linear, FloatLinear)),
        basic_norms=True,
    ),
    "f16": Precision(
        "float16 weights and inputs of linear layers, float32 between them",
        "int8",
        False,
        _plain(partial(_float_linear, HalfLinear), np.float16),
        basic_norms=True,
    ),
    "w4a16": Precision(
        "int4 group-32 affine weights, float16 inputs of linear layers",
        "int8",
        False,
        _plain(_half_int4_linear, np.float16),
        basic_norms=True,
    ),
    "w8a8": Precision(
        "int8 weights per channel (V: 16 bits), int8 activations per row, rotated residual, "
        "Hadamard blocks before o_proj and down_proj",
        "int8",
        False,
        dynamic_segments,
    ),
    "int4": Precision(
        "weights as in the file, in codes of 4 or 8 bits, int8 activations per group",
        "int8",
        True,
        _plain(_group_linear),
    ),
    "w8a16-qdq": Precision(
        "int8 weights per channel, 16-bit activations with calibrated scales",
        "int8",
        False,
        StaticSegments(mixes_runs=False),
        calibrated_bits=16,
    ),
    "w8a8-qdq": Precision(
        "as w8a16-qdq with 8-bit inputs, shadow outliers before down_proj",
        "int8",
        False,
        StaticSegments(mixes_runs=True),
        calibrated_bits=8,
    ),
    PACKED: Precision(
        "weights as in the file, int8 activations per group, for the native kernels",
        None,
        True,
        None,
    ),
}

DEFAULT_CHUNK_SIZES = (32, 128)
# One for the native kernels, one for prefill chunks and one for decode steps in ONNX Runtime; see
# `default_precisions`.
DEFAULT_PRECISIONS = (PACKED, "w8a8", "int4")


def default_precisions(config: ModelConfig) -> list[str]:
    """Return the precisions of an export that names none.

    A model whose residual cannot be rotated has float32 chunks; one with parts that the C++ kernels
    compute beside graphs has none.
    """
    if needs_host(config):
        return [PACKED]
    return [f if why_not(f, config) is None else "f32" for f in DEFAULT_PRECISIONS]


def check_request(precisions: Iterable[str], chunk_sizes: Sequence[int] | None) -> None:
    """Refuse unknown precisions, an empty list of them, and impossible chunk sizes.

    Raises:
        OptionError: the message names the wrong precisions or sizes.
    """
    names = list(precisions)
    check_precisions(names)
    if chunk_sizes is not None:
        check_chunk_sizes(chunk_sizes, names)


def check_precisions(precisions: Collection[str]) -> None:
    """Refuse unknown precision names, and an empty list.

    Raises:
        OptionError: the message names the unknown ones.
    """
    unknown = sorted(set(precisions) - set(PRECISIONS))
    if unknown or not precisions:
        raise OptionError(
            f"precisions {', '.join(unknown) or 'none'}: allowed are {', '.join(PRECISIONS)}"
        )


def check_chunk_sizes(chunk_sizes: Sequence[int], precisions: Collection[str]) -> None:
    """Refuse chunk sizes out of range, or for precisions that have no chunks.

    Raises:
        OptionError: the message names the sizes.
    """
    asked = f"`chunk_sizes` {', '.join(map(str, chunk_sizes))}"
    if not chunk_sizes or any(not 1 <= size <= MAX_CHUNK for size in chunk_sizes):
        raise OptionError(f"{asked}: numbers from 1 to {MAX_CHUNK} are allowed")
    if not any(PRECISIONS[f].segments and not PRECISIONS[f].token_by_token for f in precisions):
        raise OptionError(
            f"{asked}: {', '.join(precisions)} is exported without chunks of any size"
        )
