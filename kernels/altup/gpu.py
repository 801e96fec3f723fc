"""Several residual streams in Triton; a row has its streams side by side, `[rows, S * E]`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from edgellm.kernels.altup import AltUpWeights, Streams
from edgellm.kernels.gpu.device import aligned, on_device
from edgellm.kernels.gpu.early import allow_next, early, wait_for_last
from edgellm.kernels.linear.gpu import DevicePackedWeights, Rows, linear
from edgellm.kernels.linear.packed import PANEL, PackedWeights


@triton.jit
def routed(
    x_ptr: tl.tensor,
    norm_ptr: tl.tensor,
    router_ptr: tl.tensor,
    width: tl.tensor,
    epsilon: tl.tensor,
    COUNT: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """Return the tanh of what the router makes of a row, `[SIZE]`; 0 from COUNT on."""
    s = tl.arange(0, SIZE)[:, None]
    total = tl.zeros([SIZE, BLOCK], tl.float32)
    squares = tl.zeros([1, BLOCK], tl.float32)
    for first in range(0, width, BLOCK):
        k = first + tl.arange(0, BLOCK)[None, :]
        inside = k < width
        x = tl.load(x_ptr + k, mask=inside, other=0.0)
        squares += x * x
        x *= tl.load(norm_ptr + k, mask=inside, other=0.0)
        there = (s < COUNT) & inside
        total += x * tl.load(router_ptr + s * width + k, mask=there, other=0.0)
    scale = 1.0 / tl.sqrt(tl.sum(squares, axis=1) / width + epsilon)
    # the limits of tanh are right where the exponential overflows
    return 2.0 / (1.0 + tl.exp(-2.0 * scale * tl.sum(total, axis=1))) - 1.0


@triton.jit
def predict_kernel(
    stream_ptr: tl.tensor,
    predicted_ptr: tl.tensor,
    x_ptr: tl.tensor,
    norm_ptr: tl.tensor,
    router_ptr: tl.tensor,
    matrix_ptr: tl.tensor,
    width: tl.tensor,
    epsilon: tl.tensor,
    COUNT: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Write what a layer expects of a row's streams, and the first of them to x as well."""
    allow_next(EARLY)
    wait_for_last(EARLY)
    row = tl.program_id(0).to(tl.int64)
    stream_ptr += row * COUNT * width
    predicted_ptr += row * COUNT * width
    x_ptr += row * width
    route = routed(stream_ptr, norm_ptr, router_ptr, width, epsilon, COUNT, SIZE, BLOCK)
    to = tl.arange(0, SIZE)[:, None, None]
    source = tl.arange(0, SIZE)[None, :, None]
    r = tl.arange(0, SIZE)[None, None, :]
    there = (to < COUNT) & (source < COUNT) & (r < COUNT)
    matrix = tl.load(matrix_ptr + (to * COUNT + source) * COUNT + r, mask=there, other=0.0)
    factor = tl.sum(matrix * route[None, None, :], axis=2)
    s = tl.arange(0, SIZE)[:, None]
    for first in range(0, width, BLOCK):
        k = first + tl.arange(0, BLOCK)[None, :]
        inside = (s < COUNT) & (k < width)
        before = tl.load(stream_ptr + s * width + k, mask=inside, other=0.0)
        after = before + tl.sum(factor[:, :, None] * before[None, :, :], axis=1)
        tl.store(predicted_ptr + s * width + k, after, mask=inside)
        tl.store(x_ptr + 0 * s + k, after, mask=inside & (s == 0))


@triton.jit
def correct_kernel(
    predicted_ptr: tl.tensor,
    x_ptr: tl.tensor,
    stream_ptr: tl.tensor,
    out_ptr: tl.tensor,
    norm_ptr: tl.tensor,
    router_ptr: tl.tensor,
    matrix_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    width: tl.tensor,
    epsilon: tl.tensor,
    COUNT: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Write a row's streams, corrected by what the layer made of the first one, and that scaled."""
    allow_next(EARLY)
    wait_for_last(EARLY)
    row = tl.program_id(0).to(tl.int64)
    predicted_ptr += row * COUNT * width
    stream_ptr += row * COUNT * width
    x_ptr += row * width
    out_ptr += row * width
    route = routed(x_ptr, norm_ptr, router_ptr, width, epsilon, COUNT, SIZE, BLOCK)
    s, r = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    there = (s < COUNT) & (r < COUNT)
    matrix = tl.load(matrix_ptr + s * COUNT + r, mask=there, other=0.0)
    factor = 1.0 + tl.sum(matrix * route[None, :], axis=1)[:, None]
    for first in range(0, width, BLOCK):
        k = first + tl.arange(0, BLOCK)[None, :]
        inside = (s < COUNT) & (k < width)
        change = tl.load(x_ptr + k, mask=k < width, other=0.0)
        change -= tl.load(predicted_ptr + k, mask=k < width, other=0.0)
        after = tl.load(predicted_ptr + s * width + k, mask=inside, other=0.0) + change * factor
        tl.store(stream_ptr + s * width + k, after, mask=inside)
        after *= tl.load(scale_ptr + k, mask=k < width, other=0.0)
        tl.store(out_ptr + 0 * s + k, after, mask=inside & (s == 0))


@triton.jit
def level_kernel(
    stream_ptr: tl.tensor,
    out_ptr: tl.tensor,
    width: tl.tensor,
    COUNT: tl.constexpr,
    SIZE: tl.constexpr,
    MERGE: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Give the other streams of a row the magnitude of the first, or if MERGE write the mean then.

    A mean square below 1e-5 counts as that.
    """
    allow_next(EARLY)
    wait_for_last(EARLY)
    row = tl.program_id(0).to(tl.int64)
    stream_ptr += row * COUNT * width
    out_ptr += row * width
    s = tl.arange(0, SIZE)[:, None]
    squares = tl.zeros([SIZE, BLOCK], tl.float32)
    for first in range(0, width, BLOCK):
        k = first + tl.arange(0, BLOCK)[None, :]
        x = tl.load(stream_ptr + s * width + k, mask=(s < COUNT) & (k < width), other=0.0)
        squares += x * x
    mean = tl.sum(squares, axis=1)[:, None] / width
    target = tl.sum(tl.where(s == 0, mean, 0.0), axis=0)[None, :]
    mean = tl.where(mean < 1e-5, 1e-5, mean)  # `maximum` would drop a NaN
    scale = tl.where(s == 0, 1.0, tl.sqrt(target / mean))
    for first in range(0, width, BLOCK):
        k = first + tl.arange(0, BLOCK)[None, :]
        inside = (s < COUNT) & (k < width)
        x = tl.load(stream_ptr + s * width + k, mask=inside, other=0.0) * scale
        if MERGE:
            at = first + tl.arange(0, BLOCK)
            tl.store(out_ptr + at, tl.sum(x, axis=0) / COUNT, mask=at < width)
        else:
            tl.store(stream_ptr + s * width + k, x, mask=inside)


def _sizes(streams: int, width: int) -> dict[str, Any]:
    size = aligned(streams)
    # a thread has as many numbers for any number of streams
    block = min(aligned(width), 4096 // size**2)
    return {"COUNT": streams, "SIZE": size, "BLOCK": block, "num_warps": 4, **early()}


@dataclass(frozen=True, kw_only=True)
class DeviceAltUp:
    """Weights of a layer around streams in device memory; see `AltUpWeights`."""

    router_norm: torch.Tensor
    router: torch.Tensor
    predicting: torch.Tensor
    correcting: torch.Tensor
    scale: torch.Tensor
    epsilon: float

    @classmethod
    def of(cls, weights: AltUpWeights | None, epsilon: float, device: str) -> DeviceAltUp | None:
        if weights is None:
            return None
        return cls(
            router_norm=on_device(weights.router_norm, device),
            router=on_device(weights.router, device),
            predicting=on_device(weights.predict, device),
            correcting=on_device(weights.correct, device),
            scale=on_device(weights.scale, device),
            epsilon=epsilon,
        )

    def predict(self, streams: torch.Tensor, predicted: torch.Tensor, x: torch.Tensor) -> None:
        """Write what a layer expects of streams, and the first stream, which it computes, to `x`.

        Args:
            streams, predicted: `[M, S * E]`.
            x: `[M, E]`.
        """
        rows, width = x.shape
        predict_kernel[(rows,)](
            streams,
            predicted,
            x,
            self.router_norm,
            self.router,
            self.predicting,
            width,
            self.epsilon,
            **_sizes(len(self.router), width),
        )

    def correct(
        self, predicted: torch.Tensor, x: torch.Tensor, streams: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Write the streams behind a layer, and the first one, scaled, to `out`.

        Args:
            x: what the layer made of the first stream `[M, E]`, like `out`.
        """
        rows, width = x.shape
        correct_kernel[(rows,)](
            predicted,
            x,
            streams,
            out,
            self.router_norm,
            self.router,
            self.correcting,
            self.scale,
            width,
            self.epsilon,
            **_sizes(len(self.router), width),
        )


@dataclass(frozen=True)
class DeviceStreams:
    """Weights around all layers in device memory; see `Streams`.

    Attributes:
        leaving: of each stream but the first.
    """

    entering: DevicePackedWeights
    leaving: Sequence[DevicePackedWeights]

    @classmethod
    def of(cls, streams: Streams | None, device: str) -> DeviceStreams | None:
        if streams is None:
            return None
        leave, width = streams.leave, streams.leave.inputs
        parts = [
            PackedWeights(leave.data[first : first + width // PANEL], width, width, leave.kind)
            for first in range(0, leave.outputs // PANEL, width // PANEL)
        ]
        return cls(
            DevicePackedWeights.of(streams.enter, device),
            [DevicePackedWeights.of(part, device) for part in parts],
        )

    def enter(self, x: torch.Tensor, streams: torch.Tensor, rows: Rows) -> None:
        """Make the streams before the first layer, `[M, S * E]`, of the first one, `[M, E]`."""
        width = x.shape[1]
        streams[:, :width].copy_(x)
        linear(x, self.entering, streams[:, width:], rows)
        self._level(streams, x, merge=False)

    def leave(self, streams: torch.Tensor, x: torch.Tensor, rows: Rows) -> None:
        """Write the mean of the streams behind the last layer, taken back, to `x` `[M, E]`."""
        width = x.shape[1]
        for number, weight in enumerate(self.leaving, 1):
            stream = streams[:, number * width : (number + 1) * width]
            linear(stream, weight, stream, rows)  # which is copied, as codes or halves, before
        self._level(streams, x, merge=True)

    def _level(self, streams: torch.Tensor, x: torch.Tensor, *, merge: bool) -> None:
        rows, width = x.shape
        sizes = _sizes(1 + len(self.leaving), width)
        level_kernel[(rows,)](streams, x, width, MERGE=merge, **sizes)
