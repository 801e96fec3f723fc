"""The two limits of a language model: arithmetic in prefill, memory in decode.

Williams et al., "Roofline", CACM 2009.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from threadpoolctl import threadpool_limits

from edgellm.bundle import PANELS, Bundle
from edgellm.graphs.config import ModelConfig
from edgellm.graphs.contract import WEIGHTS_FILE
from edgellm.kernels.int4 import GROUP, Int4Weight
from edgellm.kernels.kv_blocks import BLOCK, KVFormat, block_bytes
from edgellm.kernels.linear import int4_panels
from edgellm.kernels.linear import native as native_linear
from edgellm.kernels.native import library
from edgellm.timing import best_seconds

_REPEATS = 5
_READ_BYTES = 256 << 20  # more than any cache holds
_FLOAT_SIZE = 1024
_INT4_SHAPE = (256, 2048, 2048)  # rows, outputs, inputs


@dataclass(frozen=True)
class Machine:
    """What a machine can do at best, measured.

    Attributes:
        float_flops: float32 operations a second in a large product (numpy's BLAS).
        int4_flops: operations a second of the native int4 kernel; None where it is not built.
        read_bytes: bytes a second from memory.
    """

    float_flops: float
    int4_flops: float | None
    read_bytes: float


@dataclass(frozen=True)
class Work:
    """What a model asks for.

    Attributes:
        prefill_flops: a token of a prompt, on average, without the LM head.
        decode_bytes: weights and KV cache that one decode step reads.
    """

    prefill_flops: float
    decode_bytes: int


def measure_machine(threads: int) -> Machine:
    """Takes about a second."""
    return Machine(_float_flops(threads), _int4_flops(threads), _read_bytes(threads))


def work_of(bundle: Bundle, tokens: int, *, flavour: str, kv_format: KVFormat) -> Work:
    """Of a prompt of `tokens`, and of a decode step after it with the weights of `flavour`."""
    config = bundle.config
    block = block_bytes(
        format=kv_format,
        layers=config.layers,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
    )
    folders = [flavour] if flavour == PANELS else [flavour, f"head-{bundle.flavour(flavour).head}"]
    weights = sum(bundle.manifest.files[f"{folder}/{WEIGHTS_FILE}"].bytes for folder in folders)
    return Work(_flops(config, tokens), weights + block * tokens // BLOCK)


def _flops(config: ModelConfig, tokens: int) -> float:
    """A multiplication and an addition for each weight; attention over half of the prompt."""
    attention = config.attention_size
    weights = config.hidden_size * (attention + config.qkv_size + 3 * config.intermediate_size)
    return 2.0 * config.layers * (weights + attention * tokens)


def _float_flops(threads: int) -> float:
    a = np.ones((_FLOAT_SIZE, _FLOAT_SIZE), np.float32)
    with threadpool_limits(threads, user_api="blas"):
        return 2 * _FLOAT_SIZE**3 / best_seconds(lambda: a @ a, times=_REPEATS)


def _int4_flops(threads: int) -> float | None:
    compiled = library()
    if compiled is None:
        return None
    rows, outputs, inputs = _INT4_SHAPE
    scale = np.ones((outputs, inputs // GROUP), np.float32)
    weight = Int4Weight(
        np.full((outputs, inputs // GROUP, GROUP // 2), 0x97, np.uint8), scale, -8 * scale
    )
    panels, x = int4_panels(weight), np.ones((rows, inputs), np.float32)
    seconds = best_seconds(
        lambda: native_linear.linear(compiled, x, panels, threads=threads), times=_REPEATS
    )
    return 2 * rows * outputs * inputs / seconds


def _read_bytes(threads: int) -> float:
    parts = np.array_split(np.ones(_READ_BYTES // 8), threads)
    with ThreadPoolExecutor(threads) as pool:
        return _READ_BYTES / best_seconds(lambda: list(pool.map(np.max, parts)), times=_REPEATS)
