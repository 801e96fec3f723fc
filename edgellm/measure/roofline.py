"""Roofline of a language model: arithmetic limits prefill, and memory limits decode.

Williams et al., "Roofline", CACM 2009.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from threadpoolctl import threadpool_limits

from edgellm.cache.groups import step_bytes
from edgellm.engine.costs import best_seconds
from edgellm.graphs.config import ModelConfig
from edgellm.graphs.contract import WEIGHTS_FILE
from edgellm.graphs.layer_config import Attention
from edgellm.graphs.tensors import multiplied_parameters
from edgellm.kernels.gpu.device import device_name, require
from edgellm.kernels.kv_blocks import (
    KVFormats,
)
from edgellm.kernels.linear import native as native_linear
from edgellm.kernels.linear import pack_weight
from edgellm.kernels.native import library
from edgellm.kernels.quantized import GROUP, KINDS, QuantizedWeight
from edgellm.store.bundle import Bundle
from edgellm.store.manifest import PACKED, imported

_REPEATS = 5
_READ_BYTES = 256 << 20  # more than any cache holds
_FLOAT_SIZE = 1024
_INT4_SHAPE = (256, 2048, 2048)  # rows, outputs, inputs
_PEAK_TURNS = 1_000_000  # about 10 ms


@dataclass(frozen=True)
class Machine:
    """Measured peak performance of a processor.

    Attributes:
        flops: operations a second in a large matrix product.
        kind: number format of that product, and processor.
        read_bytes: bytes a second from the processor's memory.
        peak: operations a second of 8-bit products between registers, which no kernel exceeds;
            None where the C++ kernels do not compute, or for another processor.
    """

    flops: float
    kind: str
    read_bytes: float
    peak: float | None = None


@dataclass(frozen=True)
class Work:
    """Work that a model asks for.

    Attributes:
        prefill_flops: operations per token of a prompt, on average, without the LM head.
        decode_bytes: bytes of weights and KV cache that one decode step reads.
        weight_share: bytes of these weights over their bytes in the file that they were imported
            from; None where the latter is not known.
    """

    prefill_flops: float
    decode_bytes: int
    weight_share: float | None = None


def measure_cpu(threads: int, *, int4: bool) -> Machine:
    """Measure the C++ int4 kernel, or float32 in numpy's BLAS, and the memory of the CPU.

    The measurement takes about a second.

    Args:
        int4: whether to measure the int4 kernel, if it is built.
    """
    flops = _int4_flops(threads) if int4 else None
    if flops is None:
        return Machine(_float_flops(threads), "float32, CPU", _read_bytes(threads))
    return Machine(flops, "int4 kernel, CPU", _read_bytes(threads), peak_flops(threads))


def measure_gpu() -> Machine:
    """Measure torch's product of halves, which Triton kernels also multiply, and its copy.

    Raises:
        ProviderError: there is no GPU for Triton kernels.
    """
    device = require()
    import torch  # seconds

    def seconds(run: Callable[[], object]) -> float:
        def finished() -> None:
            run()
            if device != "cpu":
                torch.cuda.synchronize()

        finished()
        return best_seconds(finished, times=_REPEATS)

    size = 64 if device == "cpu" else 8 * _FLOAT_SIZE
    a = torch.ones((size, size), dtype=torch.float16, device=device)
    source = torch.ones(_READ_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return Machine(
        2 * size**3 / seconds(lambda: a @ a),
        f"float16, {device_name()}",
        2 * _READ_BYTES / seconds(lambda: target.copy_(source)),
    )


def work_of(bundle: Bundle, tokens: int, *, precision: str, kv_format: KVFormats) -> Work:
    """Return the work of a prompt of `tokens`, and of a decode step behind it in a precision."""
    config = bundle.config
    cached = step_bytes(config, tokens, format=kv_format)
    if precision == PACKED:
        summary = imported(bundle.manifest, precision)
        share = summary.decode_bytes / summary.file_bytes if summary.file_bytes else None
        return Work(_flops(config, tokens), summary.decode_bytes + cached, share)
    folders = (precision, f"head-{bundle.precision(precision).head}")
    weights = sum(bundle.manifest.files[f"{folder}/{WEIGHTS_FILE}"].bytes for folder in folders)
    return Work(_flops(config, tokens), weights + cached)


def _flops(config: ModelConfig, tokens: int) -> float:
    """Return the operations per token of a prompt, on average.

    A multiplication and an addition are counted for each weight. Attention adds the same for each
    channel of each position that a token sees, once for scores and once for sums of values.
    """
    attended = sum(
        _channels(attention) * _mean_seen(config, index, tokens)
        for index, attention in config.attentions.items()
    )
    return 2.0 * (multiplied_parameters(config) + 2 * attended)


def _channels(attention: Attention) -> int:
    """Return the channels of scores and of sums of values of all heads, half of them."""
    if attention.latent is None:
        return attention.size
    return attention.heads * (attention.head_dim + 2 * attention.latent.rank) // 2


def _mean_seen(config: ModelConfig, layer: int, tokens: int) -> float:
    """Return the average number of positions that the tokens of a prompt see in a layer.

    The number is half of the prompt or, with a short window, nearly the window.
    """
    seen = min(tokens, config.layers[layer].attention.window or tokens)
    return seen * (tokens - seen / 2) / max(tokens, 1)


def _float_flops(threads: int) -> float:
    a = np.ones((_FLOAT_SIZE, _FLOAT_SIZE), np.float32)
    with threadpool_limits(threads, user_api="blas"):
        return 2 * _FLOAT_SIZE**3 / best_seconds(lambda: a @ a, times=_REPEATS)


def _int4_flops(threads: int) -> float | None:
    compiled = library()
    if compiled is None:
        return None
    rows, outputs, inputs = _INT4_SHAPE
    codes = np.full((outputs, inputs), 7, np.uint8)
    scale = np.ones((outputs, inputs // GROUP), np.float16)
    weight = pack_weight(QuantizedWeight(KINDS["int4_symmetric"], codes, scale))
    x = np.ones((rows, inputs), np.float32)
    seconds = best_seconds(
        lambda: native_linear.linear(compiled, x, weight, threads=threads), times=_REPEATS
    )
    return 2 * rows * outputs * inputs / seconds


def peak_flops(threads: int) -> float | None:
    """Measure 8-bit products between registers in the instruction set in use, without memory."""
    compiled = library()
    if compiled is None:
        return None

    def rate() -> float:
        start = time.perf_counter()
        operations: float = compiled.edgellm_bare_products(threads, _PEAK_TURNS)
        return operations / (time.perf_counter() - start)

    return max(rate() for _ in range(_REPEATS))


def _read_bytes(threads: int) -> float:
    parts = np.array_split(np.ones(_READ_BYTES // 8), threads)
    with ThreadPoolExecutor(threads) as pool:
        return _READ_BYTES / best_seconds(lambda: list(pool.map(np.max, parts)), times=_REPEATS)
