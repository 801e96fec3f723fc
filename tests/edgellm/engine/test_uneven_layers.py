"""A model whose layers differ in window, number of heads and width of the MLP; HF is the judge."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer

from edgellm.engine.one_sequence import compute_prompt, compute_tokens
from edgellm.export import exporter
from edgellm.graphs.config import ModelConfig
from edgellm.graphs.layer_config import Attention, LayerConfig, Mlp, Rope
from edgellm.graphs.tensor import Tensor
from edgellm.llm import LLM, load

WINDOW, HEAD_DIM, HIDDEN = 40, 32, 128
# Heads, KV heads, width of the MLP and window of each layer.
LAYERS = [(4, 2, 160, None), (2, 2, 96, WINDOW), (8, 2, 256, None), (6, 3, 64, WINDOW)]
TOKENS = np.random.default_rng(0).integers(0, 320, 300).tolist()

ROPE = Rope(inv_freq=tuple((10000.0 ** (-np.arange(HEAD_DIM // 2) / (HEAD_DIM // 2))).tolist()))
CONFIG = ModelConfig(
    model_type="qwen2",
    vocab_size=320,
    hidden_size=HIDDEN,
    layers=tuple(
        LayerConfig(
            mixer=Attention(
                heads=heads, kv_heads=kv_heads, head_dim=HEAD_DIM, window=window, qkv_bias=True
            ),
            mlp=Mlp(intermediate=width),
        )
        for heads, kv_heads, width, window in LAYERS
    ),
    ropes=(ROPE,),
    norm_eps=1e-6,
    context_length=1024,
    tied_embedding=False,
)


def hf_model() -> Qwen2ForCausalLM:
    """Every norm, bias and weight is drawn, so that each of them shows."""

    def config(heads: int, kv_heads: int, width: int) -> Qwen2Config:
        return Qwen2Config(
            vocab_size=320,
            hidden_size=HIDDEN,
            intermediate_size=width,
            num_hidden_layers=len(LAYERS),
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=HEAD_DIM,
            max_position_embeddings=1024,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            rms_norm_eps=1e-6,
            tie_word_embeddings=False,
            use_sliding_window=True,
            sliding_window=WINDOW,
            layer_types=[
                "full_attention" if window is None else "sliding_attention" for *_, window in LAYERS
            ],
            attn_implementation="eager",
        )

    torch.manual_seed(0)
    model = Qwen2ForCausalLM(config(*LAYERS[0][:3])).eval()
    for index, (heads, kv_heads, width, _) in enumerate(LAYERS):
        own = config(heads, kv_heads, width)
        own._attn_implementation = "eager"
        model.model.layers[index] = Qwen2DecoderLayer(own, index)
    for name, parameter in model.named_parameters():
        with torch.no_grad():
            if name.endswith("norm.weight"):
                parameter.copy_(1 + 0.2 * torch.randn_like(parameter))
            elif name.endswith(".bias"):
                parameter.copy_(0.3 * torch.randn_like(parameter))
            else:
                fan_in = 1.0 if "embed" in name else parameter.shape[1] ** 0.5
                parameter.copy_(torch.randn_like(parameter) / fan_in)
    return model.eval()


_PARTS = {
    "attention_norm": "input_layernorm.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    **{part: f"self_attn.{part}_proj.weight" for part in "qkvo"},
    **{f"{part}_bias": f"self_attn.{part}_proj.bias" for part in "qkv"},
    **{part: f"mlp.{part}_proj.weight" for part in ("gate", "up", "down")},
}
_TOP = {"embedding": "model.embed_tokens.weight", "final_norm": "model.norm.weight"}


@dataclass(frozen=True)
class HFCheckpoint:
    """The weights of a model of transformers, under edgellm's names."""

    weights: Mapping[str, torch.Tensor]
    path: Path
    config: ModelConfig = CONFIG
    metadata: Mapping[str, Any] = field(default_factory=dict)
    mtp: None = None

    def tensor(self, name: str) -> Tensor:
        if name.startswith("layers."):
            _, layer, part = name.split(".")
            theirs = f"model.layers.{layer}.{_PARTS[part]}"
        else:
            theirs = _TOP.get(name, "lm_head.weight")
        values = self.weights[theirs].detach().numpy()
        return Tensor(values.shape, "F32", lambda: values)


@pytest.fixture(scope="module")
def uneven(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> tuple[Path, np.ndarray]:
    """A bundle, and HF's logits after each of `TOKENS`."""
    model, out = hf_model(), tmp_path_factory.mktemp("uneven") / "bundle"
    with pytest.MonkeyPatch.context() as patch:
        checkpoint = HFCheckpoint(model.state_dict(), tiny_model)
        patch.setattr(exporter, "open_checkpoint", lambda _: checkpoint)
        exporter.export(
            tiny_model, out, name="m", source="m", precisions=("packed", "f32", "w8a8", "int4"),
            chunk_sizes=(32, 128),
        )  # fmt: skip
    with torch.no_grad():
        logits = model(torch.tensor([TOKENS])).logits[0].numpy()
    return out, logits


def found(llm: LLM) -> np.ndarray:
    """Logits after the last tokens: some come with a chunk, the others one by one."""
    sequence = llm.engine.cache.sequence()

    def compute() -> np.ndarray:
        rows = [compute_prompt(llm.engine.prefill, TOKENS[:-8], sequence)]
        rows += [compute_tokens(llm.engine.decoder, [t], sequence)[0] for t in TOKENS[-8:]]
        return np.stack(rows)

    return llm.engine.thread.call(compute)


@pytest.mark.parametrize(
    ("options", "most"),
    [
        ({"prefill": "cpu", "decode": "reference", "precision": "f32", "kv_format": "f32"}, 1e-4),
        ({"prefill": "cpu", "decode": "portable", "precision": "f32"}, 0.05),
        ({"prefill": "native", "decode": "native", "kv_format": "f32"}, 0.05),
        ({"prefill": "native", "decode": "native", "kv_format": "int8"}, 0.05),
        ({"prefill": "cpu", "decode": "native", "precision": "w8a8"}, 0.05),
    ],
    ids=str,
)
def test_back_ends_are_near_hf(
    uneven: tuple[Path, np.ndarray], options: dict[str, Any], most: float
) -> None:
    path, expected = uneven
    with load(str(path), ctx_size=512, **options) as llm:
        error = np.abs(found(llm) - expected[-9:]).mean() / expected[-9:].std()
    assert error < most


def test_what_was_computed_is_found_again(uneven: tuple[Path, np.ndarray], tmp_path: Path) -> None:
    """By another prompt, behind a rewind, in a fork, from a file: blocks of all kinds of layers."""
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
    with load(str(uneven[0]), ctx_size=512) as llm:
        expected = llm.generate(TOKENS, **options).tokens
        again = llm.generate(TOKENS, **options)
        assert (again.tokens, again.stats.cached_tokens) == (expected, len(TOKENS) - 1)
        session = llm.session()
        session.append(TOKENS)
        assert session.generate(**options).tokens == expected
        session.save(tmp_path / "session")
        session.rewind(len(TOKENS))
        assert session.fork().generate(**options).tokens == expected
        session.close()
    with load(str(uneven[0]), ctx_size=512) as llm:
        session = llm.load_session(tmp_path / "session")
        assert session.cached > len(TOKENS)
        session.rewind(len(TOKENS))
        assert session.generate(**options).tokens == expected


@pytest.mark.triton
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_triton_goes_on_from_what_the_host_computed(
    uneven: tuple[Path, np.ndarray], triton_device: str
) -> None:
    path, expected = uneven
    with load(str(path), ctx_size=512, prefill="native", decode="triton") as llm:
        error = np.abs(found(llm) - expected[-9:]).mean() / expected[-9:].std()
    assert error < 0.05
