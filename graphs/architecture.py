"""Model architectures, one per file of `graphs/models/`: reading of configs, names of tensors.

Tensors have the usual names of their format where an architecture does not name its own.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from edgellm.errors import UnsupportedModelError
from edgellm.graphs.config import ModelConfig
from edgellm.graphs.fields import Fields
from edgellm.graphs.layer_config import Attention, LayerConfig, Norms, QKNorm
from edgellm.graphs.tensor import Tensor


@dataclass(frozen=True)
class Fused:
    """Tensor of a file that holds the rows of several tensors of a layer.

    Attributes:
        name: name of the file's tensor.
        parts: names of the layer's tensors whose rows it holds, in the order of the rows.
        by_heads: whether it has this order within each head of attention, or key head of a delta
            net.
        interleaved: whether the parts take turns row by row, and not one whole part after another.
        transposed: whether a stack of floats has its columns first, `[X, K, N]`. (Codes never do.)
    """

    name: str
    parts: tuple[str, ...]
    by_heads: bool = False
    interleaved: bool = False
    transposed: bool = False


@dataclass(frozen=True)
class PerExpert:
    """Tensors of a file, one for each expert of a layer, that are stacked in one tensor.

    Attributes:
        name: name of the file's tensors; the second `{}` stands for the expert.
    """

    name: str


# Matrices of experts have names of their own, as a model's other layers may have one MLP.
Names = Mapping[str, str | Fused | PerExpert]
_MLP = ("gate", "up", "down")

HF_NAMES: Names = {
    "embedding": "model.embed_tokens.weight",
    "final_norm": "model.norm.weight",
    "head": "lm_head.weight",
    "attention_norm": "model.layers.{}.input_layernorm.weight",
    **{x: f"model.layers.{{}}.self_attn.{x}_proj.weight" for x in "qkvo"},
    **{f"{x}_bias": f"model.layers.{{}}.self_attn.{x}_proj.bias" for x in "qkvo"},
    **{f"{x}_norm": f"model.layers.{{}}.self_attn.{x}_norm.weight" for x in "qk"},
    "mlp_norm": "model.layers.{}.post_attention_layernorm.weight",
    **{x: f"model.layers.{{}}.mlp.{x}_proj.weight" for x in _MLP},
    **{f"{x}_bias": f"model.layers.{{}}.mlp.{x}_proj.bias" for x in _MLP},
    "router": "model.layers.{}.mlp.gate.weight",
    **{
        f"expert_{x}": PerExpert(f"model.layers.{{}}.mlp.experts.{{}}.{x}_proj.weight")
        for x in _MLP
    },
    "selection_bias": "model.layers.{}.mlp.gate.e_score_correction_bias",
    **{f"shared_{x}": f"model.layers.{{}}.mlp.shared_experts.{x}_proj.weight" for x in _MLP},
}
# Names for norms on both sides, in files of Gemma 2 and later models: `post_attention_layernorm` is
# the norm after attention here. In Llama's files it is the norm before the MLP.
HF_SANDWICH_NAMES: Names = {
    **HF_NAMES,
    "post_attention_norm": "model.layers.{}.post_attention_layernorm.weight",
    "mlp_norm": "model.layers.{}.pre_feedforward_layernorm.weight",
    "post_mlp_norm": "model.layers.{}.post_feedforward_layernorm.weight",
}

GGUF_NAMES: Names = {
    "embedding": "token_embd.weight",
    "final_norm": "output_norm.weight",
    "final_norm_bias": "output_norm.bias",
    "head": "output.weight",
    "attention_norm": "blk.{}.attn_norm.weight",
    "attention_norm_bias": "blk.{}.attn_norm.bias",
    **{x: f"blk.{{}}.attn_{x}.weight" for x in "qkv"},
    **{f"{x}_bias": f"blk.{{}}.attn_{x}.bias" for x in "qkv"},
    **{f"{x}_norm": f"blk.{{}}.attn_{x}_norm.weight" for x in "qk"},
    "o": "blk.{}.attn_output.weight",
    "o_bias": "blk.{}.attn_output.bias",
    "post_attention_norm": "blk.{}.post_attention_norm.weight",
    "mlp_norm": "blk.{}.ffn_norm.weight",
    "mlp_norm_bias": "blk.{}.ffn_norm.bias",
    **{x: f"blk.{{}}.ffn_{x}.weight" for x in _MLP},
    **{f"{x}_bias": f"blk.{{}}.ffn_{x}.bias" for x in _MLP},
    "router": "blk.{}.ffn_gate_inp.weight",
    **{f"expert_{x}": f"blk.{{}}.ffn_{x}_exps.weight" for x in _MLP},
    "router_bias": "blk.{}.ffn_gate_inp.bias",
    "selection_bias": "blk.{}.exp_probs_b.bias",
    **{f"expert_{x}_bias": f"blk.{{}}.ffn_{x}_exps.bias" for x in _MLP},
    "shared_router": "blk.{}.ffn_gate_inp_shexp.weight",
    **{f"shared_{x}": f"blk.{{}}.ffn_{x}_shexp.weight" for x in _MLP},
    "sinks": "blk.{}.attn_sinks.weight",
    "post_mlp_norm": "blk.{}.post_ffw_norm.weight",
}
_QKV, _GATE_UP = ("q", "k", "v"), ("gate", "up")
# llama.cpp's converter fuses Q, K and V of any architecture if it is asked to.
GGUF_FUSED_QKV: Names = {
    **{x: Fused("blk.{}.attn_qkv.weight", _QKV) for x in _QKV},
    **{f"{x}_bias": Fused("blk.{}.attn_qkv.bias", _QKV) for x in _QKV},
}
# It fuses gate and up of all experts of any architecture if it is asked to.
GGUF_FUSED_EXPERTS: Names = {
    f"expert_{x}": Fused("blk.{}.ffn_gate_up_exps.weight", _GATE_UP) for x in _GATE_UP
}
# Early files of Qwen3-Next have q, k, v and z of delta nets in one tensor, as its folders.
GGUF_FUSED_DELTA: Names = {
    f"delta_{x}": Fused("blk.{}.ssm_in.weight", ("delta_qkv", "delta_z"), by_heads=True)
    for x in ("qkv", "z")
}
# Modules of a layer in which MLX stacks its experts.
_MLX_STACKS = (
    *("mlp.switch_mlp", "block_sparse_moe.switch_mlp", "feed_forward.switch_mlp"),
    "mlp.experts",  # of gpt-oss
)


def mlx_experts(layers: int, known: Callable[[str], bool]) -> Names:
    """Return names of stacks of experts as MLX writes them; none where a folder has none.

    Args:
        layers: number of layers, the first of which may be dense.
        known: whether the folder has a tensor of a name.
    """
    for stack in _MLX_STACKS:
        if any(known(f"model.layers.{i}.{stack}.gate_proj.weight") for i in range(layers)):
            module = f"model.layers.{{}}.{stack}."
            return {
                **{f"expert_{x}": f"{module}{x}_proj.weight" for x in _MLP},
                **{f"expert_{x}_bias": f"{module}{x}_proj.bias" for x in _MLP},
            }
    return {}


# Releases of Qwen3.5 stack the matrices of all experts, where transformers writes one for each.
HF_STACK = "mlp.experts.gate_up_proj"
HF_STACKED_EXPERTS: Names = {
    **{f"expert_{x}": Fused(f"model.layers.{{}}.{HF_STACK}", _GATE_UP) for x in _GATE_UP},
    "expert_down": "model.layers.{}.mlp.experts.down_proj",
}
# Parts of the matrix that makes keys, and values, of latents, in each head; keys are columns there.
LATENT_UPS = ("key_up", "value_up")
# Older files have them in one tensor, as folders.
GGUF_FUSED_LATENT: Names = {
    x: Fused("blk.{}.attn_kv_b.weight", LATENT_UPS, by_heads=True) for x in LATENT_UPS
}
# Architectures that fuse gate and up have one tensor called `up` with the rows of both.
GGUF_FUSED_MLP: Names = {x: Fused("blk.{}.ffn_up.weight", _GATE_UP) for x in _GATE_UP}
HF_FUSED_QKV: Names = {x: Fused("model.layers.{}.self_attn.qkv_proj.weight", _QKV) for x in _QKV}
HF_FUSED_MLP: Names = {
    x: Fused("model.layers.{}.mlp.gate_up_proj.weight", _GATE_UP) for x in _GATE_UP
}

# `general.architecture` of GGUF files -> file of `graphs/models/`, where the names differ.
_GGUF_ARCHITECTURES: Mapping[str, str] = {
    "deepseek2": "deepseek_v2",
    "falcon-h1": "falcon_h1",
    "gemma3": "gemma3_text",
    "gemma3n": "gemma3n_text",
    "gemma4": "gemma4_text",
    "gemma4-assistant": "gemma4_text",
    "glm4moe": "glm4_moe",
    "gpt-oss": "gpt_oss",
    "granitehybrid": "granitemoehybrid",
    "hunyuan-dense": "hunyuan_v1_dense",
    "lfm2moe": "lfm2_moe",
    "mistral3": "ministral3",
    "qwen2moe": "qwen2_moe",
    "qwen35": "qwen3_5_text",
    "qwen35moe": "qwen3_5_moe_text",
    "qwen3moe": "qwen3_moe",
    "qwen3next": "qwen3_next",
}
# Parts of models that are not supported -> words in the names of architectures that need them.
_MISSING: Mapping[str, tuple[str, ...]] = {
    "a router of another kind": ("phimoe",),
    "recurrent layers": (
        "bamba", "hybrid", "jamba", "mamba", "nemotronh",
        "recurrentgemma", "rwkv",
    ),
    "sparse attention (DSA)": ("deepseekv32", "deepseek32"),
}  # fmt: skip
# `model_type` of Hugging Face models that wrap a text model or equal it -> that model's type.
_HF_MODEL_TYPES: Mapping[str, str] = {
    "gemma3": "gemma3_text",
    "gemma3n": "gemma3n_text",
    "gemma4": "gemma4_text",
    "gemma4_assistant": "gemma4_text",
    "gemma4_unified_assistant": "gemma4_unified_text",
    "gemma4_unified": "gemma4_text",
    "gemma4_unified_text": "gemma4_text",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
}


@dataclass(frozen=True)
class GGUFHeader:
    """Description of a model in a GGUF file: keys and tensors that its config is made of.

    Attributes:
        model_type: name of the architecture's file in `graphs/models/`.
        fields: keys of the file behind the architecture's name.
        vocab_size: number of rows of the embedding.
        tensors: shapes of the file's tensors, by their names in the file.
        vector: reads a small tensor by its name in the file; None: the file has no such tensor.
    """

    model_type: str
    fields: Fields
    vocab_size: int
    tensors: Mapping[str, tuple[int, ...]]
    vector: Callable[[str], list[float] | None]


Fold = Callable[[str, Tensor, Fields], Tensor]


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """Rules for reading the files of a family of models.

    Attributes:
        config_from_hf, config_from_gguf: readers of the model's config; None where the family has
            no files of that format.
        hf_names, gguf_names: names of tensors in the files, by their names in `tensors.py` without
            `layers.I.`, with `expert_` before those that a layer's experts have, and with the
            mixer's name before those that differ by mixers (`short_conv_o`); `{}` stands for the
            layer.
        hf_interleaved_rope, gguf_interleaved_rope: whether RoPE turns neighbouring channels, so
            that rows of Q and K are reordered when they are read.
        hf_fold: changes a tensor of a Hugging Face folder, given by its canonical name, to the
            values that ModelConfig expects. Its last argument has the fields of the config.
        gguf_fold: the same for a tensor of a GGUF file.
        mtp: whether files may have a head that predicts the token after the next, see `mtp.py`.
    """

    config_from_hf: Callable[[Fields], ModelConfig] | None = None
    config_from_gguf: Callable[[GGUFHeader], ModelConfig] | None = None
    hf_names: Names = field(default_factory=lambda: HF_NAMES)
    gguf_names: Names = field(default_factory=lambda: GGUF_NAMES)
    hf_interleaved_rope: bool = False
    gguf_interleaved_rope: bool = False
    hf_fold: Fold | None = None
    gguf_fold: Fold | None = None
    mtp: bool = False


def supported() -> list[str]:
    """List the model types that have a file in `graphs/models/`."""
    return sorted(p.stem for p in (Path(__file__).parent / "models").glob("[a-z]*.py"))


def model_type_of(name: str, *, gguf: bool) -> str:
    """Return the name that an architecture's file in `graphs/models/` has, if there is one.

    Args:
        name: `model_type` of a config.json, or `general.architecture` of a GGUF file.
        gguf: whether the name comes from a GGUF file.
    """
    return (_GGUF_ARCHITECTURES if gguf else _HF_MODEL_TYPES).get(name, name)


def family_of(model_type: str) -> Architecture:
    """Return the architecture of a file in `graphs/models/`."""
    module = importlib.import_module(f"edgellm.graphs.models.{model_type}")
    family: Architecture = module.ARCHITECTURE
    return family


def architecture(name: str, *, gguf: bool, origin: str) -> Architecture:
    """Return the architecture that a model file names.

    Args:
        name: name in the model file, as in `model_type_of`.
        gguf: whether the model file is a GGUF file.
        origin: name of the model file in errors.

    Raises:
        UnsupportedModelError: the architecture is not supported, or not in this format.
    """
    model_type = model_type_of(name, gguf=gguf)
    if model_type not in supported():
        raise UnsupportedModelError(
            f"{origin}: architecture {name!r} is not supported{_why_not(name)}; supported are "
            + ", ".join(supported())
        )
    family = family_of(model_type)
    if (family.config_from_gguf if gguf else family.config_from_hf) is None:
        format = "GGUF files" if gguf else "Hugging Face folders"
        raise UnsupportedModelError(f"{origin}: {name} is not supported in {format}")
    return family


def _why_not(name: str) -> str:
    """Name the unsupported parts that an architecture is known to need, for an error message."""
    word = name.replace("_", "").replace("-", "").lower()
    missing = [part for part, names in _MISSING.items() if any(each in word for each in names)]
    return f": it needs {' and '.join(missing)}" if missing else ""


def with_layers(
    config: ModelConfig, change: Callable[[int, LayerConfig], LayerConfig]
) -> ModelConfig:
    """Return the config with each layer replaced by `change(index, layer)`."""
    return replace(config, layers=tuple(change(i, layer) for i, layer in enumerate(config.layers)))


def with_attention(
    config: ModelConfig, change: Callable[[int, Attention], Attention]
) -> ModelConfig:
    """Return the config with each layer's attention replaced by `change(index, attention)`.

    Layers that do not attend stay.
    """
    return with_layers(
        config,
        lambda i, layer: (
            replace(layer, mixer=change(i, layer.attention)) if layer.attends else layer
        ),
    )


def with_norms(config: ModelConfig, *, layers: Norms, queries: QKNorm) -> ModelConfig:
    """Return the config with norms in this place of each layer, and these of Q and K."""
    config = with_layers(config, lambda _, layer: replace(layer, norms=layers))
    return with_attention(config, lambda _, a: replace(a, qk_norm=queries))
