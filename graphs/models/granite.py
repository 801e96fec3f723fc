"""Granite 3 and dense Granite 4: Llama with multipliers of embeddings, residuals, scores, logits.

A layer adds `r f(x)` to the residual x. Everything is computed on x / r instead: layers add f(x),
and the embedding is divided by r. RMS norms give the same for x / r as for x once their epsilon is
divided by r^2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from edgellm.graphs.architecture import Architecture, GGUFHeader, with_attention
from edgellm.graphs.config import ModelConfig
from edgellm.graphs.fields import Fields
from edgellm.graphs.models import llama
from edgellm.graphs.rope_scaling import no_rotation
from edgellm.graphs.tensor import Tensor
from edgellm.graphs.translation import with_values

_HF = ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")
_GGUF = ("embedding_scale", "residual_scale", "attention.scale", "logit_scale")
# Keys that Granite 4 does not use: its MLP has the name of shared experts, and its files have a key
# of the recurrent layers of larger models.
_GGUF_UNUSED = ("expert_shared_feed_forward_length", "ssm.conv_kernel")


def config_from_hf(fields: Fields, *, intermediate: str = "intermediate_size") -> ModelConfig:
    fields.assume(dict.fromkeys(_HF, 1.0))
    return _multiplied(llama.config_from_hf(fields, intermediate=intermediate), fields, _HF)


def config_from_gguf(header: GGUFHeader, *, hybrid: bool = False) -> ModelConfig:
    fields = header.fields
    config = llama.config_from_gguf(header, hybrid=hybrid)
    fields.ignore(*_GGUF_UNUSED)
    # a file without a scale of scores has the usual one
    fields.assume({_GGUF[0]: 1.0, _GGUF[1]: 1.0, _GGUF[2]: config.head_dim**-0.5, _GGUF[3]: 1.0})
    if fields.optional(bool, "rope.scaling.finetuned") is False:
        config = replace(config, ropes=(no_rotation(config.ropes[0]),))
    return _multiplied(config, fields, _GGUF)


def fold_hf(name: str, tensor: Tensor, fields: Fields) -> Tensor:
    return _fold(name, tensor, fields, _HF[3])


def fold_gguf(name: str, tensor: Tensor, fields: Fields) -> Tensor:
    return _fold(name, tensor, fields, _GGUF[3])


def _fold(name: str, tensor: Tensor, fields: Fields, key: str) -> Tensor:
    """Divide the weight of the final norm, which stands for a divisor of the logits."""
    if name != "final_norm":
        return tensor
    divisor = fields.positive(key)
    return with_values(tensor, lambda values: values / divisor)


def _multiplied(config: ModelConfig, fields: Fields, keys: Sequence[str]) -> ModelConfig:
    # the divisor of the logits is only checked here; `_fold` applies it
    embedding, residual, scale, _ = (fields.positive(key) for key in keys)
    config = with_attention(config, lambda _, a: replace(a, scale=scale))
    return replace(
        config,
        embedding_scale=embedding / residual,
        norm_eps=config.norm_eps / residual / residual,
    )


ARCHITECTURE = Architecture(
    config_from_hf=config_from_hf,
    config_from_gguf=config_from_gguf,
    gguf_interleaved_rope=True,
    hf_fold=fold_hf,
    gguf_fold=fold_gguf,
)
