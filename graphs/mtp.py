"""Heads for multi-token prediction (MTP): one more layer, which predicts the token after the next.

Its tensors have a list of their own beside the model's:

    embedding_norm, hidden_norm [E]    combine [E, 2E]    layers.0.NAME    final_norm [E]

A row of its layer is made of the embedding of a token and of the model's hidden state, behind the
final norm, at the token before: each goes through its norm, and `combine` takes both, the embedding
first. The head's own final norm and the model's LM head come behind the layer (arXiv:2412.19437,
section 2.2; Qwen3.5 and Qwen3-Next have one such head).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from edgellm.graphs.architecture import Fused, Names, PerExpert
from edgellm.graphs.config import ModelConfig
from edgellm.graphs.tensor import Tensor
from edgellm.graphs.tensors import TensorSpec, layer_tensors
from edgellm.graphs.translation import Translation

HF_COMBINE = "mtp.fc.weight"
# Tables of a head's own in place of the model's; such a head is left out.
HF_TABLES = ("mtp.embed_tokens.weight", "mtp.lm_head.weight")
GGUF_TABLES = ("nextn.embed_tokens.weight", "nextn.shared_head_head.weight")
_NORMS = ("embedding_norm", "hidden_norm", "final_norm")


def mtp_config(config: ModelConfig) -> ModelConfig:
    """Return the config of the one layer of a model's head, which is like its others that attend.

    Args:
        config: config of the model.
    """
    attending = next(iter(config.attentions))
    return replace(config, layers=(config.layers[attending],))


def mtp_tensors(config: ModelConfig) -> dict[str, TensorSpec]:
    """Map the names of the tensors of a model's head to the tensors.

    Args:
        config: config of the model.
    """
    e, here = config.hidden_size, mtp_config(config)
    specs = {name: TensorSpec(name, (e,), "vector") for name in _NORMS}
    specs["combine"] = TensorSpec("combine", (e, 2 * e), "linear")
    layer = {f"layers.0.{spec.name}": spec for spec in layer_tensors(here, 0)}
    return specs | layer


def hf_names(names: Names) -> Names:
    """Return the names of a head's tensors in a Hugging Face folder.

    Args:
        names: names of the model's tensors.
    """
    return {
        **_renamed(names, lambda name: name.replace("model.layers.", "mtp.layers.")),
        "embedding_norm": "mtp.pre_fc_norm_embedding.weight",
        "hidden_norm": "mtp.pre_fc_norm_hidden.weight",
        "combine": HF_COMBINE,
        "final_norm": "mtp.norm.weight",
    }


def gguf_names(names: Names, block: int, *, own_norm: bool) -> Names:
    """Return the names of a head's tensors in a GGUF file.

    Args:
        names: names of the model's tensors.
        block: number of the head's block, behind those of the model.
        own_norm: whether the file has a final norm of the head's own; else it is the model's.
    """
    nextn = f"blk.{block}.nextn."
    norm = {"final_norm": f"{nextn}shared_head_norm.weight"} if own_norm else {}
    return {
        **_renamed(names, lambda name: name.replace("blk.{}", f"blk.{block}")),
        "embedding_norm": f"{nextn}enorm.weight",
        "hidden_norm": f"{nextn}hnorm.weight",
        "combine": f"{nextn}eh_proj.weight",
        **norm,
    }


def _renamed(names: Names, rename: Callable[[str], str]) -> Names:
    def renamed(name: str | Fused | PerExpert) -> str | Fused | PerExpert:
        return rename(name) if isinstance(name, str) else replace(name, name=rename(name.name))

    return {part: renamed(name) for part, name in names.items()}


@dataclass
class MtpCheckpoint:
    """The head of a model on disk; see `Checkpoint`."""

    path: Path
    config: ModelConfig
    metadata: Mapping[str, Any]
    translation: Translation
    mtp: None = None

    def tensor(self, name: str) -> Tensor:
        """Return the tensor of a name of `mtp_tensors`."""
        return self.translation.tensor(name)
