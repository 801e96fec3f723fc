"""Tensors of a model under canonical names: the one list for all other files.

    embedding [V, E]    final_norm [E]    head [V, E] (absent where tied to the embedding)
    layers.I.NAME, with the names of `layer_tensors`

Rows of q and k, and their biases, are in the half-split RoPE order (first halves, then second
halves of the rotated channels of a head).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from edgellm.graphs.config import ModelConfig

# Matrix of a linear layer, matrix whose rows are looked up as well, or vector (norm, bias).
Role = Literal["linear", "table", "vector"]


@dataclass(frozen=True)
class TensorSpec:
    """Name, shape and role of one tensor of a model.

    Attributes:
        shape: `[outputs, inputs]` of a matrix, `[size]` of a vector.
    """

    name: str
    shape: tuple[int, ...]
    role: Role


def layer_tensors(config: ModelConfig, layer: int) -> tuple[TensorSpec, ...]:
    """Return the tensors of a layer under their names within it, in the order of computation.

        attention_norm [E]    q [H*D, E]    k, v [Hkv*D, E]    q_norm, k_norm [D] or [H*D], [Hkv*D]
        o [E, H*D]    post_attention_norm [E]
        mlp_norm [E]    gate, up [F, E]    down [E, F]    post_mlp_norm [E]

    Biases, where the config has them, come behind their tensors: `q_bias`, `mlp_norm_bias` ...
    """
    here, e = config.layers[layer], config.hidden_size
    attention, mlp = here.attention, here.mlp
    specs: list[TensorSpec] = []

    def norm(name: str) -> None:
        specs.append(TensorSpec(name, (e,), "vector"))
        if config.norm == "layer":
            specs.append(TensorSpec(f"{name}_bias", (e,), "vector"))

    def linear(name: str, outputs: int, inputs: int, *, bias: bool) -> None:
        specs.append(TensorSpec(name, (outputs, inputs), "linear"))
        if bias:
            specs.append(TensorSpec(f"{name}_bias", (outputs,), "vector"))

    if here.norms_inputs:
        norm("attention_norm")
    widths = {"q": attention.size, "k": attention.kv_size, "v": attention.kv_size}
    for name, width in widths.items():
        linear(name, width, e, bias=attention.qkv_bias)
    if attention.qk_norm != "none":
        whole = attention.qk_norm == "width"
        for name in ("q", "k"):
            width = widths[name] if whole else attention.head_dim
            specs.append(TensorSpec(f"{name}_norm", (width,), "vector"))
    linear("o", e, attention.size, bias=attention.output_bias)
    if here.norms_outputs:
        norm("post_attention_norm")
    if here.norms_inputs:
        norm("mlp_norm")
    if mlp.gated:
        linear("gate", mlp.intermediate, e, bias=mlp.bias)
    linear("up", mlp.intermediate, e, bias=mlp.bias)
    linear("down", e, mlp.intermediate, bias=mlp.bias)
    if here.norms_outputs:
        norm("post_mlp_norm")
    return tuple(specs)


def model_tensors(config: ModelConfig) -> dict[str, TensorSpec]:
    """Map the canonical names of a model's tensors to the tensors; embedding and head come last."""
    specs = {
        f"layers.{layer}.{spec.name}": spec
        for layer in range(config.layer_count)
        for spec in layer_tensors(config, layer)
    }
    vectors = ["final_norm", "final_norm_bias"][: 2 if config.norm == "layer" else 1]
    tables = ["embedding"] if config.tied_embedding else ["embedding", "head"]
    for name in vectors:
        specs[name] = TensorSpec(name, (config.hidden_size,), "vector")
    for name in tables:
        specs[name] = TensorSpec(name, (config.vocab_size, config.hidden_size), "table")
    return specs


def linear_parameters(config: ModelConfig) -> int:
    """Count the weights of all linear layers, without embedding and head."""
    matrices = (s.shape for s in model_tensors(config).values() if s.role == "linear")
    return sum(outputs * inputs for outputs, inputs in matrices)


def parameters(config: ModelConfig) -> int:
    """Count the parameters of a model."""
    total = 0
    for spec in model_tensors(config).values():
        count = 1
        for size in spec.shape:
            count *= size
        total += count
    return total
