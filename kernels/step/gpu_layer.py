"""Single layer of the fused step in Triton.

Absent parts cost nothing: a layer with only RMS norms before products takes seven launches. Each
norm behind a product, and each layer norm, takes another one; experts take three more, and five if
there are many rows; a shared expert takes two. A short convolution takes three in place of the
first four, a delta net or Mamba-2 six; a Mamba-2 beside attention takes six more. Attention over
latents takes seven launches more, an MLP beside experts five, a laurel five, an embedding of the
layer's own five, residual streams three, and sealing blocks one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from edgellm.kernels.altup.gpu import DeviceAltUp
from edgellm.kernels.attention.gpu import attend, takes_codes
from edgellm.kernels.attention.gpu_tiles import Tiling, Work
from edgellm.kernels.gpu.device import on_device
from edgellm.kernels.gpu.kv_blocks import DeviceBlocks, DevicePool, DeviceStateRows
from edgellm.kernels.kv_append.gpu import DeviceNorms, append_rotated
from edgellm.kernels.kv_seal.gpu import seal
from edgellm.kernels.latent.gpu import DeviceLatent
from edgellm.kernels.linear.gpu import (
    FEW_ROWS,
    DevicePackedWeights,
    Next,
    linear,
)
from edgellm.kernels.linear.gpu_rows import CodedRows, code_rows
from edgellm.kernels.lora.gpu import Readers
from edgellm.kernels.rope import RopeTable
from edgellm.kernels.step.gpu_buffers import Buffers, some
from edgellm.kernels.step.gpu_feed_forward import FeedForward, add_product, inputs_of
from edgellm.kernels.step.gpu_inputs import Place
from edgellm.kernels.step.gpu_layer_input import DeviceInput, LayerEmbeddings
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
from edgellm.kernels.step.gpu_mlp import joined_biases
from edgellm.kernels.step.gpu_norm import DeviceNorm, norm_of, normalize
from edgellm.kernels.step.weights import Floats, Laurel, LayerWeights, Weights


class DeviceRope(NamedTuple):
    """A `RopeTable` in device memory."""

    cos: torch.Tensor
    sin: torch.Tensor

    @classmethod
    def of(cls, table: RopeTable, device: str) -> DeviceRope:
        return cls(on_device(table.cos, device), on_device(table.sin, device))


class DeviceLaurel(NamedTuple):
    """A `Laurel` in device memory."""

    left: DevicePackedWeights
    right: DevicePackedWeights
    post_norm: DeviceNorm

    @classmethod
    def of(cls, laurel: Laurel | None, device: str) -> DeviceLaurel | None:
        if laurel is None:
            return None
        left, right = (DevicePackedWeights.of(x, device) for x in (laurel.left, laurel.right))
        return cls(left, right, DeviceNorm.of(laurel.post_norm, None, device))


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
        tiling: of attention, or None.
        laurel: what it adds beside attention, or None.
        altup: weights around several residual streams, or None.
        input: what it adds of a token's own embedding, or None.
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
    tiling: Tiling | None
    laurel: DeviceLaurel | None
    altup: DeviceAltUp | None
    mlp: FeedForward
    input: DeviceInput | None
    changed: MixerReaders

    @property
    def readers(self) -> list[Readers]:
        """Linear layers that adapters may change, those with the same input together."""
        return [each for each in (*self.changed, *self.mlp.readers) if each is not None]

    @classmethod
    def of(
        cls,
        weights: Weights,
        index: int,
        ropes: Sequence[DeviceRope],
        pools: Sequence[DevicePool],
        embeddings: LayerEmbeddings | None,
        device: str,
    ) -> DeviceLayer:
        """Move the weights of a layer to the device."""
        layer = weights.layers[index]
        norms, mixer, pool = layer.head_norms, layer.mixer, pools[layer.pool]
        own = (layer.q, layer.q_bias), (layer.k, layer.k_bias), (layer.v, layer.v_bias)
        biases = [(weight.outputs, bias) for weight, bias in own if weight is not None]

        def vector(array: Floats | None) -> torch.Tensor | None:
            return None if array is None else on_device(array, device)

        return cls(
            slot=weights.slots[index],
            host=layer,
            epsilon=weights.epsilon,
            rope=ropes[layer.rope],
            attention_norm=norm_of(layer.attention_norm, layer.attention_norm_bias, device),
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
            post_attention_norm=norm_of(
                layer.post_attention_norm, layer.post_attention_norm_bias, device
            ),
            tiling=Tiling.of(pool, layer.heads) if isinstance(pool, DeviceBlocks) else None,
            laurel=DeviceLaurel.of(layer.laurel, device),
            altup=DeviceAltUp.of(layer.altup, weights.epsilon, device),
            mlp=FeedForward.of(weights, index, device),
            input=DeviceInput.of(weights, index, embeddings, device),
            changed=MixerReaders.of(layer, index, device),
        )

    def run(
        self,
        buffers: Buffers,
        places: Mapping[int, Place],
        states: Mapping[int, DeviceStateRows],
        work: Mapping[Tiling, Work],
        *,
        ready: bool = False,
        after: DeviceLayer | None = None,
    ) -> bool:
        """Run the layer, which adds its outputs to the residual.

        Args:
            places: blocks and block tables in each pool of K and V.
            states: rows and their blocks in each pool of states.
            work: of attention, by its tiling.
            ready: whether `buffers.residual` has the codes of its inputs.
            after: next layer, if any.

        Returns:
            Whether `buffers.residual` has the codes of the next layer's inputs.
        """
        few = len(buffers.x) <= FEW_ROWS
        if self.altup is not None:
            self.altup.predict(buffers.streams, buffers.predicted, buffers.x)
        if self.mixer is None:
            assert self.tiling is not None
            here = work[self.tiling]
            mixed, attended = self._attend(buffers, places, states, here, ready=ready)
        else:
            mixed = some(buffers.mixed, len(buffers.x), self.o.inputs)
            width = sum(weight.outputs for weight, _ in self.projections)
            inputs = some(buffers.projected, len(buffers.x), width)
            self._project(buffers, inputs, ready=ready)
            of = states[self.host.pool]
            attended = mix(buffers, self.mixer, inputs, of, self.slot, mixed)
        ready = add_product(
            mixed,
            self.o,
            self.o_bias,
            self.post_attention_norm,
            buffers,
            readers=self.changed.o,
            epsilon=self.epsilon,
            scale=1.0 if self.laurel is None else 0.5**0.5,
            coded=attended,
            then=_next(self.mlp.norm, buffers) if few else None,
        )
        norm = None if after is None else after.attention_norm
        # codes of 16 bits for V
        last = self.input is None and self.altup is None
        then = _next(norm, buffers, fine=True) if few and last else None
        ready = self.mlp.run(buffers, ready=ready, then=then)
        streams = None
        if self.altup is not None:
            self.altup.correct(buffers.predicted, buffers.x, buffers.streams, buffers.states)
            rows, width = buffers.x.shape
            streams = buffers.streams.view(rows, -1, width)
        if self.input is not None:
            self.input.run(buffers, self.host.activation, streams=streams)
        return ready

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
        place, rows = places[self.host.pool], len(buffers.x)
        if self.latent is not None:
            return self._attend_latents(buffers, self.latent, place, work, ready=ready), None
        qkv = some(buffers.qkv, rows, sum(weight.outputs for weight, _ in self.projections))
        product = self._project(buffers, qkv, ready=ready)
        if self.beside is not None:
            # what it adds to the residual is no input of the gate
            mixer, projection, o, slot = self.beside
            inputs = some(buffers.projected, rows, projection.outputs)
            product(projection, inputs)
            mixed = some(buffers.mixed, rows, o.inputs)
            coded = mix(buffers, mixer, inputs, states[self.host.beside_pool], slot, mixed)
        gate = None
        if self.q_gate is not None:
            gate = some(buffers.projected, rows, self.q_gate.outputs)
            product(self.q_gate, gate)
        if self.beside is not None:
            bias = buffers.biases(None, self.changed.mamba_o, mixed)
            linear(mixed, o, buffers.x, buffers.rows, bias=bias, add=True, coded=coded)
        if self.laurel is not None:
            self._add_laurel(buffers, self.laurel, product)
        q, out = (some(each, rows, self.o.inputs) for each in (buffers.q, buffers.attended))
        shape = rows, -1, self.host.head_dim
        sealed = place.sealed
        append_rotated(
            place.blocks,
            place.tables,
            self.slot,
            work.rows,
            qkv.view(shape),
            *self.rope,
            q.view(shape),
            bias=self.qkv_bias,
            norms=self.head_norms,
            plain=None if sealed is None else out.view(shape),
        )
        if sealed is not None and self.host.kv_from is None:
            seal(place.blocks, place.tables, sealed, self.slot, work.rows)
        coded = buffers.coded if takes_codes(self.host.head_dim) else None
        attend(
            place.blocks,
            place.tables,
            self.slot,
            q.view(shape),
            work,
            out.view(shape),
            buffers.partials,
            window=self.host.window,
            scale=self.host.scale,
            softcap=self.host.softcap,
            sinks=self.sinks,
            gate=gate,
            coded=coded,
            sealed=sealed,
        )
        return out, coded

    def _add_laurel(
        self,
        buffers: Buffers,
        laurel: DeviceLaurel,
        product: Callable[[DevicePackedWeights, torch.Tensor], None],
    ) -> None:
        """Add the rows that attention reads, and what a product of low rank makes of them."""
        assert self.attention_norm is not None
        x, epsilon = buffers.x, self.epsilon
        left = some(buffers.mixed, len(x), laurel.left.outputs)
        product(laurel.left, left)
        linear(left, laurel.right, buffers.states, buffers.rows)
        normalize(x, self.attention_norm, x, epsilon=epsilon, add=True)
        normalize(buffers.states, laurel.post_norm, x, epsilon=epsilon, add=True)

    def _attend_latents(
        self, buffers: Buffers, latent: DeviceLatent, place: Place, work: Work, *, ready: bool
    ) -> torch.Tensor:
        """Compute attention over latents; return the values that heads attend to."""
        rows, heads = len(buffers.x), self.host.heads
        room, rank = buffers.heads[heads], place.blocks.host.latent
        turned = some(buffers.q, rows, heads * (self.host.head_dim + rank)).view(rows, heads, -1)
        attended = some(buffers.attended, rows, heads * rank).view(rows, heads, -1)
        inputs = some(
            buffers.projected, rows, sum(each.weight.outputs for each in self.projections)
        )
        product = self._project(buffers, inputs, ready=ready)
        q = some(buffers.convolved, rows, latent.q.outputs)
        down = inputs.shape[1] - self.host.head_dim - rank
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
            turned,
            room,
        )
        attend(
            place.blocks,
            place.tables,
            self.slot,
            turned,
            work,
            attended,
            buffers.partials,
            window=self.host.window,
            scale=self.host.scale,
            softcap=self.host.softcap,
            sinks=self.sinks,
        )
        values = some(buffers.mixed, rows, self.o.inputs)
        latent.values(attended, values, room)
        return values

    def _project(
        self, buffers: Buffers, out: torch.Tensor, *, ready: bool
    ) -> Callable[[DevicePackedWeights, torch.Tensor], None]:
        """Compute the projections, side by side in `out`; return a function for further ones."""
        inputs, norm = inputs_of(self.attention_norm, buffers, self.epsilon)
        few, first = len(inputs) <= FEW_ROWS, 0
        if few and not ready:
            code_rows(inputs, buffers.residual, norm=norm, fine=True)
        changed, epsilon = self.changed.projections, self.epsilon
        added = buffers.biases(None, changed, inputs, norm=norm, epsilon=epsilon)

        def product(weight: DevicePackedWeights, y: torch.Tensor, fine: bool = False) -> None:
            nonlocal first
            bias = None
            # adapters change those that come first, and nothing of a laurel
            if added is not None and first < added.shape[1]:
                bias = added[:, first : first + weight.outputs]
            linear(
                inputs,
                weight,
                y,
                buffers.rows,
                norm=norm,
                epsilon=epsilon,
                bias=bias,
                fine=fine,
                coded=buffers.residual if few else None,
            )
            first += weight.outputs

        for weight, fine in self.projections:
            product(weight, out[:, first : first + weight.outputs], fine)
        return product


def _next(norm: DeviceNorm | None, buffers: Buffers, *, fine: bool = False) -> Next | None:
    """Return what takes the residual next, if it is a product behind an RMS norm."""
    if norm is None or norm.bias is not None:
        return None
    return Next(buffers.residual, norm.weight, fine)
