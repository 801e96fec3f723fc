"""The Walsh-Hadamard transform of heads: it spreads an outlier over all of a head's dimensions.

A head of `D` dimensions is transformed in blocks of the largest power of two that divides `D`. The
matrix is orthogonal and its own inverse, so `(q H) . (k H) = q . k`. Rounding to few bits loses
less after the transform (QuaRot, Ashkboos et al., arXiv:2404.00456).
"""

from edgellm.kernels.hadamard.portable import matrix, power_of_two_factor, transform

__all__ = ["matrix", "power_of_two_factor", "transform"]
