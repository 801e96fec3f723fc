"""Conversion of GGUF's quantized tensor types to codes and scales.

Layouts are those of ggml-common.h in llama.cpp. A row of a tensor is blocks of 32 or 256 numbers,
each with its scales before or behind its codes. `FORMATS` has the types whose numbers one of our
kinds holds exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgellm.kernels.quantized import KINDS, QuantizedWeight, concatenate, row_slices

Bytes = NDArray[Any]  # uint8


def _halves(blocks: Bytes, first: int) -> NDArray[np.float16]:
    """Read the half at byte `first` of each block: `[N, blocks, bytes]` to `[N, blocks]`."""
    return np.ascontiguousarray(blocks[..., first : first + 2]).view(np.float16)[..., 0]


def _nibbles(data: Bytes) -> Bytes:
    """Unpack 4-bit codes `[..., n]` to `[..., 2 n]`: low halves of the bytes, then high halves."""
    return np.concatenate([data & 15, data >> 4], axis=-1)


def _bits(data: Bytes) -> Bytes:
    """Unpack the bits of bytes `[..., n]` to `[..., 8 n]`, the lowest bit first."""
    return np.unpackbits(data, axis=-1, bitorder="little")


def _rows(codes: Bytes) -> Bytes:
    return np.ascontiguousarray(codes).reshape(codes.shape[0], -1)


def _q4(blocks: Bytes, kind: str) -> QuantizedWeight:
    codes, header = KINDS[kind], 4 if KINDS[kind].affine else 2
    offset = _halves(blocks, 2) if codes.affine else None
    return QuantizedWeight(codes, _rows(_nibbles(blocks[..., header:])), _halves(blocks, 0), offset)


def _q5(blocks: Bytes, kind: str) -> QuantizedWeight:
    header = 4 if KINDS[kind].affine else 2
    high = _bits(blocks[..., header : header + 4]) << 4
    codes = _nibbles(blocks[..., header + 4 :]) | high
    offset = _halves(blocks, 2) if KINDS[kind].affine else None
    return QuantizedWeight(KINDS[kind], _rows(codes), _halves(blocks, 0), offset)


def _q8_0(blocks: Bytes) -> QuantizedWeight:
    codes = blocks[..., 2:] ^ np.uint8(128)
    return QuantizedWeight(KINDS["int8_symmetric"], _rows(codes), _halves(blocks, 0))


def _k_scales(packed: Bytes) -> tuple[Bytes, Bytes]:
    """Unpack 12 bytes of each block to 8 scales and 8 minima of 6 bits, `[N, blocks, 8]` each."""
    low, high, rest = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = np.concatenate([low & 63, rest & 15 | low >> 6 << 4], axis=-1)
    minima = np.concatenate([high & 63, rest >> 4 | high >> 6 << 4], axis=-1)
    return scales, minima


def _q4_q5_k(blocks: Bytes, kind: str) -> QuantizedWeight:
    scales, minima = _k_scales(blocks[..., 4:16])
    codes = _k_nibbles(blocks[..., -128:])
    if KINDS[kind].bits == 5:
        # bit i of byte j belongs to number j of group i
        high = _bits(blocks[..., 16:48, None]).swapaxes(-1, -2)
        codes = codes | high.reshape(codes.shape) << 4
    return QuantizedWeight(
        KINDS[kind],
        _rows(codes),
        _rows(scales).view(np.int8),
        _rows(minima),
        _halves(blocks, 0),
        _halves(blocks, 2),
    )


def _k_nibbles(data: Bytes) -> Bytes:
    """Unpack 128 bytes to 256 codes; 32 bytes have one group in low and the next in high halves."""
    return _nibbles(data.reshape(*data.shape[:-1], 4, 32)).reshape(*data.shape[:-1], 256)


def _q6_k(blocks: Bytes) -> QuantizedWeight:
    low = blocks[..., :128].reshape(*blocks.shape[:-1], 2, 64)
    high = blocks[..., 128:192].reshape(*blocks.shape[:-1], 2, 1, 32)
    fields = high >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3
    codes = _nibbles(low) | fields.reshape(*blocks.shape[:-1], 2, 128) << 4
    scales = np.ascontiguousarray(blocks[..., 192:208]).view(np.int8)
    return _block_of_16(codes, scales, _halves(blocks, 208))


def _q3_k(blocks: Bytes) -> QuantizedWeight:
    """Convert Q3_K: codes of 3 bits, `code - 4`, become codes of 6 bits."""
    low = blocks[..., 32:96].reshape(*blocks.shape[:-1], 2, 1, 32)
    low = low >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3  # [N, blocks, 2, 4, 32]
    high = _bits(blocks[..., :32, None]).swapaxes(-1, -2)  # [N, blocks, 8, 32]
    codes = low.reshape(high.shape) | high << 2
    packed = blocks[..., 96:108]
    shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
    top = packed[..., None, 8:] >> shifts & 3  # [N, blocks, 4, 4]
    scales = _nibbles(packed[..., :8]) | top.reshape(*packed.shape[:-1], 16) << 4
    signed = (scales.astype(np.int8) - 32).astype(np.int8)
    return _block_of_16(codes + np.uint8(28), signed, _halves(blocks, 108))


def _block_of_16(
    codes: Bytes, scales: NDArray[np.int8], half: NDArray[np.float16]
) -> QuantizedWeight:
    scale = np.ascontiguousarray(scales).reshape(scales.shape[0], -1)
    return QuantizedWeight(KINDS["int6_k"], _rows(codes), scale, block_scale=half)


def _iq4_nl(blocks: Bytes) -> QuantizedWeight:
    return QuantizedWeight(KINDS["iq4_nl"], _rows(_nibbles(blocks[..., 2:])), _halves(blocks, 0))


def _iq4_xs(blocks: Bytes) -> QuantizedWeight:
    low = blocks[..., 4:8]
    low = np.stack([low & 15, low >> 4], axis=-1).reshape(*low.shape[:-1], 8)
    high = _bits(blocks[..., 2:4]).reshape(*low.shape, 2)
    scales = low | high[..., 0] << 4 | high[..., 1] << 5
    signed = (scales.astype(np.int8) - 32).astype(np.int8)
    groups = blocks[..., 8:].reshape(*blocks.shape[:-1], 8, 16)
    return QuantizedWeight(
        KINDS["iq4_xs"],
        _rows(_nibbles(groups)),
        signed.reshape(signed.shape[0], -1),
        block_scale=_halves(blocks, 0),
    )


def _mxfp4(blocks: Bytes) -> QuantizedWeight:
    """Convert MXFP4, whose scales are powers of two, `2^(e - 128)` for doubled values.

    Scales below the smallest half, 2^-24, become 0: a loss of less than 1e-6 of any weight that
    matters.
    """
    # a damaged scale may be infinite; `checked` refuses it later
    with np.errstate(over="ignore"):
        scale = np.ldexp(np.float32(1), blocks[..., 0].astype(np.int32) - 128).astype(np.float16)
    return QuantizedWeight(KINDS["mxfp4"], _rows(_nibbles(blocks[..., 1:])), scale)


def _ternary(codes: Bytes, scale: NDArray[np.float16]) -> QuantizedWeight:
    """Convert ternary codes 0, 1, 2 for -1, 0, 1, with a scale for every 256 of them."""
    return QuantizedWeight(
        KINDS["int4_symmetric"], _rows(codes) + np.uint8(7), np.repeat(scale, 8, axis=1)
    )


def _tq2_0(blocks: Bytes) -> QuantizedWeight:
    fields = blocks[..., :64].reshape(*blocks.shape[:-1], 2, 1, 32)
    fields = fields >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3
    return _ternary(fields, _halves(blocks, 64))


def _tq1_0(blocks: Bytes) -> QuantizedWeight:
    """Convert TQ1_0: a byte has five digits of base 3, and each of the last four bytes has four."""
    powers = np.array([1, 3, 9, 27, 81], np.uint8)[:, None]

    def digits(data: Bytes, count: int) -> Bytes:
        shifted = (data[..., None, :] * powers[:count]).astype(np.uint16)
        return (shifted * 3 >> 8).astype(np.uint8).reshape(*data.shape[:-1], -1)

    parts = [digits(blocks[..., :32], 5), digits(blocks[..., 32:48], 5)]
    parts.append(digits(blocks[..., 48:52], 4))
    return _ternary(np.concatenate(parts, axis=-1), _halves(blocks, 52))


# Tensor type -> bytes of a block, and the function from blocks `[N, blocks, bytes]` to a weight.
FORMATS: Mapping[str, tuple[int, Callable[[Bytes], QuantizedWeight]]] = {
    "Q4_0": (18, lambda blocks: _q4(blocks, "int4_symmetric")),
    "Q4_1": (20, lambda blocks: _q4(blocks, "int4_affine")),
    "Q5_0": (22, lambda blocks: _q5(blocks, "int5_symmetric")),
    "Q5_1": (24, lambda blocks: _q5(blocks, "int5_affine")),
    "Q8_0": (34, _q8_0),
    "Q3_K": (110, _q3_k),
    "Q4_K": (144, lambda blocks: _q4_q5_k(blocks, "int4_k")),
    "Q5_K": (176, lambda blocks: _q4_q5_k(blocks, "int5_k")),
    "Q6_K": (210, _q6_k),
    "IQ4_NL": (18, _iq4_nl),
    "IQ4_XS": (136, _iq4_xs),
    "MXFP4": (17, _mxfp4),
    "TQ1_0": (54, _tq1_0),
    "TQ2_0": (66, _tq2_0),
}


def weight_of(rows: Bytes, storage: str) -> QuantizedWeight:
    """Convert the rows of bytes `[N, bytes]` of a tensor in one of `FORMATS` to a weight."""
    size, convert = FORMATS[storage]
    blocks = rows.reshape(rows.shape[0], -1, size)
    slices = row_slices(len(rows), rows.shape[1])
    return concatenate([convert(np.ascontiguousarray(blocks[part])) for part in slices])
