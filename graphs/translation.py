"""Translation of a file's tensors to those of `tensors.py`: names, fused rows, RoPE's pairs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from edgellm.errors import ModelFormatError
from edgellm.graphs.architecture import LATENT_UPS, Fused, Names, PerExpert
from edgellm.graphs.config import ModelConfig
from edgellm.graphs.fields import key_of
from edgellm.graphs.layer_config import Attention, Latent, Mixer
from edgellm.graphs.safetensors_folder import FLOATS
from edgellm.graphs.state_mixers import DeltaNet
from edgellm.graphs.tensor import (
    Tensor,
    flattened,
    half_split_order,
    reshaped,
    rows_first,
    rows_of_tensor,
    stacked,
)
from edgellm.graphs.tensors import STREAM_STACKS, layer_tensors, model_tensors

# Tensors with rows in the order of RoPE's pairs: Q and K, their biases and norms.
_ROTATED = ("q", "q_up", "k", "q_bias", "k_bias", "q_norm", "k_norm")


@dataclass(frozen=True)
class Translation:
    """Translation of the tensors of a model file to those of `tensors.py`.

    Attributes:
        names: names of the tensors in the file.
        interleaved: whether RoPE turns neighbouring channels in the file.
        stored: reads a tensor by its name in the file.
        fold: last change of each tensor, given with its canonical name.
    """

    config: ModelConfig
    names: Names
    interleaved: bool
    stored: Callable[[str], Tensor]
    fold: Callable[[str, Tensor], Tensor]

    def tensor(self, canonical: str) -> Tensor:
        """Return the tensor of a canonical name.

        Raises:
            ModelFormatError: the file lacks the tensor, or it does not fit the config.
        """
        tensor = self._translated(canonical)
        if self.interleaved and canonical.split(".")[-1] in _ROTATED:
            rows = tensor.shape[0] if tensor.shape else 0
            layer = int(canonical.split(".")[1])
            attention = self.config.layers[layer].attention
            heads = max(rows // attention.head_dim, 1)
            if attention.latent is not None and rows == attention.query_size:
                order = latent_query_order(attention, attention.latent)
            else:
                order = half_split_order(rows, heads, 2 * len(self.config.rope_of(layer).inv_freq))
            tensor = rows_of_tensor(tensor, order)
        return self.fold(canonical, tensor)

    def file_names(self) -> set[str]:
        """Return the names of the file's tensors that the model is made of."""
        return {name for each in model_tensors(self.config) for name in self.names_of(each)}

    def unused_names(self) -> set[str]:
        """Return names that the file may have for K and V of layers which read those of others."""
        shared = [i for i, each in self.config.attentions.items() if each.kv_from is not None]
        names = [self.names[part] for part in ("k", "v", "k_norm") if part in self.names]
        return {name.format(i) for name in names if isinstance(name, str) for i in shared}

    def names_of(self, canonical: str) -> Iterator[str]:
        """Yield the names of the file's tensors that a tensor is made of."""
        name, experts = self._file_name(canonical)
        if isinstance(name, PerExpert):
            yield from (name.name.format(expert) for expert in range(experts))
        else:
            yield name.name if isinstance(name, Fused) else name

    def _translated(self, canonical: str) -> Tensor:
        """Return a tensor of the config, with rows of Q and K in the file's order."""
        name, experts = self._file_name(canonical)
        if isinstance(name, PerExpert):
            each = [self.stored(of_expert) for of_expert in self.names_of(canonical)]
            return stacked(each, name=name.name.format("*"))
        whole = name.name if isinstance(name, Fused) else name
        tensor = self.stored(whole)
        if isinstance(name, Fused) and name.transposed and tensor.storage in FLOATS:
            tensor = rows_first(tensor)
        if experts:
            bias = canonical.endswith("_bias")
            tensor = flattened(tensor, experts, name=whole, matrices=not bias)
        part = canonical.rpartition(".")[2]
        if part in LATENT_UPS:
            mixer = self.config.layers[int(canonical.split(".")[1])].attention
            return _latent_up(tensor, part, mixer, fused=isinstance(name, Fused))
        if isinstance(name, Fused):
            layer = self.config.layers[int(canonical.split(".")[1])]
            stacks = _heads(layer.mixer) if name.by_heads else max(experts, 1)
            tensor = self._part(canonical, name, tensor, stacks=stacks)
        return tensor

    def _part(self, canonical: str, fused: Fused, tensor: Tensor, *, stacks: int) -> Tensor:
        """Return the rows of one of a fused tensor's parts, of each of its stacks of rows."""
        _, layer, part = canonical.split(".")
        mixer = self.config.layers[int(layer)].mixer
        rows = {spec.name: spec.shape[0] for spec in layer_tensors(self.config, int(layer))}
        counts = [rows[name] // stacks for name in fused.parts]
        if not tensor.shape or tensor.shape[0] != stacks * sum(counts):
            raise ModelFormatError(
                f"tensor {fused.name} has shape {list(tensor.shape)}, but the config asks for "
                f"{stacks * sum(counts)} rows"
            )
        index = fused.parts.index(part.removesuffix("_bias"))
        first = sum(counts[:index])
        if fused.interleaved:
            return rows_of_tensor(tensor, np.arange(index, tensor.shape[0], len(counts)))
        if stacks == 1:
            return rows_of_tensor(tensor, slice(first, first + counts[index]))
        order = np.arange(tensor.shape[0]).reshape(stacks, -1)[:, first : first + counts[index]]
        cuts = []
        if part == "delta_qkv" and isinstance(mixer, DeltaNet):
            # q, k and v of each head in turn, which are q of all heads, then k, then v here
            cuts = [mixer.key_dim, 2 * mixer.key_dim]
        pieces = [piece.reshape(-1) for piece in np.split(order, cuts, axis=1)]
        return rows_of_tensor(tensor, np.concatenate(pieces))

    def _file_name(self, canonical: str) -> tuple[str | Fused | PerExpert, int]:
        """Return the file's name of a tensor: `layers.3.q` -> `blk.3.attn_q.weight`.

        The number of matrices, of experts or streams, that are stacked in the tensor comes with
        it, or 0.
        """
        if not canonical.startswith("layers."):
            of_streams = canonical in STREAM_STACKS
            return self.names[canonical], (self.config.streams or 1) - 1 if of_streams else 0
        _, layer, part = canonical.split(".")
        here = self.config.layers[int(layer)]
        experts, mixed = here.experts, f"{key_of(type(here.mixer))}_{part}"
        own = experts is not None and f"expert_{part}" in self.names
        name = self.names[f"expert_{part}" if own else mixed if mixed in self.names else part]
        count = experts.experts if experts is not None and own else 0
        if isinstance(name, str):
            return name.format(layer), count
        # of two `{}`, the second one is left
        return replace(name, name=name.name.format(layer, "{}")), count


def latent_query_order(attention: Attention, latent: Latent) -> NDArray[np.intp]:
    """Return the order of the rows of queries that puts what RoPE turns, in pairs of halves, before
    the rest of each head; files have it behind, in pairs of neighbours."""
    turned = half_split_order(attention.head_dim, 1, attention.head_dim)
    order = np.concatenate((latent.key + turned, np.arange(latent.key)))
    return (np.arange(attention.heads)[:, None] * len(order) + order).reshape(-1)


def _latent_up(tensor: Tensor, part: str, attention: Attention, *, fused: bool) -> Tensor:
    """Return the matrices of all heads that make keys, or values, of latents.

    Args:
        fused: whether the tensor has rows of keys, then of values, of each head; a key's part has
            the rows of latents in files that have it alone.
    """
    latent, heads = attention.latent, attention.heads
    assert latent is not None
    if not fused:  # [H, N, K]
        return reshaped(tensor, math.prod(tensor.shape[:-1]), *tensor.shape[-1:])
    needed = heads * (latent.key + latent.value), latent.rank
    if tensor.shape != needed:
        raise ModelFormatError(
            f"the tensor with {part} has shape {list(tensor.shape)}, but the config asks for "
            f"{list(needed)}"
        )
    order = np.arange(needed[0]).reshape(heads, -1)
    if part == "value_up":
        return rows_of_tensor(tensor, order[:, latent.key :].reshape(-1))
    keys = rows_of_tensor(tensor, order[:, : latent.key].reshape(-1))

    def columns(values: NDArray[np.float32]) -> NDArray[np.float32]:
        by_head = values.reshape(heads, latent.key, latent.rank)
        return np.ascontiguousarray(by_head.swapaxes(1, 2)).reshape(-1, latent.key)

    return replace(with_values(keys, columns), shape=(heads * latent.rank, latent.key))


def _heads(mixer: Mixer) -> int:
    """Return the number of heads in which parts of a fused tensor take turns."""
    if isinstance(mixer, DeltaNet):
        return mixer.key_heads
    assert isinstance(mixer, Attention)
    return mixer.heads


def with_values(
    tensor: Tensor, change: Callable[[NDArray[np.float32]], NDArray[np.float32]]
) -> Tensor:
    """Return the tensor with changed values, which is no longer available as codes."""
    return replace(tensor, float32=lambda: change(tensor.float32()), quantized=None)
