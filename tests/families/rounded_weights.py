"""Models whose matrices are numbers that 8 bits hold, and what the native kernels make of them."""

from __future__ import annotations

from typing import Any

import numpy as np

from edgellm.engine.one_sequence import Hooks, compute_prompt, compute_tokens
from edgellm.kernels.quantized import dequantize
from edgellm.llm import LLM
from edgellm.quantize.weights import quantize_groups

# Parts of models of transformers that stay in float32.
_EXACT = (
    *(".gate.weight", ".router.weight", ".conv.conv.weight", ".conv1d.weight", "_bias"),
    *("_coefs.weight", ".modality_router.weight"),
)


def round_weights(model: Any) -> None:
    """Round all matrices but the exact ones to numbers that int8 groups hold."""
    import torch

    columns_first = model.config.model_type == "gpt_oss"
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if weight.ndim > 1 and not key.endswith(_EXACT):
                turned = weight
                if columns_first and ".experts." in key:
                    turned = weight.swapaxes(1, 2)
                rows = turned.numpy().reshape(-1, turned.shape[-1])
                turned.copy_(torch.tensor(dequantize(quantize_groups(rows)).reshape(turned.shape)))


def found(llm: LLM, tokens: list[int], length: int) -> np.ndarray:
    """The logits after a prompt, and after each token behind it."""
    engine, sequence = llm.engine, llm.engine.cache.sequence()

    def compute() -> np.ndarray:
        rows = [compute_prompt(engine.prefill, tokens[:length], sequence, Hooks())]
        rows += [compute_tokens(engine.decoder, [t], sequence)[0] for t in tokens[length:]]
        sequence.close()
        return np.stack(rows)

    return engine.thread.call(compute)
