"""KV shift: moving K and V rows to earlier positions of a sequence, as if computed there.

A key at position `p` is `R(p) x`, so `R(-distance)` turns it to the key at `p - distance` (RoPE, Su
et al., arXiv:2104.09864). So tokens behind a gap can close it without being computed again, and a
sequence goes on with its first tokens and a recent window (StreamingLLM, Xiao et al.,
arXiv:2309.17453). Values do not depend on the position. A quantized key is rounded once more.
"""

from edgellm.kernels.kv_shift.portable import move

__all__ = ["move"]
