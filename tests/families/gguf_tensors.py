"""Tensors of folders as llama.cpp's converter writes them: names, orders of rows, stacks."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import Any

import numpy as np

Tensors = dict[str, np.ndarray]


def delta_net(key: str, values: np.ndarray, config: Any) -> tuple[str, np.ndarray]:
    """As `_LinearAttentionVReorderBase` of the converter: of each key head the first value head,
    then of each the second one."""
    heads, keys = config.linear_num_value_heads, config.linear_num_key_heads
    first = 2 * keys * config.linear_key_head_dim  # rows of q and k
    part = key.split(".linear_attn.")[1]

    def tiled(rows: np.ndarray) -> np.ndarray:
        split = rows.reshape(keys, heads // keys, len(rows) // heads, *rows.shape[1:])
        return split.swapaxes(0, 1).reshape(rows.shape)

    if config.model_type == "qwen3_next":
        values = -np.exp(values) if part == "A_log" else values.squeeze()
        return key.replace("dt_bias", "dt_proj.bias"), values
    if part in ("in_proj_qkv.weight", "conv1d.weight"):
        return key, np.concatenate([values[:first], tiled(values[first:])]).squeeze()
    if part == "out_proj.weight":
        return key, tiled(values.T).T
    if part == "norm.weight":
        return key, values
    if part == "A_log":
        values = -np.exp(values)
    return key.replace("dt_bias", "dt_proj.bias"), tiled(values)


def qkv_and_z(tensors: Tensors, config: Any) -> Tensors:
    """As `Qwen3NextModel` of the converter since January 2026: q of all heads, k, v; then z."""
    left = {}
    heads, dim = config.linear_num_key_heads, config.linear_key_head_dim
    values = config.linear_num_value_heads // heads * config.linear_value_head_dim
    for key, rows in tensors.items():
        if not key.endswith("in_proj_qkvz.weight"):
            left[key] = rows
            continue
        split = rows.reshape(heads, -1, rows.shape[1])
        parts = np.split(split, [dim, 2 * dim, 2 * dim + values], axis=1)
        *qkv, z = (part.reshape(-1, rows.shape[1]) for part in parts)
        left[key.replace("qkvz", "qkv")] = np.concatenate(qkv)
        left[key.replace("qkvz", "z")] = z
    return left


def of_gemma4(key: str) -> str | None:
    """The name of a router's vectors, which the map does not know."""
    found = re.fullmatch(r"model\.layers\.(\d+)\.router\.(scale|per_expert_scale)", key)
    if found is None:
        return None
    part = "ffn_gate_inp" if found[2] == "scale" else "ffn_down_exps"
    return f"blk.{found[1]}.{part}.scale"


def of_streams(tensors: Tensors) -> Tensors:
    """As `Gemma3NModel` of the converter: matrices of all residual streams in one tensor."""
    left, stacks = {}, defaultdict(list)
    for key, values in sorted(tensors.items()):
        found = re.fullmatch(r"(model\.altup_\w+)\.\d+\.weight", key)
        if found is None:
            left[key] = values
        else:
            stacks[f"{found[1]}.weight"].append(values)
    return left | {key: np.stack(values) for key, values in stacks.items()}


def permuted(values: np.ndarray, heads: int) -> np.ndarray:
    """As `LlamaModel.permute` of the converter."""
    split = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
    return split.swapaxes(1, 2).reshape(values.shape)


def stacked(tensors: Tensors) -> Tensors:
    """With the matrices of a layer's experts in one tensor, and gate and up apart."""
    left: Tensors = {}
    experts: dict[str, list[np.ndarray]] = defaultdict(list)
    for key, values in sorted(tensors.items(), key=lambda item: _expert(item[0])):
        if _expert(key) >= 0:
            name = re.sub(r"experts\.\d+", "experts", key).removeprefix("model.")
            # the map knows these names without, others with that
            known = "feed_forward" in name
            experts[name if known else f"model.{name}"].append(values)
        elif "mlp.experts.gate_up_proj" in key:
            for index, name in enumerate(("gate", "up")):
                kept = key.replace("gate_up_proj", f"{name}_proj")
                left |= _of_gpt_oss(kept, values[..., index::2])
        elif "mlp.experts.down_proj" in key:
            left |= _of_gpt_oss(key, values)
        elif ".experts." in key or key.endswith("sinks"):  # of Gemma 4
            left[f"{key}.weight"] = values
        elif key.endswith("feed_forward.expert_bias"):
            left[f"{key}.bias"] = values
        elif key.endswith("e_score_correction_bias"):
            left[key.removesuffix("_bias") + ".bias"] = values
        elif key.endswith("shared_expert_gate.weight"):
            left[key] = values[0]
        elif "input_linear" in key:
            for name, part in zip(("w1", "w3"), np.split(values, 2, axis=1), strict=True):
                left[key.replace("input_linear", f"experts.{name}")] = part
        else:
            left[key] = values
    return {**left, **{key: np.stack(parts) for key, parts in experts.items()}}


def multiplied(tensors: Tensors, config: Any) -> Tensors:
    """As `FalconH1Model` of the converter: all factors are in the tensors."""
    left, inner = {}, config.mamba_d_ssm
    shared = config.mamba_n_groups * config.mamba_d_state
    rows = np.repeat(
        np.float32(config.ssm_multipliers), (inner, inner, shared, shared, config.mamba_n_heads)
    )
    factors = {
        "q_proj": config.attention_in_multiplier,
        "k_proj": config.attention_in_multiplier * config.key_multiplier,
        "v_proj": config.attention_in_multiplier,
        "o_proj": config.attention_out_multiplier,
        "gate_proj": config.mlp_multipliers[0],
        "down_proj": config.mlp_multipliers[1],
        "in_proj": config.ssm_in_multiplier * rows[:, None],
        "out_proj": config.ssm_out_multiplier,
        "embed_tokens": config.embedding_multiplier,
        "lm_head": config.lm_head_multiplier,
    }
    for key, values in tensors.items():
        left[key] = values * np.float32(factors.get(key.split(".")[-2], 1))
    return left


def hybrid(tensors: Tensors, config: Any) -> Tensors:
    """With gate and up apart, and vectors of Mamba-2 as `Mamba2Model` of the converter has them."""
    left: Tensors = {}
    mlp = "mlp.shared_experts" if getattr(config, "num_local_experts", 0) else "mlp"
    for key, values in tensors.items():
        module, _, part = key.removesuffix(".weight").rpartition(".")
        if module.endswith("block_sparse_moe") or part == "layer":
            left[key] = values
        elif part == "input_linear":
            for name, rows in zip(("gate_proj", "up_proj"), np.split(values, 2), strict=True):
                left[f"{module.replace('shared_mlp', mlp)}.{name}.weight"] = rows
        elif part == "output_linear":
            left[f"{module.replace('shared_mlp', mlp)}.down_proj.weight"] = values
        elif part == "dt_bias":
            left[f"{module}.dt_proj.bias"] = values
        elif part in ("A_log", "D"):
            left[key] = (-np.exp(values) if part == "A_log" else values)[:, None]
        elif key.endswith("mamba.norm.weight"):
            left[key] = values.reshape(config.mamba_n_groups, -1)
        else:
            left[key] = values.squeeze()
    return left


def _of_gpt_oss(key: str, values: np.ndarray) -> Tensors:
    if key.endswith("_bias"):
        return {key.removesuffix("_bias") + ".bias": values}
    return {f"{key}.weight": values.swapaxes(1, 2)}


def _expert(key: str) -> int:
    found = re.search(r"experts\.(\d+)\.", key)
    return -1 if found is None else int(found[1])


def fused(tensors: Tensors, layers: int) -> Tensors:
    """With one tensor for Q, K and V, one for their biases, and one for gate and up of experts."""
    left = dict(tensors)
    for layer in range(layers):
        for kind in ("weight", "bias"):
            parts = [left.pop(f"blk.{layer}.attn_{x}.{kind}", None) for x in "qkv"]
            if parts[0] is not None:
                left[f"blk.{layer}.attn_qkv.{kind}"] = np.concatenate(parts)
        parts = [left.pop(f"blk.{layer}.ffn_{x}_exps.weight", None) for x in ("gate", "up")]
        if parts[0] is not None:
            left[f"blk.{layer}.ffn_gate_up_exps.weight"] = np.concatenate(parts, axis=1)
    return left


def latent_ups(key: str, values: np.ndarray, config: Any) -> Tensors:
    """What makes keys of latents, with rows of latents, and what makes values."""
    heads = values.reshape(config.num_attention_heads, -1, config.kv_lora_rank)
    keys, of_values = np.split(heads, [config.qk_nope_head_dim], axis=1)
    block = f"blk.{key.split('.')[2]}.attn_"
    return {f"{block}k_b.weight": keys.swapaxes(1, 2), f"{block}v_b.weight": of_values}
