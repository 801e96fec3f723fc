"""Configuration of one layer: its parts and their sizes.

Defaults are Llama's. Some features fold exactly into weights or numbers when a model is read (norm
weights around one, scaled residuals), and have no field here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from edgellm.errors import ModelFormatError, UnsupportedModelError
from edgellm.graphs.fields import LARGEST, check_groups, check_positive, check_sizes
from edgellm.graphs.state_mixers import Mamba2, StateMixer
from edgellm.kernels.experts import Routing

_MOST_EXPERTS = 1 << 12
_LARGEST_ANGLE = 2 * math.pi

QKNorm = Literal["none", "head", "head_after_rope", "width"]
Norms = Literal["pre", "post", "sandwich"]
# gpt-oss has a SwiGLU whose factors are clamped: gate to 7 at most, up to -7 to 7, which 1 is added
# to; the sigmoid takes 1.702 times the gate (arXiv:2508.10925).
Activation = Literal["silu", "gelu_tanh", "clamped_swiglu"]


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary position embedding (arXiv:2104.09864), scaling already applied.

    Attributes:
        inv_freq: angle per position of each rotated pair; 0 for a pair that does not turn.
        magnitude: factor of cosines and sines (YaRN, arXiv:2309.00071, section 3.4).
    """

    inv_freq: tuple[float, ...]
    magnitude: float = 1.0

    def __post_init__(self) -> None:
        if not all(0 <= angle <= _LARGEST_ANGLE for angle in self.inv_freq):
            raise ModelFormatError(
                f"model config: inv_freq must be numbers from 0 to {_LARGEST_ANGLE:.2f}, a whole "
                "turn for each position"
            )
        check_positive("the magnitude of RoPE", self.magnitude)


# `Attention.kv_from` of layers that read K and V of another model's last layer with their window.
OTHER_MODEL = -1


@dataclass(frozen=True, kw_only=True)
class Latent:
    """Latents in place of K and V: one vector of a token, of which those of all heads are made
    (multi-head latent attention, arXiv:2405.04434).

    Attributes:
        rank: width of the latent, which is normalized.
        key: numbers of a head's query and key that RoPE does not turn.
        value: numbers of a head's value.
        query_rank: width of the normalized vector that queries are made of; None: they are made of
            the row itself.
        norm_eps: number added to the mean squares of these norms.
    """

    rank: int
    key: int
    value: int
    query_rank: int | None = None
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        check_sizes(self, LARGEST)
        for name in ("rank", "key", "query_rank"):
            check_groups(f"{name} of latent attention", getattr(self, name))
        if self.value % 16:
            raise UnsupportedModelError(
                f"model config: heads have values of {self.value} numbers in latent attention; it "
                "must be a multiple of 16"
            )


@dataclass(frozen=True, kw_only=True)
class Attention:
    """Softmax attention over the KV cache, with `heads / kv_heads` queries for each key.

    Attributes:
        rope: index into `ModelConfig.ropes`.
        window: number of positions that a token attends to, itself included; None: all positions.
        scale: factor of the scores; None is `head_dim ** -0.5`.
        qk_norm: RMS norms of Q and K: of each head before RoPE or after it, with one weight
            `[head_dim]` for all heads, or of all heads together before RoPE.
        softcap: soft cap: scores `s` become `softcap * tanh(s / softcap)`.
        qkv_bias: whether Q, K and V have biases, added before norms and RoPE.
        output_bias: whether the output projection has a bias.
        v_norm: whether each head of V is normalized, without a weight.
        k_as_v: whether V is K before its norm and RoPE, and has no projection of its own.
        kv_from: index of the layer before whose K and V this one reads in place of its own; its
            norm, window and sizes of K and V are those of that layer. None: it has its own.
            `OTHER_MODEL`: it reads those of the model that its own one drafts for.
        output_gate: whether the attention output is multiplied by the sigmoid of a projection of
            its own before the output projection.
        sinks: whether each head has a score without key and value in its softmax
            (Xiao et al., arXiv:2309.17453).
        latent: latents in place of K and V; None: there are none. All heads share one key then, of
            which RoPE turns a part of the width `head_dim`, and the rest is the latent.
    """

    heads: int
    kv_heads: int
    head_dim: int
    rope: int = 0
    window: int | None = None
    scale: float | None = None
    qk_norm: QKNorm = "none"
    softcap: float | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    v_norm: bool = False
    k_as_v: bool = False
    kv_from: int | None = None
    output_gate: bool = False
    sinks: bool = False
    latent: Latent | None = None

    def __post_init__(self) -> None:
        check_sizes(self, LARGEST)
        if (self.v_norm or self.k_as_v) and self.qk_norm == "none":
            raise UnsupportedModelError(
                "model config: V is normalized or made of K, and K has no norm; supported are both "
                "with norms of Q and K"
            )
        if self.heads % self.kv_heads:
            raise ModelFormatError(
                f"model config: heads ({self.heads}) must be a multiple of "
                f"kv_heads ({self.kv_heads})"
            )
        if self.head_dim % 4:
            raise UnsupportedModelError(
                f"model config: head_dim is {self.head_dim}; it must be a multiple of 4"
            )
        # cache blocks and projections of all back ends need this
        if self.kv_size % 8:
            raise UnsupportedModelError(
                f"model config: kv_heads * head_dim is {self.kv_size}; it must be a multiple of 8"
            )
        if self.latent is not None:
            self._check_latent()
        check_positive("scale", self.scale)
        check_positive("softcap", self.softcap)

    def _check_latent(self) -> None:
        plain = Attention(
            heads=self.heads,
            kv_heads=1,
            head_dim=self.head_dim,
            rope=self.rope,
            scale=self.scale,
            output_bias=self.output_bias,
        )
        if self.scale is None or self.head_dim % 16 or replace(self, latent=None) != plain:
            raise UnsupportedModelError(
                "model config: latent attention with biases, norms, windows, caps, gates or sinks; "
                "supported is one key for all heads, 16, 32 ... wide, a scale and none of these"
            )

    @property
    def size(self) -> int:
        """Width of the attention output, `heads * head_dim` without latents."""
        return self.heads * (self.head_dim if self.latent is None else self.latent.value)

    @property
    def query_size(self) -> int:
        return self.heads * (self.head_dim + (0 if self.latent is None else self.latent.key))

    @property
    def value_size(self) -> int:
        """Width of a token's V in the cache, or of its latent."""
        return self.kv_size if self.latent is None else self.latent.rank

    @property
    def kv_size(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def qkv_size(self) -> int:
        """Width of all query heads, then K and V, as far as the layer has projections to them.

        Queries that score latents have gone through the matrix that makes keys of these.
        """
        if self.latent is not None:
            return (self.heads + 1) * (self.head_dim + self.latent.rank)
        own = 0 if self.kv_from is not None else 1 if self.k_as_v else 2
        return self.query_size + own * self.kv_size

    @property
    def inputs(self) -> int:
        """Width of what attention reads: Q, K and V, then the gate, if any."""
        return self.qkv_size + (self.size if self.output_gate else 0)

    @property
    def outputs(self) -> int:
        """Width of what attention gives: of each head a value, or a sum of latents."""
        return self.size if self.latent is None else self.heads * self.latent.rank


# What mixes the rows of a sequence in a layer.
Mixer = Attention | StateMixer


@dataclass(frozen=True, kw_only=True)
class Mlp:
    """MLP: `down(activation(gate(x)) * up(x))`, or `down(activation(up(x)))` without a gate.

    Attributes:
        intermediate: outputs of gate and up, inputs of down.
        bias: whether each of its linear layers has a bias.
        cutoff: number of standard deviations above the mean of a token's gates from which on a gate
            counts, by what it exceeds; None: all count as they are.
    """

    intermediate: int
    activation: Activation = "silu"
    gated: bool = True
    bias: bool = False
    cutoff: float | None = None

    def __post_init__(self) -> None:
        check_sizes(self, LARGEST)
        if self.activation == "clamped_swiglu" and not self.gated:
            raise UnsupportedModelError("model config: a clamped SwiGLU without a gate")
        if self.cutoff is None:
            return
        if not math.isfinite(self.cutoff):
            raise ModelFormatError(f"model config: cutoff is {self.cutoff}; it must be a number")
        if self.bias or not self.gated:
            raise UnsupportedModelError(
                "model config: gates above a cutoff in an MLP with biases or without a gate; "
                "supported is one with a gate and without biases"
            )


@dataclass(frozen=True, kw_only=True)
class SharedExpert:
    """MLP that all rows go through beside the experts that the router chooses, without biases.

    Attributes:
        routed: whether its output counts by the sigmoid of a product with the row; else it is
            added as it is.
        beside: whether it is an MLP beside the experts: it reads what the layer's norm gives, they
            and their router read what norms of their own give, and norms are behind both.
    """

    intermediate: int
    routed: bool = False
    beside: bool = False

    def __post_init__(self) -> None:
        check_sizes(self, LARGEST)


@dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """Configuration of one layer.

    Attributes:
        mixer: part that mixes the rows of a sequence; attention alone has K and V.
        norms: place of the norms: before mixer and MLP (pre), behind them, before their outputs
            are added to the residual (post), or both (sandwich).
        experts: choice among several MLPs of the size `mlp`; None: there is one, for all tokens.
        scaled: whether the residual is multiplied by a number of the layer's at its end.
        shared: expert beside the chosen ones, with their activation; None: there is none.
        beside: mixer that reads the same rows as attention, and whose output is added as well, so
            that the layer has K and V and a state; None: there is none.
        laurel: rank of a product that attention's normalized rows go through beside it: with these
            rows it is added to the residual, which is divided by the root of 2 then (LAuReL,
            arXiv:2411.07501). None: there is none.
    """

    mixer: Mixer
    mlp: Mlp
    norms: Norms = "pre"
    experts: Routing | None = None
    scaled: bool = False
    shared: SharedExpert | None = None
    beside: Mamba2 | None = None
    laurel: int | None = None

    def __post_init__(self) -> None:
        if self.experts is not None:
            _check_experts(self.experts, self.mlp)
        elif self.shared is not None:
            raise ModelFormatError("model config: a shared expert in a layer without experts")
        if self.shared is not None and self.shared.beside:
            _check_beside(self)
        if self.beside is not None and not (self.attends and self.norms == "pre"):
            raise UnsupportedModelError(
                "model config: a mixer beside another one; supported is one beside attention, in a "
                "layer without norms of outputs"
            )
        if self.mlp.cutoff is not None and self.experts is not None:
            raise UnsupportedModelError("model config: experts whose gates count above a cutoff")
        if self.laurel is not None:
            _check_laurel(self, self.laurel)

    @property
    def attention(self) -> Attention:
        """Attention of a layer that attends.

        Raises:
            TypeError: the layer has another mixer.
        """
        if not isinstance(self.mixer, Attention):
            raise TypeError(f"a layer with {type(self.mixer).__name__} does not attend")
        return self.mixer

    @property
    def attends(self) -> bool:
        """Whether the layer has K and V."""
        return isinstance(self.mixer, Attention)

    @property
    def state_mixer(self) -> StateMixer | None:
        """Mixer of the layer that keeps a state; None: there is none."""
        return self.beside if isinstance(self.mixer, Attention) else self.mixer

    @property
    def inputs(self) -> int:
        """Width of what the mixers read: that of one beside attention comes behind Q, K and V."""
        return self.mixer.inputs + (0 if self.beside is None else self.beside.inputs)

    @property
    def outputs(self) -> int:
        """Width of what the mixers give, in the same order."""
        own = self.mixer.outputs if isinstance(self.mixer, Attention) else self.mixer.size
        return own + (0 if self.beside is None else self.beside.size)

    @property
    def norms_inputs(self) -> bool:
        """Whether the inputs of mixer and MLP are normalized."""
        return self.norms != "post"

    @property
    def norms_outputs(self) -> bool:
        """Whether the outputs of mixer and MLP are normalized before they are added."""
        return self.norms != "pre"


def _check_experts(experts: Routing, mlp: Mlp) -> None:
    check_sizes(experts, {"experts": _MOST_EXPERTS, "used": _MOST_EXPERTS})
    if experts.used > experts.experts:
        raise ModelFormatError(
            f"model config: a token uses {experts.used} experts of {experts.experts}"
        )
    check_sizes(experts, {"groups": experts.experts, "used_groups": experts.groups})
    in_group, rest = divmod(experts.experts, experts.groups)
    if (
        rest
        or experts.used > in_group * experts.used_groups
        or (experts.groups > 1 and in_group < 2)
    ):
        raise ModelFormatError(
            f"model config: a token uses {experts.used} experts of {experts.used_groups} of "
            f"{experts.groups} groups of {experts.experts} experts"
        )
    check_positive("the scale of the experts", experts.scale)
    if not mlp.gated:
        raise UnsupportedModelError("model config: experts without a gate; supported is one")


def _check_laurel(layer: LayerConfig, rank: int) -> None:
    check_sizes(layer, {"laurel": LARGEST["rank"]})
    check_groups("the rank of laurel", rank)
    plain = layer.attends and layer.attention.latent is None and layer.experts is None
    if not plain or layer.norms != "sandwich":
        raise UnsupportedModelError(
            "model config: laurel beside experts, latents or another mixer than attention, or "
            "without norms on both sides; supported is a layer with attention, an MLP and these"
        )


def _check_beside(layer: LayerConfig) -> None:
    if layer.norms != "sandwich" or (layer.shared is not None and layer.shared.routed):
        raise UnsupportedModelError(
            "model config: an MLP beside experts; supported is one in a layer with norms on both "
            "sides, that counts whole"
        )
