"""Formats of single layers for `kv_bits`: layers that lose most without bits of K and V get them.

Layers differ far more than formats do: of SmolLM2-135M's 30 layers, half have 3 % of what the model
loses from 4 to 2 bits of V, and four have two thirds of what it loses from 8 to 4 bits of K.
"""

from __future__ import annotations

import json
import math
import typing
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgellm.cache.groups import layer_bits, packable, sealing_layers
from edgellm.errors import ModelFormatError, OptionError
from edgellm.graphs import contract
from edgellm.graphs.checkpoint import Checkpoint
from edgellm.kernels.kv_blocks import BLOCK, LAYOUT_VERSION, SEALED, KVFormat
from edgellm.kernels.sealed_blocks import CHOSEN_FORMATS, HOT
from edgellm.options import EngineOptions
from edgellm.progress import Progress, ProgressCallback
from edgellm.store.bundle import KV_LOSSES, Bundle
from edgellm.store.home import replacing_file
from edgellm.text.tokenizer import Tokenizer

# Chapters of the manual that neither `edgellm quality` reads nor docs/precisions.md reports.
_TOPICS = ("string-methods", "class", "import", "compound", "numbers", "assignment", "strings")
_WINDOW = 1024
# Characters after which prose and code alternate.
_PIECE = 2048
# What bits are shown to, and compared.
_ROUNDING = 0.005


@dataclass(frozen=True)
class Upgrade:
    """A step of one layer to a format with more bits.

    Attributes:
        gain: loss that is saved.
        bits: bits of a number, over those of the format before.
    """

    layer: int
    format: KVFormat
    gain: float
    bits: float


def with_layer_formats(
    bundle: Bundle,
    options: EngineOptions,
    *,
    measures: bool = True,
    progress: ProgressCallback | None = None,
) -> EngineOptions:
    """Return options with a format for each layer in place of `kv_bits`, if they have that.

    Args:
        measures: whether layers are measured that were not before; else formats of the same size.

    Raises:
        OptionError: more or fewer bits than the formats have, or a model whose layers seal none.
        SourceError: the checkpoint to measure is missing, or changed.
        ModelFormatError: it gives values that are infinite or not a number.
    """
    if options.kv_bits is None:
        return options
    if not packable(bundle.config):
        raise OptionError(
            f"`kv_bits` is {options.kv_bits}: blocks are packed of attention to all positions with "
            "a head_dim in eights, and this model has none; leave it out"
        )
    allowed = SEALED if options.kv_read is None else CHOSEN_FORMATS
    bits = {format: layer_bits(bundle.config, format) for format in allowed}
    least, most = (float(np.mean(bits[format])) for format in (allowed[-1], allowed[0]))
    if not least - _ROUNDING <= options.kv_bits <= most + _ROUNDING:
        beside = "" if options.kv_read is None else " and `kv_read`"
        raise OptionError(
            f"`kv_bits` is {options.kv_bits}; allowed with this model{beside} are {least:.2f} to "
            f"{most:.2f}, and int8 has 8 and its scales"
        )
    losses = _kept(bundle)
    if losses is None and measures:
        losses = _measured(bundle, options, progress)
    alike = {name: float(rank) for rank, name in enumerate(SEALED)}
    formats = choose(losses or [alike for _ in bits[SEALED[-1]]], bits, options.kv_bits)
    one = len(set(formats)) == 1
    return replace(options, kv_bits=None, kv_format=formats[0] if one else formats)


def choose(
    losses: Sequence[Mapping[KVFormat, float]],
    bits: Mapping[KVFormat, Sequence[float]],
    mean: float,
) -> tuple[KVFormat, ...]:
    """Choose the format of each layer: the upgrade that saves most for its bits is next, while one
    fits that loses no more.

    Args:
        losses: of each layer, what the model loses by each format.
        bits: of each format, bits of a number with the scales, in each layer; the last format has
            the fewest.
        mean: bits on average at most.
    """
    order = [*bits][::-1]
    formats = [order[0]] * len(losses)
    left = (mean + _ROUNDING) * len(losses) - sum(bits[order[0]])
    while True:
        upgrades = [
            each
            for layer, format in enumerate(formats)
            for each in _upgrades(layer, order[order.index(format) :], losses[layer], bits)
            if each.bits <= left and each.gain >= 0
        ]
        if not upgrades:
            return tuple(formats)
        best = max(upgrades, key=lambda each: each.gain / each.bits)
        formats[best.layer] = best.format
        left -= best.bits


def _upgrades(
    layer: int,
    order: Sequence[KVFormat],
    losses: Mapping[KVFormat, float],
    bits: Mapping[KVFormat, Sequence[float]],
) -> list[Upgrade]:
    """Return the upgrades of a layer from the first of some formats."""
    return [
        Upgrade(
            layer,
            format,
            losses[order[0]] - losses[format],
            bits[format][layer] - bits[order[0]][layer],
        )
        for format in order[1:]
    ]


Losses = list[dict[KVFormat, float]]


def _measured(bundle: Bundle, options: EngineOptions, progress: ProgressCallback | None) -> Losses:
    """Measure what layers lose, in float32 on the weights of the bundle's own file, and keep it."""
    from edgellm.export.source_checkpoint import open_source  # 0.4 s, and rarely needed
    from edgellm.measure.quality import manual_text

    checkpoint = open_source(bundle, progress=progress)
    tokenizer = Tokenizer(bundle.path, bundle.manifest.tokenizer, rows=bundle.config.vocab_size)
    text = manual_text(_TOPICS, (typing,), piece=_PIECE)
    tokens = tokenizer.encode(text)[: min(_WINDOW, checkpoint.config.context_length)]
    losses: Losses = [{} for _ in sealing_layers(bundle.config)]
    for layer, format, loss in layer_losses(checkpoint, tokens, threads=options.threads):
        losses[layer][format] = loss
        if progress is not None:
            label = "measuring what layers lose with fewer bits"
            progress(Progress(label, layer + 1, len(losses)))
    if not all(math.isfinite(loss) for layer in losses for loss in layer.values()):
        raise ModelFormatError(
            f"{checkpoint.path}: in float32 it gives values that are infinite or not a number; the "
            "file is damaged, download it again"
        )
    _keep(bundle, losses)
    return losses


def layer_losses(
    checkpoint: Checkpoint, tokens: Sequence[int], *, threads: int | None = None
) -> Iterator[tuple[int, KVFormat, float]]:
    """Compute what packing K and V of one layer changes behind that layer.

    Yields:
        Number of the layer among those that seal, format, and the squared change of the residual
        over its square, on average over the rows that read packed blocks.
    """
    from edgellm.export import float_segments as segments
    from edgellm.export.window_attention import WindowAttention

    window, layers = len(tokens), sealing_layers(checkpoint.config)
    exact = WindowAttention.of(checkpoint, window)
    packed = {name: WindowAttention.of(checkpoint, window, format=name) for name in SEALED}
    (values,) = segments.first_inputs(checkpoint, [tokens])
    changed: dict[KVFormat, NDArray[np.float32]] = {}
    with closing(segments.float_segments(checkpoint, threads=threads)) as every:
        for index, run in enumerate(every):
            outputs = run(values)
            for name, attended in changed.items():
                ours = run({**values, contract.ATTENTION: attended})
                yield layers.index(index - 1), name, _change(ours, outputs)
            values = segments.next_inputs(index, outputs, exact)
            changed = {}
            if index in layers:
                qkv = outputs[contract.QKV]
                changed = {name: each(index, qkv, outputs) for name, each in packed.items()}


def _change(ours: Mapping[str, NDArray[np.float32]], exact: Mapping[str, Any]) -> float:
    name = contract.HIDDEN if contract.HIDDEN in exact else contract.RESIDUAL_OUT
    rows = exact[name][HOT * BLOCK :].astype(np.float64)
    if not len(rows):
        return 0.0
    changes = np.square(ours[name][HOT * BLOCK :] - rows).sum(1) / np.square(rows).sum(1)
    return float(changes.mean())


def _kept(bundle: Bundle) -> Losses | None:
    """Return the losses of an earlier start; None if there are none for this model."""
    count = len(sealing_layers(bundle.config))
    try:
        values: Any = json.loads((bundle.path / KV_LOSSES).read_text(encoding="utf-8"))
        losses: Losses = [
            {name: float(each[name]) for name in SEALED} for each in values[str(LAYOUT_VERSION)]
        ]
    except (OSError, OverflowError, ValueError, RecursionError, KeyError, TypeError):
        return None
    right = len(losses) == count and all(math.isfinite(y) for x in losses for y in x.values())
    return losses if right else None


def _keep(bundle: Bundle, losses: Losses) -> None:
    try:
        with replacing_file(bundle.path / KV_LOSSES, lasting=False) as temporary:
            temporary.write_text(json.dumps({LAYOUT_VERSION: losses}, indent=1), encoding="utf-8")
    except OSError:
        pass  # a read-only bundle is measured at each start
