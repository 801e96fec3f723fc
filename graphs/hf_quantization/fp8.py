"""Weights of 8-bit floats (E4M3) with scales for the whole weight, for each output or for blocks.

    MODULE.weight [N, K]    MODULE.weight_scale_inv, or MODULE.weight_scale

Codes are multiplied by either, despite the name `weight_scale_inv`. Blocks at the edges may be cut
off.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgellm.errors import ModelFormatError
from edgellm.graphs.fields import Fields
from edgellm.graphs.hf_quantization.groups import read_powers_of_two, read_scales
from edgellm.graphs.safetensors_folder import FLOATS, SafetensorsFolder
from edgellm.graphs.tensor import Tensor

DTYPE = "F8_E4M3"


class Reader:
    def __init__(
        self, values: Mapping[str, Any], folder: SafetensorsFolder, *, origin: str
    ) -> None:
        self._block = read_block(values, "weight_block_size", origin=origin)
        self._folder = folder

    def tensor(self, module: str) -> Tensor | None:
        weight, scale = f"{module}.weight", f"{module}.weight_scale_inv"
        if weight not in self._folder or self._folder.entry(weight).dtype != DTYPE:
            return None
        if scale not in self._folder:
            scale = f"{module}.weight_scale"
        return fp8_tensor(self._folder, weight, scale, block=self._block)


def read_block(values: Mapping[str, Any], key: str, *, origin: str) -> tuple[int, int] | None:
    """Read the numbers of outputs and inputs in a block; None where there are no blocks."""
    block = Fields(values, origin=origin).optional(list, key)
    if block is None:
        return None
    if len(block) != 2 or not all(type(size) is int and size > 0 for size in block):
        raise ModelFormatError(f"{origin}: {key} is {block}; expected two numbers above 0")
    return block[0], block[1]


def fp8_tensor(
    folder: SafetensorsFolder, weight: str, scale: str, *, block: tuple[int, int] | None
) -> Tensor:
    """Return a weight of 8-bit floats; no kind holds such codes, so `quantized` is None.

    Args:
        weight, scale: names of the tensors.
        block: outputs and inputs of a block; None: one scale for the weight, or for each output.

    Raises:
        ModelFormatError: the scales are missing or have another shape.
    """
    rows, columns = folder.expect(weight, (DTYPE,), shape=(None, None)).shape
    entry = folder.expect(scale, (*FLOATS, "F8_E8M0", "U8"))
    power = entry.dtype in ("F8_E8M0", "U8")
    sizes = _sizes(entry.shape, (rows, columns), block)
    if sizes is None:
        raise ModelFormatError(
            f"{entry.file}: tensor {scale} has shape {list(entry.shape)}, which is neither a scale "
            f"for {weight} {[rows, columns]}, nor one for each of its outputs"
            + (f", nor one for each block of {list(block)}" if block else "")
        )

    def float32() -> NDArray[np.float32]:
        scales = read_powers_of_two(folder, scale) if power else read_scales(folder, scale)
        by_block = scales.reshape(-(-rows // sizes[0]), -(-columns // sizes[1]))
        values = folder.read(weight).astype(np.float32)
        values *= np.repeat(by_block, sizes[0], axis=0)[:rows].repeat(sizes[1], axis=1)[:, :columns]
        return values

    return Tensor((rows, columns), "FP8", float32)


def _sizes(
    scale: tuple[int, ...], weight: tuple[int, int], block: tuple[int, int] | None
) -> tuple[int, int] | None:
    """Return the numbers of outputs and inputs that share a scale, by the shape of the scales.

    None stands for scales that do not fit the weight.
    """
    rows, columns = weight
    if block is not None and scale == (-(-rows // block[0]), -(-columns // block[1])):
        return min(block[0], rows), min(block[1], columns)
    if int(np.prod(scale)) == 1:
        return rows, columns
    if scale in ((rows,), (rows, 1)):
        return 1, columns
    return None
