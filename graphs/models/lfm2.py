"""LFM2 and LFM2.5: short convolutions, and attention with norms of Q and K in some layers."""

from __future__ import annotations

from dataclasses import replace

from edgellm.graphs.architecture import (
    GGUF_NAMES,
    HF_NAMES,
    Architecture,
    GGUFHeader,
    with_attention,
)
from edgellm.graphs.config import ModelConfig
from edgellm.graphs.fields import Fields
from edgellm.graphs.layer_kinds import FULL, attending_of_gguf, mixers_of_hf, with_mixers
from edgellm.graphs.models import llama
from edgellm.graphs.state_mixers import ShortConv
from edgellm.graphs.tensor import Tensor, reshaped

_DEFAULTS = {
    "rope_theta": 1e6,
    "norm_eps": 1e-5,
    "conv_L_cache": 3,
    "block_auto_adjust_ff_dim": True,
    "block_ffn_dim_multiplier": 1.0,
    "block_multiple_of": 256,
}
# Keys that transformers does not read: how weights began, and sizes under other names.
_UNUSED = (
    "block_mlp_init_scale", "block_norm_eps", "block_out_init_scale", "conv_dim", "conv_dim_out",
    "conv_use_xavier_init", "num_heads",
)  # fmt: skip
_LAYER = "model.layers.{}"


def config_from_hf(fields: Fields) -> ModelConfig:
    fields.assume(_DEFAULTS)
    fields.require("conv_bias", False)
    fields.ignore(*_UNUSED)
    tied = fields.optional(bool, "tie_embedding")
    fields.assume({"tie_word_embeddings": True})
    config = llama.config_from_hf(fields, norm_eps="norm_eps", intermediate=_width(fields))
    if tied is not None:
        config = replace(config, tied_embedding=tied)
    attends = _attending(fields, config.layer_count)
    return _mixed(config, attends, fields.read(int, "conv_L_cache"))


def config_from_gguf(header: GGUFHeader) -> ModelConfig:
    config = llama.config_from_gguf(header, hybrid=True)
    attends = attending_of_gguf(header.fields, config.layer_count)
    return _mixed(config, attends, header.fields.read(int, "shortconv.l_cache"))


def fold_hf(name: str, tensor: Tensor, _: Fields) -> Tensor:
    """Take the filters, one for each channel, out of the shape of a convolution's weight."""
    if name.rpartition(".")[2] != "conv" or len(tensor.shape) != 3 or tensor.shape[1] != 1:
        return tensor
    return reshaped(tensor, tensor.shape[0], tensor.shape[2])


def _attending(fields: Fields, count: int) -> list[bool]:
    """Return for each layer whether it attends: by its type or, in older files, by a list."""
    types = mixers_of_hf(fields, count, others=("conv",))
    attending = fields.optional(list, "full_attn_idxs")
    if types is not None:
        return [each == FULL for each in types]
    return [attending is None or index in attending for index in range(count)]


def _mixed(config: ModelConfig, attends: list[bool], taps: int) -> ModelConfig:
    conv = ShortConv(channels=config.hidden_size, taps=taps)
    config = with_attention(config, lambda _, a: replace(a, qk_norm="head"))
    return with_mixers(config, [None if each else conv for each in attends])


def _width(fields: Fields) -> int:
    """Return the width of the MLP that a file's number stands for."""
    key = "block_ff_dim" if "block_ff_dim" in fields else "intermediate_size"
    width, multiple = fields.read(int, key), fields.read(int, "block_multiple_of")
    multiplier = fields.optional(float, "block_ffn_dim_multiplier")
    if not fields.optional(bool, "block_auto_adjust_ff_dim"):
        return width
    width = int(2 * width / 3)
    if multiplier is None:
        return width
    return max(multiple, 1) * -(-int(multiplier * width) // max(multiple, 1))


ARCHITECTURE = Architecture(
    config_from_hf=config_from_hf,
    config_from_gguf=config_from_gguf,
    hf_names={
        **HF_NAMES,
        "final_norm": "model.embedding_norm.weight",
        "attention_norm": f"{_LAYER}.operator_norm.weight",
        "mlp_norm": f"{_LAYER}.ffn_norm.weight",
        "o": f"{_LAYER}.self_attn.out_proj.weight",
        "q_norm": f"{_LAYER}.self_attn.q_layernorm.weight",
        "k_norm": f"{_LAYER}.self_attn.k_layernorm.weight",
        "conv_in": f"{_LAYER}.conv.in_proj.weight",
        "conv": f"{_LAYER}.conv.conv.weight",
        "short_conv_o": f"{_LAYER}.conv.out_proj.weight",
        "gate": f"{_LAYER}.feed_forward.w1.weight",
        "up": f"{_LAYER}.feed_forward.w3.weight",
        "down": f"{_LAYER}.feed_forward.w2.weight",
    },
    gguf_names={
        **GGUF_NAMES,
        "final_norm": "token_embd_norm.weight",
        "conv_in": "blk.{}.shortconv.in_proj.weight",
        "conv": "blk.{}.shortconv.conv.weight",
        "short_conv_o": "blk.{}.shortconv.out_proj.weight",
    },
    hf_fold=fold_hf,
)
