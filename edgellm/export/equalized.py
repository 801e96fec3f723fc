"""Checkpoint in a key basis, whose K loses less when rounded (see `store/key_basis.py`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgellm.graphs.builder import WeightFile
from edgellm.graphs.checkpoint import Checkpoint
from edgellm.graphs.config import ModelConfig
from edgellm.graphs.contract import StoredArray
from edgellm.graphs.layer_config import OTHER_MODEL
from edgellm.graphs.tensor import Tensor
from edgellm.graphs.tensors import model_tensors
from edgellm.kernels.quantized import QuantizedWeight
from edgellm.quantize.basis import common_part, pair_exponents
from edgellm.store.key_basis import (
    FOLDER,
    Exponents,
    KeyBasis,
    has_offset,
    is_head_norm,
    of_channels,
    of_rows,
    stored_arrays,
)

# Tensors that take the powers of two: projections, or norms of Q and K where the model has some.
_PROJECTIONS = ("q", "k", "q_bias", "k_bias")
_NORMS = ("q_norm", "k_norm")
# Kinds of Q and K norms that have one weight for all heads.
_SHARED = ("head", "head_after_rope")


class EqualizedCheckpoint:
    """A checkpoint in a key basis: the same model, with other rows of Q and K, or other norms."""

    def __init__(self, checkpoint: Checkpoint, basis: KeyBasis) -> None:
        self.path: Path = checkpoint.path
        self.config: ModelConfig = checkpoint.config
        self.metadata: Mapping[str, Any] = checkpoint.metadata
        self.mtp: Checkpoint | None = checkpoint.mtp
        self._checkpoint = checkpoint
        self._basis = basis

    def tensor(self, name: str) -> Tensor:
        """Read a tensor of the checkpoint in the key basis.

        Rows of K are divided and rows of Q multiplied, in weights and biases, or in the weights of
        their norms if the model has these. All other tensors are unchanged.
        """
        tensor = self._checkpoint.tensor(name)
        layer, _, part = name.rpartition(".")
        if part not in (*_PROJECTIONS, *_NORMS):
            return tensor
        index = int(layer.split(".")[1])
        attention = self.config.layers[index].attention
        kind = attention.qk_norm
        if attention.latent is not None or part not in (_PROJECTIONS if kind == "none" else _NORMS):
            return tensor
        exponents = self._basis.exponents[index]
        if part.startswith("k"):
            exponents = -exponents
        if kind in _SHARED:
            return scaled_rows(tensor, of_channels(exponents, attention)[0])
        heads = attention.heads if part.startswith("q") else attention.kv_heads
        return scaled_rows(tensor, of_rows(exponents, attention, heads=heads))


def scaled_rows(tensor: Tensor, exponents: Exponents) -> Tensor:
    """Multiply each row of a tensor by a power of two; a quantized one only changes its scales.

    Args:
        tensor: `[N, K]` or `[N]`.
        exponents: exponents of two, `[N]`.
    """

    def scaled(values: NDArray[np.float32]) -> NDArray[np.float32]:
        by_row = exponents.reshape(-1, *[1] * (values.ndim - 1))
        return np.ldexp(values, by_row.astype(np.int32))

    def quantized() -> QuantizedWeight:
        assert tensor.quantized is not None
        weight = tensor.quantized()
        arrays: dict[str, Any] = {
            name: scaled(array.astype(np.float32)).astype(np.float16)
            for name, array in weight.arrays().items()
            if array.dtype == np.float16
        }
        return replace(weight, **arrays)

    return replace(
        tensor,
        float32=lambda: scaled(tensor.float32()),
        quantized=None if tensor.quantized is None else quantized,
    )


def choose_basis(checkpoint: Checkpoint) -> KeyBasis:
    """Choose the basis for a model's keys, from its weights alone."""
    config = checkpoint.config
    layers = range(config.layer_count)
    none = np.zeros((0, 0), np.float32)  # of a layer that does not attend
    exponents: list[Exponents] = []
    for layer in layers:
        there = config.attentions.get(layer)
        if there is None:
            exponents.append(none.astype(np.int8))
        elif there.latent is not None:  # what RoPE turns of its keys is small
            exponents.append(np.zeros((1, len(config.rope_of(layer).inv_freq)), np.int8))
        elif there.kv_from == OTHER_MODEL:  # its basis is known when both are opened
            shape = there.kv_heads, len(config.rope_of(layer).inv_freq)
            exponents.append(np.zeros(shape, np.int8))
        elif there.kv_from is not None:  # Q meets the keys of that layer
            exponents.append(exponents[there.kv_from])
        else:
            exponents.append(_exponents(checkpoint, layer))
    basis = KeyBasis(exponents, None)
    if not has_offset(config):
        return basis
    equalized = EqualizedCheckpoint(checkpoint, basis)
    offsets = [
        _offset(equalized, layer, magnitude=config.rope_of(layer).magnitude).astype(np.float32)
        if layer in config.attentions
        else none
        for layer in layers
    ]
    return replace(basis, offsets=offsets)


def store_basis(basis: KeyBasis, checkpoint: Checkpoint, root: Path) -> dict[str, StoredArray]:
    """Write a key basis, and norms of Q and K, into the bundle at `root`.

    Args:
        checkpoint: the checkpoint that is already in the basis.

    Returns:
        The arrays that `open_key_basis` and `open_head_norms` read.
    """
    (root / FOLDER).mkdir()
    with WeightFile(root / FOLDER) as file:
        for name, array in stored_arrays(basis).items():
            file.add(name, array)
        for name in model_tensors(checkpoint.config):
            if is_head_norm(name):
                file.add(name, checkpoint.tensor(name).float32())
    return file.arrays


def _exponents(checkpoint: Checkpoint, layer: int) -> Exponents:
    config = checkpoint.config
    attention, half = config.layers[layer].attention, len(config.rope_of(layer).inv_freq)
    key, query = (_energy(checkpoint, layer, part) for part in "kq")
    if has_offset(config):
        # the cache leaves out the common part that the bias adds to keys
        key -= _offset(checkpoint, layer) ** 2
    query = query.reshape(attention.kv_heads, -1, attention.head_dim).mean(axis=1)
    if attention.qk_norm in _SHARED:
        # one weight for all heads
        key, query = (np.broadcast_to(e.mean(axis=0), e.shape) for e in (key, query))
    pairs = (np.sqrt(np.maximum(_of_pairs(energy, half), 0)) for energy in (key, query))
    exponents = pair_exponents(*pairs)
    if attention.qk_norm != "none":
        return exponents  # for float32 weights
    return within_halves(exponents, checkpoint, layer)


def within_halves(exponents: Exponents, checkpoint: Checkpoint, layer: int) -> Exponents:
    """Move exponents towards 0 where a scale would no longer be exact in half precision.

    Args:
        exponents: `[Hkv, P]` of one layer.
    """
    attention = checkpoint.config.layers[layer].attention
    halves = {part: _halves(checkpoint.tensor(f"layers.{layer}.{part}")) for part in "qk"}
    heads = {"q": attention.heads, "k": attention.kv_heads}
    while True:
        lost = np.zeros(exponents.shape, np.bool_)
        for part, sign in (("q", 1), ("k", -1)):
            by_row = sign * of_rows(exponents, attention, heads=heads[part]).astype(np.int32)
            scaled = np.ldexp(halves[part], by_row[:, None])
            with np.errstate(over="ignore"):
                wrong = (scaled.astype(np.float16) != scaled).any(axis=1)
            by_head = wrong.reshape(attention.kv_heads, -1, attention.head_dim).any(axis=1)
            lost |= _of_pairs(by_head, exponents.shape[1]) > 0
        lost &= exponents != 0
        if not lost.any():
            return exponents
        exponents = np.where(lost, exponents - np.sign(exponents), exponents).astype(np.int8)


def _halves(tensor: Tensor) -> NDArray[np.float32]:
    """Return the numbers `[N, n]` that a weight stores in half precision; n is 0 for float ones."""
    if tensor.quantized is None:
        return np.zeros((tensor.shape[0], 0), np.float32)
    arrays = tensor.quantized().arrays().values()
    halves = [array.astype(np.float32) for array in arrays if array.dtype == np.float16]
    return np.concatenate(halves, axis=1)


def _energy(checkpoint: Checkpoint, layer: int, part: str) -> NDArray[np.float64]:
    """Compute mean squares `[heads, D]` of Q or K before RoPE, for input channels all alike."""
    config = checkpoint.config
    weight = checkpoint.tensor(f"layers.{layer}.{part}").float32()
    if config.layers[layer].norms_inputs:
        weight = weight * checkpoint.tensor(f"layers.{layer}.attention_norm").float32()
    energy: NDArray[np.float64] = np.square(weight).sum(axis=1, dtype=np.float64)
    attention = config.layers[layer].attention
    energy = energy.reshape(-1, attention.head_dim) + _constant(checkpoint, layer, part) ** 2
    kind = attention.qk_norm
    if kind == "none":
        return energy
    # the output of a norm: its weight, and the channel's share of what it divides by
    norm = checkpoint.tensor(f"layers.{layer}.{part}_norm").float32().astype(np.float64)
    mean = energy.mean() if kind == "width" else energy.mean(axis=1, keepdims=True)
    shares = energy / np.where(mean > 0, mean, 1)
    return shares * np.square(norm).reshape(-1, attention.head_dim)


def _constant(checkpoint: Checkpoint, layer: int, part: str) -> NDArray[np.float64]:
    """Compute the constant part `[heads, D]` of Q or K for any input; zeros without biases."""
    config, name = checkpoint.config, f"layers.{layer}.{part}"
    attention = config.layers[layer].attention
    heads = attention.heads if part == "q" else attention.kv_heads
    added = np.zeros(heads * attention.head_dim)
    if config.norm == "layer" and config.layers[layer].norms_inputs:
        bias = checkpoint.tensor(f"layers.{layer}.attention_norm_bias").float32()
        added += checkpoint.tensor(name).float32() @ bias
    if attention.qkv_bias:
        added += checkpoint.tensor(f"{name}_bias").float32()
    return added.reshape(heads, attention.head_dim)


def _offset(checkpoint: Checkpoint, layer: int, *, magnitude: float = 1.0) -> NDArray[np.float64]:
    """Compute the common part `[Hkv, D]` of a layer's keys.

    Zeros if scores are capped (softcap) or stand beside sinks, because leaving it out would change
    them, and where a norm comes behind the bias.
    """
    constant = _constant(checkpoint, layer, "k")
    attention = checkpoint.config.layers[layer].attention
    if attention.softcap is not None or attention.sinks or attention.qk_norm != "none":
        return np.zeros_like(constant)
    inv_freq = checkpoint.config.rope_of(layer).inv_freq
    return common_part(constant, inv_freq, magnitude=magnitude)


def _of_pairs(channels: NDArray[Any], half: int) -> NDArray[np.float64]:
    """Sum the two channels of each of `half` RoPE pairs, `[Hkv, D]` to `[Hkv, P]`."""
    values = channels.astype(np.float64)
    return values[:, :half] + values[:, half : 2 * half]
