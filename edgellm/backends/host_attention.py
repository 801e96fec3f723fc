"""Attention on the host between two segments, on KV blocks in host memory.

Segments know nothing of positions, so the work that depends on positions is here: norms of Q and K,
RoPE, the append to the cache, and attention.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from edgellm.errors import UnsupportedModelError
from edgellm.graphs.config import ModelConfig
from edgellm.graphs.layer_config import Attention
from edgellm.kernels import rope
from edgellm.kernels.attention import attend
from edgellm.kernels.kv_append import HeadNorms, append_rotated
from edgellm.kernels.kv_blocks import KVView
from edgellm.kernels.kv_seal import seal
from edgellm.kernels.latent.native import append_latents
from edgellm.kernels.native import library
from edgellm.kernels.rope import RopeTable
from edgellm.kernels.sealed_blocks import sealed_end

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class HostAttention:
    """The attention of every layer of a model.

    Attributes:
        ropes: one RoPE table for each of `config.ropes`.
        norms: norms of Q and K for each layer; None for a layer without them.
        sinks: attention sinks of each layer that has some.
        latent_norms: weight of the norm of latents of each layer that has some.
    """

    config: ModelConfig
    ropes: Sequence[RopeTable]
    norms: Sequence[HeadNorms | None]
    sinks: Mapping[int, Floats] = field(default_factory=dict)
    latent_norms: Mapping[int, Floats] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        config: ModelConfig,
        ropes: Sequence[RopeTable],
        norms: Sequence[HeadNorms | None],
        vector: Callable[[str], Floats],
    ) -> HostAttention:
        """Make the attention of a model.

        Args:
            vector: function that gives a vector by its canonical name, `layers.0.sinks`.
        """

        def of(name: str, there: Callable[[Attention], bool]) -> dict[int, Floats]:
            layers = [index for index, each in config.attentions.items() if there(each)]
            return {index: vector(f"layers.{index}.{name}") for index in layers}

        sinks = of("sinks", lambda each: each.sinks)
        return cls(config, ropes, norms, sinks, of("latent_norm", lambda x: x.latent is not None))

    def __call__(
        self,
        layer: int,
        view: KVView,
        slot: int,
        start: int,
        qkv: Floats,
        *,
        threads: int = 1,
    ) -> Floats:
        """Write K and V of new tokens at positions `start ..` and attend from there.

        Args:
            view, slot: blocks with the layer's K and V, and the layer's index in these blocks.
            qkv: Q, K and V `[C, (H + 2 Hkv) * D]`, and gates of the outputs behind them, if any,
                as a segment writes them.

        Returns:
            The attention `[C, H * D]`, as the next segment reads it.
        """
        attention = self.config.layers[layer].attention
        own = np.ascontiguousarray(qkv[:, : attention.qkv_size])
        q = self._append(layer, view, slot, start, own, threads=threads)
        if view.blocks.sealed is not None:  # all of a text at once; blocks stay as rows beside it
            numbers = range(1, sealed_end(start + len(qkv)))
            seal(view.blocks, view.table, view.sealed, slot, numbers, threads=threads)
        attended = attend(
            view.blocks,
            view.table,
            slot,
            q,
            start,
            sealed=view.sealed,
            window=attention.window,
            scale=attention.scale,
            softcap=attention.softcap,
            sinks=self.sinks.get(layer),
            threads=threads,
        )
        attended = attended.reshape(len(qkv), -1)
        if attention.output_gate:
            # the logistic function without an exponential that overflows
            attended = attended * (0.5 + 0.5 * np.tanh(0.5 * qkv[:, attention.qkv_size :]))
        return attended

    def _append(
        self, layer: int, view: KVView, slot: int, start: int, rows: Floats, *, threads: int
    ) -> Floats:
        """Write K and V of rows as far as they are the layer's own; returns its queries."""
        attention = self.config.layers[layer].attention
        rope_table, latent = self.ropes[attention.rope], attention.latent
        if latent is not None:
            compiled = library()
            if compiled is None:
                raise UnsupportedModelError(
                    "attention over latents without the C++ kernels, which were not built when "
                    "edgellm was installed; install a C++ compiler and reinstall"
                )
            return append_latents(
                compiled,
                view.blocks,
                view.table,
                slot,
                start,
                rows,
                rope_table,
                norm=self.latent_norms[layer],
                epsilon=latent.norm_eps,
                threads=threads,
            )
        if attention.k_as_v:
            rows = np.concatenate([rows, rows[:, -attention.kv_size :]], axis=1)
        return append_rotated(
            view.blocks,
            view.table,
            slot,
            start,
            rows.reshape(len(rows), -1, attention.head_dim),
            rope_table,
            norms=self.norms[layer],
            queries_alone=attention.kv_from is not None,
            threads=threads,
        )


def rope_tables(config: ModelConfig, positions: int) -> list[RopeTable]:
    """Return one RoPE table for each of `config.ropes`, for positions from 0 on."""
    return [rope.table(each.inv_freq, positions, magnitude=each.magnitude) for each in config.ropes]


def head_norms(config: ModelConfig, weight: Callable[[str], Floats]) -> list[HeadNorms | None]:
    """Return the norms of Q and K of each layer; None for a layer without them.

    Args:
        weight: function that gives a tensor by its canonical name, `layers.0.q_norm`.
    """

    def of(layer: int) -> HeadNorms | None:
        mixer = config.layers[layer].mixer
        if not isinstance(mixer, Attention) or mixer.qk_norm == "none":
            return None
        source = layer if mixer.kv_from is None else mixer.kv_from
        return HeadNorms(
            q=weight(f"layers.{layer}.q_norm"),
            k=weight(f"layers.{source}.k_norm"),
            epsilon=config.norm_eps,
            after_rope=mixer.qk_norm == "head_after_rope",
            values=mixer.v_norm,
        )

    return [of(layer) for layer in range(config.layer_count)]
