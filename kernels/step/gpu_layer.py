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
from edgellm.kernels.lora.gpu import Readers
from edgellm.kernels.rope import RopeTable
from edgellm.kernels.step.gpu_buffers import Buffers, some
from edgellm.kernels.step.gpu_inputs import Place
from edgellm.kernels.step.gpu_mixers import (
    DeviceBeside,
    DeviceMixer,
    MixerReaders,
    Projection,
    beside_of,
    device_mixer,
    latent_of,
    mix,
    projections_of,
)
from edgellm.kernels.step.gpu_mlp import DeviceMlp, joined_biases, mlp_of, router_of, shared_of
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
        changed: projections, o and what is beside it, as adapters change them.
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
    changed: MixerReaders

    @property
    def readers(self) -> list[Readers]:
        """Linear layers that adapters may change, those with the same input together."""
        mlps = (self.mlp, self.shared)
        of_mlps = (x for mlp in mlps if mlp is not None for x in (mlp.inputs, mlp.outputs))
        return [each for each in (*self.changed, *of_mlps) if each is not None]

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
        biases: list[tuple[int, Floats | None]] = []
        if mixer is None:
            q, k, v = (each.outputs for each in layer.qkv)
            biases = [(q, layer.q_bias), (k, layer.k_bias), (v, layer.v_bias)]

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
            qkv_bias=vector(joined_biases(biases)),
            head_norms=None if norms is None else DeviceNorms.of(norms, layer.head_dim, device),
            sinks=vector(layer.sinks),
            o=DevicePackedWeights.of(layer.o, device),
            o_bias=vector(layer.o_bias),
            post_attention_norm=norm(layer.post_attention_norm, layer.post_attention_norm_bias),
            mlp_norm=norm(layer.mlp_norm, layer.mlp_norm_bias),
            mlp=mlp_of(layer, index, device),
            shared=shared_of(layer, index, device),
            post_mlp_norm=norm(layer.post_mlp_norm, layer.post_mlp_norm_bias),
            router=router_of(layer, device),
            changed=MixerReaders.of(layer, index, device),
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
            readers=self.changed.o,
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
            readers=self.mlp.outputs,
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
            bias = self._biases(None, self.changed.mamba_o, mixed, None, buffers)
            linear(mixed, o, buffers.x, buffers.rows, bias=bias, add=True, coded=coded)
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
        coded = buffers.coded if takes_codes(self.host.head_dim) else None
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
        added = self._biases(None, self.changed.projections, inputs, norm, buffers)

        def product(weight: DevicePackedWeights, y: torch.Tensor, fine: bool = False) -> None:
            nonlocal first
            linear(
                inputs,
                weight,
                y,
                buffers.rows,
                norm=norm,
                epsilon=self.epsilon,
                bias=None if added is None else added[:, first : first + weight.outputs],
                fine=fine,
                coded=buffers.residual if few else None,
            )
            first += weight.outputs

        for weight, fine in self.projections:
            product(weight, out[:, first : first + weight.outputs], fine)
        return product

    def _biases(
        self,
        bias: torch.Tensor | None,
        readers: Readers | None,
        inputs: torch.Tensor,
        norm: torch.Tensor | None,
        buffers: Buffers,
    ) -> torch.Tensor | None:
        """Return biases, if any: of each row with what adapters add, where there are some."""
        if buffers.adapters is None or readers is None:
            return bias
        return buffers.adapters.rows(readers, inputs, norm=norm, epsilon=self.epsilon)

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
        bias, up_bias, width = mlp.gate_bias, mlp.up_bias, mlp.up.outputs
        if mlp.gate is None:
            bias, up_bias = up_bias, None
        if tiles is None:
            inner, coded = buffers.activated[: count * width].view(-1, width), buffers.coded
            added = self._biases(None, mlp.inputs, inputs, norm, buffers)
            if added is not None:
                bias, up_bias = added[:, :width], added[:, width:]
        else:
            assert self.router is not None
            assert room is not None
            inner = room.slots(self.router.sizes, count)[0]
            coded = room.inner if count <= FEW_ROWS else None
        linear(
            inputs,
            mlp.up if mlp.gate is None else mlp.gate,
            inner,
            buffers.rows,
            norm=norm,
            epsilon=self.epsilon,
            bias=bias,
            activation=self.host.activation,
            up=None if mlp.gate is None else mlp.up,
            up_bias=None if mlp.gate is None else up_bias,
            coded=buffers.residual if ready else None,
            then=None if coded is None else Next(coded),
            tiles=tiles,
        )
        return inner, coded

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
            bias = self._biases(None, self.shared.outputs, inner, None, buffers)
            linear(inner, self.shared.down, shared, buffers.rows, bias=bias, coded=coded)
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
        readers: Readers | None,
        coded: CodedRows | None,
        then: Next | None,
    ) -> bool:
        """Add the output of a linear layer, normalized if there is a norm, to the residual.

        Returns:
            Whether the residual was coded for what comes next.
        """
        out = buffers.x if norm is None else buffers.states
        after = then if norm is None else None
        bias = self._biases(bias, readers, inputs, None, buffers)
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
