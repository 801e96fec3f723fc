"""Single layer of the fused step in Triton.

Absent parts cost nothing: a layer with only RMS norms before products takes seven launches. Each
norm behind a product, and each layer norm, takes another one; experts take three more, and five if
there are many rows; a shared expert takes two. A short convolution takes three in place of the
first four, a delta net or Mamba-2 six; a Mamba-2 beside attention takes six more. Attention over
latents takes seven launches more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

from edgellm.kernels.attention.gpu import attend, takes_codes
from edgellm.kernels.attention.gpu_tiles import Work
from edgellm.kernels.experts.gpu import DeviceRouter, add_up, route
from edgellm.kernels.gpu.device import on_device
from edgellm.kernels.gpu.kv_blocks import DeviceStateRows
from edgellm.kernels.kv_append.gpu import DeviceNorms, append_rotated
from edgellm.kernels.latent.gpu import DeviceLatent
from edgellm.kernels.linear.gpu import (
    FEW_ROWS,
    DevicePackedWeights,
    Next,
    Tiles,
    linear,
)
from edgellm.kernels.linear.gpu_rows import CodedRows, code_rows
from edgellm.kernels.rope import RopeTable
from edgellm.kernels.step.gpu_buffers import Buffers, expert_sizes, some
from edgellm.kernels.step.gpu_inputs import Place
from edgellm.kernels.step.gpu_mixers import (
    DeviceBeside,
    DeviceMixer,
    Projection,
    beside_of,
    device_mixer,
    latent_of,
    mix,
    projections_of,
)
from edgellm.kernels.step.gpu_norm import DeviceNorm, normalize
from edgellm.kernels.step.weights import Floats, LayerWeights, Weights


class DeviceRope(NamedTuple):
    """A `RopeTable` in device memory."""

    cos: torch.Tensor
    sin: torch.Tensor

    @classmethod
    def of(cls, table: RopeTable, device: str) -> DeviceRope:
        return cls(on_device(table.cos, device), on_device(table.sin, device))


@dataclass(frozen=True, kw_only=True)
class DeviceMlp:
    """MLP, all experts of a layer, or a shared expert; see `LayerWeights`."""

    gate: DevicePackedWeights | None
    gate_bias: torch.Tensor | None = None
    up: DevicePackedWeights
    up_bias: torch.Tensor | None = None
    down: DevicePackedWeights
    down_bias: torch.Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class DeviceLayer:
    """Layer with its weights in device memory, ready to `run`; see `LayerWeights`.

    Attributes:
        slot: index of the layer among the layers of its pool.
        host: the same weights on the host, for numbers and for absent parts.
        epsilon: epsilon of the norms of the residual.
        projections: those to Q, K and V, or to what the mixer reads; neighbours are stacked where
            that is possible.
        mixer: mixer in place of attention, or None.
        beside: mixer that reads the same rows as attention, or None.
        latent: what attention over latents has beside the projections of keys and latents, or None.
    """

    slot: int
    host: LayerWeights
    epsilon: float
    rope: DeviceRope
    attention_norm: DeviceNorm | None
    projections: Sequence[Projection]
    mixer: DeviceMixer | None
    beside: DeviceBeside | None
    latent: DeviceLatent | None
    q_gate: DevicePackedWeights | None
    qkv_bias: torch.Tensor | None
    head_norms: DeviceNorms | None
    sinks: torch.Tensor | None
    o: DevicePackedWeights
    o_bias: torch.Tensor | None
    post_attention_norm: DeviceNorm | None
    mlp_norm: DeviceNorm | None
    mlp: DeviceMlp
    shared: DeviceMlp | None
    post_mlp_norm: DeviceNorm | None
    router: DeviceRouter | None

    @classmethod
    def of(
        cls, weights: Weights, index: int, ropes: Sequence[DeviceRope], device: str
    ) -> DeviceLayer:
        """Move the weights of a layer to the device.

        Raises:
            ValueError: the layer has a part that Triton kernels do not compute.
        """
        layer = weights.layers[index]
        norms, mixer = layer.head_norms, layer.mixer

        def norm(weight: Floats | None, bias: Floats | None) -> DeviceNorm | None:
            return None if weight is None else DeviceNorm.of(weight, bias, device)

        def vector(array: Floats | None) -> torch.Tensor | None:
            return None if array is None else on_device(array, device)

        return cls(
            slot=weights.slots[index],
            host=layer,
            epsilon=weights.epsilon,
            rope=ropes[layer.rope],
            attention_norm=norm(layer.attention_norm, layer.attention_norm_bias),
            projections=projections_of(layer, device),
            mixer=None if mixer is None else device_mixer(mixer, weights.epsilon, device),
            beside=beside_of(weights, index, device),
            latent=latent_of(layer, device),
            q_gate=None if layer.q_gate is None else DevicePackedWeights.of(layer.q_gate, device),
            qkv_bias=vector(_qkv_bias(layer)),
            head_norms=None if norms is None else DeviceNorms.of(norms, layer.head_dim, device),
            sinks=vector(layer.sinks),
            o=DevicePackedWeights.of(layer.o, device),
            o_bias=vector(layer.o_bias),
            post_attention_norm=norm(layer.post_attention_norm, layer.post_attention_norm_bias),
            mlp_norm=norm(layer.mlp_norm, layer.mlp_norm_bias),
            mlp=DeviceMlp(
                gate=None if layer.gate is None else DevicePackedWeights.of(layer.gate, device),
                gate_bias=vector(layer.gate_bias),
                up=DevicePackedWeights.of(layer.up, device),
                up_bias=vector(layer.up_bias),
                down=DevicePackedWeights.of(layer.down, device),
                down_bias=vector(layer.down_bias),
            ),
            shared=_shared(layer, device),
            post_mlp_norm=norm(layer.post_mlp_norm, layer.post_mlp_norm_bias),
            router=_device_router(layer, device),
        )

    def run(
        self,
        buffers: Buffers,
        places: Mapping[int, Place],
        states: Mapping[int, DeviceStateRows],
        work: Work,
        *,
        ready: bool = False,
        after: DeviceLayer | None = None,
    ) -> bool:
        """Run the layer, which adds its outputs to the residual.

        Args:
            places: blocks and block tables in each pool of K and V.
            states: rows and their blocks in each pool of states.
            ready: whether `buffers.residual` has the codes of its inputs.
            after: next layer, if any.

        Returns:
            Whether `buffers.residual` has the codes of the next layer's inputs.
        """
        few = len(buffers.x) <= FEW_ROWS
        if self.mixer is None:
            mixed, attended = self._attend(buffers, places, states, work, ready=ready)
        else:
            mixed = some(buffers.mixed, len(buffers.x), self.o.inputs)
            width = sum(weight.outputs for weight, _ in self.projections)
            inputs = some(buffers.projected, len(buffers.x), width)
            self._project(buffers, inputs, ready=ready)
            of = states[self.host.pool]
            attended = mix(buffers, self.mixer, inputs, of, self.slot, mixed)
        then = _next(self.mlp_norm, buffers) if few else None
        ready = self._add(
            mixed,
            self.o,
            self.o_bias,
            self.post_attention_norm,
            buffers,
            coded=attended,
            then=then,
        )
        norm = None if after is None else after.attention_norm
        # codes of 16 bits for V
        then = _next(norm, buffers, fine=True) if few else None
        if self.router is not None:
            return self._add_experts(buffers, self.router, ready=ready, then=then)
        inputs, norm = self._inputs(self.mlp_norm, buffers)
        inner, activated = self._activate(self.mlp, inputs, norm, buffers, ready=ready)
        return self._add(
            inner,
            self.mlp.down,
            self.mlp.down_bias,
            self.post_mlp_norm,
            buffers,
            coded=activated,
            then=then,
        )

    def _attend(
        self,
        buffers: Buffers,
        places: Mapping[int, Place],
        states: Mapping[int, DeviceStateRows],
        work: Work,
        *,
        ready: bool,
    ) -> tuple[torch.Tensor, CodedRows | None]:
        """Compute attention, and add the mixer beside it; return the results, or their codes."""
        place = places[self.host.pool]
        if self.latent is not None:
            return self._attend_latents(buffers, self.latent, place, work, ready=ready), None
        qkv = buffers.qkv.view(len(buffers.x), -1)
        product = self._project(buffers, qkv, ready=ready)
        if self.beside is not None:
            # what it adds to the residual is no input of the gate
            mixer, projection, o, slot = self.beside
            inputs = some(buffers.projected, len(qkv), projection.outputs)
            product(projection, inputs)
            mixed = some(buffers.mixed, len(qkv), o.inputs)
            coded = mix(buffers, mixer, inputs, states[self.host.beside_pool], slot, mixed)
        gate = None
        if self.q_gate is not None:
            gate = some(buffers.projected, len(qkv), self.q_gate.outputs)
            product(self.q_gate, gate)
        if self.beside is not None:
            linear(mixed, o, buffers.x, buffers.rows, add=True, coded=coded)
        append_rotated(
            place.blocks,
            place.tables,
            self.slot,
            work.rows,
            buffers.qkv,
            *self.rope,
            buffers.q,
            bias=self.qkv_bias,
            norms=self.head_norms,
        )
        few = len(qkv) <= FEW_ROWS
        coded = buffers.inner if few and takes_codes(self.host.head_dim) else None
        attend(
            place.blocks,
            place.tables,
            self.slot,
            buffers.q,
            work,
            buffers.attended,
            buffers.partials,
            window=self.host.window,
            scale=self.host.scale,
            softcap=self.host.softcap,
            sinks=self.sinks,
            gate=gate,
            coded=coded,
        )
        return buffers.attended.view(len(qkv), -1), coded

    def _attend_latents(
        self, buffers: Buffers, latent: DeviceLatent, place: Place, work: Work, *, ready: bool
    ) -> torch.Tensor:
        """Compute attention over latents; return the values that heads attend to."""
        rows, room = len(buffers.x), buffers.heads
        assert room is not None
        inputs = some(
            buffers.projected, rows, sum(each.weight.outputs for each in self.projections)
        )
        product = self._project(buffers, inputs, ready=ready)
        q = some(buffers.convolved, rows, latent.q.outputs)
        down = inputs.shape[1] - self.host.head_dim - place.blocks.host.latent
        if latent.query_norm is None:
            product(latent.q, q)
        else:
            norm, epsilon = latent.query_norm, latent.epsilon
            linear(inputs[:, :down], latent.q, q, buffers.rows, norm=norm, epsilon=epsilon)
        latent.append(
            place.blocks,
            place.tables,
            self.slot,
            work.rows,
            inputs[:, down:],
            q,
            self.rope,
            buffers.q,
            room,
        )
        attend(
            place.blocks,
            place.tables,
            self.slot,
            buffers.q,
            work,
            buffers.attended,
            buffers.partials,
            window=self.host.window,
            scale=self.host.scale,
            softcap=self.host.softcap,
            sinks=self.sinks,
        )
        values = some(buffers.mixed, rows, self.o.inputs)
        latent.values(buffers.attended, values, room)
        return values

    def _project(
        self, buffers: Buffers, out: torch.Tensor, *, ready: bool
    ) -> Callable[[DevicePackedWeights, torch.Tensor], None]:
        """Compute the projections, side by side in `out`; return a function for further ones."""
        inputs, norm = self._inputs(self.attention_norm, buffers)
        few, first = len(inputs) <= FEW_ROWS, 0
        if few and not ready:
            code_rows(inputs, buffers.residual, norm=norm, fine=True)

        def product(weight: DevicePackedWeights, y: torch.Tensor, fine: bool = False) -> None:
            linear(
                inputs,
                weight,
                y,
                buffers.rows,
                norm=norm,
                epsilon=self.epsilon,
                fine=fine,
                coded=buffers.residual if few else None,
            )

        for weight, fine in self.projections:
            product(weight, out[:, first : first + weight.outputs], fine)
            first += weight.outputs
        return product

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
        if tiles is None:
            width, coded = mlp.up.outputs, buffers.inner
            inner = buffers.activated[: count * width].view(-1, width)
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

    def _add_experts(
        self, buffers: Buffers, router: DeviceRouter, *, ready: bool, then: Next | None
    ) -> bool:
        """Add what the router's experts give, and the shared one; see `_add`."""
        room, shared, post = buffers.experts, None, self.post_mlp_norm
        assert room is not None
        inputs, norm = self._inputs(self.mlp_norm, buffers)
        tiles = route(inputs, router, room, norm=norm, epsilon=self.epsilon)
        inner, coded = self._activate(self.mlp, inputs, norm, buffers, ready=ready, tiles=tiles)
        _, out = room.slots(router.sizes, len(inputs))
        slots = replace(tiles, source=None)
        linear(
            inner, self.mlp.down, out, room.rows, bias=self.mlp.down_bias, coded=coded, tiles=slots
        )
        if self.shared is not None:
            inner, coded = self._activate(self.shared, inputs, norm, buffers, ready=ready)
            shared = buffers.states  # which has no inputs any longer
            linear(inner, self.shared.down, shared, buffers.rows, coded=coded)
        after = then if post is None else None
        to = buffers.x if post is None else buffers.states
        add_up(room, router, to, shared=shared, add=post is None, then=after)
        if post is not None:
            normalize(to, post, buffers.x, epsilon=self.epsilon, add=True)
        return after is not None

    def _inputs(
        self, norm: DeviceNorm | None, buffers: Buffers
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return rows for the next product, and RMS norm weights if the product norms them."""
        if norm is None or norm.bias is None:
            return buffers.x, None if norm is None else norm.weight
        normalize(buffers.x, norm, buffers.states, epsilon=self.epsilon)
        return buffers.states, None

    def _add(
        self,
        inputs: torch.Tensor,
        weight: DevicePackedWeights,
        bias: torch.Tensor | None,
        norm: DeviceNorm | None,
        buffers: Buffers,
        *,
        coded: CodedRows | None,
        then: Next | None,
    ) -> bool:
        """Add the output of a linear layer, normalized if there is a norm, to the residual.

        Returns:
            Whether the residual was coded for what comes next.
        """
        out = buffers.x if norm is None else buffers.states
        after = then if norm is None else None
        linear(
            inputs, weight, out, buffers.rows, bias=bias, add=norm is None, coded=coded, then=after
        )
        if norm is not None:
            normalize(out, norm, buffers.x, epsilon=self.epsilon, add=True)
        return after is not None


def _next(norm: DeviceNorm | None, buffers: Buffers, *, fine: bool = False) -> Next | None:
    """Return what takes the residual next, if it is a product behind an RMS norm."""
    if norm is None or norm.bias is not None:
        return None
    return Next(buffers.residual, norm.weight, fine)


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


def _qkv_bias(layer: LayerWeights) -> Floats | None:
    """Join the biases of Q, K and V, with zeros for absent ones; None if all are absent."""
    if layer.q_bias is None and layer.k_bias is None and layer.v_bias is None:
        return None
    q, k, v = layer.qkv
    parts = ((q, layer.q_bias), (k, layer.k_bias), (v, layer.v_bias))
    return np.concatenate(
        [np.zeros(of.outputs, np.float32) if bias is None else bias for of, bias in parts]
    )
