"""Checked reads of fields that the descriptions of several quantization formats have."""

from __future__ import annotations

from collections.abc import Sequence

from edgellm.errors import ModelFormatError, UnsupportedModelError
from edgellm.graphs.fields import Fields


def read_choice(fields: Fields, key: str, allowed: Sequence[int], *, origin: str) -> int:
    """Read an integer that must be one of `allowed`.

    Raises:
        UnsupportedModelError: the number is another one.
    """
    value = fields.read(int, key)
    if value not in allowed:
        raise UnsupportedModelError(
            f"{origin}: {key} is {value}; supported are {', '.join(map(str, allowed))}"
        )
    return value


def read_group_size(fields: Fields, *, origin: str) -> int:
    """Read the number of inputs that share a scale; -1 stands for all inputs.

    Raises:
        ModelFormatError: the number is neither -1 nor positive.
    """
    size = fields.read(int, "group_size")
    if size != -1 and size < 1:
        raise ModelFormatError(
            f"{origin}: group_size is {size}; it must be -1 (all inputs) or above 0"
        )
    return size


def group_count(columns: int, group_size: int, *, module: str, origin: str) -> int:
    """Return the number of groups of a module's inputs.

    Raises:
        ModelFormatError: the group size does not divide the number of inputs.
    """
    size = columns if group_size == -1 else group_size
    if columns % size:
        raise ModelFormatError(
            f"{origin}: group_size {group_size} does not divide the {columns} inputs of {module}"
        )
    return columns // size
