"""Shapes of models whose Triton kernels are compiled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from edgellm.kernels.experts import Routing
from edgellm.kernels.gpu.elementwise import Activation
from edgellm.kernels.quantized import Kind


@dataclass(frozen=True)
class Shape:
    """Sizes of a layer, and its parts beyond those of Llama; see `LayerWeights`.

    Attributes:
        post_norms: whether outputs of attention and MLP are normed before they are added.
        layer_norm: whether layer norms take the place of RMS norms.
        head_norms: order of the norms of Q and K, as in `DeviceNorms`; None: no such norms.
        gated: whether the MLP has a gate.
        biases: whether linear layers have biases.
        softcap: whether scores and logits are capped.
        sinks: whether heads have sinks.
        routing: choice of experts; None: a layer has one MLP.
        shared: outputs of the shared expert's up; 0: there is none.
        share: whether the shared expert has a share.
        mixer: mixer of every second layer, beside gated attention; None: all attend.
        beside: whether that mixer, a Mamba-2, is beside attention in its layers.
        latent: width of the latents that heads attend to, whose keys have 128 numbers beside what
            RoPE turns; 0: there are none.
        wide: KV heads and head_dim of every second layer, and whether its V is made of K; None:
            they are those of the others, without norms of V.
        layer_width: width of embeddings for each layer, of which the last ones read K and V of
            others then; 0: there are none.
        mlp_beside: whether the shared expert is an MLP beside the others.
        streams: number of residual streams, beside which layers have laurels, and every second one
            an MLP with a cutoff; 1: all that is absent.
        adapter: whether rows have an adapter, of attention and MLP.
    """

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    post_norms: bool = False
    layer_norm: bool = False
    head_norms: Literal["each", "whole", "after_rope"] | None = None
    activation: Activation = "silu"
    gated: bool = True
    biases: bool = False
    softcap: bool = False
    sinks: bool = False
    routing: Routing | None = None
    shared: int = 0
    share: bool = False
    mixer: Literal["short_conv", "delta_net", "mamba2"] | None = None
    beside: bool = False
    latent: int = 0
    wide: tuple[int, int, bool] | None = None
    layer_width: int = 0
    mlp_beside: bool = False
    streams: int = 1
    adapter: bool = False

    def fits(self, kind: Kind) -> bool:
        """Whether weights of these shapes can be quantized in the kind."""
        inputs = self.hidden, self.intermediate, self.heads * self.head_dim, self.shared
        return not any(size % kind.inputs_multiple for size in inputs)


SHAPES = {
    "SmolLM2-135M": Shape(576, 1536, 9, 3, 64),
    "SmolLM2-with-adapters": Shape(576, 1536, 9, 3, 64, biases=True, adapter=True),
    "Llama-3-8B": Shape(4096, 14336, 32, 8, 128),
    "Gemma-2-2B": Shape(
        2304, 9216, 8, 4, 256, post_norms=True, activation="gelu_tanh", softcap=True
    ),
    "Gemma-3-1B": Shape(
        1152, 6912, 4, 1, 256, post_norms=True, activation="gelu_tanh", head_norms="each"
    ),
    "OLMo-2-1B": Shape(2048, 8192, 16, 16, 128, post_norms=True, head_norms="whole"),
    "Hunyuan-1.8B": Shape(2048, 6144, 16, 4, 128, head_norms="after_rope"),
    "StarCoder2-3B": Shape(
        3072, 12288, 24, 2, 128, layer_norm=True, activation="gelu_tanh", gated=False, biases=True
    ),
    "Llama-with-biases": Shape(2048, 8192, 16, 4, 128, biases=True),
    "Qwen3-30B-A3B": Shape(
        2048, 768, 32, 4, 128, head_norms="each", routing=Routing(experts=128, used=8)
    ),
    "gpt-oss-20b": Shape(
        *(2880, 2880, 64, 8, 64),
        activation="clamped_swiglu",
        biases=True,
        sinks=True,
        routing=Routing(experts=32, used=4, bias=True),
    ),
    "Ling-mini-2.0": Shape(
        *(2048, 512, 16, 4, 128),
        head_norms="each",
        routing=Routing(
            experts=256,
            used=8,
            scores="sigmoid",
            selection_bias=True,
            groups=8,
            used_groups=4,
        ),
        shared=512,
    ),
    "Qwen1.5-MoE-A2.7B": Shape(
        *(2048, 1408, 16, 16, 128),
        routing=Routing(experts=60, used=4, normalized=False),
        shared=5632,
        share=True,
    ),
    "LFM2-1.2B": Shape(2048, 8192, 32, 8, 64, head_norms="each", mixer="short_conv"),
    "Qwen3.5-0.8B": Shape(1024, 3584, 8, 2, 256, head_norms="each", mixer="delta_net"),
    "Granite-4.0-H-1B": Shape(1536, 4096, 12, 4, 128, mixer="mamba2"),
    "Falcon-H1-1.5B": Shape(2048, 4096, 8, 2, 128, mixer="mamba2", beside=True),
    "DeepSeek-V2-Lite": Shape(
        *(2048, 1408, 16, 1, 64),
        routing=Routing(experts=64, used=6, normalized=False),
        shared=2816,
        latent=512,
    ),
    "Gemma-4-E2B": Shape(
        *(1536, 6144, 8, 1, 256),
        post_norms=True,
        activation="gelu_tanh",
        head_norms="each",
        wide=(1, 512, False),
        layer_width=256,
    ),
    "Gemma-3n-E2B": Shape(
        *(2048, 8192, 8, 2, 256),
        post_norms=True,
        activation="gelu_tanh",
        head_norms="each",
        wide=(2, 256, False),
        layer_width=256,
        streams=4,
    ),
    "Gemma-4-26B-A4B": Shape(
        *(2816, 704, 16, 8, 256),
        post_norms=True,
        activation="gelu_tanh",
        head_norms="each",
        wide=(2, 512, True),
        routing=Routing(experts=128, used=8, scaled=True),
        shared=2112,
        mlp_beside=True,
    ),
    "Mixtral-8x7B": Shape(4096, 14336, 32, 8, 128, routing=Routing(experts=8, used=2)),
}
