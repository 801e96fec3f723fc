"""4-bit floats (E2M1) of compressed-tensors: `mxfp4-pack-quantized` and `nvfp4-pack-quantized`.

MODULE.weight_packed [N, K/2], the first of two numbers in the low half of a byte
MODULE.weight_scale [N, K/32] powers of two (MXFP4), or [N, K/16] E4M3 (NVFP4)
MODULE.weight_global_scale [1] (NVFP4), the divisor of all scales
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgellm.errors import ModelFormatError
from edgellm.graphs.hf_quantization.mxfp4 import e2m1, mxfp4_tensor
from edgellm.graphs.hf_quantization.packing import unpack
from edgellm.graphs.hf_quantization.scales import read_powers_of_two, read_scales
from edgellm.graphs.safetensors_folder import SafetensorsFolder
from edgellm.graphs.tensor import Tensor

_BITS = 4
_MX_GROUP, _NV_GROUP = 32, 16


def packed_float_tensor(
    folder: SafetensorsFolder, module: str, *, origin: str
) -> tuple[Tensor, int]:
    """Return a module's weight, and its group size, which follows from the dtype of its scales.

    Raises:
        ModelFormatError: tensors are missing or do not fit each other.
    """
    packed, scale = f"{module}.weight_packed", f"{module}.weight_scale"
    rows, size = folder.expect(packed, ("U8",), shape=(None, None)).shape
    columns = 2 * size
    entry = folder.expect(scale, ("U8", "F8_E8M0", "F8_E4M3"))
    group_size = _NV_GROUP if entry.dtype == "F8_E4M3" else _MX_GROUP
    if columns % group_size:
        raise ModelFormatError(
            f"{origin}: the {columns} inputs of {module} are not groups of {group_size}"
        )
    folder.expect(scale, (entry.dtype,), shape=(rows, columns // group_size))
    if group_size == _NV_GROUP:
        return _nvfp4(folder, module, (rows, columns)), group_size
    tensor = mxfp4_tensor(
        (rows, columns),
        codes=lambda: unpack(folder.read(packed), _BITS),
        scales=lambda: read_powers_of_two(folder, scale),
    )
    return tensor, group_size


def _nvfp4(folder: SafetensorsFolder, module: str, shape: tuple[int, int]) -> Tensor:
    """Return a weight in NVFP4.

    No kind has groups of 16 with E4M3 scales, so `quantized` is None.
    """
    key = f"{module}.weight_global_scale"
    entry = folder.expect(key, ("F32",))
    if int(np.prod(entry.shape)) != 1:
        raise ModelFormatError(
            f"{entry.file}: tensor {key} has shape {list(entry.shape)}; one number is expected"
        )

    def float32() -> NDArray[np.float32]:
        divisor = float(read_scales(folder, key).reshape(()))
        if divisor <= 0:
            raise ModelFormatError(f"{entry.file}: tensor {key} is {divisor}; above 0 is expected")
        scales = read_scales(folder, f"{module}.weight_scale") / np.float32(divisor)
        codes = unpack(folder.read(f"{module}.weight_packed"), _BITS)
        groups = e2m1(codes).reshape(shape[0], -1, _NV_GROUP) * scales[..., None]
        return groups.reshape(shape)

    return Tensor(shape, "NVFP4", float32)
