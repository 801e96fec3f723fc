"""Float32 segments of a model with experts or states, in numpy: no graph computes these."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from edgellm.graphs import contract
from edgellm.graphs.checkpoint import Checkpoint
from edgellm.graphs.tensors import mixer_inputs, model_tensors
from edgellm.kernels.experts.reference import shares
from edgellm.kernels.step.reference import activate, gated, norm

Floats = NDArray[np.float32]


class ExpertSegment:
    """A segment of a model that has experts or states; its weights are read once.

    Args:
        index: number of the segment, see `graphs/contract.py`.
    """

    def __init__(self, checkpoint: Checkpoint, index: int) -> None:
        self._checkpoint = checkpoint
        self._config = checkpoint.config
        self._specs = model_tensors(checkpoint.config)
        self._index = index
        self._read: dict[str, Floats] = {}

    def __call__(self, inputs: Mapping[str, Floats]) -> dict[str, Floats]:
        """Compute the segment's outputs from its inputs, both by name."""
        if self._index == 0:
            residual = inputs[contract.X] * np.float32(self._config.embedding_scale)
        else:
            residual = self._after_layer(f"layers.{self._index - 1}", inputs)
        if self._index == self._config.layer_count:
            return {contract.HIDDEN: self._normed("final_norm", residual)}
        name = f"layers.{self._index}"
        x = self._normed(f"{name}.attention_norm", residual)
        parts = mixer_inputs(self._config, self._index)
        qkv = [self._product(f"{name}.{part}", x) for part in parts]
        return {contract.RESIDUAL_OUT: residual, contract.QKV: np.concatenate(qkv, axis=-1)}

    def _after_layer(self, name: str, inputs: Mapping[str, Floats]) -> Floats:
        added = self._product(f"{name}.o", inputs[contract.ATTENTION])
        residual = inputs[contract.RESIDUAL] + self._normed(f"{name}.post_attention_norm", added)
        x = self._normed(f"{name}.mlp_norm", residual)
        after: Floats = residual + self._normed(f"{name}.post_mlp_norm", self._mlps(name, x))
        return after

    def _mlps(self, name: str, x: Floats) -> Floats:
        layer = self._config.layers[self._index - 1]
        experts = layer.experts
        if experts is None:
            return self._mlp(f"{name}.", x)
        logits = self._product(f"{name}.router", x).astype(np.float64)
        selection = self._tensor(f"{name}.selection_bias") if experts.selection_bias else None
        weights = shares(logits, experts, selection)
        added = np.zeros_like(x)
        for expert in range(experts.experts):
            rows = np.flatnonzero(weights[:, expert])
            if len(rows):
                share = weights[rows, expert, None].astype(np.float32)
                added[rows] += share * self._mlp(f"{name}.", x[rows], expert, experts.experts)
        return added if layer.shared is None else added + self._shared(name, x)

    def _shared(self, name: str, x: Floats) -> Floats:
        """Compute the expert that all rows go through, by its share."""
        added = self._mlp(f"{name}.shared_", x)
        router = f"{name}.shared_router"
        if router not in self._specs:
            return added
        logits = x @ self._tensor(router)
        return np.asarray(added / (1 + np.exp(-logits))[:, None])

    def _mlp(self, prefix: str, x: Floats, expert: int = 0, experts: int = 1) -> Floats:
        """Compute one of the MLPs that are stacked in a layer, by the prefix of their names."""
        mlp = self._config.layers[self._index - 1].mlp
        up = self._product(f"{prefix}up", x, expert, experts).astype(np.float64)
        if mlp.gated:
            gate = self._product(f"{prefix}gate", x, expert, experts)
            inner = gated(gate.astype(np.float64), up, mlp.activation)
        else:
            inner = activate(up, mlp.activation)
        return self._product(f"{prefix}down", inner.astype(np.float32), expert, experts)

    def _product(self, name: str, x: Floats, stacked: int = 0, stacks: int = 1) -> Floats:
        weight = self._tensor(name)
        rows = len(weight) // stacks
        part = slice(stacked * rows, (stacked + 1) * rows)
        product: Floats = x @ weight[part].T
        bias = f"{name}_bias"
        return product + self._tensor(bias)[part] if bias in self._specs else product

    def _normed(self, name: str, x: Floats) -> Floats:
        """Return normalized rows, or the rows where the model has no such norm."""
        weight = self._tensor(name) if name in self._specs else None
        bias = self._tensor(f"{name}_bias") if f"{name}_bias" in self._specs else None
        return norm(x.astype(np.float64), weight, bias, self._config.norm_eps).astype(np.float32)

    def _tensor(self, name: str) -> Floats:
        if name not in self._read:
            self._read[name] = self._checkpoint.tensor(name).float32()
        return self._read[name]
