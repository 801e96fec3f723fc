"""MLP of a layer in Triton, its experts, and what all rows go through beside them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
import triton
import triton.language as tl

from edgellm.kernels.experts.gpu import DeviceRouter, add_up, route
from edgellm.kernels.gpu.device import aligned, on_device
from edgellm.kernels.gpu.early import allow_next, early, wait_for_last
from edgellm.kernels.gpu.elementwise import activated, gate_factor
from edgellm.kernels.linear.gpu import (
    FEW_ROWS,
    DevicePackedWeights,
    Next,
    Tiles,
    linear,
)
from edgellm.kernels.linear.gpu_rows import CodedRows, code_rows, row_pointers, store_part
from edgellm.kernels.step.gpu_buffers import Buffers, expert_sizes, some
from edgellm.kernels.step.gpu_norm import DeviceNorm, norm_of, normalize
from edgellm.kernels.step.weights import Floats, LayerWeights


@dataclass(frozen=True, kw_only=True)
class DeviceMlp:
    """MLP, all experts of a layer, or a shared expert; see `LayerWeights`."""

    gate: DevicePackedWeights | None
    gate_bias: torch.Tensor | None = None
    up: DevicePackedWeights
    up_bias: torch.Tensor | None = None
    down: DevicePackedWeights
    down_bias: torch.Tensor | None = None


@triton.jit
def cutoff_kernel(
    gate_ptr: tl.tensor,
    up_ptr: tl.tensor,
    out_ptr: tl.tensor,
    codes_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    shift_ptr: tl.tensor,
    width: tl.tensor,
    deviations: tl.tensor,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
    CODED: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Gate a row by what its gates exceed their mean and some standard deviations by.

    The grid counts rows. The variance is summed after the mean is known: with a large mean, squares
    would cancel.
    """
    allow_next(EARLY)
    wait_for_last(EARLY)
    row = tl.program_id(0)
    gate_ptr += row.to(tl.int64) * width
    up_ptr += row.to(tl.int64) * width
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, width, BLOCK):
        k = first + tl.arange(0, BLOCK)
        total += tl.load(gate_ptr + k, mask=k < width, other=0.0)
    mean = tl.sum(total, axis=0) / width
    squares = tl.zeros([BLOCK], tl.float32)
    for first in range(0, width, BLOCK):
        k = first + tl.arange(0, BLOCK)
        x = tl.load(gate_ptr + k, mask=k < width, other=mean) - mean
        squares += x * x
    cutoff = mean + deviations * tl.sqrt(tl.sum(squares, axis=0) / width)
    ptrs = out_ptr, codes_ptr, scale_ptr, shift_ptr
    for first in range(0, width, BLOCK):
        k = first + tl.arange(0, BLOCK)
        x = tl.load(gate_ptr + k, mask=k < width, other=0.0) - cutoff
        x = tl.where(x < 0, 0.0, x)  # `maximum` would drop a NaN
        up = tl.load(up_ptr + k, mask=k < width, other=0.0)
        x = activated(x, ACTIVATION) * gate_factor(up, ACTIVATION)
        store_part(x, row, first, tl.minimum(width - first, BLOCK), width, ptrs, CODED)


@dataclass(frozen=True, kw_only=True)
class ExpertNorms:
    """Norms of experts beside an MLP: what they and their router read, and of what both give."""

    experts: DeviceNorm
    router: DeviceNorm
    experts_post: DeviceNorm
    shared_post: DeviceNorm

    @classmethod
    def of(cls, layer: LayerWeights, device: str) -> ExpertNorms | None:
        experts, router = layer.experts_norm, layer.router_norm
        experts_post, shared_post = layer.experts_post_norm, layer.shared_post_norm
        if experts is None or router is None or experts_post is None or shared_post is None:
            return None
        return cls(
            experts=DeviceNorm.of(experts, None, device),
            router=DeviceNorm.of(router, None, device),
            experts_post=DeviceNorm.of(experts_post, None, device),
            shared_post=DeviceNorm.of(shared_post, None, device),
        )


@dataclass(frozen=True, kw_only=True)
class FeedForward:
    """All of a layer that comes behind attention, with its weights in device memory.

    Attributes:
        host: the same weights on the host, for numbers and for absent parts.
        epsilon: epsilon of the norms of the residual.
        beside: norms of experts that are beside the shared one; None: there are none.
        scale: factor of the residual behind all.
    """

    host: LayerWeights
    epsilon: float
    norm: DeviceNorm | None
    mlp: DeviceMlp
    shared: DeviceMlp | None
    post_norm: DeviceNorm | None
    router: DeviceRouter | None
    beside: ExpertNorms | None
    scale: float

    @classmethod
    def of(cls, layer: LayerWeights, epsilon: float, device: str) -> FeedForward:
        """Move the weights to the device."""

        def vector(array: Floats | None) -> torch.Tensor | None:
            return None if array is None else on_device(array, device)

        return cls(
            host=layer,
            epsilon=epsilon,
            norm=norm_of(layer.mlp_norm, layer.mlp_norm_bias, device),
            mlp=DeviceMlp(
                gate=None if layer.gate is None else DevicePackedWeights.of(layer.gate, device),
                gate_bias=vector(layer.gate_bias),
                up=DevicePackedWeights.of(layer.up, device),
                up_bias=vector(layer.up_bias),
                down=DevicePackedWeights.of(layer.down, device),
                down_bias=vector(layer.down_bias),
            ),
            shared=_shared(layer, device),
            post_norm=norm_of(layer.post_mlp_norm, layer.post_mlp_norm_bias, device),
            router=_device_router(layer, device),
            beside=ExpertNorms.of(layer, device),
            scale=1.0 if layer.input is not None else layer.output_scale,
        )

    def run(self, buffers: Buffers, *, ready: bool, then: Next | None) -> bool:
        """Add the outputs to the residual.

        Args:
            ready: whether `buffers.residual` has the codes of the inputs.
            then: what takes the residual next.

        Returns:
            Whether the residual was coded for what comes next.
        """
        if self.scale != 1.0:
            then = None
        if self.router is not None:
            after = self._add_experts(buffers, self.router, ready=ready, then=then)
        else:
            inputs, norm = inputs_of(self.norm, buffers, self.epsilon)
            inner, coded = self._activate(self.mlp, inputs, norm, buffers, ready=ready)
            after = add_product(
                inner,
                self.mlp.down,
                self.mlp.down_bias,
                self.post_norm,
                buffers,
                epsilon=self.epsilon,
                scale=self.scale,
                coded=coded,
                then=then,
            )
        if self.scale != 1.0 and self.post_norm is None:
            buffers.x.mul_(self.scale)
        return after

    def _activate(
        self,
        mlp: DeviceMlp,
        inputs: torch.Tensor,
        norm: torch.Tensor | None,
        buffers: Buffers,
        *,
        ready: bool,
        tiles: Tiles | None = None,
    ) -> tuple[torch.Tensor, CodedRows | None]:
        """Compute an MLP up to the inputs of `down`; return those, and their codes if they are.

        Args:
            tiles: slots of experts, if it is all of them.
        """
        count, room = len(inputs), buffers.experts
        if self.host.cutoff is not None and mlp.gate is not None:
            return self._cut_off(mlp, mlp.gate, inputs, norm, buffers, ready=ready)
        if tiles is None:
            inner, coded = some(buffers.activated, count, mlp.up.outputs), buffers.inner
        else:
            assert self.router is not None
            assert room is not None
            inner, coded = room.slots(self.router.sizes, count)[0], room.inner
        gated = mlp.gate is not None
        few = count <= FEW_ROWS
        linear(
            inputs,
            mlp.up if mlp.gate is None else mlp.gate,
            inner,
            buffers.rows,
            norm=norm,
            epsilon=self.epsilon,
            bias=mlp.gate_bias if gated else mlp.up_bias,
            activation=self.host.activation,
            up=mlp.up if gated else None,
            up_bias=mlp.up_bias if gated else None,
            coded=buffers.residual if ready else None,
            then=Next(coded) if few else None,
            tiles=tiles,
        )
        return inner, coded if few else None

    def _cut_off(
        self,
        mlp: DeviceMlp,
        gate: DevicePackedWeights,
        inputs: torch.Tensor,
        norm: torch.Tensor | None,
        buffers: Buffers,
        *,
        ready: bool,
    ) -> tuple[torch.Tensor, CodedRows | None]:
        """Compute an MLP whose gates count above a cutoff, like `_activate`."""
        assert self.host.cutoff is not None
        count, width = len(inputs), mlp.up.outputs
        gates, inner = (some(each, count, width) for each in (buffers.gates, buffers.activated))
        few = count <= FEW_ROWS
        if few and not ready:
            code_rows(inputs, buffers.residual, norm=norm)
        coded = buffers.residual if few else None
        for weight, out in ((gate, gates), (mlp.up, inner)):
            linear(inputs, weight, out, buffers.rows, norm=norm, epsilon=self.epsilon, coded=coded)
        to = buffers.inner if few else None
        cutoff_kernel[(count,)](
            gates,
            inner,
            *row_pointers(inner, to),
            width,
            self.host.cutoff,
            ACTIVATION=self.host.activation,
            BLOCK=min(1024, aligned(width)),
            CODED=few,
            num_warps=4,
            **early(),
        )
        return inner, to

    def _add_experts(
        self, buffers: Buffers, router: DeviceRouter, *, ready: bool, then: Next | None
    ) -> bool:
        """Add what the router's experts give, and the shared one; see `run`."""
        room, shared, post, beside = buffers.experts, None, self.post_norm, self.beside
        assert room is not None
        inputs, norm = inputs_of(self.norm, buffers, self.epsilon)
        routed = norm if beside is None else beside.router.weight
        tiles = route(inputs, router, room, norm=routed, epsilon=self.epsilon)
        read = norm if beside is None else beside.experts.weight
        given = ready and beside is None
        inner, coded = self._activate(self.mlp, inputs, read, buffers, ready=given, tiles=tiles)
        _, out = room.slots(router.sizes, len(inputs))
        slots = replace(tiles, source=None)
        linear(
            inner, self.mlp.down, out, room.rows, bias=self.mlp.down_bias, coded=coded, tiles=slots
        )
        after = then if post is None else None
        if beside is not None:
            self._join_beside(buffers, router, beside, ready=ready)
        else:
            if self.shared is not None:
                shared = buffers.states  # which has no inputs any longer
                self._compute_shared(self.shared, inputs, norm, buffers, shared, ready=ready)
            to = buffers.x if post is None else buffers.states
            add_up(room, router, to, shared=shared, add=post is None, then=after)
        if post is not None:
            states, scale = buffers.states, self.scale
            normalize(states, post, buffers.x, epsilon=self.epsilon, add=True, scale=scale)
        return after is not None

    def _join_beside(
        self, buffers: Buffers, router: DeviceRouter, norms: ExpertNorms, *, ready: bool
    ) -> None:
        """Compute the MLP beside experts, and join what both give in `buffers.states`."""
        room, states, epsilon = buffers.experts, buffers.states, self.epsilon
        assert room is not None
        assert self.shared is not None
        add_up(room, router, states, add=False, then=None)
        normalize(states, norms.experts_post, states, epsilon=epsilon)
        inputs, norm = inputs_of(self.norm, buffers, epsilon)
        out = some(room.out, *states.shape)  # whose slots were added up
        self._compute_shared(self.shared, inputs, norm, buffers, out, ready=ready)
        normalize(out, norms.shared_post, states, epsilon=epsilon, add=True)

    def _compute_shared(
        self,
        mlp: DeviceMlp,
        inputs: torch.Tensor,
        norm: torch.Tensor | None,
        buffers: Buffers,
        out: torch.Tensor,
        *,
        ready: bool,
    ) -> None:
        inner, coded = self._activate(mlp, inputs, norm, buffers, ready=ready)
        linear(inner, mlp.down, out, buffers.rows, coded=coded)


def inputs_of(
    norm: DeviceNorm | None, buffers: Buffers, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return rows for the next product, and RMS norm weights if the product norms them."""
    if norm is None or norm.bias is None:
        return buffers.x, None if norm is None else norm.weight
    normalize(buffers.x, norm, buffers.states, epsilon=epsilon)
    return buffers.states, None


def add_product(
    inputs: torch.Tensor,
    weight: DevicePackedWeights,
    bias: torch.Tensor | None,
    norm: DeviceNorm | None,
    buffers: Buffers,
    *,
    epsilon: float,
    scale: float = 1.0,
    coded: CodedRows | None = None,
    then: Next | None = None,
) -> bool:
    """Add the output of a linear layer, normalized if there is a norm, to the residual.

    Args:
        scale: factor of the sum.

    Returns:
        Whether the residual was coded for what comes next.
    """
    out = buffers.x if norm is None else buffers.states
    after = then if norm is None else None
    linear(inputs, weight, out, buffers.rows, bias=bias, add=norm is None, coded=coded, then=after)
    if norm is not None:
        normalize(out, norm, buffers.x, epsilon=epsilon, add=True, scale=scale)
    return after is not None


def _shared(layer: LayerWeights, device: str) -> DeviceMlp | None:
    if layer.shared is None:
        return None
    gate, up, down = (DevicePackedWeights.of(each, device) for each in layer.shared)
    return DeviceMlp(gate=gate, up=up, down=down)


def _device_router(layer: LayerWeights, device: str) -> DeviceRouter | None:
    sizes, weight, bias = expert_sizes(layer), layer.router, layer.router_bias
    if sizes is None or weight is None:
        return None
    if layer.shared_router is not None:
        weight = np.concatenate([weight, layer.shared_router[None]])
        bias = None if bias is None else np.append(bias, np.float32(0))
    vectors = bias, layer.selection_bias, layer.expert_scale
    on = (None if vector is None else on_device(vector, device) for vector in vectors)
    return DeviceRouter(on_device(weight, device), sizes, *on)
