"""A GGUF file of random Q4_0 weights in the shape of a known model, for timings.

    python tests/bench/random_gguf.py OUT.gguf [1b|8b|qwen3|...]

    1b, 8b, qwen3, qwen35, experts, olmoe, hybrid, lfm2, latents: TinyLlama, Llama 3 8B,
    Qwen3-0.6B, Qwen3.5-0.8B, a quarter of the layers of Qwen3-30B-A3B,
    OLMoE 1B-7B, Granite-4.0-H-1B, LFM2-1.2B, a sixth of the layers of GLM-4.7-Flash
    python tests/bench/peers.py --model OUT.gguf

Its tokens are bytes and numbered words: it is made to be fast or slow, not to be read.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np

CONTEXT = 8192
# The merges that a byte-pair vocabulary must have some of.
PAIRS = [("t", "h"), ("h", "e"), ("i", "n"), ("e", "r"), ("a", "n"), ("r", "e")]
CHAT = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@dataclass(frozen=True)
class Shape:
    vocabulary: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    architecture: str = "llama"
    experts: int = 0
    used: int = 0
    mamba_heads: int = 0  # of 64 channels with 128 numbers, in nine of ten layers
    delta_heads: int = 0  # of key and of value in three of four layers
    attending: tuple[int, ...] = ()  # layers; the others have short convolutions
    dense: int = 0  # intermediate size of a first layer without experts; the others share one more
    latent: int = 0  # rank of K and V; of a key, HEAD_TURNED numbers are beside it
    query_rank: int = 0

    def attends(self, layer: int) -> bool:
        if self.attending:
            return layer in self.attending
        if self.mamba_heads:
            return layer % 10 == 5
        return not self.delta_heads or layer % 4 == 3


# Width of the heads of delta nets, taps of their convolution, and of those of LFM2.
DELTA_DIM, TAPS, SHORT_TAPS = 128, 4, 3
HEAD_TURNED = 64
SHAPES = {
    "1b": Shape(32_000, 2048, 5632, 22, 32, 4, 64),
    "qwen3": Shape(151_936, 1024, 3072, 28, 16, 8, 128, "qwen3"),
    "qwen35": Shape(248_320, 1024, 3584, 24, 8, 2, 256, "qwen35", delta_heads=16),
    "experts": Shape(151_936, 2048, 768, 12, 32, 4, 128, "qwen3moe", experts=128, used=8),
    "olmoe": Shape(50_304, 2048, 1024, 16, 16, 16, 128, "olmoe", experts=64, used=8),
    "hybrid": Shape(100_352, 1536, 4096, 40, 12, 4, 128, "granitehybrid", mamba_heads=48),
    "lfm2": Shape(65_536, 2048, 8192, 16, 32, 8, 64, "lfm2", attending=(2, 5, 8, 10, 12, 14)),
    "latents": Shape(
        *(154_880, 2048, 1536, 8, 20, 1, 256, "deepseek2", 64, 4),
        dense=10_240,
        latent=512,
        query_rank=768,
    ),
    "8b": Shape(128_256, 4096, 14336, 32, 32, 8, 128),
}


def q4_0(rng: np.random.Generator, rows: int, columns: int) -> np.ndarray:
    """Random Q4_0 blocks `[rows, columns / 32 * 18]`: a half-precision scale and 16 bytes each."""
    blocks = np.empty((rows, columns // 32, 18), np.uint8)
    blocks[..., 2:] = rng.integers(0, 256, (rows, columns // 32, 16), dtype=np.uint8)
    # Codes are -0.5 on average: with scales of one sign all rows would choose the same experts.
    scale = np.where(rng.integers(0, 2, (rows, columns // 32)), 0.2, -0.2) / np.sqrt(columns)
    scale = scale.astype(np.float16)
    blocks[..., :2] = scale.view(np.uint8).reshape(*scale.shape, 2)
    return blocks.reshape(rows, -1)


def q8_0(rng: np.random.Generator, rows: int, columns: int) -> np.ndarray:
    """Random Q8_0 blocks `[rows, columns / 32 * 34]`."""
    blocks = np.empty((rows, columns // 32, 34), np.uint8)
    codes = rng.integers(-127, 128, (rows, columns // 32, 32), dtype=np.int8)
    blocks[..., 2:] = codes.view(np.uint8)
    scale = np.full((rows, columns // 32), 0.02 / 127, np.float16)
    blocks[..., :2] = scale.view(np.uint8).reshape(*scale.shape, 2)
    return blocks.reshape(rows, -1)


def vocabulary(size: int) -> tuple[list[str], list[int]]:
    """GPT-2 tokens: its 256 byte characters, then words; all normal but the end of text."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    characters = [chr(b) for b in printable] + [chr(256 + i) for i in range(len(others))]
    words = [f"w{i}" for i in range(size - 257 - len(PAIRS))]
    tokens = [*characters, *(a + b for a, b in PAIRS), *words, "<|end|>"]
    return tokens, [gguf.TokenType.NORMAL] * (size - 1) + [gguf.TokenType.CONTROL]


def mamba_keys(writer: gguf.GGUFWriter, heads: int) -> None:
    writer.add_ssm_conv_kernel(4)
    writer.add_ssm_state_size(128)
    writer.add_ssm_group_count(1)
    writer.add_ssm_inner_size(heads * 64)
    writer.add_ssm_time_step_rank(heads)
    writer.add_rope_scaling_finetuned(False)


def delta_keys(writer: gguf.GGUFWriter, heads: int) -> None:
    writer.add_rope_dimension_sections([11, 11, 10, 0])
    writer.add_ssm_conv_kernel(TAPS)
    writer.add_ssm_state_size(DELTA_DIM)
    writer.add_ssm_group_count(heads)
    writer.add_ssm_time_step_rank(heads)
    writer.add_ssm_inner_size(heads * DELTA_DIM)


def expert_keys(writer: gguf.GGUFWriter, shape: Shape) -> None:
    writer.add_expert_count(shape.experts)
    writer.add_expert_used_count(shape.used)
    writer.add_expert_feed_forward_length(shape.intermediate)
    if shape.dense:
        writer.add_leading_dense_block_count(1)
        writer.add_expert_shared_count(1)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_expert_weights_norm(True)
        writer.add_expert_weights_scale(1.8)


def attention_keys(writer: gguf.GGUFWriter, shape: Shape) -> None:
    writer.add_head_count(shape.heads)
    kv_heads = [shape.kv_heads * shape.attends(layer) for layer in range(shape.layers)]
    varied = shape.mamba_heads or shape.attending
    writer.add_head_count_kv(kv_heads if varied else shape.kv_heads)
    writer.add_rope_freq_base(10000.0)
    if shape.latent:
        writer.add_q_lora_rank(shape.query_rank)
        writer.add_kv_lora_rank(shape.latent)
        writer.add_key_length(shape.latent + HEAD_TURNED)
        writer.add_value_length(shape.latent)
        writer.add_key_length_mla(shape.head_dim)
        writer.add_value_length_mla(shape.head_dim)
        writer.add_rope_dimension_count(HEAD_TURNED)
        return
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_rope_dimension_count(shape.head_dim // 4 if shape.delta_heads else shape.head_dim)


def tokenizer_keys(writer: gguf.GGUFWriter, size: int) -> None:
    tokens, types = vocabulary(size)
    writer.add_vocab_size(size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([f"{a} {b}" for a, b in PAIRS])
    writer.add_eos_token_id(size - 1)
    writer.add_bos_token_id(size - 1)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT)


def add_settings(writer: gguf.GGUFWriter, shape: Shape, name: str) -> None:
    writer.add_name(f"random-{name}")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_0)  # OpenVINO GenAI asks for it
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.dense or shape.intermediate)
    writer.add_layer_norm_rms_eps(1e-5)
    attention_keys(writer, shape)
    if shape.experts:
        expert_keys(writer, shape)
    if shape.attending:
        writer.add_shortconv_l_cache(SHORT_TAPS)
    if shape.mamba_heads:
        mamba_keys(writer, shape.mamba_heads)
    if shape.delta_heads:
        delta_keys(writer, shape.delta_heads)
    tokenizer_keys(writer, shape.vocabulary)


@dataclass(frozen=True)
class Tensors:
    """Random tensors of a model, written one after the other."""

    writer: gguf.GGUFWriter
    shape: Shape
    rng: np.random.Generator

    def product(self, name: str, rows: int, columns: int, *, stack: int = 1) -> None:
        """Add weights of a product, or a stack of such."""
        kind = gguf.GGMLQuantizationType.Q4_0
        data = q4_0(self.rng, stack * rows, columns)
        if stack > 1:
            data = data.reshape(stack, rows, -1)
        self.writer.add_tensor(f"{name}.weight", data, raw_dtype=kind)

    def ones(self, name: str, size: int, value: float = 1.0) -> None:
        self.writer.add_tensor(name, np.full(size, value, np.float32))

    def normal(self, name: str, *size: int, scale: float = 1.0) -> None:
        values = scale * self.rng.standard_normal(size, np.float32)
        self.writer.add_tensor(name, values.astype(np.float32))

    def model(self) -> None:
        shape = self.shape
        # the tables of models with states are one
        tied = shape.mamba_heads or shape.delta_heads or shape.attending
        for table in ("token_embd", "output")[: 1 if tied else 2]:
            data = q8_0(self.rng, shape.vocabulary, shape.hidden)
            kind = gguf.GGMLQuantizationType.Q8_0
            self.writer.add_tensor(f"{table}.weight", data, raw_dtype=kind)
        for layer in range(shape.layers):
            block = f"blk.{layer}"
            self.ones(f"{block}.attn_norm.weight", shape.hidden)
            before_mlp = "post_attention_norm" if shape.delta_heads else "ffn_norm"
            self.ones(f"{block}.{before_mlp}.weight", shape.hidden)
            self.mixer(block, attends=shape.attends(layer))
            self.mlp(block, dense=layer == 0 and shape.dense > 0)
        norm = "token_embd_norm.weight" if shape.attending else "output_norm.weight"
        self.ones(norm, shape.hidden)

    def mixer(self, block: str, *, attends: bool) -> None:
        shape = self.shape
        if shape.latent:
            self.latents(block)
        elif attends:
            self.attention(block)
        elif shape.attending:
            self.product(f"{block}.shortconv.in_proj", 3 * shape.hidden, shape.hidden)
            self.product(f"{block}.shortconv.out_proj", shape.hidden, shape.hidden)
            self.normal(f"{block}.shortconv.conv.weight", shape.hidden, SHORT_TAPS)
        elif shape.mamba_heads:
            self.mamba(block)
        else:
            self.delta_net(block)

    def attention(self, block: str) -> None:
        shape = self.shape
        size, kv_size = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        if shape.architecture.startswith(("qwen3", "olmoe", "lfm2")):
            whole = shape.architecture == "olmoe"
            self.ones(f"{block}.attn_q_norm.weight", size if whole else shape.head_dim)
            self.ones(f"{block}.attn_k_norm.weight", kv_size if whole else shape.head_dim)
        gated = 2 if shape.delta_heads else 1
        self.product(f"{block}.attn_q", gated * size, shape.hidden)
        self.product(f"{block}.attn_k", kv_size, shape.hidden)
        self.product(f"{block}.attn_v", kv_size, shape.hidden)
        self.product(f"{block}.attn_output", shape.hidden, size)

    def latents(self, block: str) -> None:
        shape, heads = self.shape, self.shape.heads
        self.product(f"{block}.attn_q_a", shape.query_rank, shape.hidden)
        self.ones(f"{block}.attn_q_a_norm.weight", shape.query_rank)
        self.product(f"{block}.attn_q_b", heads * shape.head_dim, shape.query_rank)
        self.product(f"{block}.attn_kv_a_mqa", shape.latent + HEAD_TURNED, shape.hidden)
        self.ones(f"{block}.attn_kv_a_norm.weight", shape.latent)
        straight = shape.head_dim - HEAD_TURNED
        self.product(f"{block}.attn_k_b", shape.latent, straight, stack=heads)
        self.product(f"{block}.attn_v_b", shape.head_dim, shape.latent, stack=heads)
        self.product(f"{block}.attn_output", shape.hidden, heads * shape.head_dim)

    def mamba(self, block: str) -> None:
        heads, hidden = self.shape.mamba_heads, self.shape.hidden
        channels = heads * 64 + 256
        self.normal(f"{block}.ssm_conv1d.weight", channels, 4)
        self.ones(f"{block}.ssm_conv1d.bias", channels, 0)
        self.ones(f"{block}.ssm_dt.bias", heads, -2)
        decay = -np.arange(1, heads + 1, dtype=np.float32)[:, None]
        self.writer.add_tensor(f"{block}.ssm_a", decay)
        self.writer.add_tensor(f"{block}.ssm_d", np.ones((heads, 1), np.float32))
        self.writer.add_tensor(f"{block}.ssm_norm.weight", np.ones((1, heads * 64), np.float32))
        self.product(f"{block}.ssm_in", heads * 129 + 256, hidden)
        self.product(f"{block}.ssm_out", hidden, heads * 64)

    def delta_net(self, block: str) -> None:
        heads, hidden = self.shape.delta_heads, self.shape.hidden
        size = heads * DELTA_DIM
        self.product(f"{block}.attn_qkv", 3 * size, hidden)
        self.product(f"{block}.attn_gate", size, hidden)
        self.product(f"{block}.ssm_alpha", heads, hidden)
        self.product(f"{block}.ssm_beta", heads, hidden)
        self.product(f"{block}.ssm_out", hidden, size)
        self.normal(f"{block}.ssm_conv1d.weight", 3 * size, TAPS)
        self.ones(f"{block}.ssm_a", heads, -0.1)
        self.ones(f"{block}.ssm_dt.bias", heads)
        self.ones(f"{block}.ssm_norm.weight", DELTA_DIM)

    def mlp(self, block: str, *, dense: bool) -> None:
        shape = self.shape
        if dense or not shape.experts:
            self.gated(block, "", shape.dense or shape.intermediate)
            return
        router = f"{block}.ffn_gate_inp.weight"
        self.normal(router, shape.experts, shape.hidden, scale=shape.hidden**-0.5)
        self.gated(block, "_exps", shape.intermediate, stack=shape.experts)
        if shape.dense:
            self.ones(f"{block}.exp_probs_b.bias", shape.experts, 0)
            self.gated(block, "_shexp", shape.intermediate)

    def gated(self, block: str, suffix: str, intermediate: int, *, stack: int = 1) -> None:
        hidden = self.shape.hidden
        self.product(f"{block}.ffn_gate{suffix}", intermediate, hidden, stack=stack)
        self.product(f"{block}.ffn_up{suffix}", intermediate, hidden, stack=stack)
        self.product(f"{block}.ffn_down{suffix}", hidden, intermediate, stack=stack)


def main() -> None:
    target = Path(sys.argv[1])
    name = sys.argv[2] if len(sys.argv) > 2 else "1b"
    shape = SHAPES[name]
    partial = target.with_suffix(".partial")
    writer = gguf.GGUFWriter(partial, shape.architecture)
    add_settings(writer, shape, name)
    Tensors(writer, shape, np.random.default_rng(0)).model()
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.replace(target)


if __name__ == "__main__":
    main()
