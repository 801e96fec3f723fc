"""The fused step in Triton on weights of several kinds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")
# the interpreter computes in numpy, which warns of the NaN in memory that was never written
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

from random_weights import random_weight  # noqa: E402

from edgellm.kernels import rope  # noqa: E402
from edgellm.kernels.gpu.kv_blocks import DeviceBlocks  # noqa: E402
from edgellm.kernels.kv_blocks import allocate  # noqa: E402
from edgellm.kernels.linear import Panels, to_panels  # noqa: E402
from edgellm.kernels.quantized import KINDS, dequantize  # noqa: E402
from edgellm.kernels.step import LayerWeights, Weights, reference  # noqa: E402
from edgellm.kernels.step import gpu as step_gpu  # noqa: E402

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM = 256, 512, 2, 1, 128
VOCABULARY = 70
TABLE = [2, 0]
EPSILON = 1e-5
INV_FREQ = (10000.0 ** (-np.arange(HEAD_DIM // 2) / (HEAD_DIM // 2))).tolist()
SHAPES = {
    "q": (HEADS * HEAD_DIM, HIDDEN),
    "k": (KV_HEADS * HEAD_DIM, HIDDEN),
    "v": (KV_HEADS * HEAD_DIM, HIDDEN),
    "o": (HIDDEN, HEADS * HEAD_DIM),
    "gate": (INTERMEDIATE, HIDDEN),
    "up": (INTERMEDIATE, HIDDEN),
    "down": (HIDDEN, INTERMEDIATE),
}
# Of q, k, v, o, gate, up, down, the embedding and the head, as files mix them and worse.
MIXED = [
    "int4_k int4_k int6_k int5_k int4_k int4_k int6_k int4_k int6_k",
    "iq4_xs int5_symmetric int8_symmetric iq4_nl int8_affine int4_k mxfp4 int8_symmetric iq4_xs",
    "int5_affine int8_affine int8_affine int4_affine int6_k iq4_xs int4_k int5_k int4_affine",
]


class Model:
    """Random weights, dequantized ones beside them."""

    def __init__(self, kinds: Sequence[str]) -> None:
        self._rng = np.random.default_rng(0)
        self.floats: dict[str, np.ndarray] = {}
        self.tokens = self._rng.integers(0, VOCABULARY, 10).tolist()
        *layer, embedding, head = kinds
        self.weights = Weights(
            layers=[self._layer("layers.0.", layer)],
            final_norm=self._norm("final_norm"),
            embedding=self._linear("embedding", embedding, VOCABULARY, HIDDEN),
            head=self._linear("head", head, VOCABULARY, HIDDEN),
            heads=HEADS,
            window=None,
            epsilon=EPSILON,
        )

    def _layer(self, prefix: str, kinds: Sequence[str]) -> LayerWeights:
        linears = {
            name: self._linear(prefix + name, kind, *SHAPES[name])
            for name, kind in zip(SHAPES, kinds, strict=True)
        }
        return LayerWeights(
            attention_norm=self._norm(prefix + "attention_norm"),
            mlp_norm=self._norm(prefix + "mlp_norm"),
            **linears,
        )

    def _norm(self, name: str) -> np.ndarray:
        self.floats[name] = (1 + 0.1 * self._rng.standard_normal(HIDDEN)).astype("f4")
        return self.floats[name]

    def _linear(self, name: str, kind: str, outputs: int, inputs: int) -> Panels:
        weight = random_weight(KINDS[kind], outputs, inputs, self._rng)
        self.floats[name] = dequantize(weight)
        return to_panels(weight)

    def step(self, device: str) -> step_gpu.DeviceStep:
        sizes = {"layers": 1, "kv_heads": KV_HEADS, "head_dim": HEAD_DIM}
        blocks = DeviceBlocks.like(allocate(format="f32", blocks=3, **sizes), device)
        return step_gpu.DeviceStep(self.weights, rope.table(INV_FREQ, 256), blocks, device)

    def reference(self) -> tuple[np.ndarray, np.ndarray]:
        return reference.forward(
            self.floats,
            self.tokens,
            INV_FREQ,
            layers=1,
            heads=HEADS,
            kv_heads=KV_HEADS,
            epsilon=EPSILON,
            format="f32",
            rounded=False,
        )


@pytest.mark.parametrize("kinds", MIXED)
def test_mixed_kinds_match_reference(triton_device: str, kinds: str) -> None:
    """One token by one, some at once, and one again."""
    model = Model(kinds.split())
    step = model.step(triton_device)
    found = []
    for start, end in ((0, 1), (1, 9), (9, 10)):
        tokens = model.tokens[start:end]
        found.append(step.run(TABLE, tokens, start, logit_rows=end - start))
    for ours, theirs in zip(zip(*found, strict=True), model.reference(), strict=True):
        assert np.abs(np.concatenate(ours) - theirs).mean() / np.abs(theirs).mean() < 4e-3


@pytest.mark.parametrize(
    ("kinds", "launches"),
    [
        (["int4_k"] * 3, 4),
        (["int4_k", "int4_k", "int6_k"], 5),
        (["int8_symmetric", "int4_k", "int4_k"], 5),
        (["int4_k", "int6_k", "int4_k"], 6),
    ],
)
def test_neighbours_of_one_kind_are_one_launch(
    triton_device: str, monkeypatch: pytest.MonkeyPatch, kinds: list[str], launches: int
) -> None:
    model = Model([*kinds, *["int4_affine"] * 6])
    step = model.step(triton_device)
    seen: list[int] = []
    linear = step_gpu.linear

    def counted(*arguments: Any, **options: Any) -> None:
        seen.append(1)
        linear(*arguments, **options)

    monkeypatch.setattr(step_gpu, "linear", counted)
    step.run(TABLE, model.tokens[:2], 0, logit_rows=0)
    assert len(seen) == launches
