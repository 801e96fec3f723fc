"""A GGUF file of random Q4_0 weights in the shape of a known model, for timings.

    python tests/bench/random_gguf.py OUT.gguf [1b|8b|qwen3|qwen35|experts|olmoe|hybrid|lfm2]

    TinyLlama, Llama 3 8B, Qwen3-0.6B, Qwen3.5-0.8B, a quarter of the layers of Qwen3-30B-A3B,
    OLMoE 1B-7B, Granite-4.0-H-1B, LFM2-1.2B
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

    def attends(self, layer: int) -> bool:
        if self.attending:
            return layer in self.attending
        if self.mamba_heads:
            return layer % 10 == 5
        return not self.delta_heads or layer % 4 == 3


# Width of the heads of delta nets, taps of their convolution, and of those of LFM2.
DELTA_DIM, TAPS, SHORT_TAPS = 128, 4, 3
SHAPES = {
    "1b": Shape(32_000, 2048, 5632, 22, 32, 4, 64),
    "qwen3": Shape(151_936, 1024, 3072, 28, 16, 8, 128, "qwen3"),
    "qwen35": Shape(248_320, 1024, 3584, 24, 8, 2, 256, "qwen35", delta_heads=16),
    "experts": Shape(151_936, 2048, 768, 12, 32, 4, 128, "qwen3moe", experts=128, used=8),
    "olmoe": Shape(50_304, 2048, 1024, 16, 16, 16, 128, "olmoe", experts=64, used=8),
    "hybrid": Shape(100_352, 1536, 4096, 40, 12, 4, 128, "granitehybrid", mamba_heads=48),
    "lfm2": Shape(65_536, 2048, 8192, 16, 32, 8, 64, "lfm2", attending=(2, 5, 8, 10, 12, 14)),
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


def mamba_vectors(
    writer: gguf.GGUFWriter, block: str, heads: int, rng: np.random.Generator
) -> None:
    channels = heads * 64 + 256
    convolution = rng.standard_normal((channels, 4), np.float32)
    writer.add_tensor(f"{block}.ssm_conv1d.weight", convolution)
    writer.add_tensor(f"{block}.ssm_conv1d.bias", np.zeros(channels, np.float32))
    writer.add_tensor(f"{block}.ssm_dt.bias", np.full(heads, -2, np.float32))
    writer.add_tensor(f"{block}.ssm_a", -np.arange(1, heads + 1, dtype=np.float32)[:, None])
    writer.add_tensor(f"{block}.ssm_d", np.ones((heads, 1), np.float32))
    writer.add_tensor(f"{block}.ssm_norm.weight", np.ones((1, heads * 64), np.float32))


def add_settings(writer: gguf.GGUFWriter, shape: Shape, name: str) -> None:
    writer.add_name(f"random-{name}")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_0)  # OpenVINO GenAI asks for it
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.intermediate)
    if shape.experts:
        writer.add_expert_count(shape.experts)
        writer.add_expert_used_count(shape.used)
        writer.add_expert_feed_forward_length(shape.intermediate)
    writer.add_head_count(shape.heads)
    kv_heads = [shape.kv_heads * shape.attends(layer) for layer in range(shape.layers)]
    varied = shape.mamba_heads or shape.attending
    writer.add_head_count_kv(kv_heads if varied else shape.kv_heads)
    if shape.attending:
        writer.add_shortconv_l_cache(SHORT_TAPS)
    if shape.mamba_heads:
        mamba_keys(writer, shape.mamba_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_rope_dimension_count(shape.head_dim // 4 if shape.delta_heads else shape.head_dim)
    if shape.delta_heads:
        writer.add_rope_dimension_sections([11, 11, 10, 0])
        writer.add_ssm_conv_kernel(TAPS)
        writer.add_ssm_state_size(DELTA_DIM)
        writer.add_ssm_group_count(shape.delta_heads)
        writer.add_ssm_time_step_rank(shape.delta_heads)
        writer.add_ssm_inner_size(shape.delta_heads * DELTA_DIM)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(shape.vocabulary)
    tokens, types = vocabulary(shape.vocabulary)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([f"{a} {b}" for a, b in PAIRS])
    writer.add_eos_token_id(shape.vocabulary - 1)
    writer.add_bos_token_id(shape.vocabulary - 1)
    writer.add_add_bos_token(False)


def main() -> None:
    target = Path(sys.argv[1])
    name = sys.argv[2] if len(sys.argv) > 2 else "1b"
    shape = SHAPES[name]
    partial = target.with_suffix(".partial")
    writer = gguf.GGUFWriter(partial, shape.architecture)
    add_settings(writer, shape, name)
    rng = np.random.default_rng(0)

    def add(name: str, rows: int, columns: int, *, experts: int = 0) -> None:
        kind = gguf.GGMLQuantizationType.Q4_0
        data = q4_0(rng, max(experts, 1) * rows, columns)
        if experts:
            name, data = f"{name}_exps", data.reshape(experts, rows, -1)
        writer.add_tensor(f"{name}.weight", data, raw_dtype=kind)

    def ones(name: str, size: int, value: float = 1.0) -> None:
        writer.add_tensor(name, np.full(size, value, np.float32))

    # those of the hybrids are one
    tied = shape.mamba_heads or shape.delta_heads or shape.attending
    for table in ("token_embd", "output")[: 1 if tied else 2]:
        kind = gguf.GGMLQuantizationType.Q8_0
        writer.add_tensor(
            f"{table}.weight", q8_0(rng, shape.vocabulary, shape.hidden), raw_dtype=kind
        )
    for layer in range(shape.layers):
        block = f"blk.{layer}"
        ones(f"{block}.attn_norm.weight", shape.hidden)
        before_mlp = "post_attention_norm" if shape.delta_heads else "ffn_norm"
        ones(f"{block}.{before_mlp}.weight", shape.hidden)
        if shape.attends(layer):
            size, kv_size = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
            if shape.architecture.startswith(("qwen3", "olmoe", "lfm2")):
                widths = {"q": shape.head_dim, "k": shape.head_dim}
                if shape.architecture == "olmoe":
                    widths = {"q": size, "k": kv_size}
                for part, width in widths.items():
                    ones(f"{block}.attn_{part}_norm.weight", width)
            gated = 2 if shape.delta_heads else 1
            add(f"{block}.attn_q", gated * size, shape.hidden)
            add(f"{block}.attn_k", kv_size, shape.hidden)
            add(f"{block}.attn_v", kv_size, shape.hidden)
            add(f"{block}.attn_output", shape.hidden, size)
        elif shape.attending:
            add(f"{block}.shortconv.in_proj", 3 * shape.hidden, shape.hidden)
            add(f"{block}.shortconv.out_proj", shape.hidden, shape.hidden)
            conv = rng.standard_normal((shape.hidden, SHORT_TAPS), np.float32)
            writer.add_tensor(f"{block}.shortconv.conv.weight", conv)
        elif shape.mamba_heads:
            mamba_vectors(writer, block, shape.mamba_heads, rng)
            add(f"{block}.ssm_in", shape.mamba_heads * 129 + 256, shape.hidden)
            add(f"{block}.ssm_out", shape.hidden, shape.mamba_heads * 64)
        else:
            size = shape.delta_heads * DELTA_DIM
            add(f"{block}.attn_qkv", 3 * size, shape.hidden)
            add(f"{block}.attn_gate", size, shape.hidden)
            add(f"{block}.ssm_alpha", shape.delta_heads, shape.hidden)
            add(f"{block}.ssm_beta", shape.delta_heads, shape.hidden)
            add(f"{block}.ssm_out", shape.hidden, size)
            conv = rng.standard_normal((3 * size, TAPS), np.float32)
            writer.add_tensor(f"{block}.ssm_conv1d.weight", conv)
            ones(f"{block}.ssm_a", shape.delta_heads, -0.1)
            ones(f"{block}.ssm_dt.bias", shape.delta_heads)
            ones(f"{block}.ssm_norm.weight", DELTA_DIM)
        if shape.experts:
            router = rng.standard_normal((shape.experts, shape.hidden), np.float32)
            writer.add_tensor(f"{block}.ffn_gate_inp.weight", router / shape.hidden**0.5)
        add(f"{block}.ffn_gate", shape.intermediate, shape.hidden, experts=shape.experts)
        add(f"{block}.ffn_up", shape.intermediate, shape.hidden, experts=shape.experts)
        add(f"{block}.ffn_down", shape.hidden, shape.intermediate, experts=shape.experts)
    ones("token_embd_norm.weight" if shape.attending else "output_norm.weight", shape.hidden)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.replace(target)


if __name__ == "__main__":
    main()
