"""A checkpoint with keys that lose less when they are rounded (see `store/key_basis.py`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgellm.graphs.builder import WeightFile
from edgellm.graphs.checkpoint import Checkpoint, Tensor
from edgellm.graphs.config import ModelConfig
from edgellm.graphs.contract import StoredArray
from edgellm.kernels.quantized import QuantizedWeight
from edgellm.quantize.keys import common_part, pair_exponents
from edgellm.store.key_basis import EXPONENTS, FOLDER, OFFSET, KeyBasis

Exponents = NDArray[np.int8]


class EqualizedCheckpoint:
    """A checkpoint in a key basis: the same model, with other rows of Q and K."""

    def __init__(self, checkpoint: Checkpoint, basis: KeyBasis) -> None:
        self.path: Path = checkpoint.path
        self.config: ModelConfig = checkpoint.config
        self.metadata: Mapping[str, Any] = checkpoint.metadata
        self._checkpoint = checkpoint
        self._basis = basis

    def tensor(self, name: str) -> Tensor:
        """Rows of K are divided and rows of Q multiplied, weights and biases; all else is as it
        was."""
        tensor = self._checkpoint.tensor(name)
        part = name.rpartition(".")[2].removesuffix("_bias")
        if part not in ("q", "k"):
            return tensor
        exponents = self._basis.exponents[int(name.split(".")[1])]
        by_row = _of_rows(exponents, self.config, heads=self.config.kv_heads)
        if part == "k":
            return scaled_rows(tensor, -by_row)
        return scaled_rows(tensor, _of_rows(exponents, self.config, heads=self.config.heads))


def scaled_rows(tensor: Tensor, exponents: Exponents) -> Tensor:
    """Each row times a power of two, which only changes the scales of a quantized one.

    Args:
        tensor: `[N, K]` or `[N]`; exponents: `[N]`.
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
    """The basis for a model's keys, from its weights alone."""
    config = checkpoint.config
    exponents = [_exponents(checkpoint, layer) for layer in range(config.layers)]
    basis = KeyBasis(np.stack(exponents), None)
    if not config.qkv_bias:
        return basis
    equalized = EqualizedCheckpoint(checkpoint, basis)
    offsets = [_offset(equalized, layer) for layer in range(config.layers)]
    return replace(basis, offset=np.stack(offsets).astype(np.float32))


def store_basis(basis: KeyBasis, root: Path) -> dict[str, StoredArray]:
    """Write a basis into the bundle at `root`; what `open_key_basis` reads."""
    (root / FOLDER).mkdir()
    with WeightFile(root / FOLDER) as file:
        file.add(EXPONENTS, basis.exponents)
        if basis.offset is not None:
            file.add(OFFSET, basis.offset)
    return file.arrays


def _exponents(checkpoint: Checkpoint, layer: int) -> Exponents:
    config = checkpoint.config
    key = _energy(checkpoint, layer, "k")
    if config.qkv_bias:
        bias = _bias(checkpoint, layer, "k")
        # of what the bias adds, the cache leaves out the common part
        key += bias**2 - _offset(checkpoint, layer) ** 2
    query = _energy(checkpoint, layer, "q")
    if config.qkv_bias:
        query += _bias(checkpoint, layer, "q") ** 2
    query = query.reshape(config.kv_heads, -1, config.head_dim).mean(axis=1)
    pairs = (np.sqrt(np.maximum(_of_pairs(energy, config), 0)) for energy in (key, query))
    return within_halves(pair_exponents(*pairs), checkpoint, layer)


def within_halves(exponents: Exponents, checkpoint: Checkpoint, layer: int) -> Exponents:
    """Nearer to 0 where a scale would not be a half any more."""
    config = checkpoint.config
    halves = {part: _halves(checkpoint.tensor(f"layers.{layer}.{part}")) for part in "qk"}
    heads = {"q": config.heads, "k": config.kv_heads}
    while True:
        lost = np.zeros(exponents.shape, np.bool_)
        for part, sign in (("q", 1), ("k", -1)):
            by_row = sign * _of_rows(exponents, config, heads=heads[part]).astype(np.int32)
            scaled = np.ldexp(halves[part], by_row[:, None])
            with np.errstate(over="ignore"):
                wrong = (scaled.astype(np.float16) != scaled).any(axis=1)
            by_head = wrong.reshape(config.kv_heads, -1, config.head_dim).any(axis=1)
            lost |= _of_pairs(by_head, config) > 0
        lost &= exponents != 0
        if not lost.any():
            return exponents
        exponents = np.where(lost, exponents - np.sign(exponents), exponents).astype(np.int8)


def _halves(tensor: Tensor) -> NDArray[np.float32]:
    """What is stored of a weight in half precision, `[N, n]`; nothing of one that is still to be
    rounded."""
    if tensor.quantized is None:
        return np.zeros((tensor.shape[0], 0), np.float32)
    arrays = tensor.quantized().arrays().values()
    halves = [array.astype(np.float32) for array in arrays if array.dtype == np.float16]
    return np.concatenate(halves, axis=1)


def _energy(checkpoint: Checkpoint, layer: int, part: str) -> NDArray[np.float64]:
    """Mean squares `[heads, D]` of Q or K without bias, for inputs whose channels are alike."""
    weight = checkpoint.tensor(f"layers.{layer}.{part}").float32()
    norm = checkpoint.tensor(f"layers.{layer}.attention_norm").float32()
    energy: NDArray[np.float64] = np.square(weight * norm).sum(axis=1, dtype=np.float64)
    return energy.reshape(-1, checkpoint.config.head_dim)


def _bias(checkpoint: Checkpoint, layer: int, part: str) -> NDArray[np.float64]:
    bias = checkpoint.tensor(f"layers.{layer}.{part}_bias").float32()
    return bias.reshape(-1, checkpoint.config.head_dim).astype(np.float64)


def _offset(checkpoint: Checkpoint, layer: int) -> NDArray[np.float64]:
    return common_part(_bias(checkpoint, layer, "k"), checkpoint.config.inv_freq)


def _of_rows(exponents: Exponents, config: ModelConfig, *, heads: int) -> Exponents:
    """`[Hkv, P]` to the rows `[heads * D]` of a projection; channels that do not turn have 0."""
    rows = np.zeros((config.kv_heads, config.head_dim), np.int8)
    half = exponents.shape[1]
    rows[:, :half] = rows[:, half : 2 * half] = exponents
    return np.repeat(rows, heads // config.kv_heads, axis=0).reshape(-1)


def _of_pairs(channels: NDArray[Any], config: ModelConfig) -> NDArray[np.float64]:
    """Sums `[Hkv, P]` of the two channels of each pair."""
    half = len(config.inv_freq)
    values = channels.astype(np.float64)
    return values[:, :half] + values[:, half : 2 * half]
