"""Adapters (LoRA, Hu et al., arXiv:2106.09685): changes of low rank of linear layers.

Rows of one step may have different adapters, or none, as in Punica (Chen et al., arXiv:2310.18547).
"""

from edgellm.kernels.lora.weights import (
    CHANGED,
    AdapterWeights,
    LowRank,
    pack_adapter,
    packed_bytes,
)

__all__ = ["CHANGED", "AdapterWeights", "LowRank", "pack_adapter", "packed_bytes"]
