"""The fused step in Triton on weights of several kinds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
# the interpreter computes in numpy, which warns of the NaN in memory that was never written
pytestmark = [pytest.mark.triton, pytest.mark.filterwarnings("ignore::RuntimeWarning")]

import model_shapes  # noqa: E402
import random_model  # noqa: E402
from gpu_steps import counted, device_step, span, tables  # noqa: E402
from model_shapes import Parts  # noqa: E402
from random_weights import random_weight  # noqa: E402

from edgellm.kernels import rope  # noqa: E402
from edgellm.kernels.experts import Routing  # noqa: E402
from edgellm.kernels.gpu.kv_blocks import DeviceBlocks  # noqa: E402
from edgellm.kernels.kv_blocks import (  # noqa: E402
    KVFormat,
    allocate,
)
from edgellm.kernels.linear import PackedWeights, pack_weight  # noqa: E402
from edgellm.kernels.linear.gpu import FEW_ROWS  # noqa: E402
from edgellm.kernels.quantized import KINDS, dequantize  # noqa: E402
from edgellm.kernels.step import (  # noqa: E402
    LayerWeights,
    Weights,
    gpu_norm,
    reference,
)
from edgellm.kernels.step.gpu import DeviceStep  # noqa: E402

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
            final_norm=self._norm(),
            embedding=self._linear("embedding", embedding, VOCABULARY, HIDDEN),
            head=self._linear("head", head, VOCABULARY, HIDDEN),
            epsilon=EPSILON,
        )

    def _layer(self, prefix: str, kinds: Sequence[str]) -> LayerWeights:
        linears = {
            name: self._linear(prefix + name, kind, *SHAPES[name])
            for name, kind in zip(SHAPES, kinds, strict=True)
        }
        return LayerWeights(
            attention_norm=self._norm(),
            mlp_norm=self._norm(),
            heads=HEADS,
            **linears,
        )

    def _norm(self) -> np.ndarray:
        return (1 + 0.1 * self._rng.standard_normal(HIDDEN)).astype("f4")

    def _linear(self, name: str, kind: str, outputs: int, inputs: int) -> PackedWeights:
        weight = random_weight(KINDS[kind], outputs, inputs, self._rng)
        self.floats[name] = dequantize(weight)
        return pack_weight(weight)

    def step(self, device: str) -> DeviceStep:
        sizes = {"layers": 1, "kv_heads": KV_HEADS, "head_dim": HEAD_DIM}
        blocks = DeviceBlocks.like(allocate(format="f32", blocks=3, **sizes), device)
        return DeviceStep(self.weights, [rope.table(INV_FREQ, 256)], [blocks], device)

    def reference(self) -> tuple[np.ndarray, np.ndarray]:
        return reference.forward(
            self.weights,
            self.floats,
            self.tokens,
            [(INV_FREQ, 1.0)],
            format="f32",
            rounded=True,
        )


@pytest.mark.parametrize("kinds", MIXED)
def test_mixed_kinds_match_reference(triton_device: str, kinds: str) -> None:
    """One token by one, some at once, and one again."""
    model = Model(kinds.split())
    step = model.step(triton_device)
    results = []
    for start, end in ((0, 1), (1, 9), (9, 10)):
        results.append(step.run([span([TABLE], model.tokens, start, end)]))
    for ours, theirs in zip(zip(*results, strict=True), model.reference(), strict=True):
        assert np.abs(np.concatenate(ours) - theirs).mean() / np.abs(theirs).mean() < 0.02


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
    counts = counted(monkeypatch)
    step.run([span([TABLE], model.tokens, 0, 2, logit_rows=0)])
    assert counts["linear"] == launches


PARTS = {
    "gelu": Parts(activation="gelu_tanh"),
    "ungated": Parts(gated=False),
    "biases": Parts(biases=True),
    "layer norms": Parts(layer_norm=True),
    "post norms": Parts(norms="post"),
    "sandwich": Parts(norms="sandwich"),
    "head norms": Parts(qk_norm="head"),
    "norms of all heads": Parts(qk_norm="width"),
    "head norms after RoPE": Parts(qk_norm="head_after_rope"),
    "scale": Parts(scale=0.3),
    "softcap": Parts(softcap=2.0, scale=0.3),
    "embedding scale": Parts(embedding_scale=0.2),
    "logit softcap": Parts(logit_softcap=4.0),
    "ropes": Parts(ropes=(1.4, 0.0)),
}
SMALL = model_shapes.Shape(4, 2, 32, hidden=64, intermediate=96, layers=2, window=6)
ALONE = {name: replace(SMALL, parts=parts) for name, parts in PARTS.items()}


@pytest.mark.parametrize(
    ("name", "format"),
    [
        *((name, "f32") for name in ALONE),
        *((name, "int8") for name in model_shapes.PARTS),
        ("everything", "f32"),
    ],
)
@pytest.mark.usefixtures("poisoned_tensors")
def test_parts_match_reference(triton_device: str, name: str, format: KVFormat) -> None:
    """Each part on its own, and those of families of models: one token, some, and one again."""
    model = random_model.Model((ALONE | model_shapes.PARTS)[name])
    step = device_step(model, format, triton_device)
    results = []
    for start, end in ((0, 1), (1, 9), (9, 10)):
        results.append(step.run([span(tables(model), model.tokens, start, end)]))
    expected = model.reference(10, format)
    # Q and K have activations of 16 bits beside V, where the C++ kernels and the reference have 8
    allowed = 0.04
    for ours, theirs in zip(zip(*results, strict=True), expected, strict=True):
        assert np.abs(np.concatenate(ours) - theirs).mean() / np.abs(theirs).mean() < allowed


@pytest.mark.parametrize("name", [pytest.param("logit softcap", marks=pytest.mark.smoke), "gemma2"])
def test_the_best_logits_are_capped_as_well(triton_device: str, name: str) -> None:
    model = random_model.Model((ALONE | model_shapes.PARTS)[name])
    step = device_step(model, "f32", triton_device)
    _, logits = step.run([span(tables(model), model.tokens, 0, 1)])
    (best,) = step.best([span(tables(model), model.tokens, 0, 1)])
    np.testing.assert_array_equal(best.scores, logits[0, best.ids])
    assert np.abs(logits).max() < model.weights.logit_softcap
    np.testing.assert_allclose(best.log_sum_exp, np.log(np.exp(logits).sum()), rtol=1e-5)
    states, _ = step.run([span(tables(model), model.tokens, 0, 1, logit_rows=0)])
    np.testing.assert_allclose(step.logits(states), logits, atol=0.02)


@pytest.mark.parametrize(
    ("parts", "linears", "norms"),
    [
        (Parts(), 4, 0),
        (Parts(qk_norm="head", biases=True, activation="gelu_tanh", softcap=3.0), 4, 0),
        (Parts(norms="post"), 4, 2),
        (Parts(norms="sandwich"), 4, 2),
        (Parts(layer_norm=True, gated=False), 4, 2),
        (Parts(routing=Routing(experts=2, used=1), shared=32), 6, 0),
    ],
)
def test_only_norms_that_no_product_computes_are_launches(
    triton_device: str,
    monkeypatch: pytest.MonkeyPatch,
    parts: Parts,
    linears: int,
    norms: int,
) -> None:
    model = random_model.Model(replace(SMALL, layers=1, parts=parts))
    step = device_step(model, "f32", triton_device)
    counts = counted(monkeypatch)
    step.run([span(tables(model), model.tokens, 0, 1, logit_rows=0)])
    launches = {"linear": linears, "append_rotated": 1, "attend": 1, "normalize": norms}
    assert counts == Counter(launches)


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("layer", [False, True])
@pytest.mark.parametrize("width", [32, 96, 5000])
def test_norms_match_reference(triton_device: str, width: int, layer: bool, add: bool) -> None:
    """Of rows whose mean is far from zero, wider than a block as well."""
    rng = np.random.default_rng(width)
    x, before = (rng.standard_normal((3, width)).astype("f4") + 20 for _ in range(2))
    weight, bias = (rng.standard_normal(width).astype("f4") for _ in range(2))
    norm = gpu_norm.DeviceNorm.of(weight, bias if layer else None, triton_device)
    y = torch.tensor(before if add else np.full_like(before, np.nan), device=triton_device)
    ours = torch.tensor(x, device=triton_device)
    gpu_norm.normalize(ours, norm, y, epsilon=EPSILON, add=add)
    expected = reference.norm(x.astype(np.float64), weight, bias if layer else None, EPSILON)
    np.testing.assert_allclose(y.cpu().numpy(), expected + add * before, atol=5e-5)


def test_layers_that_name_a_rope_that_is_not_there_are_refused(triton_device: str) -> None:
    model = random_model.Model(ALONE["ropes"])
    pools = [DeviceBlocks.like(view.blocks, triton_device) for view in model.views("f32")]
    with pytest.raises(ValueError, match="RoPE table 1 of 1"):
        DeviceStep(model.weights, model.ropes[:1], pools, triton_device)


@pytest.mark.parametrize(
    "name", ["gemma4", "gemma3n", "streams", "embeddings", "shared", "k_as_v", "heads"]
)
@pytest.mark.usefixtures("poisoned_tensors")
def test_layers_that_differ_match_reference(triton_device: str, name: str) -> None:
    """Of shared K and V, of heads and widths, and with embeddings of their own; two sequences."""
    model = random_model.Model((model_shapes.SHARED | model_shapes.UNEVEN)[name])
    step = device_step(model, "f32", triton_device)
    sequences = [
        (tables(model), model.tokens),
        ([[2], [4]][: len(tables(model))], model.tokens[9:]),
    ]
    results: list[list[tuple[np.ndarray, ...]]] = [[], []]
    steps = [[(0, 0, 1)], [(0, 1, 4), (1, 0, 3)], [(1, 3, 4), (0, 4, 5)]]
    if name.startswith("gemma"):
        steps.append([(1, 4, 4 + FEW_ROWS), (0, 5, 6)])  # more rows than are coded
    for calls in steps:
        found = step.run([span(*sequences[number], *part) for number, *part in calls])
        ends = np.cumsum([end - start for _, start, end in calls])[:-1]
        for (number, *_), *each in zip(calls, *(np.split(of, ends) for of in found), strict=True):
            results[number].append(tuple(each))
    for (_, tokens), parts in zip(sequences, results, strict=True):
        ours = [np.concatenate(part) for part in zip(*parts, strict=True)]
        expected = reference.forward(
            model.weights, model.floats, tokens[: len(ours[0])], model.turns, format="f32"
        )
        for mine, theirs in zip(ours, expected, strict=True):
            errors = np.abs(mine - theirs).mean(axis=1) / np.abs(theirs).mean()
            # those of the first token have no part in it; of others Q and K have 16 bits beside V
            assert errors[0] < 0.02
            assert errors.mean() < 0.04


def test_rows_leave_before_layers_that_read_k_and_v_of_others(triton_device: str) -> None:
    """Of two sequences, one of which asks for nothing; the next rows read what all have left."""
    model = random_model.Model(model_shapes.SHARED["gemma3n"])
    wanted = []
    for all_states in (True, False):
        step = device_step(model, "f32", triton_device)
        others = [[2], [4]], model.tokens[9:]
        spans = [span(tables(model), model.tokens, 0, 6, logit_rows=2), span(*others, 0, 2)]
        first = step.run([spans[0], replace(spans[1], logit_rows=0)], all_states=all_states)
        last = step.run([span(tables(model), model.tokens, 6, 7), span(*others, 2, 3)])
        wanted.append((*first, *last))
    for number, (whole, short) in enumerate(zip(*wanted, strict=True)):
        rows = slice(4, 6) if number == 0 else slice(None)
        np.testing.assert_allclose(short[rows], whole[rows], atol=1e-4 * np.abs(whole).max())
    assert not wanted[1][0][[0, 1, 2, 3, 6, 7]].any()
