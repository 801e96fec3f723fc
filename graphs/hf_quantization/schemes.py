"""Quantization schemes of weights in a config of compressed-tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from edgellm.errors import UnsupportedModelError
from edgellm.graphs.fields import Fields
from edgellm.graphs.hf_quantization.fp8 import read_block

_FORMATS = (
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "mxfp4-pack-quantized",
    "nvfp4-pack-quantized",
    "mixed-precision",
)


@dataclass(frozen=True)
class Scheme:
    """Quantization of the weights of one config group.

    Attributes:
        bits: bits of a code.
        floats: whether codes are floats, not integers.
        group_size: inputs that share a scale; None where each output, each block or the whole
            weight has one scale.
        symmetric: whether there are no zero points.
        block: outputs and inputs of a block; None where there are no blocks.
    """

    bits: int
    floats: bool
    group_size: int | None
    symmetric: bool
    block: tuple[int, int] | None

    def allows(self, bits: int, floats: bool, group_size: int | None, symmetric: bool) -> bool:
        """Whether tensors with these properties can belong to the scheme.

        Scales for one group of all inputs look like scales of outputs, so a `group_size` of None
        fits any scheme.
        """
        return (
            (bits, floats) == (self.bits, self.floats)
            and group_size in (None, self.group_size)
            # symmetric weights may have zero points, all in the middle
            and (self.symmetric or not symmetric)
        )

    def __str__(self) -> str:
        groups = "" if self.group_size is None else f" in groups of {self.group_size}"
        zeros = "" if self.symmetric else " with zero points"
        return f"{'float' if self.floats else 'int'} {self.bits}{groups}{zeros}"


def read_schemes(values: Mapping[str, Any], *, origin: str) -> list[Scheme]:
    """Read the schemes of all config groups that have weights.

    Raises:
        ModelFormatError: a group is incomplete.
        UnsupportedModelError: the format is not supported, or the weights are also rotated or
            sparse.
    """
    fields = Fields(values, origin=origin)
    _check_format(fields.optional(str, "format"), origin)
    for key in ("transform_config", "sparsity_config"):
        if any((fields.optional(dict, key) or {}).values()):
            raise UnsupportedModelError(
                f"{origin}: {key} is set: rotations and sparse weights are not read; take a file "
                "of the model without them"
            )
    schemes = []
    for name, group in fields.read(dict, "config_groups").items():
        where = f"{origin}: config_groups.{name}"
        if not isinstance(group, dict):
            raise UnsupportedModelError(f"{where} is {group!r}; supported are objects")
        group_fields = Fields(group, origin=where)
        _check_format(group_fields.optional(str, "format"), where)
        weights = group_fields.optional(dict, "weights")
        if weights is not None:
            schemes.append(_scheme(weights, f"{where}.weights"))
    return schemes


def _check_format(name: str | None, origin: str) -> None:
    if name is not None and name not in _FORMATS:
        raise UnsupportedModelError(
            f"{origin}: format {name!r} is not read; read are {', '.join(_FORMATS)}"
        )


def _scheme(weights: Mapping[str, Any], origin: str) -> Scheme:
    fields = Fields(weights, origin=origin)
    fields.require("type", "int", "float")
    fields.require("actorder", False, "group", "weight", "static", "dynamic")
    symmetric = fields.optional(bool, "symmetric")
    return Scheme(
        bits=fields.read(int, "num_bits"),
        floats=fields.optional(str, "type") == "float",
        group_size=fields.optional(int, "group_size"),
        symmetric=True if symmetric is None else symmetric,
        block=read_block(weights, "block_structure", origin=origin),
    )
