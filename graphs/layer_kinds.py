"""Layers with a sliding window or another mixer than attention, as model files describe them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from edgellm.errors import ModelFormatError, UnsupportedModelError
from edgellm.graphs.architecture import with_attention, with_layers
from edgellm.graphs.config import ModelConfig
from edgellm.graphs.fields import Fields
from edgellm.graphs.layer_config import Mixer, Rope

FULL, SLIDING = "full_attention", "sliding_attention"


def sliding_of_hf(fields: Fields, count: int, *, period: int) -> list[bool]:
    """Return for each layer of a `config.json` whether it has a sliding window.

    Args:
        count: number of layers.
        period: default if the file has none: the last of every `period` layers has no window.

    Raises:
        ModelFormatError: `layer_types` has not one entry for each layer.
        UnsupportedModelError: a layer has another type.
    """
    period = _period(fields) or period
    # some versions of transformers write this key beside layer_types
    fields.ignore("_sliding_window_pattern")
    types = layer_types(fields, count)
    return by_period(count, period) if types is None else types


def layer_types(fields: Fields, count: int) -> list[bool] | None:
    """Return for each layer whether it has a window by `layer_types` of a `config.json`.

    None stands for a file without `layer_types`.

    Raises:
        ModelFormatError, UnsupportedModelError: see `sliding_of_hf`.
    """
    types = mixers_of_hf(fields, count, others=(SLIDING,))
    return None if types is None else [layer_type == SLIDING for layer_type in types]


def mixers_of_hf(fields: Fields, count: int, *, others: Sequence[str]) -> list[str] | None:
    """Return `layer_types` of a `config.json`: attention, or one of the `others`.

    None stands for a file without `layer_types`.

    Raises:
        ModelFormatError: `layer_types` has not one entry for each layer.
        UnsupportedModelError: a layer has another type.
    """
    allowed = (FULL, *others)
    types = fields.entries(str, "layer_types", count)
    for layer_type in types or ():
        if layer_type not in allowed:
            raise UnsupportedModelError(
                f"{fields.origin}: layer_types has {layer_type!r}; supported are "
                + " and ".join(allowed)
            )
    return types


def attending_of_gguf(fields: Fields, count: int) -> list[bool]:
    """Return for each layer of a GGUF file whether it attends: others have 0 KV heads."""
    key = "attention.head_count_kv"
    if not fields.holds(list, key):
        return [True] * count
    return [heads != 0 for heads in fields.entries(int, key, count) or []]


def with_mixers(config: ModelConfig, mixers: Sequence[Mixer | None]) -> ModelConfig:
    """Return the config with other mixers; None stands for a layer that keeps its own."""
    return with_layers(config, lambda i, layer: replace(layer, mixer=mixers[i] or layer.mixer))


def sliding_of_gguf(fields: Fields, count: int, *, period: int) -> list[bool]:
    """Return for each layer of a GGUF file whether it has a window, by a period or a list."""
    key = "attention.sliding_window_pattern"
    if not fields.holds(list, key):
        return by_period(count, fields.optional(int, key) or period)
    return fields.entries(bool, key, count) or []


def by_period(count: int, period: int) -> list[bool]:
    """Return False for the last of every `period` layers, and True for the others."""
    if period < 1:
        raise ModelFormatError(f"model config: a period of {period} layers; 1 is the least")
    return [index % period != period - 1 for index in range(count)]


def with_windows(
    config: ModelConfig,
    sliding: Sequence[bool],
    window: int | None,
    *,
    local: Rope | None = None,
) -> ModelConfig:
    """Return the config with a sliding window in some of its layers.

    Args:
        sliding: for each layer, whether it has the window.
        window: length of the window; None: unknown.
        local: RoPE of the layers with the window; None: the same RoPE in all layers.

    Raises:
        ModelFormatError: layers have a window, and its length is unknown.
    """
    if any(sliding) and window is None:
        raise ModelFormatError(
            "model config: layers have sliding windows, and sliding_window is missing"
        )
    if local is not None:
        config = replace(config, ropes=(config.ropes[0], local))
    rope = len(config.ropes) - 1
    return with_attention(
        config,
        lambda i, a: replace(
            a, window=window if sliding[i] else None, rope=rope if sliding[i] else 0
        ),
    )


def _period(fields: Fields) -> int | None:
    """Read the period: a number, or a word such as LLLG for three local layers and a global one."""
    key = "sliding_window_pattern"
    if not fields.holds(str, key):
        return fields.optional(int, key)
    pattern = fields.read(str, key)
    if pattern != "L" * (len(pattern) - 1) + "G":
        raise UnsupportedModelError(
            f"{fields.origin}: {key} = {pattern!r} is not supported; supported are numbers, and "
            "one G behind some L"
        )
    return len(pattern)
