"""Float32 segments of a model with experts, states or other parts that no graph computes, in numpy.

Beside what graphs take and give (see `graphs/contract.py`), segments of some models hand on what
later ones need: the residual before layer 0, embeddings for each layer, and K and V.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from edgellm.graphs import contract
from edgellm.graphs.checkpoint import Checkpoint
from edgellm.graphs.layer_config import Attention
from edgellm.graphs.tensors import mixer_inputs, model_tensors
from edgellm.kernels.experts.reference import shares
from edgellm.kernels.quantized import dequantize
from edgellm.kernels.step.reference import activate, gated, norm

Floats = NDArray[np.float32]


# The residual before layer 0 [n, E], and rows of tokens' embeddings for each layer [n, layers * P].
FIRST, EMBEDDINGS = "first", "embeddings"


class ExpertSegment:
    """A segment of a model that no graph computes; its weights are read once.

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
        own = (contract.X, contract.ATTENTION, contract.RESIDUAL)
        handed_on = {key: value for key, value in inputs.items() if key not in own}
        if self._index == 0:
            residual = inputs[contract.X] * np.float32(self._config.embedding_scale)
            if self._config.layer_embedding is not None:
                handed_on[FIRST] = residual
        else:
            residual = self._after_layer(f"layers.{self._index - 1}", inputs)
        if self._index == self._config.layer_count:
            return {contract.HIDDEN: self._normed("final_norm", residual)}
        name = f"layers.{self._index}"
        x = self._normed(f"{name}.attention_norm", residual)
        mixer = self._config.layers[self._index].mixer
        if isinstance(mixer, Attention):
            parts = [self._product(f"{name}.q", x), *self._keys_and_values(mixer, x, handed_on)]
            if mixer.output_gate:
                parts.append(self._product(f"{name}.q_gate", x))
            if self._config.layers[self._index].beside is not None:
                parts.append(self._product(f"{name}.mamba_in", x))
        else:
            names = mixer_inputs(self._config, self._index)
            parts = [self._product(f"{name}.{part}", x) for part in names]
        qkv = np.concatenate(parts, axis=-1)
        return {contract.RESIDUAL_OUT: residual, contract.QKV: qkv, **handed_on}

    def _keys_and_values(
        self, attention: Attention, x: Floats, handed_on: dict[str, Floats]
    ) -> list[Floats]:
        """Return the products for K and V, of the layer or of the one whose K and V it reads."""
        if attention.kv_from is not None:
            return [handed_on[f"{part} {attention.kv_from}"] for part in "kv"]
        name = f"layers.{self._index}"
        k = self._product(f"{name}.k", x)
        v = k if attention.k_as_v else self._product(f"{name}.v", x)
        if any(each.kv_from == self._index for each in self._config.attentions.values()):
            handed_on |= {f"k {self._index}": k, f"v {self._index}": v}
        return [k, v]

    def _after_layer(self, name: str, inputs: Mapping[str, Floats]) -> Floats:
        mixed, beside = inputs[contract.ATTENTION], self._config.layers[self._index - 1].beside
        added = self._product(f"{name}.o", mixed[:, : len(self._tensor(f"{name}.o")[0])])
        if beside is not None:
            added = added + self._product(f"{name}.mamba_o", mixed[:, -beside.size :])
        residual = inputs[contract.RESIDUAL] + self._normed(f"{name}.post_attention_norm", added)
        after: Floats = residual + self._normed(f"{name}.post_mlp_norm", self._mlps(name, residual))
        if self._config.layer_embedding is not None:
            after = after + self._embedded(name, after, inputs)
        scaled = self._config.layers[self._index - 1].scaled
        return after * self._tensor(f"{name}.layer_scale") if scaled else after

    def _embedded(self, name: str, x: Floats, inputs: Mapping[str, Floats]) -> Floats:
        """Return what the tokens' embeddings for a layer add behind its MLP."""
        rows = np.split(inputs[EMBEDDINGS], self._config.layer_count, axis=1)[self._index - 1]
        context = self._product(f"{name}.layer_context", inputs[FIRST])
        context = self._normed("layer_embedding_norm", context / np.sqrt(x.shape[1]))
        e = (context + np.sqrt(rows.shape[1]) * rows) / np.sqrt(2)
        gate = self._product(f"{name}.layer_gate", x).astype(np.float64)
        activation = self._config.layers[self._index - 1].mlp.activation
        inner = (activate(gate, activation) * e).astype(np.float32)
        added = self._product(f"{name}.layer_output", inner)
        return self._normed(f"{name}.post_layer_norm", added)

    def _mlps(self, name: str, residual: Floats) -> Floats:
        layer = self._config.layers[self._index - 1]
        experts, x = layer.experts, self._normed(f"{name}.mlp_norm", residual)
        if experts is None:
            return self._mlp(f"{name}.", x)
        read = routed = x
        if layer.shared is not None and layer.shared.beside:
            read = self._normed(f"{name}.experts_norm", residual)
            routed = self._normed(f"{name}.router_norm", residual)
        logits = self._product(f"{name}.router", routed).astype(np.float64)
        selection = self._tensor(f"{name}.selection_bias") if experts.selection_bias else None
        scales = self._tensor(f"{name}.expert_scale") if experts.scaled else None
        weights = shares(logits, experts, selection, scales)
        added = np.zeros_like(x)
        for expert in range(experts.experts):
            rows = np.flatnonzero(weights[:, expert])
            if len(rows):
                share = weights[rows, expert, None].astype(np.float32)
                added[rows] += share * self._mlp(f"{name}.", read[rows], expert, experts.experts)
        if layer.shared is None:
            return added
        shared = self._normed(f"{name}.shared_post_norm", self._shared(name, x))
        return self._normed(f"{name}.experts_post_norm", added) + shared

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


def layer_embeddings(checkpoint: Checkpoint, windows: Sequence[Sequence[int]]) -> list[Floats]:
    """Read the rows of tokens' embeddings for all layers, `[n, layers * P]` for each window."""
    layers = checkpoint.config.layer_count
    tensor = checkpoint.tensor("layer_embedding")
    if tensor.quantized is None:
        values = tensor.float32()
        read: Callable[[NDArray[np.int64]], Floats] = values.__getitem__
    else:  # a dequantized table may be larger than memory
        weight = tensor.quantized()
        read = lambda rows: dequantize(weight.rows(rows))  # noqa: E731
    found = []
    for window in windows:
        rows = (np.asarray(window, np.int64)[:, None] * layers + np.arange(layers)).reshape(-1)
        found.append(read(rows).reshape(len(window), -1))
    return found
