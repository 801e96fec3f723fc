"""Shapes of random models: what a layer may have beside, or in place of, Llama's parts."""

from __future__ import annotations

from dataclasses import dataclass, replace

from edgellm.kernels.experts import Routing


@dataclass(frozen=True)
class Latents:
    """Widths of attention over latents; see `LatentWeights`."""

    rank: int
    key: int
    value: int
    query_rank: int | None = None


@dataclass(frozen=True)
class Parts:
    """What a layer has beside, or in place of, Llama's parts; see `LayerWeights`."""

    norms: str = "pre"
    layer_norm: bool = False
    biases: bool = False
    qk_norm: str = "none"
    activation: str = "silu"
    gated: bool = True
    scale: float | None = None
    softcap: float | None = None
    embedding_scale: float = 1.0
    logit_softcap: float | None = None
    ropes: tuple[float, ...] = (1.0,)  # magnitudes; layers take turns
    routing: Routing | None = None
    v_norm: bool = False
    k_as_v: bool = False
    output_scale: float = 1.0
    mixer: str = "attention"
    mamba_beside: bool = False
    output_gate: bool = False
    shared: int = 0  # outputs of the shared expert
    shared_router: bool = False
    sinks: bool = False
    beside: bool = False  # the shared expert is an MLP with norms of its own beside the experts
    latent: Latents | None = None  # head_dim is the width of what RoPE turns
    laurel: int | None = None  # its rank
    cutoff: float | None = None


@dataclass(frozen=True)
class Shape:
    """Sizes of a model; those of every second layer may be others (`odd`)."""

    heads: int
    kv_heads: int
    head_dim: int
    hidden: int = 96
    intermediate: int = 160
    layers: int = 1
    window: int | None = None
    bias: bool = False
    parts: Parts = Parts()
    odd: Shape | None = None
    shared: int = 0  # last layers that read K and V of the last other one with the same window
    layer_width: int | None = None  # of embeddings for each layer
    layer_tokens: int | None = None  # that have some
    streams: int | None = None

    @property
    def mixed(self) -> bool:
        """Whether some layers have a window and others not."""
        return self.window is not None and self.layers > 1

    @property
    def hybrid(self) -> bool:
        """Whether some layers have states and others attend."""
        return self.odd is not None and self.odd.parts.mixer != self.parts.mixer

    def of(self, layer: int) -> Shape:
        """Sizes of a layer."""
        return self.odd if self.odd is not None and layer % 2 else self


SHAPES = [
    Shape(9, 3, 64, hidden=192),
    Shape(1, 1, 64, layers=3),
    Shape(8, 1, 96),
    Shape(4, 4, 80, window=40),
    Shape(10, 2, 32, intermediate=96),
    Shape(2, 1, 256),
    Shape(7, 1, 128, hidden=32, window=130),
    Shape(6, 2, 32, bias=True),
]
GEMMA2 = Parts(
    norms="sandwich",
    activation="gelu_tanh",
    scale=0.07,
    softcap=5.0,
    embedding_scale=3.5,
    logit_softcap=8.0,
)
PARTS = {
    "gemma2": Shape(4, 2, 64, layers=2, window=50, parts=GEMMA2),
    "gemma3": Shape(
        4,
        1,
        64,
        hidden=64,
        layers=2,
        window=60,
        parts=Parts(norms="sandwich", qk_norm="head", activation="gelu_tanh", ropes=(1.0, 0.0)),
    ),
    "olmo2": Shape(3, 3, 32, layers=2, parts=Parts(norms="post", qk_norm="width")),
    "hunyuan": Shape(4, 2, 48, parts=Parts(qk_norm="head_after_rope", ropes=(1.3,))),
    "starcoder2": Shape(
        6,
        2,
        32,
        bias=True,
        layers=2,
        parts=Parts(layer_norm=True, biases=True, gated=False, activation="gelu_tanh"),
    ),
    "everything": Shape(
        8,
        4,
        36,
        hidden=192,
        bias=True,
        layers=2,
        parts=replace(GEMMA2, layer_norm=True, biases=True, qk_norm="width", ropes=(0.7, 1.0)),
    ),
}
# Layers that have nothing in common but the residual.
UNEVEN = {
    "heads": Shape(
        *(6, 3, 32),
        layers=2,
        window=40,
        parts=Parts(ropes=(1.0, 1.0)),
        odd=Shape(2, 1, 96, intermediate=96),
    ),
    "parts": replace(
        PARTS["gemma3"],
        window=30,
        odd=Shape(
            *(2, 1, 96),
            intermediate=96,
            parts=Parts(layer_norm=True, biases=True, gated=False, softcap=5.0),
        ),
    ),
}
GEMMA4 = Parts(
    norms="sandwich",
    qk_norm="head",
    v_norm=True,
    activation="gelu_tanh",
    scale=1.0,
    embedding_scale=8.0,
    logit_softcap=30.0,
    ropes=(1.0, 1.0),
    output_scale=0.7,
)
# Layers that read K and V of others, and that have embeddings of their own.
SHARED = {
    "gemma4": Shape(
        *(4, 1, 32),
        layers=4,
        window=50,
        parts=GEMMA4,
        odd=Shape(
            *(2, 1, 512), intermediate=320, parts=replace(GEMMA4, k_as_v=True, output_scale=1.2)
        ),
        shared=2,
        layer_width=64,
    ),
    "gemma3n": Shape(
        *(4, 2, 32),
        layers=4,
        window=50,
        parts=replace(GEMMA4, output_scale=1.0, laurel=32, cutoff=0.6),
        odd=Shape(
            *(4, 2, 32), intermediate=320, parts=replace(GEMMA4, output_scale=1.0, laurel=64)
        ),
        shared=2,
        layer_width=64,
        layer_tokens=50,
        streams=4,
    ),
    "streams": Shape(2, 2, 64, layers=2, streams=2, parts=Parts(cutoff=-0.3)),
    "embeddings": Shape(2, 2, 64, layers=2, layer_width=32),
    "shared": Shape(4, 2, 32, bias=True, layers=3, shared=2),
    "k_as_v": Shape(
        *(4, 2, 32), layers=2, bias=True, parts=Parts(qk_norm="head", k_as_v=True, v_norm=True)
    ),
}
EXPERTS = {
    "one of three": Shape(4, 2, 32, parts=Parts(routing=Routing(experts=3, used=1))),
    "two of seven": Shape(
        *(3, 1, 64),
        hidden=64,
        intermediate=96,
        layers=2,
        parts=Parts(routing=Routing(experts=7, used=2, normalized=False), activation="gelu_tanh"),
    ),
    "all of five": Shape(
        *(2, 2, 32),
        intermediate=32,
        parts=Parts(
            norms="sandwich",
            layer_norm=True,
            routing=Routing(experts=5, used=5, scale=2.5),
        ),
    ),
    "every second layer": Shape(
        *(4, 1, 32),
        layers=3,
        parts=Parts(qk_norm="head", routing=Routing(experts=20, used=3)),
        odd=Shape(4, 1, 32, intermediate=96),
    ),
}
# Layers that attend over latents, one of them beside another kind of attention.
LATENTS = {
    "one latent": Shape(3, 1, 32, parts=Parts(scale=0.1, latent=Latents(64, 32, 32))),
    "latents": Shape(
        *(4, 1, 16),
        layers=2,
        parts=Parts(scale=0.1, ropes=(1.0, 1.0), latent=Latents(96, 64, 48, query_rank=64)),
        odd=Shape(4, 1, 16, parts=Parts(scale=0.1, latent=Latents(96, 32, 32))),
    ),
    "wide latents": Shape(
        *(20, 1, 64),
        hidden=64,
        parts=Parts(
            scale=0.05,
            latent=Latents(512, 192, 256, query_rank=96),
            routing=Routing(experts=6, used=2, groups=3, used_groups=2),
        ),
    ),
}
# Layers that keep a state in place of K and V, beside others that attend.
CONV, MAMBA = Parts(mixer="short_conv"), Parts(mixer="mamba2")
HYBRIDS = {
    "short_conv": Shape(4, 2, 32, layers=3, parts=CONV, odd=Shape(4, 2, 32)),
    "short_conv with experts": Shape(
        *(2, 1, 64),
        hidden=64,
        layers=3,
        parts=Parts(norms="sandwich", qk_norm="head", layer_norm=True),
        odd=Shape(
            *(2, 1, 64),
            hidden=64,
            intermediate=32,
            parts=replace(CONV, norms="post", routing=Routing(experts=4, used=2)),
        ),
    ),
    "mamba2": Shape(5, 1, 32, hidden=64, layers=3, parts=MAMBA, odd=Shape(2, 2, 32)),
    "mamba2 with groups": Shape(
        *(2, 1, 64),
        layers=3,
        parts=Parts(norms="sandwich", qk_norm="head"),
        odd=Shape(12, 3, 16, parts=replace(MAMBA, norms="post", biases=True)),
    ),
    "mamba2 beside attention": Shape(
        *(4, 2, 32),
        layers=3,
        bias=True,
        parts=Parts(mamba_beside=True),
        odd=Shape(4, 2, 32, bias=True, parts=Parts(biases=True, mamba_beside=True)),
    ),
    "delta_net": Shape(
        *(2, 1, 48),
        layers=3,
        parts=Parts(mixer="delta_net"),
        odd=Shape(2, 1, 48, parts=Parts(qk_norm="head", output_gate=True)),
    ),
}
# Shapes with routers and experts without biases, and no shared expert.
PLAIN_EXPERTS = tuple(EXPERTS)
# What gpt-oss has, and what DeepSeek-V3, GLM-4.5 and Qwen2-MoE have.
EXPERTS |= {
    "groups": Shape(
        *(2, 2, 32),
        intermediate=32,
        parts=Parts(
            routing=Routing(
                experts=12, used=3, scores="sigmoid", selection_bias=True, groups=4, used_groups=2
            ),
        ),
    ),
    "biases, sinks and a clamp": Shape(
        *(4, 2, 32),
        window=40,
        layers=2,
        bias=True,
        parts=Parts(
            biases=True,
            sinks=True,
            activation="clamped_swiglu",
            routing=Routing(experts=5, used=2, bias=True),
        ),
    ),
    "sigmoid and a shared expert": Shape(
        *(2, 1, 64),
        layers=2,
        intermediate=64,
        parts=Parts(
            routing=Routing(experts=11, used=3, scores="sigmoid", selection_bias=True, scale=1.8),
            shared=96,
        ),
        odd=Shape(2, 1, 64, intermediate=96),
    ),
    "a shared expert by its share": Shape(
        *(4, 4, 32),
        parts=Parts(
            routing=Routing(experts=6, used=4, normalized=False),
            shared=224,
            shared_router=True,
            activation="gelu_tanh",
        ),
    ),
    "groups of one": Shape(
        *(4, 2, 32),
        intermediate=32,
        parts=Parts(routing=Routing(experts=4, used=2, scores="sigmoid", groups=4, used_groups=2)),
    ),
    "a bias in the choice by softmax": Shape(
        *(4, 2, 32),
        intermediate=32,
        parts=Parts(
            routing=Routing(experts=6, used=2, selection_bias=True, groups=3, used_groups=2)
        ),
    ),
    "sigmoid as it is": Shape(
        *(4, 2, 32),
        intermediate=32,
        parts=Parts(routing=Routing(experts=4, used=2, normalized=False, scores="sigmoid")),
    ),
}
EXPERTS |= {
    "an MLP beside experts": Shape(
        *(2, 1, 64),
        layers=2,
        intermediate=64,
        parts=Parts(
            norms="sandwich",
            activation="gelu_tanh",
            routing=Routing(experts=7, used=3, scaled=True),
            shared=160,
            beside=True,
            output_scale=0.8,
        ),
        odd=Shape(
            *(2, 1, 64),
            intermediate=96,
            parts=Parts(routing=Routing(experts=4, used=2, scaled=True), shared=32),
        ),
    ),
}
# Wide enough for kinds with blocks of 256.
WIDE = Shape(8, 2, 32, hidden=256, intermediate=512, bias=True)
