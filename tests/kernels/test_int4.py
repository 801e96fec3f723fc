from __future__ import annotations

import numpy as np

from edgellm.kernels.int4 import Int4Weight, dequantize, pack, unpack


def test_low_nibble_comes_first() -> None:
    codes = np.arange(32, dtype=np.uint8)[None] % 16
    packed = pack(codes)
    assert packed.shape == (1, 1, 16)
    assert packed[0, 0, :3].tolist() == [0x10, 0x32, 0x54]


def test_unpack_inverts_pack() -> None:
    codes = np.random.default_rng(0).integers(0, 16, (7, 96), dtype=np.uint8)
    assert (unpack(pack(codes)) == codes).all()


def test_dequantize_is_scale_times_code_plus_offset() -> None:
    rng = np.random.default_rng(1)
    codes = rng.integers(0, 16, (5, 64), dtype=np.uint8)
    scale, offset = rng.standard_normal((2, 5, 2)).astype(np.float32)
    found = dequantize(Int4Weight(pack(codes), scale, offset))
    for row in range(5):
        for column in range(64):
            group = column // 32
            expected = codes[row, column] * scale[row, group] + offset[row, group]
            assert found[row, column] == np.float32(expected)


def test_symmetric_weight_has_no_excess() -> None:
    scale = np.full((3, 2), 0.25, np.float32)
    weight = Int4Weight(np.zeros((3, 2, 16), np.uint8), scale, -8 * scale)
    assert not weight.excess.any()
