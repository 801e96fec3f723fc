"""Rotary position embedding (Su et al., RoFormer, arXiv:2104.09864), half-split layout.

Element `i` of the first half is rotated with element `i` of the second half by the angle
`position * inv_freq[i]`; dimensions past `2 * len(inv_freq)` are left alone.
"""

from edgellm.kernels.rope.portable import RopeTable, apply, table

__all__ = ["RopeTable", "apply", "table"]
