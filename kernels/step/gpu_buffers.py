"""Buffers for the tokens of a step in Triton on their way through the layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from edgellm.kernels.attention.gpu import Partials
from edgellm.kernels.delta_net import DeltaNetWeights
from edgellm.kernels.experts.gpu import ExpertBuffers, ExpertSizes
from edgellm.kernels.latent.gpu import HeadRows
from edgellm.kernels.linear.gpu import FEW_ROWS, Rows
from edgellm.kernels.linear.gpu_rows import CodedRows
from edgellm.kernels.mamba2 import Mamba2Weights
from edgellm.kernels.step.weights import LayerWeights


@dataclass(frozen=True)
class Buffers:
    """Buffers for the tokens of a step on their way through the layers.

    Attributes:
        x: residual `[rows, E]`.
        qkv, q, attended: what a layer's projections to Q, K and V give, queries, and outputs of
            attention, of the layer with most.
        streams, predicted: residual streams side by side `[rows, S * E]`, and what a layer expects
            of them; nothing where there is one.
        gates: what the gate of an MLP with a cutoff gives.
        activated: inputs of down of an MLP or a shared expert, `[rows, F]` of the largest F.
        states: `[rows, E]`: hidden states at the end, and before that the output of a layer norm or
            a product for the next launch.
        projected: gates of attention or of a layer's own embeddings, or what a mixer with states or
            attention over latents reads, of the layer with most.
        mixed, convolved: outputs of such a mixer or of a laurel's first product, and room for a
            convolution, or for queries before RoPE.
        heads: for products of each head with its part of a weight, where there are latents; by the
            number of heads.
        residual, inner: few rows as codes: the residual as inputs of a norm's products, and inputs
            of o and down.
    """

    x: torch.Tensor
    qkv: torch.Tensor
    q: torch.Tensor
    attended: torch.Tensor
    streams: torch.Tensor
    predicted: torch.Tensor
    gates: torch.Tensor
    activated: torch.Tensor
    states: torch.Tensor
    projected: torch.Tensor
    mixed: torch.Tensor
    convolved: torch.Tensor
    rows: Rows
    residual: CodedRows
    inner: CodedRows
    partials: Partials
    experts: ExpertBuffers | None
    heads: Mapping[int, HeadRows]

    @classmethod
    def empty(cls, layers: Sequence[LayerWeights], *, rows: int, device: str) -> Buffers:
        """Allocate buffers for layers, some of which attend."""
        attending = [each for each in layers if each.mixer is None]
        sizes = [each for each in map(expert_sizes, layers) if each is not None]
        hidden, width = layers[0].up.inputs, max(each.o.inputs for each in layers)
        kinds = {_heads(layers, each) for each in attending}
        latents = [(x.heads, x.latent) for x in attending if x.latent is not None]
        projected, mixed, convolved = (
            max(each) for each in zip(*map(_widths, layers), strict=True)
        )
        alone = (each.up if each.routing is None else each.shared_up for each in layers)
        intermediate = max((up.outputs for up in alone if up is not None), default=0)

        cut = max(0 if each.cutoff is None else each.up.outputs for each in layers)
        altup = layers[0].altup
        streams = 0 if altup is None else len(altup.router)

        def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        queries = (each.q.inputs for each in layers if each.q is not None)
        given = (each.input.output.inputs for each in layers if each.input is not None)
        inputs = max(hidden, intermediate, width, mixed, *queries, *given)
        return cls(
            x=empty(rows, hidden),
            qkv=empty(rows * max(_read(each) for each in attending)),
            q=empty(rows * max(_queries(each) for each in attending)),
            attended=empty(rows * max(heads * value for heads, _, value in kinds)),
            streams=empty(rows, streams * hidden),
            predicted=empty(rows, streams * hidden),
            gates=empty(rows * cut),
            activated=empty(rows * intermediate),
            states=empty(rows, hidden),
            projected=empty(rows * projected),
            mixed=empty(rows * mixed),
            convolved=empty(rows * convolved),
            rows=Rows.empty(rows, inputs, device),
            residual=CodedRows.empty(min(rows, FEW_ROWS), hidden, device),
            inner=CodedRows.empty(min(rows, FEW_ROWS), inputs, device),
            partials=Partials.empty(tokens=rows, kinds=kinds, device=device),
            experts=ExpertBuffers.empty(sizes, rows=rows, device=device) if sizes else None,
            heads={
                heads: HeadRows.empty(
                    heads=heads,
                    rows=rows,
                    inputs=max(max(x.rank, x.key_up.inputs) for n, x in latents if n == heads),
                    device=device,
                )
                for heads in {heads for heads, _ in latents}
            },
        )

    def of(self, rows: int) -> Buffers:
        """Return the part of the buffers for the first `rows` tokens."""
        return replace(
            self,
            x=self.x[:rows],
            states=self.states[:rows],
            streams=self.streams[:rows],
            predicted=self.predicted[:rows],
        )

    def keep(self, index: torch.Tensor) -> None:
        """Move some rows of the residual, or of its streams, to the beginning."""
        for memory in (self.x, self.streams):
            kept(memory, index)


def kept(memory: torch.Tensor, index: torch.Tensor) -> None:
    """Move rows to the beginning of their memory `[rows, width]`."""
    memory[: len(index)].copy_(memory[index])


def some(memory: torch.Tensor, rows: int, width: int) -> torch.Tensor:
    """Return rows `[rows, width]` of memory that layers of several widths share."""
    return memory[: rows * width].view(rows, width)


def _heads(layers: Sequence[LayerWeights], layer: LayerWeights) -> tuple[int, int, int]:
    """Return heads, KV heads and the width of a value of a layer that attends."""
    if layer.latent is not None:
        return layer.heads, 1, layer.latent.rank
    source = layer if layer.kv_from is None else layers[layer.kv_from]
    return layer.heads, source.kv_heads, layer.head_dim


def _read(layer: LayerWeights) -> int:
    """Return the width of what the projections to Q, K and V of a layer give."""
    if layer.latent is not None:
        return 0
    return sum(each.outputs for each in (layer.q, layer.k, layer.v) if each is not None)


def _queries(layer: LayerWeights) -> int:
    rank = 0 if layer.latent is None else layer.latent.rank
    return layer.heads * (layer.head_dim + rank)


def _widths(layer: LayerWeights) -> tuple[int, int, int]:
    """Return what a layer needs of `projected`, `mixed` and `convolved`."""
    gates = layer.q_gate, None if layer.input is None else layer.input.gate
    gate = max(0 if each is None else each.outputs for each in gates)
    if layer.latent is not None:
        (q, *parts), down = layer.qkv, layer.latent.query_down
        every = parts if down is None else [down, *parts]
        return max(gate, sum(each.outputs for each in every)), layer.o.inputs, q.outputs
    mixer = layer.mixer or layer.beside
    if mixer is None:
        return gate, 0 if layer.laurel is None else layer.laurel.left.outputs, 0
    channels = 0
    if isinstance(mixer, Mamba2Weights):
        channels = mixer.vectors.channels
    elif isinstance(mixer, DeltaNetWeights):
        channels = mixer.channels
    return max(gate, sum(each.outputs for each in mixer.linears)), mixer.size, channels


def expert_sizes(layer: LayerWeights) -> ExpertSizes | None:
    """Return the sizes of a layer's experts; None: it has none."""
    if layer.routing is None:
        return None
    return ExpertSizes(layer.routing, layer.up.inputs, layer.down.inputs)
