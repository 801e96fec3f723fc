"""Segments around a rotated residual stream, for weights and activations in integers.

The rotation R follows each layer that writes the residual and precedes each that reads it. Runs of
inputs of o_proj and down_proj are multiplied by Hadamard matrices, so that no channel is an
outlier (QuaRot, arXiv:2404.00456). Norm weights move into the next layer, so that a norm commutes
with R.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from edgellm.export.weight_reader import ImportReport, WeightReader
from edgellm.graphs.builder import Array, Norm, WeightFile
from edgellm.graphs.checkpoint import Checkpoint, qkv_bias
from edgellm.graphs.latent_linear import (
    LatentQueries,
    LatentValues,
    LowRankLinear,
    head_matrices,
)
from edgellm.graphs.layer_config import Attention
from edgellm.graphs.linear import (
    BiasedLinear,
    BlockRotatedLinear,
    ConcatLinear,
    FloatLinear,
    Int8Linear,
    Int8PairLinear,
    Linear,
    ObservedLinear,
    SplitLinear,
    StaticLinear,
    input_name,
)
from edgellm.graphs.segment import Experts, Mlp, Segment
from edgellm.graphs.tensors import mixer_inputs, model_tensors
from edgellm.kernels import hadamard
from edgellm.quantize.basis import (
    random_rotation,
    rotate_input,
    rotate_input_blocks,
    rotate_output,
    spreading,
)
from edgellm.quantize.error import relative_error
from edgellm.quantize.weights import quantize_channels, quantize_channels_for
from edgellm.store.reference import ROTATION

Floats = NDArray[np.float32]
# Any seed makes a valid rotation; a fixed one makes two exports of a model the same.
_ROTATION_SEED = 0
# Runs of 64 mix nearly as well as longer ones (KL divergence 0.0049 against 0.0046 with runs of 512
# before down_proj, simulated for SmolLM2-135M) and are an eighth of their float product.
_HADAMARD_LIMIT = 64
# Input projections of a mixer in 16 bits.
_FINE = ("v", "delta_a", "delta_b")


class Observer(Protocol):
    """Observer of each segment's activations before its weights are rounded."""

    @property
    def file(self) -> WeightFile:
        """File that holds a segment's weights before they are rounded."""

    def observe(self, segment: Segment) -> Mapping[str, Floats]:
        """Run a segment, and return second moments `[K, K]` of inputs of linear layers.

        Keys are `input_name`s; layers whose weights are rounded to the nearest have none.
        """


def dynamic_segments(
    reader: WeightReader, file: WeightFile, observer: Observer | None = None
) -> Iterator[Segment]:
    """Yield segments with int8 weights, and activations whose scales are computed at run time."""
    layers = _RotatedLayers(reader.checkpoint, static=False)
    store = _Rounded(file, reader.report, Int8Linear, layers.storage)
    for index in range(reader.checkpoint.config.layer_count + 1):
        yield layers.segment(index, layers.weights(index), store)


class StaticSegments:
    """Author of segments with int8 weights, and activations with scales from a calibration run."""

    def __init__(self, *, mixes_runs: bool) -> None:
        """Set whether the runs of inputs of o_proj and down_proj are mixed with each other.

        Args:
            mixes_runs: see `BlockRotatedLinear.across`. One grid for a whole input is the finer the
                more alike its channels are: KL divergence to float32 0.0058 against 0.0070 without
                mixing (w8a8-qdq, SmolLM2-135M, 26,572 tokens, weights to the nearest), at the same
                speed. Mixing needs shadows if a token is far larger than others (see
                quantize/README.md).
        """
        self._mixes_runs = mixes_runs

    def __call__(
        self, reader: WeightReader, file: WeightFile, observer: Observer | None = None
    ) -> Iterator[Segment]:
        """Yield the segments; weights are rounded to the nearest without an observer."""
        layers = _RotatedLayers(reader.checkpoint, static=True, mixes_runs=self._mixes_runs)
        store = _Rounded(file, reader.report, StaticLinear, layers.storage)
        for index in range(reader.checkpoint.config.layer_count + 1):
            weights = layers.weights(index)
            if observer is not None:
                unrounded = layers.segment(index, weights, _Unrounded(observer.file))
                store.moments = observer.observe(unrounded)
            yield layers.segment(index, weights, store)


class _Store(ABC):
    """Writer of the arrays and linear layers of segments into a weights file."""

    def __init__(self, file: WeightFile) -> None:
        self._file = file
        self._arrays: dict[str, Array] = {}

    def array(self, name: str, values: NDArray[np.float64] | Floats) -> Array:
        """Store an array as float32, once for all layers that share its name."""
        if name not in self._arrays:
            self._arrays[name] = self._file.add(name, values.astype(np.float32))
        return self._arrays[name]

    @abstractmethod
    def linear(self, name: str, weight: Floats) -> Linear:
        """Store the weight `[N, K]` of a linear layer."""

    @abstractmethod
    def value(self, name: str, weight: Floats) -> Linear:
        """Store the weight of V, or of rates that act on all tokens behind, in 16 bits.

        In 8 bits, V causes a third of the cost of rounding weights (KL divergence to float32,
        SmolLM2-135M, each weight to the nearest: V alone 0.0010, all together 0.0029).
        """


class _Unrounded(_Store):
    """Writer of unrounded weights, for an observer."""

    def linear(self, name: str, weight: Floats) -> Linear:
        return ObservedLinear(name, FloatLinear.store(self._file, name, weight))

    def value(self, name: str, weight: Floats) -> Linear:
        codes, scale = quantize_channels(weight)
        high = codes * scale[:, None]
        return Int8PairLinear(self.linear(name, high), self.linear(f"{name}.low", weight - high))


class _Rounded(_Store):
    """Writer of weights rounded to 8 bits.

    Attributes:
        moments: second moments `[K, K]` of inputs by `input_name`; a layer without any has its
            weights rounded to the nearest.
    """

    def __init__(
        self,
        file: WeightFile,
        report: ImportReport,
        kind: type[Int8Linear] | type[StaticLinear],
        storage_of: Callable[[str], str],
    ) -> None:
        """Begin without moments.

        Args:
            storage_of: function that returns the checkpoint's type of a weight, for the report.
        """
        super().__init__(file)
        self._storage_of = storage_of
        self._report = report
        self._kind = kind
        self.moments: Mapping[str, Floats] = {}

    def linear(self, name: str, weight: Floats) -> Linear:
        moments = self.moments.get(input_name(name))
        if moments is None:
            codes, scale = quantize_channels(weight)
        else:
            codes, scale = quantize_channels_for(weight, moments)
        error = relative_error(weight, codes * scale[:, None])
        self._report.took(name, self._storage_of(name), "int8", error)
        return self._kind.store(self._file, name, codes, scale)

    def value(self, name: str, weight: Floats) -> Linear:
        codes, scale = quantize_channels(weight)
        high = self._kind.store(self._file, name, codes, scale)
        rest = weight - codes * scale[:, None]
        codes, scale = quantize_channels(rest)
        low = self._kind.store(self._file, f"{name}.low", codes, scale)
        error = np.linalg.norm(rest - codes * scale[:, None]) / np.linalg.norm(weight)
        self._report.took(name, self._storage_of(name), "int16", float(error))
        return Int8PairLinear(high, low)


class _RotatedLayers:
    """Maker of rotated weights of segments, and of segments from such weights."""

    def __init__(self, checkpoint: Checkpoint, *, static: bool, mixes_runs: bool = False) -> None:
        self._checkpoint = checkpoint
        self._static = static
        self._mixes_runs = mixes_runs
        self._config = checkpoint.config
        self._specs = model_tensors(checkpoint.config)
        self._rotation = random_rotation(self._config.hidden_size, seed=_ROTATION_SEED)

    def weights(self, index: int) -> dict[str, Floats]:
        """Compute a segment's rotated weights, each `[N, K]`, by name."""
        config, weights = self._config, {}
        if index:
            before, layer = f"layers.{index - 1}", config.layers[index - 1]
            weights[f"{before}.o"] = self._writes(f"{before}.o", layer.mixer.size)
            if layer.beside is not None:
                weights[f"{before}.mamba_o"] = self._writes(f"{before}.mamba_o", layer.beside.size)
            if layer.experts is None:
                for name in (f"{before}.gate", f"{before}.up"):
                    if name in self._specs:
                        weights[name] = self._reads(f"{before}.mlp_norm", name)
                weights[f"{before}.down"] = self._writes(f"{before}.down", layer.mlp.intermediate)
        if index < config.layer_count:
            here = f"layers.{index}"
            norm = f"{here}.attention_norm"
            for part in self._inputs(index):
                stacked = ("q", "k") if part == "qk" else (part,)
                names = [f"{here}.{each}" for each in stacked]
                weights[f"{here}.{part}"] = self._reads(norm, *names)
            if f"{here}.q_up" in self._specs:
                up = self._floats(f"{here}.q_up")
                weights[f"{here}.q_up"] = rotate_input_blocks(up, *self._blocks(up.shape[1]))
        return weights

    def _inputs(self, layer: int) -> list[str]:
        """Return the names of a layer's input projections, Q and K as one where both read rows."""
        parts, mixer = mixer_inputs(self._config, layer), self._config.layers[layer].mixer
        if isinstance(mixer, Attention) and mixer.latent is None:
            return ["qk", *parts[2:]]
        return parts

    def storage(self, name: str) -> str:
        """Return a weight's type in the checkpoint; Q and K, stored as one, may have two types."""
        layer, _, part = name.rpartition(".")
        parts = ("q", "k") if part == "qk" else (part,)
        types = (self._checkpoint.tensor(f"{layer}.{one}").storage for one in parts)
        return "+".join(dict.fromkeys(types))

    def segment(self, index: int, weights: Mapping[str, Floats], store: _Store) -> Segment:
        last = index == self._config.layer_count
        ones = Norm(store.array("ones", np.ones(self._config.hidden_size)))
        experts = index > 0 and self._config.layers[index - 1].experts is not None
        return Segment(
            index,
            norm=ones,
            output=self._output(index - 1, weights, store) if index else None,
            mlp=self._mlp(index - 1, weights, store, ones) if index and not experts else None,
            experts=self._experts(index - 1, store, ones) if experts else None,
            qkv=None if last else self._qkv(index, weights, store),
            enter=None if index else store.array(ROTATION, self._rotation),
            leave=store.array("leave", self._leave()) if last else None,
        )

    def _output(self, layer: int, weights: Mapping[str, Floats], store: _Store) -> Linear:
        here, name = self._config.layers[layer], f"layers.{layer}"
        own = self._rotated(f"{name}.o", weights, store)
        if here.attends and here.attention.latent is not None:
            values = self._of_heads(f"{name}.value_up", here.attention.heads, store)
            return LatentValues(own, values)
        if here.beside is None:
            return own
        beside = self._rotated(f"{name}.mamba_o", weights, store)
        return SplitLinear(((own, here.mixer.size), (beside, here.beside.size)))

    def _queries(self, layer: int, weights: Mapping[str, Floats], store: _Store) -> Linear:
        """Store what makes the queries of a layer with latents."""
        name, attention = f"layers.{layer}", self._config.layers[layer].attention
        assert attention.latent is not None
        if f"{name}.q_up" in weights:
            norm = Norm(store.array(f"{name}.q_down_norm", self._floats(f"{name}.q_down_norm")))
            down = store.linear(f"{name}.q_down", weights[f"{name}.q_down"])
            up = self._rotated(f"{name}.q_up", weights, store)
            q: Linear = LowRankLinear(down, norm, up, attention.latent.norm_eps)
        else:
            q = store.linear(f"{name}.q", weights[f"{name}.q"])
        keys = self._of_heads(f"{name}.key_up", attention.heads, store)
        return LatentQueries(q, keys, attention.head_dim)

    def _of_heads(self, name: str, heads: int, store: _Store) -> Array:
        return store.array(name, head_matrices(self._floats(name), heads))

    def _rotated(self, name: str, weights: Mapping[str, Floats], store: _Store) -> Linear:
        """Store a layer whose inputs have Hadamard blocks, with its bias, if any."""
        linear = self._biased(name, weights, store)
        return self._block_rotated(linear, store, weights[name].shape[1])

    def _mlp(self, layer: int, weights: Mapping[str, Floats], store: _Store, ones: Norm) -> Mlp:
        gate = f"layers.{layer}.gate"
        return Mlp(
            gate=self._biased(gate, weights, store) if gate in weights else None,
            up=self._biased(f"layers.{layer}.up", weights, store),
            down=self._rotated(f"layers.{layer}.down", weights, store),
            norm=ones,
            activation=self._config.layers[layer].mlp.activation,
        )

    def _experts(self, layer: int, store: _Store, ones: Norm) -> Experts:
        norm = f"layers.{layer}.mlp_norm"
        return Experts(
            norm=ones,
            leave=store.array("unrotated", self._rotation.T),
            weight=store.array(norm, self._floats(norm)),
            enter=store.array(ROTATION, self._rotation),
        )

    def _biased(self, name: str, weights: Mapping[str, Floats], store: _Store) -> Linear:
        """Store a linear layer with its bias, if any; a bias added to the residual is rotated."""
        layer, bias = store.linear(name, weights[name]), f"{name}_bias"
        if bias not in self._specs:
            return layer
        values = self._floats(bias)
        writes = name.endswith((".o", ".down"))
        return BiasedLinear(layer, store.array(bias, values @ self._rotation if writes else values))

    def _qkv(self, layer: int, weights: Mapping[str, Floats], store: _Store) -> Linear:
        products: list[Linear] = []
        for part in self._inputs(layer):
            name = f"layers.{layer}.{part}"
            if part in ("q", "q_down"):
                products.append(self._queries(layer, weights, store))
            else:
                kind = store.value if part in _FINE else store.linear
                products.append(kind(name, weights[name]))
        joined = ConcatLinear(tuple(products))
        bias = qkv_bias(self._checkpoint, layer)
        if bias is None:
            return joined
        return BiasedLinear(joined, store.array(f"layers.{layer}.qkv_bias", bias))

    def _leave(self) -> NDArray[np.float64]:
        return self._rotation.T * self._floats("final_norm")

    def _reads(self, norm: str, *parts: str) -> Floats:
        """Rotate stacked weights that read the residual; the norm before them is multiplied in."""
        weight = np.concatenate([self._floats(part) for part in parts])
        return rotate_input(weight * self._floats(norm), self._rotation)

    def _writes(self, name: str, width: int) -> Floats:
        """Rotate a weight that writes the residual and has Hadamard blocks on its input."""
        block, across = self._blocks(width)
        weight = rotate_input_blocks(self._floats(name), block, across)
        return rotate_output(weight, self._rotation)

    def _block_rotated(self, layer: Linear, store: _Store, width: int) -> Linear:
        block, across = self._blocks(width)
        size = len(block)
        # an input of its own for Qualcomm's compiler, see BlockRotatedLinear; 64: exactly 1/8
        factor = size**-0.5 if self._static else None
        stored = store.array(f"hadamard.{size}", block if factor is None else block / factor)
        runs = None if across is None else store.array(f"across.{len(across)}", across)
        return BlockRotatedLinear(layer, stored, width, factor, runs)

    def _blocks(self, width: int) -> tuple[NDArray[np.float64], NDArray[np.float64] | None]:
        size = hadamard.power_of_two_factor(width, limit=_HADAMARD_LIMIT)
        return hadamard.matrix(size), spreading(width // size) if self._mixes_runs else None

    def _floats(self, name: str) -> Floats:
        return self._checkpoint.tensor(name).float32()
