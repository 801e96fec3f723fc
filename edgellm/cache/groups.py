"""Cache groups: layers that share blocks, and their need of blocks.

Layers that see the same positions form a group with a pool of its own, and a sequence has one block
table per group. Blocks before the window of a group are given back, as in vLLM's hybrid KV cache
manager. A block holds K and V of its group's layers alone. Formats that seal blocks make two groups
of one whose layers see all positions: of the rows that are written, with the first block and the
last ones, and of the sealed blocks between them; other groups have int8 beside them. Layers that
seal blocks in formats of their own form a group for each format. With a budget,
a group of layers that see all positions has an eviction policy (`eviction.py`). Layers that keep a
state of fixed size form a group as well, whose blocks are snapshots of the states at the ends of
some full blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from edgellm.cache.eviction import BUDGET_ROWS, EvictionPolicy
from edgellm.checks import check_choice
from edgellm.errors import OptionError
from edgellm.graphs.config import ModelConfig
from edgellm.graphs.layer_config import Attention
from edgellm.kernels.kv_blocks import (
    BLOCK,
    KV_FORMATS,
    KVBlocks,
    KVFormat,
    KVFormats,
    SealedBlocks,
    block_bytes,
    format_text,
    formats_of,
    seals,
)
from edgellm.kernels.sealed_blocks import (
    Shortlists,
    allocate_shortlists,
    sealed_bytes,
    sealed_end,
)
from edgellm.kernels.state_blocks import StateBlocks

# Maximum of tokens that one step adds to a sequence. A prompt of 512 at once was 9 % faster than
# 128 at a time (SmolLM2-135M, two cores, C++).
STEP_ROWS = 512
# The same for models with windows: the rows of a step add to the blocks that a window needs.
# Gemma-3-270m takes a quarter of the memory without windows at a context of 8,192, and did 1,544
# tokens/s of a prompt; with 512 rows it did 1,700 (two cores, C++).
WINDOWED_ROWS = 256
# States after rows of drafts that are kept in a step, of all its sequences together: each row's are
# as large as those of a sequence, 20 MB of Qwen3.5-0.8B.
DRAFT_STATES = 7
# What K and V take, over what snapshots of states may take beside those that sequences need.
_STATE_SHARE = 4
# Bytes of a model's states for which each full block's end has a snapshot. Larger ones are taken
# less often: 20 MB (Qwen3.5-0.8B) every 512 tokens, 57 MB (Granite-4.0-H-1B) every 1,024.
_BYTES_PER_BLOCK = 8 << 20
# Snapshots that the pool of one sequence has room for beside the blocks of its longest step.
_SNAPSHOTS = 3
# The memory, of host or device, that a block is written in.
Side = Literal["host", "device"]
# Part of a layer's blocks that a group has: all, those that are not sealed yet, or the sealed ones.
Part = Literal["all", "hot", "sealed"]


@dataclass(frozen=True)
class CacheGroup:
    """Layers that share KV blocks: they see the same positions, and have as many heads of a width.

    Attributes:
        layers: indices of the layers in the model; blocks hold them in this order.
        window: number of positions that a token sees, itself among them; None for all.
        latent: width of latents in place of V; 0: there are none.
        readers: pairs of a layer without K and V of its own and of the one whose K and V it reads.
        part: blocks that the group has, see `kernels/sealed_blocks.py`.
        format: storage format of K and V, in groups that are stored.
        policy: choice of the blocks that stay; None: those that the window says.
    """

    layers: tuple[int, ...]
    window: int | None
    kv_heads: int
    head_dim: int
    readers: tuple[tuple[int, int], ...] = ()
    latent: int = 0
    part: Part = "all"
    format: KVFormat = "int8"
    policy: EvictionPolicy | None = None

    @property
    def keeps_all(self) -> bool:
        """Whether a sequence keeps all its blocks, as its next token sees all positions."""
        return self.window is None and self.part == "all" and self.policy is None

    @property
    def sealable(self) -> bool:
        """Whether there are formats that seal its blocks, where heads are wide enough for them."""
        return self.window is None and not self.latent

    @property
    def condensable(self) -> bool:
        """Whether a context's rows can be dropped head by head."""
        return self.keeps_all and not self.latent

    @property
    def sinks(self) -> int:
        """Number of first blocks that a sequence keeps, whatever `first_block` is."""
        return int(self.part == "hot" or self.policy is not None)

    def first_block(self, length: int) -> int:
        """Return the number of the first block that tokens from position `length` on see or, of hot
        blocks, see or seal."""
        if self.part == "sealed":
            return 1
        if self.part == "hot":
            return sealed_end(length) if length > 2 * BLOCK else 0
        if self.policy is not None:
            return self.policy.first_block(length)
        return 0 if self.window is None else max(0, length + 1 - self.window) // BLOCK

    def seen(self, length: int) -> list[int]:
        """Return the numbers of the blocks of `length` tokens that later ones see."""
        first, end = self.first_block(length), -(-length // BLOCK)
        if self.part == "sealed":
            end = sealed_end(length)
        return [*range(min(self.sinks, first)), *range(first, end)]

    def blocks_for(self, ctx_size: int, *, rows: int) -> int:
        """Return the blocks that a sequence of up to `ctx_size` tokens needs in the group.

        Args:
            rows: maximum of tokens by which the sequence grows at a time.
        """
        whole = -(-ctx_size // BLOCK)
        if self.part == "sealed":
            return sealed_end(ctx_size) - 1
        if self.part == "hot":  # the first block, two before those of the new tokens, and these
            return min(whole, 4 + (rows - 1) // BLOCK)
        if self.policy is not None:
            return min(whole, self.policy.blocks_for(rows=rows))
        if self.window is None:
            return whole
        # positions may begin and end in the middle of a block
        return min(whole, -(-(self.window + rows - 2) // BLOCK) + 1)


@dataclass(frozen=True)
class StateGroup:
    """Layers that keep a state of fixed size in place of K and V.

    Attributes:
        layers: indices of the layers in the model; blocks hold their states in this order.
        elements: float32 numbers of one layer's state.
        interval: full blocks from one snapshot to the next.
    """

    layers: tuple[int, ...]
    elements: int
    interval: int = 1
    keeps_all = condensable = False
    sinks = 0

    def first_block(self, length: int) -> int:
        """Return the number of the block with the states after `length` tokens."""
        return max(0, length - 1) // BLOCK

    def seen(self, length: int) -> list[int]:
        """Return the number of the block with the states after `length` tokens, if any."""
        return [self.first_block(length)] if length else []

    def blocks_for(self, ctx_size: int, *, rows: int) -> int:
        """Return the blocks of a sequence: those that its last step reads and writes."""
        inside = min(rows, ctx_size) - 1
        regular = -(-inside // (self.interval * BLOCK))
        marked = self.interval > 1  # the end of a prompt's last full block
        return min(regular + marked, -(-inside // BLOCK)) + 2


Group = CacheGroup | StateGroup
Blocks = KVBlocks | SealedBlocks | StateBlocks


def cache_groups(config: ModelConfig) -> tuple[Group, ...]:
    """Return the cache groups of a model, in the order of their first layers."""
    layers: dict[Group, list[int]] = {}  # by the group without its layers
    readers: dict[Group, list[tuple[int, int]]] = {}
    for index, layer in enumerate(config.layers):
        mixer, states = layer.mixer, layer.state_mixer
        if isinstance(mixer, Attention):
            latent = 0 if mixer.latent is None else mixer.latent.rank
            kind = CacheGroup((), mixer.window, mixer.kv_heads, mixer.head_dim, latent=latent)
            if mixer.kv_from is None:
                layers.setdefault(kind, []).append(index)
            else:
                readers.setdefault(kind, []).append((index, mixer.kv_from))
        if states is not None:
            layers.setdefault(StateGroup((), states.state_size), []).append(index)
    sizes = ((g.elements, len(of)) for g, of in layers.items() if isinstance(g, StateGroup))
    interval = snapshot_interval(4 * sum(elements * count for elements, count in sizes))
    return tuple(
        replace(kind, layers=tuple(members), readers=tuple(readers.get(kind, ())))
        if isinstance(kind, CacheGroup)
        else replace(kind, layers=tuple(members), interval=interval)
        for kind, members in layers.items()
    )


def stored_groups(
    groups: Sequence[Group], format: KVFormats, policy: EvictionPolicy | None = None
) -> list[Group]:
    """Return the groups whose pools a cache of a format has: those of sealed blocks come last.

    Args:
        policy: eviction policy of layers that see all positions.

    Raises:
        OptionError: there is no such format, it cannot hold the rows of a group or seals the blocks
            of none, or there are not as many formats as layers that seal.
    """
    for name in formats_of(format):
        check_choice("kv_format", name, KV_FORMATS)
    attending = [group for group in groups if isinstance(group, CacheGroup)]
    sealing = [g for g in attending if seals(format) and g.sealable]
    text = format_text(format)
    if seals(format) and attending and not sealing:
        raise OptionError(
            f"`kv_format` is {text!r}: this model has sliding windows or latents in all layers "
            "that attend, and blocks are sealed of attention to all positions; take int8"
        )
    uneven = sorted({g.head_dim for g in sealing if g.head_dim % 8})
    if uneven:
        raise OptionError(
            f"`kv_format` is {text!r}: this model's head_dim is {uneven[0]}, and sealed blocks "
            "take multiples of 8; int8 takes any"
        )
    formats = _formats_of_layers(sealing, format)

    def stored(group: Group) -> list[Group]:
        if not isinstance(group, CacheGroup):
            return [group]
        if group in sealing:
            return [*_parts(group, formats)]
        kept = replace(group, format="int8" if sealing or isinstance(format, tuple) else format)
        return [replace(kept, policy=policy) if kept.keeps_all else kept]

    rows = [part for group in groups for part in stored(group)]
    hot = [each for each in rows if isinstance(each, CacheGroup) and each.part == "hot"]
    return [*rows, *(replace(group, part="sealed") for group in hot)]


def packable(config: ModelConfig) -> bool:
    """Whether there are layers whose blocks can be sealed."""
    layers = [config.layers[index].attention for index in sealing_layers(config)]
    return bool(layers) and all(attention.head_dim % 8 == 0 for attention in layers)


def of_other_layers(format: KVFormats, config: ModelConfig) -> KVFormat:
    """Return the format of K and V of a model that drafts, for whose layers none was chosen."""
    if not isinstance(format, tuple):
        return format
    return "k4v4" if packable(config) else "int8"


def sealing_layers(config: ModelConfig) -> list[int]:
    """Return the layers whose blocks are sealed in formats that do."""
    groups = (group for group in cache_groups(config) if isinstance(group, CacheGroup))
    return sorted(layer for group in groups if group.sealable for layer in group.layers)


def layer_bits(config: ModelConfig, format: KVFormat) -> list[float]:
    """Return the bits of a number of K or V in sealed blocks with their scales, of each layer that
    seals.

    Raises:
        OptionError: see `stored_groups`.
    """
    bits = dict[int, float]()
    for group in stored_groups(cache_groups(config), format):
        if isinstance(group, CacheGroup) and group.part == "sealed":
            numbers = 2 * BLOCK * group.kv_heads * group.head_dim * len(group.layers)
            bits |= dict.fromkeys(group.layers, 8 * _block_bytes(group) / numbers)
    return [bits[layer] for layer in sorted(bits)]


def _formats_of_layers(sealing: Sequence[CacheGroup], format: KVFormats) -> dict[int, KVFormat]:
    layers = sorted(layer for group in sealing for layer in group.layers)
    if not isinstance(format, tuple):
        return dict.fromkeys(layers, format)
    if sealing and len(format) != len(layers):
        raise OptionError(
            f"`kv_format` has {len(format)} formats; this model has {len(layers)} layers that "
            "attend to all positions"
        )
    return dict(zip(layers, format, strict=False))


def _parts(group: CacheGroup, formats: Mapping[int, KVFormat]) -> Iterator[CacheGroup]:
    """Iterate over the groups of rows that a group is stored in, one for each format."""
    for format in dict.fromkeys(formats[layer] for layer in group.layers):
        layers = tuple(layer for layer in group.layers if formats[layer] == format)
        readers = tuple(pair for pair in group.readers if pair[1] in layers)
        yield replace(group, layers=layers, readers=readers, part="hot", format=format)


def snapshot_interval(size: int) -> int:
    """Return the full blocks from one snapshot of states to the next, a power of two.

    Args:
        size: bytes of all states of a model.
    """
    interval = 1
    while interval * _BYTES_PER_BLOCK < size:
        interval *= 2
    return interval


def places(groups: Sequence[Group]) -> list[tuple[int, int]]:
    """Return the group number of each layer of a model, and its place among the group's layers.

    A layer that reads K and V of another one has that one's place. One that has K and V and a state
    has the place of K and V.
    """
    at = {layer: (number, 0) for layer, number in state_groups(groups).items()}
    for g, group in enumerate(groups):
        if isinstance(group, CacheGroup) and group.part == "sealed":
            continue
        for slot, layer in enumerate(group.layers):
            if isinstance(group, CacheGroup) or at[layer][0] == g:
                at[layer] = g, slot
    for group in groups:
        if isinstance(group, CacheGroup):
            at |= {layer: at[source] for layer, source in group.readers}
    return [at[layer] for layer in range(len(at))]


def state_groups(groups: Sequence[Group]) -> dict[int, int]:
    """Map each layer that keeps a state to the number of its group."""
    return {
        layer: number
        for number, group in enumerate(groups)
        if isinstance(group, StateGroup)
        for layer in group.layers
    }


def rows_at_once(groups: Sequence[Group], ctx_size: int) -> int:
    """Return the maximum of tokens that one step should add to a sequence."""
    if any(isinstance(group, CacheGroup) and group.policy is not None for group in groups):
        return BUDGET_ROWS
    windows = (group.window for group in groups if isinstance(group, CacheGroup))
    narrow = any(window is not None and window < ctx_size for window in windows)
    return WINDOWED_ROWS if narrow else STEP_ROWS


def resident_blocks(
    groups: Sequence[Group], *, ctx_size: int, blocks: int, drafts: int = 0
) -> list[int]:
    """Return, for each stored group, the blocks that full sequences of `ctx_size` tokens need.

    As many sequences are counted as a pool of `blocks` blocks holds without windows. One sequence
    at a time grows by many rows, and one copies its last block. States have a few blocks more for
    snapshots of the sequence, and as many for short sequences that are found again as take a small
    part of what K and V take.

    Args:
        drafts: further blocks of states, for rows of drafts.
    """
    needed = []
    for group in groups:
        each = group.blocks_for(ctx_size, rows=1)
        sequences = max(1, blocks * BLOCK // max(ctx_size, BLOCK))
        growing = group.blocks_for(ctx_size, rows=rows_at_once(groups, ctx_size)) - each
        most = sequences * each + growing + (_SNAPSHOTS if isinstance(group, StateGroup) else 1)
        held = isinstance(group, CacheGroup) and (
            group.part == "sealed" or group.policy is not None
        )
        whole = group.keeps_all or held
        needed.append(blocks if whole else min(blocks, most))
    sizes = [_block_bytes(group) for group in groups]
    states = [isinstance(group, StateGroup) for group in groups]
    kv = sum(n * s for n, s, state in zip(needed, sizes, states, strict=True) if not state)
    all_states = sum(size for size, state in zip(sizes, states, strict=True) if state)
    most = kv // _STATE_SHARE // max(all_states, 1)
    return [
        max(count, min(blocks, most)) + drafts if state else count
        for count, state in zip(needed, states, strict=True)
    ]


def context_blocks(
    config: ModelConfig, ctx_size: int, *, format: KVFormats, policy: EvictionPolicy | None
) -> int:
    """Return the blocks of each pool that sequences of `ctx_size` tokens need two at a time.

    Raises:
        OptionError: see `stored_groups`.
    """
    if policy is None:
        return 2 * pool_blocks(ctx_size)
    groups = stored_groups(cache_groups(config), format, policy)
    rows = rows_at_once(groups, ctx_size)
    return 2 * (1 + max(group.blocks_for(ctx_size, rows=rows) for group in groups))


def cache_bytes(
    config: ModelConfig,
    *,
    format: KVFormats,
    ctx_size: int,
    blocks: int,
    policy: EvictionPolicy | None = None,
) -> int:
    """Return the bytes of the pools when sequences of `ctx_size` tokens fill them, and draft.

    Raises:
        OptionError: see `stored_groups`.
    """
    groups = stored_groups(cache_groups(config), format, policy)
    resident = resident_blocks(groups, ctx_size=ctx_size, blocks=blocks, drafts=DRAFT_STATES)
    return sum(count * _block_bytes(group) for group, count in zip(groups, resident, strict=True))


def sealed_pool_bytes(config: ModelConfig, *, format: KVFormats, blocks: int) -> int:
    """Return the part of `cache_bytes` that pools of sealed blocks have."""
    groups = stored_groups(cache_groups(config), format)
    sealed = (each for each in groups if isinstance(each, CacheGroup) and each.part == "sealed")
    return sum(blocks * _block_bytes(group) for group in sealed)


def _block_bytes(group: Group) -> int:
    if isinstance(group, StateGroup):
        return 4 * len(group.layers) * group.elements
    sizes = {"kv_heads": group.kv_heads, "head_dim": group.head_dim, "layers": len(group.layers)}
    if group.part == "sealed":
        return sealed_bytes(format=group.format, **sizes)
    return block_bytes(format=group.format, latent=group.latent, **sizes)


def step_bytes(config: ModelConfig, tokens: int, *, format: KVFormats) -> int:
    """Return the bytes that a decode step behind `tokens` others reads, and writes of states."""
    read = 0
    for group in stored_groups(cache_groups(config), format):
        if isinstance(group, StateGroup):
            read += 2 * _block_bytes(group)
            continue
        rows = tokens if group.window is None else min(tokens, group.window)
        if group.part != "all":
            sealed = BLOCK * (sealed_end(tokens) - 1)
            rows = sealed if group.part == "sealed" else tokens - sealed
        layers = (*group.layers, *(reader for reader, _ in group.readers))
        read += _block_bytes(replace(group, layers=layers)) * rows // BLOCK
    return read


def shortlists(groups: Sequence[Group], kv_read: int) -> Shortlists:
    """Allocate the shortlists of an answer in each group, see `StepSpan`."""
    layers = len(places(groups))
    return [
        allocate_shortlists(layers, group.kv_heads, kv_read)
        if isinstance(group, CacheGroup) and group.part == "hot"
        else None
        for group in groups
    ]


def pool_blocks(ctx_size: int) -> int:
    """Return the blocks of a pool for one full sequence and the copy that a rewound tail needs."""
    return -(-ctx_size // BLOCK) + 1


def rope_frequencies(config: ModelConfig) -> list[tuple[float, ...]] | None:
    """Return the RoPE frequencies of each layer; None if keys are changed after RoPE, or layers
    have states, which cannot forget tokens."""
    if config.has_states:
        return None
    if any(layer.attention.qk_norm == "head_after_rope" for layer in config.layers):
        return None
    return [config.rope_of(layer).inv_freq for layer in range(config.layer_count)]
