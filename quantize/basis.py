"""Changes of basis that leave products the same, and let numbers lose less in rounding.

A product stays the same when its input is rotated and its weight counter-rotated,
`(x R) (W R)^T = x W^T`, but the rotated input has no outlier channels and loses little when it is
rounded to int8 (QuaRot, Ashkboos et al., arXiv:2404.00456; SpinQuant, Liu et al.,
arXiv:2405.16406).

RoPE turns a pair of channels as a whole, so it commutes with a factor for each pair: K divided by
the factor and Q multiplied by it give the same scores. A vector that is subtracted from all keys
changes each query's scores by one number, which softmax ignores.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from edgellm.kernels import hadamard


def random_rotation(size: int, *, seed: int) -> NDArray[np.float64]:
    """Make a random orthogonal matrix `[size, size]`: signs, a Hadamard factor and a QR factor.

    The Kronecker product mixes every channel with every other one and needs the QR decomposition
    of the odd part only (9 x 9 for 576), which keeps the export of large models cheap.
    """
    rng = np.random.default_rng(seed)
    power = hadamard.power_of_two_factor(size, limit=size)
    orthogonal, _ = np.linalg.qr(rng.standard_normal((size // power, size // power)))
    signs = rng.choice([-1.0, 1.0], size)
    return signs[:, None] * np.kron(orthogonal, hadamard.matrix(power))


def rotate_input(
    weight: NDArray[np.float32], rotation: NDArray[np.float64]
) -> NDArray[np.float32]:  # [N, K], [K, K] -> [N, K]
    """Return the weight whose output for `x @ rotation` is the output of `weight` for `x`."""
    return np.asarray(weight @ rotation, np.float32)


def rotate_output(
    weight: NDArray[np.float32], rotation: NDArray[np.float64]
) -> NDArray[np.float32]:  # [N, K], [N, N] -> [N, K]
    """Return the weight whose output is the rotated output of `weight`."""
    return np.asarray(rotation.T @ weight, np.float32)


def rotate_input_blocks(
    weight: NDArray[np.float32],
    block: NDArray[np.float64],
    across: NDArray[np.float64] | None = None,
) -> NDArray[np.float32]:  # [N, K], [b, b], [K/b, K/b] -> [N, K]
    """Rotate inputs as `rotate_input` does, but each run of b by `block`, mixed by `across`."""
    rows, columns = weight.shape
    blocks = weight.reshape(rows, columns // block.shape[0], block.shape[0]) @ block
    if across is not None:
        blocks = across @ blocks
    return np.asarray(blocks, np.float32).reshape(rows, columns)


def spreading(size: int) -> NDArray[np.float64]:
    """Make an orthogonal matrix `[size, size]` that mixes all channels evenly, for any size.

    The matrix is the Kronecker product of a discrete cosine transform (the odd factor of `size`)
    and a Hadamard matrix. No entry is larger than sqrt(2 / size).
    """
    power = hadamard.power_of_two_factor(size, limit=size)
    odd = size // power
    angles = np.pi / odd * np.outer(np.arange(odd), np.arange(odd) + 0.5)
    cosines = np.cos(angles) * np.sqrt(2 / odd)
    cosines[0] = odd**-0.5
    return np.kron(cosines, hadamard.matrix(power))


# Positions that the mean of keys is taken over; later keys are turned further away from it.
_POSITIONS = 4096
# Largest exponent: larger powers of two have no use, and bring weights near the limits of a half.
_LARGEST_EXPONENT = 8


def common_part(
    bias: NDArray[np.floating], inv_freq: Sequence[float], *, magnitude: float = 1.0
) -> NDArray[np.float64]:  # [Hkv, D] -> [Hkv, D]
    """Return the mean over positions of the bias of keys after RoPE.

    Pairs that turn slowly keep their bias, and the mean of fast pairs vanishes.

    Args:
        bias: bias of K, `[Hkv, D]`.
        inv_freq: RoPE's frequencies, in radians per position; channel `c` is turned with channel
            `c + len(inv_freq)`.
        magnitude: factor of RoPE's cosines and sines.
    """
    half = len(inv_freq)
    angles = np.arange(_POSITIONS, dtype=np.float64)[:, None] * np.asarray(inv_freq)
    turn = magnitude * np.exp(1j * angles).mean(axis=0)
    pairs = (bias[:, :half] + 1j * bias[:, half : 2 * half].astype(np.float64)) * turn
    return np.concatenate((pairs.real, pairs.imag, bias[:, 2 * half :]), axis=1)


def pair_exponents(
    key: NDArray[np.floating], query: NDArray[np.floating]
) -> NDArray[np.int8]:  # [Hkv, P], [Hkv, P] -> [Hkv, P]
    """Return exponents of the powers of two by which to divide K and multiply Q, per pair.

    The largest number of a row decides the step for the whole row, so pairs of equal size would be
    best for K. But the cost of a pair's error grows with Q in that pair. The square root of the
    ratio of K to Q balances both.

    Args:
        key, query: root mean square of the numbers in each pair of K and Q, `[Hkv, P]`; a pair with
            a zero is left as it is.
    """
    known = (key > 0) & (query > 0)
    size = np.log2(np.where(known, key, 1)) - np.log2(np.where(known, query, 1))
    size /= 2
    middle = np.array(
        [np.median(row[k]) if k.any() else 0 for row, k in zip(size, known, strict=True)]
    )
    rounded = np.rint(size - middle[:, None])
    rounded = np.clip(rounded, -_LARGEST_EXPONENT, _LARGEST_EXPONENT)
    return np.where(known, rounded, 0).astype(np.int8)
