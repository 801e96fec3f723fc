"""Buffers for the tokens of a step in Triton on their way through the layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from edgellm.kernels.attention.gpu import Partials
from edgellm.kernels.delta_net import DeltaNetWeights
from edgellm.kernels.experts.gpu import ExpertBuffers, ExpertSizes
from edgellm.kernels.latent.gpu import HeadRows
from edgellm.kernels.linear.gpu import FEW_ROWS, Rows
from edgellm.kernels.linear.gpu_rows import CodedRows
from edgellm.kernels.lora.gpu import Added
from edgellm.kernels.mamba2 import Mamba2Weights
from edgellm.kernels.step.weights import LayerWeights


@dataclass(frozen=True)
class Buffers:
    """Buffers for the tokens of a step on their way through the layers.

    Attributes:
        x: residual `[rows, E]`.
        qkv: outputs of the Q, K and V projections `[rows, H + 2 Hkv, D]`.
        q, attended: queries, and outputs of attention, `[rows, H, D]`.
        activated: inputs of down of an MLP or a shared expert, `[rows, F]` of the largest F.
        states: `[rows, E]`: hidden states at the end, and before that the output of a layer norm or
            a product for the next launch.
        projected: gates of attention, or what a mixer with states or attention over latents reads,
            of the layer with most.
        mixed, convolved: outputs of such a mixer, and room for a convolution, or for queries before
            RoPE.
        heads: for products of each head with its part of a weight, where there are latents.
        adapters: adapters of the rows; None: no row has one.
        residual, inner: few rows as codes: the residual as inputs of a norm's products, and inputs
            of o and down.
    """

    x: torch.Tensor
    qkv: torch.Tensor
    q: torch.Tensor
    attended: torch.Tensor
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
    heads: HeadRows | None
    adapters: Added | None = None

    @property
    def coded(self) -> CodedRows | None:
        """Room for inputs of o and down, if they are few, and not read by adapters."""
        few = len(self.x) <= FEW_ROWS and self.adapters is None
        return self.inner if few else None

    @classmethod
    def empty(cls, layers: Sequence[LayerWeights], *, rows: int, device: str) -> Buffers:
        """Allocate buffers for layers of which those that attend have the same heads."""
        layer = next(each for each in layers if each.mixer is None)
        sizes = [each for each in map(expert_sizes, layers) if each is not None]
        hidden, width = layer.up.inputs, max(each.o.inputs for each in layers)
        heads, kv_heads, head_dim = layer.heads, layer.kv_heads, layer.head_dim
        rank = 0 if layer.latent is None else layer.latent.rank
        projected, mixed, convolved = (
            max(each) for each in zip(*map(_widths, layers), strict=True)
        )
        ups = [x.latent.key_up.inputs for x in layers if x.latent is not None]
        alone = (each.up if each.routing is None else each.shared_up for each in layers)
        intermediate = max((up.outputs for up in alone if up is not None), default=0)

        def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        queries = (each.q.inputs for each in layers if each.q is not None)
        inputs = max(hidden, intermediate, width, mixed, *queries)
        return cls(
            x=empty(rows, hidden),
            qkv=empty(rows, heads + 2 * kv_heads, head_dim),
            q=empty(rows, heads, head_dim + rank),
            attended=empty(rows, heads, rank or head_dim),
            activated=empty(rows * intermediate),
            states=empty(rows, hidden),
            projected=empty(rows * projected),
            mixed=empty(rows * mixed),
            convolved=empty(rows * convolved),
            rows=Rows.empty(rows, inputs, device),
            residual=CodedRows.empty(min(rows, FEW_ROWS), hidden, device),
            inner=CodedRows.empty(min(rows, FEW_ROWS), inputs, device),
            partials=Partials.empty(
                tokens=rows,
                heads=heads,
                kv_heads=kv_heads,
                head_dim=rank or head_dim,
                device=device,
            ),
            experts=ExpertBuffers.empty(sizes, rows=rows, device=device) if sizes else None,
            heads=HeadRows.empty(heads=heads, rows=rows, inputs=max(rank, *ups), device=device)
            if ups
            else None,
        )

    def of(self, rows: int, adapters: Added | None = None) -> Buffers:
        """Return the part of the buffers for the first `rows` tokens, which may have adapters."""
        return replace(
            self,
            adapters=adapters,
            x=self.x[:rows],
            qkv=self.qkv[:rows],
            q=self.q[:rows],
            attended=self.attended[:rows],
            states=self.states[:rows],
        )


def some(memory: torch.Tensor, rows: int, width: int) -> torch.Tensor:
    """Return rows `[rows, width]` of memory that layers of several widths share."""
    return memory[: rows * width].view(rows, width)


def _widths(layer: LayerWeights) -> tuple[int, int, int]:
    """Return what a layer needs of `projected`, `mixed` and `convolved`."""
    gate = 0 if layer.q_gate is None else layer.q_gate.outputs
    if layer.latent is not None:
        (q, *parts), down = layer.qkv, layer.latent.query_down
        every = parts if down is None else [down, *parts]
        return sum(each.outputs for each in every), layer.o.inputs, q.outputs
    mixer = layer.mixer or layer.beside
    if mixer is None:
        return gate, 0, 0
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
