"""Orthogonal matrices that spread outliers over all channels before activations become int8.

A product stays the same when its input is rotated and its weight counter-rotated,
`(x R) (W R)^T = x W^T`, but the rotated input has no outlier channels and loses little when it is
rounded (QuaRot, Ashkboos et al., arXiv:2404.00456; SpinQuant, Liu et al., arXiv:2405.16406).
"""

from __future__ import annotations

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
