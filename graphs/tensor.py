"""Tensor of a checkpoint, in any storage format."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgellm.errors import ModelFormatError
from edgellm.kernels.quantized import QuantizedWeight

_LARGEST_HALF = float(np.finfo(np.float16).max)


@dataclass(frozen=True)
class Tensor:
    """Tensor of a checkpoint, whose values are read when one of its functions is called.

    Scales alone may have been read before.

    Attributes:
        storage: storage type in the file, e.g. `Q4_1` or `BF16`.
        float32: reads the whole tensor as float32.
        quantized: reads the tensor as codes and scales; None where no kind holds its values.
        nbytes: bytes in the file; 0 where several tensors of the file make this one.
    """

    shape: tuple[int, ...]
    storage: str
    float32: Callable[[], NDArray[np.float32]]
    quantized: Callable[[], QuantizedWeight] | None = None
    nbytes: int = 0


def checked(tensor: Tensor, origin: str) -> Tensor:
    """Return the same tensor, whose functions refuse values that half precision does not hold.

    Scales are stored in half precision, where larger values would become infinity.

    Args:
        origin: name of the file and the tensor in errors.
    """

    def refuse_others(values: NDArray[np.float32]) -> None:
        # NaN fails both comparisons
        if values.size and not (values.max() <= _LARGEST_HALF and values.min() >= -_LARGEST_HALF):
            raise ModelFormatError(
                f"{origin} holds a value that is not a number, infinite or beyond "
                f"{_LARGEST_HALF:.0f}; the file is damaged, download it again"
            )

    def float32() -> NDArray[np.float32]:
        values = tensor.float32()
        refuse_others(values)
        return values

    def quantized() -> QuantizedWeight:
        assert tensor.quantized is not None
        weight = tensor.quantized()
        refuse_others(weight.scales())
        refuse_others(weight.offsets())
        return weight

    return replace(
        tensor,
        float32=float32,
        quantized=None if tensor.quantized is None else quantized,
    )


def rows_of_tensor(tensor: Tensor, rows: slice | NDArray[np.intp]) -> Tensor:
    """Return a tensor of some rows of another one, or of all its rows in another order."""

    def quantized() -> QuantizedWeight:
        assert tensor.quantized is not None
        weight = tensor.quantized()
        arrays: dict[str, Any] = {name: array[rows] for name, array in weight.arrays().items()}
        return replace(weight, **arrays)

    count = len(range(*rows.indices(tensor.shape[0]))) if isinstance(rows, slice) else len(rows)
    return replace(
        tensor,
        shape=(count, *tensor.shape[1:]),
        float32=lambda: np.ascontiguousarray(tensor.float32()[rows]),
        quantized=None if tensor.quantized is None else quantized,
        nbytes=tensor.nbytes * count // max(tensor.shape[0], 1),
    )


def half_split_order(rows: int, heads: int, rotated: int) -> NDArray[np.intp]:
    """Return the order of the rows of Q or K that turns pairs of neighbours into pairs of halves.

    Args:
        rows: number of rows of all heads.
        rotated: number of channels in a head that RoPE turns; channels behind them stay.

    Raises:
        ModelFormatError: the rows do not split into heads.
    """
    if rows % heads or rows // heads < rotated:
        raise ModelFormatError(
            f"{rows} rows of a q or k projection do not split into {heads} heads"
        )
    head_dim = rows // heads
    order = np.arange(head_dim, dtype=np.intp)
    order[:rotated] = order[:rotated].reshape(-1, 2).T.reshape(-1)
    return (np.arange(heads)[:, None] * head_dim + order).reshape(-1)
