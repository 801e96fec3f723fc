"""Tensor of a checkpoint, in any storage format, and matrices stacked, `[X*N, K]`, or cut apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgellm.errors import ModelFormatError
from edgellm.kernels.quantized import BLOCK, KINDS, QuantizedWeight, concatenate

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
    count = len(range(*rows.indices(tensor.shape[0]))) if isinstance(rows, slice) else len(rows)
    return replace(
        tensor,
        shape=(count, *tensor.shape[1:]),
        float32=lambda: np.ascontiguousarray(tensor.float32()[rows]),
        quantized=_changed(tensor, lambda array: array[rows]),
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


def stacked(tensors: Sequence[Tensor], *, name: str) -> Tensor:
    """Return the stack of one matrix for each expert; they are read one after the other.

    Args:
        name: name of the matrices in errors.

    Raises:
        ModelFormatError: the matrices have several shapes.
    """
    shapes = sorted({tensor.shape for tensor in tensors})
    if len(shapes) > 1 or len(shapes[0]) != 2:
        raise ModelFormatError(
            f"tensors {name} have the shapes {' and '.join(str(list(s)) for s in shapes)}; needed "
            "are matrices of one shape"
        )
    rows, columns = shapes[0]

    def float32() -> NDArray[np.float32]:
        values = np.empty((len(tensors), rows, columns), np.float32)
        for index, tensor in enumerate(tensors):
            values[index] = tensor.float32()
        return values.reshape(-1, columns)

    read = [tensor.quantized for tensor in tensors if tensor.quantized is not None]
    sizes = [tensor.nbytes for tensor in tensors]
    return Tensor(
        (len(tensors) * rows, columns),
        "/".join(sorted({tensor.storage for tensor in tensors})),
        float32,
        quantized=(lambda: _concatenated(read)) if len(read) == len(tensors) else None,
        nbytes=sum(sizes) if all(sizes) else 0,
    )


def flattened(tensor: Tensor, count: int, *, name: str, matrices: bool = True) -> Tensor:
    """Return the stack of a tensor `[X, N, K]`, or of a tensor of vectors `[X, N]`.

    Args:
        count: number of matrices or vectors by the config.
        name: name of the tensor in errors.

    Raises:
        ModelFormatError: the tensor has other dimensions.
    """
    if len(tensor.shape) != 2 + matrices or tensor.shape[0] != count:
        kind = "matrices" if matrices else "vectors"
        raise ModelFormatError(
            f"tensor {name} has shape {list(tensor.shape)}, but the config asks for a stack of "
            f"{count} {kind}"
        )
    _, rows, *columns = tensor.shape
    return reshaped(tensor, count * rows, *columns)


def cut_rows(tensor: Tensor, parts: int) -> Tensor:
    """Return a matrix `[N, parts * K]` as `[N * parts, K]`: each row becomes several.

    Codes are there only where the new rows are whole blocks of all kinds.

    Raises:
        ModelFormatError: the rows do not split into so many.
    """
    if len(tensor.shape) != 2 or tensor.shape[1] % parts:
        raise ModelFormatError(
            f"a tensor has shape {list(tensor.shape)}; the config asks for rows of {parts} parts"
        )
    rows, columns = tensor.shape[0] * parts, tensor.shape[1] // parts
    codes = None if columns % BLOCK else _changed(tensor, lambda array: array.reshape(rows, -1))
    return replace(reshaped(tensor, rows, columns), quantized=codes)


def rows_first(tensor: Tensor) -> Tensor:
    """Return a stack of float matrices `[X, K, N]` as `[X, N, K]`."""
    stack, columns, rows = tensor.shape
    return replace(
        tensor,
        shape=(stack, rows, columns),
        float32=lambda: np.ascontiguousarray(tensor.float32().swapaxes(1, 2)),
    )


def as_vector(tensor: Tensor) -> Tensor:
    """Return a matrix of one row `[1, K]` as a vector; one of another shape as it is."""
    if len(tensor.shape) != 2 or tensor.shape[0] != 1:
        return tensor
    return reshaped(tensor, tensor.shape[1])


def reshaped(tensor: Tensor, *shape: int) -> Tensor:
    """Return the tensor in another shape; its codes stay as they are."""
    return replace(tensor, shape=shape, float32=lambda: tensor.float32().reshape(shape))


def _changed(
    tensor: Tensor, change: Callable[[NDArray[Any]], NDArray[Any]]
) -> Callable[[], QuantizedWeight] | None:
    """Return a reader of the tensor's codes and scales, all of which are changed."""
    read = tensor.quantized
    if read is None:
        return None

    def quantized() -> QuantizedWeight:
        weight = read()
        arrays: dict[str, Any] = {name: change(a) for name, a in weight.arrays().items()}
        return replace(weight, **arrays)

    return quantized


def _concatenated(read: Sequence[Callable[[], QuantizedWeight]]) -> QuantizedWeight:
    weights = [each() for each in read]
    kinds = {weight.kind.name for weight in weights}
    if len(kinds) > 1:
        # a file's zeros may be the same in all groups of some experts alone
        weights = [_affine(weight) for weight in weights]
    return concatenate(weights)


def _affine(weight: QuantizedWeight) -> QuantizedWeight:
    """Return a weight with offsets in place of its zero, which are rounded to halves."""
    kind = KINDS[f"int{weight.kind.bits}_affine"]
    if weight.kind == kind:
        return weight
    offset = (-weight.kind.zero * weight.scales()).astype(np.float16)
    return QuantizedWeight(kind, weight.codes, weight.scale, offset)
