"""Mistral 7B: Llama's tensors, with a sliding window in v0.1. (Its GGUF files say `llama`.)"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from edgellm.graphs.config import Fields, ModelConfig
from edgellm.graphs.models import llama

HF_TENSORS = llama.HF_TENSORS


def config_from_hf(values: Mapping[str, Any], *, origin: str) -> ModelConfig:
    window = Fields(values, origin=origin).optional(int, "sliding_window")
    return replace(llama.config_from_hf(values, origin=origin), sliding_window=window)
