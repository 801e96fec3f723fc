"""What the formats' descriptions in config.json have in common, and how it is checked."""

from __future__ import annotations

from collections.abc import Sequence

from edgellm.errors import ModelFormatError, UnsupportedModelError
from edgellm.graphs.fields import Fields


def read_choice(fields: Fields, key: str, allowed: Sequence[int], *, origin: str) -> int:
    """A number of a description that must be one of some.

    Raises:
        UnsupportedModelError: it is another one.
    """
    value = fields.read(int, key)
    if value not in allowed:
        raise UnsupportedModelError(
            f"{origin}: {key} is {value}; supported are {', '.join(map(str, allowed))}"
        )
    return value


def read_group_size(fields: Fields, *, origin: str) -> int:
    """Inputs that share a scale; -1 where all do.

    Raises:
        ModelFormatError: it is neither -1 nor positive.
    """
    size = fields.read(int, "group_size")
    if size != -1 and size < 1:
        raise ModelFormatError(
            f"{origin}: group_size is {size}; it must be -1 (all inputs) or above 0"
        )
    return size


def group_count(columns: int, group_size: int, *, module: str, origin: str) -> int:
    """Groups of a module's inputs.

    Raises:
        ModelFormatError: the groups do not divide the inputs.
    """
    size = columns if group_size == -1 else group_size
    if columns % size:
        raise ModelFormatError(
            f"{origin}: group_size {group_size} does not divide the {columns} inputs of {module}"
        )
    return columns // size
