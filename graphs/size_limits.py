"""Limits of the sizes in a model's config."""

from __future__ import annotations

from edgellm.errors import ModelFormatError

# Limits far above every model. A larger number means a damaged file, and would take hours and all
# memory before anything else refuses it.
LARGEST = {
    "intermediate": 1 << 20,
    "heads": 1 << 12,
    "kv_heads": 1 << 12,
    "head_dim": 1 << 12,
    "window": (1 << 31) - 1,
    "channels": 1 << 18,
    "taps": 16,
    "state_dim": 1 << 12,
    "groups": 1 << 12,
    "key_heads": 1 << 12,
    "value_heads": 1 << 12,
    "key_dim": 1 << 12,
    "value_dim": 1 << 12,
    "rank": 1 << 12,
    "query_rank": 1 << 14,
    "key": 1 << 12,
    "value": 1 << 12,
}


def check_sizes(config: object, largest: dict[str, int]) -> None:
    """Refuse fields of a config that are below 1 or above their limit.

    Args:
        largest: limit of each field.

    Raises:
        ModelFormatError: a field is out of range; the message names it.
    """
    for name, limit in largest.items():
        value = getattr(config, name, None)
        if value is not None and not 1 <= value <= limit:
            raise ModelFormatError(
                f"model config: {name} is {shown(value)}; 1 to {limit} is allowed"
            )


def shown(value: int) -> str:
    """Return the digits of a number, or only its size in bits if it is 2^128 or more."""
    return str(value) if abs(value) < 1 << 128 else f"a number of {value.bit_length()} bits"
