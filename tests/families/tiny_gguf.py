"""GGUF files of the tiny models, as llama.cpp's converter writes them.

Names of tensors and keys are the `gguf` package's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import NormalDist
from typing import Any

import gguf
import numpy as np
from gguf_tensors import (
    Tensors,
    delta_net,
    fused,
    hybrid,
    latent_ups,
    multiplied,
    of_gemma4,
    of_streams,
    permuted,
    qkv_and_z,
    stacked,
)
from safetensors.numpy import load_file
from small_vocabulary import sentencepiece_metadata

Keys = Callable[[gguf.GGUFWriter], None]
ARCH = gguf.MODEL_ARCH
F32 = gguf.GGMLQuantizationType.F32


def nothing(writer: gguf.GGUFWriter) -> None:
    """Beside the keys that all files have."""


def theta(value: float) -> Keys:
    return lambda w: w.add_rope_freq_base(value)


def gemma2(w: gguf.GGUFWriter) -> None:
    w.add_attn_logit_softcapping(50.0)
    w.add_final_logit_softcapping(30.0)
    w.add_sliding_window(8)


def gemma3(w: gguf.GGUFWriter) -> None:
    w.add_rope_freq_base(2e4)
    w.add_rope_freq_base_swa(300.0)
    w.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    w.add_rope_scaling_factor(4.0)
    w.add_sliding_window(8)


def gemma3n(w: gguf.GGUFWriter) -> None:
    w.add_altup_active_idx(0)
    w.add_altup_num_inputs(3)
    w.add_embedding_length_per_layer_input(32)
    w.add_shared_kv_layers(3)
    normal, shares = NormalDist(), (0.7, 0.95, 0.3, 0.0, 0.5, 0.0)
    scales = [normal.inv_cdf(share) if share else -np.inf for share in shares]
    w.add_activation_sparsity_scale(scales)
    w.add_rope_freq_base(2e4)
    w.add_rope_freq_base_swa(300.0)
    w.add_sliding_window(8)
    w.add_sliding_window_pattern([True, True, False] * 2)


def gemma4(w: gguf.GGUFWriter) -> None:
    w.add_shared_kv_layers(3)
    w.add_embedding_length_per_layer_input(32)
    w.add_feed_forward_length([96, 96, 96, 192, 192, 192])
    w.add_head_count_kv(2)
    w.add_final_logit_softcapping(30.0)
    gemma4_attention(w)


def gemma4_unified(w: gguf.GGUFWriter) -> None:
    w.add_shared_kv_layers(0)
    w.add_embedding_length_per_layer_input(0)
    w.add_feed_forward_length(96)
    w.add_head_count_kv([2, 2, 1] * 2)
    gemma4_attention(w)


def gemma4_experts(w: gguf.GGUFWriter) -> None:
    w.add_expert_feed_forward_length(32)
    gemma4_unified(w)


def gemma4_attention(w: gguf.GGUFWriter, *, layers: int = 6, window: int = 8) -> None:
    w.add_key_length(64)
    w.add_value_length(64)
    w.add_key_length_swa(32)
    w.add_value_length_swa(32)
    w.add_rope_dimension_count(64)
    w.add_rope_dimension_count_swa(32)
    w.add_rope_freq_base(2e4)
    w.add_rope_freq_base_swa(300.0)
    w.add_sliding_window(window)
    w.add_sliding_window_pattern([True, True, False] * (layers // 3))
    w.add_tensor("rope_freqs.weight", np.array([1.0] * 8 + [1e30] * 24, np.float32))


def granite(w: gguf.GGUFWriter) -> None:
    w.add_expert_shared_feed_forward_length(96)
    w.add_ssm_conv_kernel(4)
    granite_multipliers(w)


def granite_multipliers(w: gguf.GGUFWriter) -> None:
    w.add_attention_scale(0.15)
    w.add_embedding_scale(3.0)
    w.add_residual_scale(0.4)
    w.add_logit_scale(2.5)


def granite_hybrid(w: gguf.GGUFWriter) -> None:
    w.add_ssm_conv_kernel(4)
    w.add_ssm_state_size(32)
    w.add_ssm_group_count(2)
    w.add_ssm_inner_size(128)
    w.add_ssm_time_step_rank(8)
    w.add_rope_scaling_finetuned(False)
    granite_multipliers(w)


def falcon_h1(w: gguf.GGUFWriter) -> None:
    w.add_rope_freq_base(5000.0)
    w.add_ssm_conv_kernel(4)
    w.add_ssm_state_size(16)
    w.add_ssm_group_count(2)
    w.add_ssm_inner_size(128)
    w.add_ssm_time_step_rank(4)


def granite_hybrid_experts(w: gguf.GGUFWriter) -> None:
    w.add_expert_shared_feed_forward_length(96)
    granite_hybrid(w)


def yarn(w: gguf.GGUFWriter) -> None:
    w.add_rope_freq_base(5000.0)
    w.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    w.add_rope_scaling_factor(4.0)
    w.add_rope_scaling_orig_ctx_len(64)
    w.add_rope_scaling_yarn_beta_fast(4.0)
    w.add_rope_scaling_yarn_beta_slow(1.0)


def deepseek2(w: gguf.GGUFWriter) -> None:
    yarn(w)
    w.add_rope_scaling_yarn_log_mul(0.1 * 0.707)
    latents(w, key=32)
    w.add_leading_dense_block_count(1)


def latents(w: gguf.GGUFWriter, *, key: int) -> None:
    w.add_rope_dimension_count(16)
    w.add_kv_lora_rank(64)
    for name, value in (("key_length", 64 + 16), ("value_length", 64)):
        w.add_uint32(f"deepseek2.attention.{name}", value)
    w.add_key_length_mla(key + 16)
    w.add_value_length_mla(48)
    w.add_expert_shared_count(2)


def glm4_lite(w: gguf.GGUFWriter) -> None:
    w.add_rope_freq_base(5000.0)
    latents(w, key=64)
    w.add_q_lora_rank(64)
    w.add_leading_dense_block_count(1)
    w.add_expert_group_count(2)
    w.add_expert_group_used_count(1)
    w.add_expert_weights_scale(1.8)
    w.add_expert_weights_norm(True)


def deepseek3(w: gguf.GGUFWriter) -> None:
    yarn(w)
    w.add_rope_scaling_yarn_log_mul(0.1)
    latents(w, key=32)
    w.add_q_lora_rank(64)
    w.add_leading_dense_block_count(1)
    w.add_expert_group_count(4)
    w.add_expert_group_used_count(2)
    w.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    w.add_expert_weights_scale(2.5)
    w.add_expert_weights_norm(True)


def olmo3(w: gguf.GGUFWriter) -> None:
    yarn(w)
    w.add_rope_scaling_attn_factors(0.1 * np.log(4) + 1)
    windows(w)


def windows(w: gguf.GGUFWriter) -> None:
    w.add_sliding_window(8)
    w.add_sliding_window_pattern([True, True, True, False])


def ministral3(w: gguf.GGUFWriter) -> None:
    yarn(w)
    w.add_rope_scaling_yarn_log_mul(0.5)
    w.add_attn_temperature_scale(0.1)


def phi3(w: gguf.GGUFWriter) -> None:
    w.add_rope_freq_base(5000.0)
    w.add_sliding_window(24)
    w.add_rope_scaling_orig_ctx_len(4096)


def longrope(w: gguf.GGUFWriter) -> None:
    w.add_rope_freq_base(5000.0)
    w.add_sliding_window(0)
    w.add_rope_dimension_count(24)
    w.add_rope_scaling_orig_ctx_len(64)
    w.add_rope_scaling_attn_factors((1 + np.log(4) / np.log(64)) ** 0.5)
    w.add_tensor("rope_factors_short.weight", (1 + np.arange(12) / 8).astype(np.float32))
    w.add_tensor("rope_factors_long.weight", (2 + np.arange(12)).astype(np.float32))


def glm4(w: gguf.GGUFWriter) -> None:
    w.add_rope_dimension_count(16)


def lfm2(w: gguf.GGUFWriter) -> None:
    w.add_rope_freq_base(1e6)
    w.add_shortconv_l_cache(3)


def qwen35(w: gguf.GGUFWriter) -> None:
    w.add_rope_dimension_count(8)
    w.add_rope_dimension_sections([2, 1, 1, 0])
    _delta_sizes(w, key_heads=2, value_heads=4, key_dim=32, value_dim=32, taps=4)


def qwen35_even(w: gguf.GGUFWriter) -> None:
    """A list of layers, as drafting models write it, in place of a period."""
    w.add_rope_dimension_count(16)
    w.add_rope_dimension_sections([3, 3, 2, 0])
    w.add_array("qwen35.attention.recurrent_layers", [False, True, True])
    _delta_sizes(w, key_heads=3, value_heads=3, key_dim=16, value_dim=64, taps=3)


def qwen35moe(w: gguf.GGUFWriter) -> None:
    w.add_rope_dimension_count(8)
    w.add_rope_dimension_sections([2, 1, 1, 0])
    w.add_full_attention_interval(2)
    w.add_expert_shared_feed_forward_length(64)
    _delta_sizes(w, key_heads=2, value_heads=2, key_dim=32, value_dim=32, taps=4)


def qwen3next(w: gguf.GGUFWriter) -> None:
    w.add_rope_dimension_count(8)
    w.add_array("qwen3next.attention.recurrent_layers", [True, False])
    w.add_expert_shared_feed_forward_length(64)
    _delta_sizes(w, key_heads=2, value_heads=4, key_dim=32, value_dim=32, taps=4)


def _delta_sizes(
    w: gguf.GGUFWriter, *, key_heads: int, value_heads: int, key_dim: int, value_dim: int, taps: int
) -> None:
    w.add_ssm_conv_kernel(taps)
    w.add_ssm_state_size(key_dim)
    w.add_ssm_group_count(key_heads)
    w.add_ssm_time_step_rank(value_heads)
    w.add_ssm_inner_size(value_dim * value_heads)


def lfm2_moe(w: gguf.GGUFWriter) -> None:
    lfm2(w)
    w.add_leading_dense_block_count(1)
    w.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    w.add_expert_weights_scale(1.3)


def gpt_oss(w: gguf.GGUFWriter) -> None:
    yarn(w)
    w.add_sliding_window(8)
    w.add_expert_feed_forward_length(96)


def glm4_moe(w: gguf.GGUFWriter) -> None:
    w.add_rope_freq_base(5000.0)
    w.add_rope_dimension_count(16)
    w.add_expert_shared_count(2)
    w.add_leading_dense_block_count(1)
    w.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    w.add_expert_weights_scale(1.8)
    w.add_expert_weights_norm(True)


def qwen2_moe(w: gguf.GGUFWriter) -> None:
    w.add_expert_shared_feed_forward_length(96)


def with_vocabulary(keys: Keys) -> Keys:
    """With a tokenizer of `VOCABULARY` tokens, so that the file can be exported."""

    def add(w: gguf.GGUFWriter) -> None:
        keys(w)
        for key, value in sentencepiece_metadata().items():
            w.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
        w.add_bos_token_id(1)
        w.add_eos_token_id(2)

    return add


VOCABULARY = len(sentencepiece_metadata()["tokenizer.ggml.tokens"])
# Family -> architecture, keys, and what the folder differs in where a file cannot say it.
FILES: Mapping[str, tuple[gguf.MODEL_ARCH, Keys, Mapping[str, Any]]] = {
    "llama": (ARCH.LLAMA, theta(5000.0), {}),
    "qwen2": (ARCH.QWEN2, nothing, {}),
    "qwen3": (ARCH.QWEN3, nothing, {}),
    "gemma": (ARCH.GEMMA, nothing, {}),
    "gemma2": (ARCH.GEMMA2, gemma2, {"query_pre_attn_scalar": 32}),
    "gemma3_text": (ARCH.GEMMA3, gemma3, {}),
    "gemma3n_text": (ARCH.GEMMA3N, gemma3n, {}),
    "gemma4_text": (ARCH.GEMMA4, gemma4, {}),
    "gemma4_unified": (ARCH.GEMMA4, gemma4_unified, {}),
    "gemma4_experts": (ARCH.GEMMA4, gemma4_experts, {}),
    "phi3": (ARCH.PHI3, phi3, {}),
    "phi3_longrope": (ARCH.PHI3, longrope, {}),
    "granite": (ARCH.GRANITE, granite, {}),
    "granitemoehybrid_mamba": (ARCH.GRANITE_HYBRID, granite_hybrid, {}),
    "granitemoehybrid_experts": (ARCH.GRANITE_HYBRID, granite_hybrid_experts, {}),
    "smollm3": (ARCH.SMOLLM3, theta(2e6), {}),
    "olmo2": (ARCH.OLMO2, theta(5000.0), {}),
    "olmo3": (ARCH.OLMO2, olmo3, {}),
    "ministral3": (ARCH.MISTRAL3, ministral3, {}),
    "exaone4": (ARCH.EXAONE4, nothing, {}),
    "exaone4_windows": (ARCH.EXAONE4, windows, {}),
    "hunyuan_v1_dense": (ARCH.HUNYUAN_DENSE, theta(10000 * 1000 ** (32 / 30)), {}),
    "ernie4_5": (ARCH.ERNIE4_5, theta(5e5), {}),
    "glm4": (ARCH.GLM4, glm4, {}),
    "starcoder2": (ARCH.STARCODER2, nothing, {"sliding_window": None}),
    "lfm2": (ARCH.LFM2, lfm2, {}),
    "qwen3_5_text_even": (ARCH.QWEN35, qwen35_even, {}),
    "qwen3_5_moe_text": (ARCH.QWEN35MOE, qwen35moe, {}),
    "qwen3_next": (ARCH.QWEN3NEXT, qwen3next, {"mlp_only_layers": []}),
    "qwen3_moe": (ARCH.QWEN3MOE, nothing, {}),
    "olmoe": (ARCH.OLMOE, nothing, {}),
    "mixtral": (ARCH.LLAMA, theta(1e6), {"sliding_window": None}),
    "granitemoe": (ARCH.GRANITE_MOE, granite_multipliers, {}),
    "qwen2_moe": (ARCH.QWEN2MOE, qwen2_moe, {}),
    "lfm2_moe": (ARCH.LFM2MOE, lfm2_moe, {}),
    "glm4_moe": (ARCH.GLM4_MOE, glm4_moe, {}),
    "gpt_oss": (ARCH.GPT_OSS, gpt_oss, {}),
    "deepseek_v2": (ARCH.DEEPSEEK2, deepseek2, {}),
    "deepseek_v3": (ARCH.DEEPSEEK2, deepseek3, {}),
    "glm4_moe_lite": (ARCH.DEEPSEEK2, glm4_lite, {}),
}
PERMUTED = (
    ARCH.LLAMA,
    ARCH.GRANITE,
    ARCH.GRANITE_MOE,
    ARCH.GRANITE_HYBRID,
    ARCH.SMOLLM3,
    ARCH.MISTRAL3,
)
# Matrices that are stored in float32 whatever the type of the file.
EXACT = (
    *("altup_predict_coef.weight", "altup_correct_coef.weight"),
    *("ffn_gate_inp.weight", "shortconv.conv.weight"),
    *("ssm_a", "ssm_d", "ssm_norm.weight", "ssm_conv1d.weight"),
)
PLUS_ONE = (
    *(ARCH.GEMMA, ARCH.GEMMA2, ARCH.GEMMA3),
    *(ARCH.QWEN35, ARCH.QWEN35MOE, ARCH.QWEN3NEXT),
)


def convert(
    folder: Path,
    path: Path,
    arch: gguf.MODEL_ARCH,
    keys: Keys,
    *,
    fuse: bool = False,
    split_latents: bool = True,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
) -> Path:
    """A GGUF file of a folder, its matrices stored as `kind`."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder)
    config.allow_global_per_layer_attribute_access = True
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    add_sizes(writer, config)
    keys(writer)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    tensors: Tensors = {}
    loaded = load_file(folder / "model.safetensors")
    if arch == ARCH.FALCON_H1:
        loaded = multiplied(loaded, config)
    if arch in (ARCH.GRANITE_HYBRID, ARCH.FALCON_H1):
        loaded = hybrid(loaded, config)
    if arch == ARCH.GEMMA3N:
        loaded = of_streams(loaded)
    if arch == ARCH.QWEN3NEXT:
        loaded = qkv_and_z(loaded, config)
    for key, values in stacked(loaded).items():
        if key.endswith(("layer_scalar", "output_scale")):  # vectors without a suffix
            key += ".weight"
        if ".linear_attn." in key:
            key, values = delta_net(key, values, config)
        if ".kv_b_proj." in key and split_latents:
            tensors |= latent_ups(key, values, config)
            continue
        name = names.get_name(key, try_suffixes=(".weight", ".bias")) or of_gemma4(key)
        assert name is not None, key
        if arch in PERMUTED and key.split(".")[-2] in ("q_proj", "k_proj"):
            heads = config.num_attention_heads if ".q_" in key else config.num_key_value_heads
            values = permuted(values, heads)
        if name.endswith("shortconv.conv.weight"):
            values = values.squeeze(1)
        less_one = key.endswith("norm.weight") and not key.endswith("linear_attn.norm.weight")
        tensors[name] = values + 1 if arch in PLUS_ONE and less_one else values
    for name, values in (fused(tensors, config.num_hidden_layers) if fuse else tensors).items():
        exact = name.endswith(EXACT)
        stored = kind if name.endswith(".weight") and values.ndim > 1 and not exact else F32
        writer.add_tensor(
            name, gguf.quantize(np.ascontiguousarray(values), stored), raw_dtype=stored
        )
    write(writer)
    return path


def write(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_sizes(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    width, kv_heads = config.intermediate_size, config.num_key_value_heads
    if config.model_type.startswith(("lfm2", "granitemoehybrid")):
        attends = [kind == "full_attention" for kind in config.layer_types]
        kv_heads = [kv_heads * each for each in attends]
    if config.model_type == "lfm2":
        multiple = config.block_multiple_of
        width = multiple * -(-int(2 * width / 3) // multiple)
    writer.add_feed_forward_length(width)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(kv_heads)
    keys = "num_experts", "num_local_experts", "n_routed_experts"
    experts = next(filter(None, (getattr(config, key, None) for key in keys)), None)
    if experts:
        writer.add_expert_count(experts)
        gemma = config.model_type == "gemma4_text"
        writer.add_expert_used_count(config.top_k_experts if gemma else config.num_experts_per_tok)
    if getattr(config, "moe_intermediate_size", None):
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if hasattr(config, "norm_epsilon"):
        writer.add_layer_norm_eps(config.norm_epsilon)
    else:
        eps = config.norm_eps if config.model_type.startswith("lfm2") else config.rms_norm_eps
        writer.add_layer_norm_rms_eps(eps)
    if getattr(config, "head_dim", None) and not hasattr(config, "kv_lora_rank"):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
