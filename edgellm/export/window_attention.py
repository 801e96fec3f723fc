"""Mixers between the float32 segments of a text: attention, and mixers with states, in numpy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from edgellm.backends.host_attention import HostAttention, head_norms, rope_tables
from edgellm.backends.packed_weights import mamba2_vectors
from edgellm.graphs import contract
from edgellm.graphs.architecture import with_attention
from edgellm.graphs.checkpoint import Checkpoint
from edgellm.graphs.layer_config import Attention, Mixer
from edgellm.graphs.state_mixers import DeltaNet, Mamba2, ShortConv
from edgellm.kernels.delta_net import DeltaRule
from edgellm.kernels.delta_net import reference as delta_net
from edgellm.kernels.kv_blocks import BLOCK, SEALED, KVFormat, KVView, allocate
from edgellm.kernels.mamba2 import reference as mamba2
from edgellm.kernels.sealed_blocks import allocate_sealed
from edgellm.kernels.short_conv import reference as short_conv

Floats = NDArray[np.float32]
# A mixer with a state, of all rows of a text: from what its input projections give.
Mix = Callable[[Floats], Floats]


class WindowAttention:
    """Attention within one text of up to `window` tokens; K and V are not rounded, but for formats
    that seal blocks.

    Every text goes through a segment before the next one is opened, so that K and V are those of
    one layer and text alone.

    Args:
        attention: attention of a model whose layers all have K and V of their own.
        mixers: mixers of layers that keep a state.
        sources: layer whose K and V another one reads, by that one's index.
        format: storage format of K and V.
    """

    def __init__(
        self,
        attention: HostAttention,
        window: int,
        mixers: Mapping[int, Mix] | None = None,
        sources: Mapping[int, int] | None = None,
        format: KVFormat = "f32",
    ) -> None:
        self._attention, self._mixers, self._sources = attention, mixers or {}, sources or {}
        count = -(-window // BLOCK)
        self._views = {
            sizes: _view(*sizes, blocks=count, format=format)
            for sizes in set(map(_sizes, attention.config.attentions.values()))
        }

    @classmethod
    def of(
        cls, checkpoint: Checkpoint, window: int, *, format: KVFormat = "f32"
    ) -> WindowAttention:
        """Make the attention of a checkpoint's layers, for texts of up to `window` tokens."""
        config = checkpoint.config
        norms = head_norms(config, lambda name: checkpoint.tensor(name).float32())
        mixers = {
            index: _MIXERS[type(layer.state_mixer)](checkpoint, f"layers.{index}")
            for index, layer in enumerate(config.layers)
            if layer.state_mixer is not None
        }
        readers = {i: x.kv_from for i, x in config.attentions.items() if x.kv_from is not None}

        def own(index: int, attention: Attention) -> Attention:
            source = config.attentions[readers.get(index, index)]
            return replace(attention, kv_from=None, k_as_v=source.k_as_v)

        attention = HostAttention.of(
            with_attention(config, own),
            rope_tables(config, window),
            norms,
            lambda name: checkpoint.tensor(name).float32(),
        )
        return cls(attention, window, mixers, readers, format)

    def __call__(
        self, layer: int, qkv: Floats, others: Mapping[str, Floats] | None = None
    ) -> Floats:
        """Compute a layer's attention `[n, H * D]` for the first n tokens of a text.

        Args:
            qkv: Q, K and V of those tokens, `[n, (H + 2 Hkv) * D]`, with their gates behind them
                where there are some, and what the input projections of another mixer give, which
                may stand alone.
            others: the same of each layer whose K and V another one reads, by `shared_name`.

        Returns:
            Rows for the output projections, of a mixer beside attention behind those of attention.
        """
        here = self._attention.config.layers[layer]
        if not here.attends:
            return self._mixers[layer](qkv)
        attention, beside = here.attention, here.beside
        if layer in self._sources:
            assert others is not None
            width = attention.query_size
            shared = others[shared_name(self._sources[layer])][:, width : attention.qkv_size]
            qkv = np.concatenate([qkv[:, :width], shared, qkv[:, width:]], axis=1)
        view = self._views[_sizes(attention)]
        if beside is None:
            return self._attention(layer, view, 0, 0, qkv)
        qkv, rows = np.split(qkv, [attention.inputs], axis=1)
        return np.concatenate(
            [self._attention(layer, view, 0, 0, qkv), self._mixers[layer](rows)], axis=1
        )


def _view(kv_heads: int, head_dim: int, latent: int, *, blocks: int, format: KVFormat) -> KVView:
    """Allocate blocks of one layer and text; latents are not rounded."""
    seals, sealed = format in SEALED and not latent, None
    if seals:
        sealed = allocate_sealed(
            format=format, blocks=blocks, layers=1, kv_heads=kv_heads, head_dim=head_dim
        )
    rows = allocate(
        format=format if seals else "f32",
        blocks=blocks,
        layers=1,
        kv_heads=kv_heads,
        head_dim=head_dim,
        latent=latent,
        sealed=sealed,
    )
    return KVView(rows, range(blocks), range(blocks))


def _sizes(attention: Attention) -> tuple[int, int, int]:
    """Return the number of KV heads, their width, and that of latents."""
    latent = 0 if attention.latent is None else attention.latent.rank
    return attention.kv_heads, attention.head_dim, latent


def shared_name(layer: int) -> str:
    """Return the name of what a layer reads whose K and V others read as well."""
    return f"{contract.QKV} {layer}"


def _short_conv(checkpoint: Checkpoint, name: str) -> Mix:
    filters = checkpoint.tensor(f"{name}.conv").float32().T
    return lambda rows: short_conv.mix(rows.astype(np.float64), filters).astype(np.float32)


def _mamba2(checkpoint: Checkpoint, name: str) -> Mix:
    mixer = checkpoint.config.layers[int(name.rpartition(".")[2])].state_mixer
    assert isinstance(mixer, Mamba2)
    vectors = mamba2_vectors(mixer, lambda part: checkpoint.tensor(f"{name}.{part}").float32())

    def mix(rows: Floats) -> Floats:
        start = mamba2.State.zero(vectors)
        return mamba2.mix(rows.astype(np.float64), vectors, start)[0].astype(np.float32)

    return mix


def _delta_net(checkpoint: Checkpoint, name: str) -> Mix:
    net = checkpoint.config.layers[int(name.split(".")[1])].mixer
    assert isinstance(net, DeltaNet)
    conv, decay, dt_bias, norm = (
        checkpoint.tensor(f"{name}.{part}").float32()
        for part in ("conv", "decay", "dt_bias", "delta_norm")
    )
    rule = DeltaRule(
        conv=conv.T,
        decay=decay,
        dt_bias=dt_bias,
        norm=norm,
        key_heads=net.key_heads,
        tiled=net.tiled,
    )
    parts = np.cumsum([net.channels, net.size, net.value_heads])
    epsilon = checkpoint.config.norm_eps

    def mix(rows: Floats) -> Floats:
        qkv, z, a, b = np.split(rows.astype(np.float64), parts, axis=1)
        return delta_net.delta_net(rule, (qkv, z, a, b), epsilon)[0].astype(np.float32)

    return mix


_MIXERS: Mapping[type[Mixer], Callable[[Checkpoint, str], Mix]] = {
    ShortConv: _short_conv,
    Mamba2: _mamba2,
    DeltaNet: _delta_net,
}
