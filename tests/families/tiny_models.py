"""Tiny random models of all families, as transformers makes and saves them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tiny_families import FAMILIES

_SMALL: Mapping[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def make(name: str, folder: Path, **changes: Any) -> Any:
    """A model of a family, saved into a folder: no norm, bias or gate is what it was made with."""
    import torch
    import transformers

    kind, values = FAMILIES[name]
    values = {**_SMALL, **values, **changes}
    if values.get("hidden_size_per_layer_input") is not None:
        values.setdefault("vocab_size_per_layer_input", values["vocab_size"])
    config = getattr(transformers, f"{kind}Config")(**values)
    torch.manual_seed(0)
    text = kind.removesuffix("Text")
    model = getattr(transformers, f"{text}ForCausalLM")(config).eval()
    perturb(model)
    model.save_pretrained(folder)
    return model


def perturb(model: Any) -> None:
    """Give all parameters of a model random values, and all its norms, biases and gates others."""
    import torch

    with torch.no_grad():
        choices = (
            each
            for each in model.named_buffers()
            if each[0].endswith(("_correction_bias", "expert_bias"))
        )
        for key, weight in (*model.named_parameters(), *choices):
            if weight.ndim == 1 or key.endswith("_bias"):
                # as far as the clamp of gpt-oss
                weight += (2 if "gate_up" in key else 0.3) * torch.randn_like(weight)
            else:
                spread = 0.5 if "embed" in key else 1.2 / weight.shape[-1] ** 0.5
                if "modality_router" in key:  # what it reads is divided by the width
                    spread *= weight.shape[-1]
                if key.endswith("_coefs.weight"):  # or streams grow from layer to layer
                    spread *= 0.3
                weight.copy_(spread * torch.randn_like(weight))
        for key, scale in model.named_buffers():
            if key.endswith("layer_scalar"):
                scale += 0.3 * torch.randn_like(scale)


def save_tokenizer(folder: Path) -> None:
    """A tokenizer of bytes and three special tokens beside a model."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>", "<|user|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "bos_token": "<s>",
                "eos_token": {"content": "</s>"},
                "chat_template": "{% for m in messages %}<|user|>{{ m.content }}{% endfor %}",
            }
        )
    )


def logits(model: Any, tokens: list[int]) -> Any:
    """What transformers makes of a text, `[n, V]` float64."""
    import torch

    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0].double().numpy()
