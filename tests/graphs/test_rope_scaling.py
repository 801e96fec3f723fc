"""Judged by transformers' own RoPE initialisation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from edgellm.errors import ModelFormatError, UnsupportedModelError
from edgellm.graphs import rope_scaling

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize(
    "scaling",
    [None, {"rope_type": "default"}, {"rope_type": "linear", "factor": 4.0}, LLAMA3],
    ids=["none", "default", "linear", "llama3"],
)
def test_matches_transformers(scaling: dict[str, Any] | None) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    parameters = {"rope_theta": 500000.0, "rope_type": "default", **(scaling or {})}
    config = LlamaConfig(hidden_size=512, num_attention_heads=4, rope_parameters=parameters)
    judge = LlamaRotaryEmbedding(config)
    values = {"rope_theta": 500000.0, "rope_scaling": scaling}
    for found in (
        rope_scaling.from_hf(values, dim=128, origin="config.json"),
        rope_scaling.from_hf({"rope_parameters": parameters}, dim=128, origin="config.json"),
    ):
        np.testing.assert_allclose(found, judge.inv_freq.numpy(), rtol=1e-6)


def test_gguf_factors_divide() -> None:
    base = rope_scaling.base_frequencies(8, 10000.0)
    np.testing.assert_allclose(
        rope_scaling.scale_by_factors(base, [1, 2, 4, 8]) * [1, 2, 4, 8], base
    )
    with pytest.raises(ModelFormatError, match="expected 4 positive"):
        rope_scaling.scale_by_factors(base, [1, 2])


def test_unknown_scaling_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModelError, match="yarn"):
        rope_scaling.from_hf({"rope_scaling": {"type": "yarn"}}, dim=64, origin="config.json")


@pytest.mark.parametrize("scaling", [{"type": "linear"}, {"type": "linear", "factor": -1.0}])
def test_bad_factor(scaling: dict[str, Any]) -> None:
    with pytest.raises(ModelFormatError, match="factor"):
        rope_scaling.from_hf({"rope_scaling": scaling}, dim=64, origin="config.json")
