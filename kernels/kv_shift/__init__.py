"""Move K and V rows to earlier positions of a sequence, as if they had been computed there.

A key at position `p` is `R(p) x`, so `R(-distance)` makes of it the key at `p - distance` (RoPE, Su
et al., arXiv:2104.09864): what stands behind a gap can close it without being computed again, which
is how a sequence goes on with its first tokens and a recent window (StreamingLLM, Xiao et al.,
arXiv:2309.17453). Values know no position. A quantized key is rounded once more.
"""

from edgellm.kernels.kv_shift.portable import move

__all__ = ["move"]
