"""Translation of a file's tensors to those of `tensors.py`: names, fused rows, RoPE's pairs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from edgellm.errors import ModelFormatError
from edgellm.graphs.architecture import Fused, Names
from edgellm.graphs.config import ModelConfig
from edgellm.graphs.tensor import Tensor, half_split_order, rows_of_tensor
from edgellm.graphs.tensors import layer_tensors, model_tensors

# Tensors with rows in the order of RoPE's pairs: Q and K, their biases and norms.
_ROTATED = ("q", "k", "q_bias", "k_bias", "q_norm", "k_norm")


@dataclass(frozen=True)
class Translation:
    """Translation of the tensors of a model file to those of `tensors.py`.

    Attributes:
        names: names of the tensors in the file.
        interleaved: whether RoPE turns neighbouring channels in the file.
        stored: reads a tensor by its name in the file.
        fold: last change of each tensor, given with its canonical name.
    """

    config: ModelConfig
    names: Names
    interleaved: bool
    stored: Callable[[str], Tensor]
    fold: Callable[[str, Tensor], Tensor]

    def tensor(self, canonical: str) -> Tensor:
        """Return the tensor of a canonical name.

        Raises:
            ModelFormatError: the file lacks the tensor, or it does not fit the config.
        """
        name = file_name(canonical, self.names)
        tensor = self._part(canonical, name) if isinstance(name, Fused) else self.stored(name)
        if self.interleaved and canonical.split(".")[-1] in _ROTATED:
            rows = tensor.shape[0] if tensor.shape else 0
            layer = int(canonical.split(".")[1])
            heads = max(rows // self.config.layers[layer].attention.head_dim, 1)
            order = half_split_order(rows, heads, 2 * len(self.config.rope_of(layer).inv_freq))
            tensor = rows_of_tensor(tensor, order)
        return self.fold(canonical, tensor)

    def file_names(self) -> set[str]:
        """Return the names of the file's tensors that the model is made of."""
        names = (file_name(canonical, self.names) for canonical in model_tensors(self.config))
        return {name.name if isinstance(name, Fused) else name for name in names}

    def _part(self, canonical: str, fused: Fused) -> Tensor:
        _, layer, part = canonical.split(".")
        rows = {spec.name: spec.shape[0] for spec in layer_tensors(self.config, int(layer))}
        counts = [rows[name] for name in fused.parts]
        tensor = self.stored(fused.name)
        if not tensor.shape or tensor.shape[0] != sum(counts):
            raise ModelFormatError(
                f"tensor {fused.name} has shape {list(tensor.shape)}, but the config asks for "
                f"{sum(counts)} rows"
            )
        index = fused.parts.index(part.removesuffix("_bias"))
        first = sum(counts[:index])
        return rows_of_tensor(tensor, slice(first, first + counts[index]))


def file_name(canonical: str, names: Names) -> str | Fused:
    """Return the file's name of a tensor: `layers.3.q` -> `blk.3.attn_q.weight`."""
    if not canonical.startswith("layers."):
        return names[canonical]
    _, layer, part = canonical.split(".")
    name = names[part]
    if isinstance(name, Fused):
        return replace(name, name=name.name.format(layer))
    return name.format(layer)


def with_values(
    tensor: Tensor, change: Callable[[NDArray[np.float32]], NDArray[np.float32]]
) -> Tensor:
    """Return the tensor with changed values, which is no longer available as codes."""
    return replace(tensor, float32=lambda: change(tensor.float32()), quantized=None)
