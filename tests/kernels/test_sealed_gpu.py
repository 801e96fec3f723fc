"""Sealed blocks in Triton: appended, sealed and read as the references say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
# the interpreter computes in numpy, which warns of the NaN in memory that was never written
pytestmark = [pytest.mark.triton, pytest.mark.filterwarnings("ignore::RuntimeWarning")]

import model_shapes  # noqa: E402
import random_model  # noqa: E402
from gpu_steps import counted, poison, span, step_on  # noqa: E402

from edgellm.kernels import hadamard, rope  # noqa: E402
from edgellm.kernels.attention import gpu as attention  # noqa: E402
from edgellm.kernels.attention import gpu_tiles, reference  # noqa: E402
from edgellm.kernels.gpu.kv_blocks import DeviceBlocks, DeviceSealed  # noqa: E402
from edgellm.kernels.kv_append import append, gpu, portable  # noqa: E402
from edgellm.kernels.kv_append.reference import round_trip  # noqa: E402
from edgellm.kernels.kv_blocks import (  # noqa: E402
    BLOCK,
    SEALED,
    STORAGE,
    KVBlocks,
    KVFormat,
    SealedBlocks,
    allocate,
)
from edgellm.kernels.kv_seal.gpu import seal  # noqa: E402
from edgellm.kernels.kv_seal.reference import sealed_rows  # noqa: E402
from edgellm.kernels.sealed_blocks import allocate_sealed, sealed_end  # noqa: E402
from edgellm.kernels.step import StepSpan  # noqa: E402
from edgellm.kernels.step.gpu_inputs import SpanInputs  # noqa: E402

# Of two sequences, hot and sealed; id 0 stands for the first block of the sealed ones.
TABLES = [[3, 5, 0, 4, 1, 7], [9, 2, 8, 6]]
SEALED_TABLES = [[0, 2, 5, 1], [0, 3]]
LAYER = 1


def rows(length: int, kv_heads: int, head_dim: int) -> list[np.ndarray]:
    """K with channels of very different middles and ranges, as RoPE leaves them, and V."""
    rng = np.random.default_rng(head_dim + length)
    k, v = rng.standard_normal((2, length, kv_heads, head_dim)).astype("f4")
    middle, size = rng.standard_normal((2, kv_heads, head_dim)).astype("f4")
    k = k * np.exp(size) + 3 * middle
    k[:, :, -1] = 0.25  # a channel without a range
    v[5] = 0
    return [k, v]


@dataclass
class Cache:
    """Pools of two layers, on host and device; all that was never written is NaN or the largest
    code, on the device too."""

    host: KVBlocks
    device: DeviceBlocks
    sealed: DeviceSealed
    inputs: SpanInputs
    tiling: gpu_tiles.Tiling

    @classmethod
    def of(
        cls, format: KVFormat, heads: int, kv_heads: int, head_dim: int, device: str
    ) -> Cache:
        sizes = {"layers": 2, "kv_heads": kv_heads, "head_dim": head_dim}
        sealed = allocate_sealed(format=format, blocks=6, **sizes)
        host = allocate(format=format, blocks=10, sealed=sealed, **sizes)
        pools = []
        for each, kind in ((host, DeviceBlocks), (sealed, DeviceSealed)):
            poison(each)
            pools.append(kind.like(each, device))
            pools[-1].fetch(range(each.count))
        tiling = gpu_tiles.Tiling.of(pools[0], heads)
        inputs = SpanInputs(
            pools, tilings=[tiling], rows=700, positions=768, vocabulary=1, device=device
        )
        return cls(host, *pools, inputs, tiling)

    def set(self, ranges: Sequence[tuple[int, int]]) -> gpu_tiles.Work:
        """Let the next call have these positions of the sequences; work of attention for them."""
        self.inputs.set(
            [
                StepSpan(
                    tables=[table, sealed], tokens=[0] * (end - start), start=start, logit_rows=0
                )
                for (start, end), table, sealed in zip(ranges, TABLES, SEALED_TABLES, strict=False)
            ]
        )
        return self.inputs.work([end - start for start, end in ranges])[self.tiling]

    def seal(self, ranges: Sequence[tuple[int, int]]) -> None:
        work, place = self.set(ranges), self.inputs.places[0]
        assert place.sealed is not None
        seal(self.device, place.tables, place.sealed, LAYER, work.rows)


def filled(cache: Cache, lengths: Sequence[int]) -> list[list[np.ndarray]]:
    """Rows of K and V of sequences, as they are, in the cache on both sides."""
    every = []
    for length, table in zip(lengths, TABLES, strict=False):
        every.append(rows(length, cache.host.kv_heads, cache.host.head_dim))
        append(cache.host, table, LAYER, 0, *every[-1])
    cache.device.fetch(range(cache.host.count))
    return every


def codes(packed: np.ndarray, bits: int) -> np.ndarray:
    """Codes `[..., D]` of bytes `[..., D * bits / 8]`."""
    parts = [packed >> shift & 2**bits - 1 for shift in range(0, 8, bits)]
    return np.concatenate(parts, axis=-1)


def numbers(sealed: SealedBlocks, block: int, format: KVFormat) -> tuple[np.ndarray, np.ndarray]:
    """K and V after the transform, `[BLOCK, Hkv, D]`, that a sealed block stands for."""
    sealing = STORAGE[format].sealing
    assert sealing is not None
    k, v, k_scale, v_scale = (array[block, LAYER] for array in sealed.arrays)
    k = k.transpose(0, 1, 3, 2, 4).reshape(len(k), BLOCK, -1).transpose(1, 0, 2)
    v = v.transpose(0, 1, 3, 2).reshape(len(v), BLOCK, -1).transpose(1, 0, 2)
    if sealing.channels:
        lines = k_scale.astype("f8")
        keys = (2.0 * codes(k, 4) - 15) * lines[:, 0] + lines[:, 1]
    else:
        keys = hadamard.reference.transform(k.view("i1") * k_scale.astype("f8").T[..., None])
    top = 2**sealing.value_bits - 1
    scales = np.repeat(v_scale.astype("f8").transpose(2, 0, 1), v.shape[-1] * 8 // sealing.value_bits // v_scale.shape[1], axis=-1)
    return keys, (2.0 * codes(v, sealing.value_bits) - top) * scales
