"""Mixers of a layer in Triton: what they read, and those that keep states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from edgellm.kernels.delta_net import DeltaNetWeights
from edgellm.kernels.delta_net.gpu import DeviceDeltaNet
from edgellm.kernels.gpu.device import on_device
from edgellm.kernels.gpu.kv_blocks import DeviceStateRows
from edgellm.kernels.latent.gpu import DeviceLatent
from edgellm.kernels.linear.gpu import FEW_ROWS, DevicePackedWeights
from edgellm.kernels.linear.gpu_rows import CodedRows
from edgellm.kernels.linear.packed import PackedWeights
from edgellm.kernels.mamba2.gpu import DeviceMamba2
from edgellm.kernels.short_conv import ShortConvWeights
from edgellm.kernels.short_conv.gpu import Convolution
from edgellm.kernels.step.gpu_buffers import Buffers, some
from edgellm.kernels.step.weights import LayerWeights, StateMixer, Weights

DeviceMixer = Convolution | DeviceDeltaNet | DeviceMamba2


class Projection(NamedTuple):
    """Weight of a layer's input projections; `fine`: its inputs have 16 bits."""

    weight: DevicePackedWeights
    fine: bool


class DeviceBeside(NamedTuple):
    """Mixer with states beside attention; see `LayerWeights`.

    Attributes:
        projection, o: what it reads is made by, and what it gives goes through.
        slot: index of the layer among the layers of the pool of its states.
    """

    mixer: DeviceMamba2
    projection: DevicePackedWeights
    o: DevicePackedWeights
    slot: int


def mix(
    buffers: Buffers,
    mixer: DeviceMixer,
    inputs: torch.Tensor,
    states: DeviceStateRows,
    slot: int,
    out: torch.Tensor,
) -> CodedRows | None:
    """Compute a mixer with states; return the results if they are codes."""
    coded = buffers.inner if len(inputs) <= FEW_ROWS and mixer.takes_codes else None
    if isinstance(mixer, Convolution):
        mixer.run(inputs, states, slot, out, coded)
    else:
        room = some(buffers.convolved, len(inputs), mixer.channels)
        mixer.run(inputs, states, slot, room, out, coded)
    return coded


def device_mixer(mixer: StateMixer, epsilon: float, device: str) -> DeviceMixer:
    if isinstance(mixer, ShortConvWeights):
        return Convolution(filters=on_device(mixer.filters, device), products=True)
    if isinstance(mixer, DeltaNetWeights):
        return DeviceDeltaNet.of(mixer, epsilon, device)
    return DeviceMamba2.of(mixer.vectors, device)


def beside_of(weights: Weights, index: int, device: str) -> DeviceBeside | None:
    layer = weights.layers[index]
    if layer.beside is None or layer.mamba_o is None:
        return None
    return DeviceBeside(
        DeviceMamba2.of(layer.beside.vectors, device),
        DevicePackedWeights.of(layer.beside.mamba_in, device),
        DevicePackedWeights.of(layer.mamba_o, device),
        weights.beside_slots[index],
    )


def latent_of(layer: LayerWeights, device: str) -> DeviceLatent | None:
    if layer.latent is None:
        return None
    return DeviceLatent.of(layer.latent, DevicePackedWeights.of(layer.qkv[0], device), device)


def projections_of(layer: LayerWeights, device: str) -> list[Projection]:
    """Move the input projections to the device; as in C++, V and the numbers that decays of a delta
    net are made of have inputs of 16 bits, and so do neighbours of one launch."""
    mixer = layer.mixer
    if isinstance(mixer, DeltaNetWeights):
        parts = {False: (mixer.qkv, mixer.z), True: (mixer.a, mixer.b)}
        return [
            Projection(x, fine)
            for fine, of in parts.items()
            for x in DevicePackedWeights.runs(of, device)
        ]
    read: Sequence[PackedWeights | None] = (layer.q, layer.k, layer.v)
    if mixer is not None:
        read = mixer.linears
    elif layer.latent is not None:
        read = (layer.latent.query_down, layer.k, layer.v)
    stacked = DevicePackedWeights.runs([each for each in read if each is not None], device)
    # without K of its own, a layer has no V either
    last = stacked[-1] if mixer is None and layer.k is not None else None
    return [Projection(each, each is last) for each in stacked]
