"""MLPs, experts and routers of a layer in device memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from edgellm.kernels.experts.gpu import DeviceRouter
from edgellm.kernels.gpu.device import on_device
from edgellm.kernels.linear.gpu import DevicePackedWeights
from edgellm.kernels.lora.gpu import Readers
from edgellm.kernels.step.gpu_buffers import expert_sizes
from edgellm.kernels.step.weights import Floats, LayerWeights


@dataclass(frozen=True, kw_only=True)
class DeviceMlp:
    """MLP, all experts of a layer, or a shared expert; see `LayerWeights`.

    Attributes:
        inputs, outputs: gate and up, and down, as adapters change them; None: they do not.
    """

    gate: DevicePackedWeights | None
    gate_bias: torch.Tensor | None = None
    up: DevicePackedWeights
    up_bias: torch.Tensor | None = None
    down: DevicePackedWeights
    down_bias: torch.Tensor | None = None
    inputs: Readers | None = None
    outputs: Readers | None = None


def mlp_of(layer: LayerWeights, index: int, device: str) -> DeviceMlp:
    """Move the MLP of a layer to the device, or its experts, which adapters do not change."""

    def vector(array: Floats | None) -> torch.Tensor | None:
        return None if array is None else on_device(array, device)

    readers: dict[str, Readers] = {}
    if layer.routing is None:
        both = {"up": (layer.up, layer.up_bias)}
        if layer.gate is not None:
            both = {"gate": (layer.gate, layer.gate_bias), **both}
        outputs = {name: weight.outputs for name, (weight, _) in both.items()}
        bias = joined_biases([(weight.outputs, bias) for weight, bias in both.values()])
        down = {"down": layer.down.outputs}
        readers = {
            "inputs": Readers.of(index, outputs, device, bias),
            "outputs": Readers.of(index, down, device, layer.down_bias),
        }
    return DeviceMlp(
        gate=None if layer.gate is None else DevicePackedWeights.of(layer.gate, device),
        gate_bias=vector(layer.gate_bias),
        up=DevicePackedWeights.of(layer.up, device),
        up_bias=vector(layer.up_bias),
        down=DevicePackedWeights.of(layer.down, device),
        down_bias=vector(layer.down_bias),
        **readers,
    )


def shared_of(layer: LayerWeights, index: int, device: str) -> DeviceMlp | None:
    if layer.shared is None:
        return None
    gate, up, down = (DevicePackedWeights.of(each, device) for each in layer.shared)
    both = {"shared_gate": gate.outputs, "shared_up": up.outputs}
    return DeviceMlp(
        gate=gate,
        up=up,
        down=down,
        inputs=Readers.of(index, both, device),
        outputs=Readers.of(index, {"shared_down": down.outputs}, device),
    )


def router_of(layer: LayerWeights, device: str) -> DeviceRouter | None:
    sizes, weight, bias = expert_sizes(layer), layer.router, layer.router_bias
    if sizes is None or weight is None:
        return None
    if layer.shared_router is not None:
        weight = np.concatenate([weight, layer.shared_router[None]])
        bias = None if bias is None else np.append(bias, np.float32(0))
    vectors = bias, layer.selection_bias, layer.expert_scale
    on = (None if vector is None else on_device(vector, device) for vector in vectors)
    return DeviceRouter(on_device(weight, device), sizes, *on)


def joined_biases(parts: Sequence[tuple[int, Floats | None]]) -> Floats | None:
    """Join biases of linear layers of so many outputs, with zeros for absent ones.

    Returns:
        None if all are absent.
    """
    if all(bias is None for _, bias in parts):
        return None
    return np.concatenate(
        [np.zeros(outputs, np.float32) if bias is None else bias for outputs, bias in parts]
    )
