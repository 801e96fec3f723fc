"""Instruction sets that this processor has, of those that the library is compiled for."""

from __future__ import annotations

from edgellm.kernels.native import ISAS, library


def _usable() -> tuple[str, ...]:
    native = library()
    if native is None:
        return ()
    before = native.edgellm_isa()
    usable = tuple(isa for isa in ISAS if native.edgellm_set_isa(isa.encode()))
    native.edgellm_set_isa(before)
    return usable


HERE = _usable()
# A parameter in their place where nothing is compiled, so that a test is skipped with its reason.
HERE_OR_NONE = HERE or ("none",)
