"""Weights of the native and Triton kernels in a bundle: packed matrices, and vectors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgellm.backends.host_attention import head_norms
from edgellm.cache.groups import Group, cache_groups, places, state_groups
from edgellm.graphs.config import ModelConfig
from edgellm.graphs.layer_config import Attention, Mixer
from edgellm.graphs.mtp import mtp_config, mtp_tensors
from edgellm.graphs.state_mixers import DeltaNet, Mamba2, ShortConv
from edgellm.graphs.tensors import TensorSpec, layer_tensors, model_tensors
from edgellm.kernels.altup import AltUpWeights, Streams
from edgellm.kernels.delta_net import DeltaNetWeights
from edgellm.kernels.kv_append import HeadNorms
from edgellm.kernels.latent import LatentWeights
from edgellm.kernels.linear import PackedWeights, first_rows
from edgellm.kernels.mamba2 import Mamba2Vectors, Mamba2Weights
from edgellm.kernels.quantized import KINDS
from edgellm.kernels.short_conv import ShortConvWeights
from edgellm.kernels.step import Laurel, LayerInput, LayerTable, LayerWeights, Weights
from edgellm.store.bundle import Bundle
from edgellm.store.key_basis import is_head_norm, of_channels, open_head_norms, open_key_basis
from edgellm.store.manifest import PACKED, MtpEntry, PrecisionEntry, map_arrays


def open_packed_weights(bundle: Bundle, groups: SequenceOf[Group] | None = None) -> Weights:
    """Map the packed weights of a bundle; pages are read when they are used.

    Args:
        groups: groups of the cache that has K, V and states of the layers; None: the model's own.
    """
    config = bundle.config
    mapped = _model(bundle, groups)
    norms = head_norms(config, open_head_norms(bundle.path, bundle.manifest.keys).__getitem__)
    embedding = mapped.weights("embedding")
    return Weights(
        layers=[mapped.layer(i, norms[i]) for i in range(config.layer_count)],
        final_norm=mapped.arrays["final_norm"],
        final_norm_bias=mapped.arrays.get("final_norm_bias"),
        embedding=embedding,
        head=embedding if config.tied_embedding else mapped.weights("head"),
        epsilon=config.norm_eps,
        embedding_scale=config.embedding_scale,
        logit_softcap=config.logit_softcap,
        layer_table=mapped.layer_table(),
        streams=mapped.streams(),
    )


@dataclass(frozen=True)
class MtpWeights:
    """Weights of a head that predicts the token after the next, or of an assistant.

    Attributes:
        step: its layers, final norm, and LM head; its embedding is not that of tokens, but the
            head.
        embedding: embedding of tokens in the model, `[V, E]`.
        embedding_norm, hidden_norm: norms of a head's (see `graphs/mtp.py`); an assistant has none.
        project: projection of an assistant's hidden states to those of the model; a head has none,
            and a KV cache of its own.
    """

    step: Weights
    embedding: PackedWeights
    combine: PackedWeights
    embedding_scale: float = 1.0
    embedding_norm: NDArray[np.float32] | None = None
    hidden_norm: NDArray[np.float32] | None = None
    project: PackedWeights | None = None


def open_mtp_weights(bundle: Bundle, entry: MtpEntry, *, tokens: int) -> MtpWeights:
    """Map the weights of a bundle's head.

    Args:
        tokens: number of first tokens of the vocabulary that its LM head has, at least.
    """
    config, model = bundle.config, _model(bundle)
    here = mtp_config(config)
    mapped = _Mapped(bundle, here, entry, mtp_tensors(config))
    (norms,) = head_norms(here, mapped.arrays.__getitem__)
    embedding = model.weights("embedding")
    head = first_rows(embedding if config.tied_embedding else model.weights("head"), tokens)
    return MtpWeights(
        step=Weights(
            layers=[mapped.layer(0, norms)],
            final_norm=mapped.arrays["final_norm"],
            embedding=head,
            head=head,
            epsilon=config.norm_eps,
            logit_softcap=config.logit_softcap,
        ),
        embedding=embedding,
        combine=mapped.weights("combine"),
        embedding_norm=mapped.arrays["embedding_norm"],
        hidden_norm=mapped.arrays["hidden_norm"],
    )


def open_assistant_weights(
    bundle: Bundle,
    target: Bundle,
    sources: SequenceOf[int],
    *,
    at: SequenceOf[tuple[int, int]],
) -> MtpWeights:
    """Map the weights of an assistant beside those of the model that it drafts for.

    Args:
        sources: layer of the model whose K and V each layer reads.
        at: pool and place in it of each of the model's layers.
    """
    config, mapped = bundle.config, _model(bundle)
    norms = open_head_norms(bundle.path, bundle.manifest.keys)
    basis = open_key_basis(target.path, target.manifest.keys, target.config)

    def layer(index: int, source: int) -> LayerWeights:
        attention = config.layers[index].attention
        powers = of_channels(basis.exponents[source], attention)[0].astype(np.int32)
        q = np.ldexp(norms[f"layers.{index}.q_norm"], powers)
        pool, slot = at[source]
        return replace(
            mapped.layer(index, HeadNorms(q=q, k=q, epsilon=config.norm_eps)),  # k is not read
            kv_from=None,
            pool=pool,
            slot=slot,
            # of the row itself there are no K and V
            window=None if attention.window is None else attention.window - 1,
        )

    head = mapped.weights("embedding" if config.tied_embedding else "head")
    return MtpWeights(
        step=Weights(
            layers=[layer(index, source) for index, source in enumerate(sources)],
            final_norm=mapped.arrays["final_norm"],
            embedding=head,
            head=head,
            epsilon=config.norm_eps,
        ),
        embedding=_model(target).weights("embedding"),
        embedding_scale=target.config.embedding_scale,
        combine=mapped.weights("combine"),
        project=mapped.weights("project"),
    )


def _model(bundle: Bundle, groups: SequenceOf[Group] | None = None) -> _Mapped:
    config = bundle.config
    return _Mapped(bundle, config, bundle.precision(PACKED), model_tensors(config), groups)


def _attention(mixer: Attention, parts: dict[str, Any]) -> dict[str, Any]:
    names = ("heads", "rope", "window", "scale", "softcap", "kv_from")
    values = {name: getattr(mixer, name) for name in names}
    if mixer.latent is None:
        return values
    if "q_up" in parts:
        parts["q"] = parts.pop("q_up")
    latent = LatentWeights(
        **{name: parts.pop(name) for name in ("key_up", "value_up")},
        norm=parts.pop("latent_norm"),
        query_down=parts.pop("q_down", None),
        query_norm=parts.pop("q_down_norm", None),
        epsilon=mixer.latent.norm_eps,
    )
    return {**values, "latent": latent}


def _short_conv(_: ShortConv, parts: dict[str, Any]) -> dict[str, Any]:
    filters = np.ascontiguousarray(parts.pop("conv").T)
    return {"mixer": ShortConvWeights(conv_in=parts.pop("conv_in"), filters=filters)}


def mamba2_vectors(mixer: Mamba2, vector: Callable[[str], NDArray[np.float32]]) -> Mamba2Vectors:
    """Return the vectors of a Mamba-2.

    Args:
        vector: gives a vector by its name within the layer.
    """
    return Mamba2Vectors(
        conv=np.ascontiguousarray(vector("conv").T),
        conv_bias=vector("conv_bias") if mixer.conv_bias else None,
        **{name: vector(name) for name in ("dt_bias", "decay", "skip")},
        norm=vector("mamba_norm") if mixer.gate_norm else None,
        head_dim=mixer.head_dim,
        groups=mixer.groups,
        epsilon=mixer.norm_eps,
    )


def _mamba2(mixer: Mamba2, parts: dict[str, Any]) -> dict[str, Any]:
    vectors = mamba2_vectors(mixer, parts.pop)
    return {"mixer": Mamba2Weights(mamba_in=parts.pop("mamba_in"), vectors=vectors)}


def _delta_net(net: DeltaNet, parts: dict[str, Any]) -> dict[str, Any]:
    return {
        "mixer": DeltaNetWeights(
            **{name: parts.pop(f"delta_{name}") for name in ("qkv", "z", "a", "b", "norm")},
            **{name: parts.pop(name) for name in ("decay", "dt_bias")},
            conv=np.ascontiguousarray(parts.pop("conv").T),
            key_heads=net.key_heads,
            tiled=net.tiled,
        )
    }


# Kind of mixer -> what `LayerWeights` has of it; tensors of its own are taken out of the layer's.
_MIXERS: Mapping[type[Mixer], Callable[[Any, dict[str, Any]], dict[str, Any]]] = {
    Attention: _attention,
    ShortConv: _short_conv,
    Mamba2: _mamba2,
    DeltaNet: _delta_net,
}


def _input(parts: dict[str, Any]) -> LayerInput | None:
    """Take the tensors for embeddings of a layer's own out of the layer's."""
    if "layer_gate" not in parts:
        return None
    linears = {name: parts.pop(f"layer_{name}") for name in ("context", "gate", "output")}
    return LayerInput(**linears, post_norm=parts.pop("post_layer_norm"))


def _laurel(parts: dict[str, Any]) -> Laurel | None:
    """Take the tensors of a product beside attention out of the layer's."""
    if "laurel_left" not in parts:
        return None
    linears = {name: parts.pop(f"laurel_{name}") for name in ("left", "right")}
    return Laurel(**linears, post_norm=parts.pop("laurel_norm"))


def altup_weights(vector: Callable[[str], NDArray[np.float32]]) -> AltUpWeights:
    """Return the weights of a layer around several residual streams.

    Args:
        vector: gives a tensor by its name within the layer.
    """
    names = ("router_norm", "router", "predict", "correct", "scale")
    return AltUpWeights(**{name: vector(f"altup_{name}") for name in names})


class _Mapped:
    """Packed weights of a bundle: those of `specs`, which belong to layers of `config`."""

    def __init__(
        self,
        bundle: Bundle,
        config: ModelConfig,
        entry: PrecisionEntry | MtpEntry,
        specs: Mapping[str, TensorSpec],
        groups: SequenceOf[Group] | None = None,
    ) -> None:
        self.arrays: Mapping[str, NDArray[Any]] = map_arrays(bundle.path, entry.arrays)
        self._config = config
        self._kinds = entry.kinds
        self._specs = specs
        groups = cache_groups(config) if groups is None else groups
        # layers that read K and V of another model have none of their own
        self._pools = [group for group, _ in places(groups)] or [0] * config.layer_count
        self._states = state_groups(groups)

    def weights(self, name: str) -> PackedWeights:
        outputs, inputs = self._specs[name].shape
        return PackedWeights(self.arrays[name], outputs, inputs, KINDS[self._kinds[name]])

    def layer(self, index: int, norms: HeadNorms | None) -> LayerWeights:
        layer = self._config.layers[index]
        parts: dict[str, Any] = {
            spec.name: self._part(f"layers.{index}.{spec.name}", spec)
            for spec in layer_tensors(self._config, index)
            if not is_head_norm(spec.name)
        }
        mixer = _MIXERS[type(layer.mixer)](layer.mixer, parts)
        if layer.beside is not None:
            mixer["beside"] = _mamba2(layer.beside, parts)["mixer"]
            mixer["beside_pool"] = self._states[index]
        scale = parts.pop("layer_scale", None)
        return LayerWeights(
            input=_input(parts),
            laurel=_laurel(parts),
            altup=None if self._config.streams is None else altup_weights(parts.pop),
            cutoff=layer.mlp.cutoff,
            output_scale=1.0 if scale is None else float(scale[0]),
            **parts,
            **mixer,
            routing=layer.experts,
            head_norms=norms,
            activation=layer.mlp.activation,
            pool=self._pools[index],
        )

    def layer_table(self) -> LayerTable | None:
        if self._config.layer_embedding is None:
            return None
        norm = self.arrays["layer_embedding_norm"]
        return LayerTable(table=self.weights("layer_embedding"), norm=norm)

    def streams(self) -> Streams | None:
        if self._config.streams is None:
            return None
        return Streams(enter=self.weights("streams_enter"), leave=self.weights("streams_leave"))

    def _part(self, name: str, spec: TensorSpec) -> PackedWeights | NDArray[Any]:
        return self.weights(name) if spec.quantized else self.arrays[name]
