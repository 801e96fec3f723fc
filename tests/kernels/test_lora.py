"""Adapters in the fused step: rows of one step with several of them, and with none."""

from __future__ import annotations

import ctypes
import functools
import itertools
from dataclasses import replace

import numpy as np
import pytest
from model_shapes import EXPERTS, HYBRIDS, LATENTS, PARTS, SHAPES, SHARED, UNEVEN, Parts, Shape
from random_model import Model, View, span_of

from edgellm.kernels.lora import CHANGED, AdapterWeights, LowRank, pack_adapter
from edgellm.kernels.lora.reference import change
from edgellm.kernels.step import reference

LAYERS = {
    "grouped queries": SHAPES[0],
    "gemma3": PARTS["gemma3"],
    "everything": PARTS["everything"],
    "starcoder2": PARTS["starcoder2"],
    "olmo2": PARTS["olmo2"],
    "uneven heads": UNEVEN["heads"],
    "experts": EXPERTS["every second layer"],
    "output gate": Shape(4, 2, 32, layers=2, parts=Parts(qk_norm="head", output_gate=True)),
    "latents": LATENTS["latents"],
    "a shared expert": EXPERTS["sigmoid and a shared expert"],
    "an MLP beside experts": EXPERTS["an MLP beside experts"],
    "short_conv": HYBRIDS["short_conv"],
    "mamba2": HYBRIDS["mamba2 with groups"],
    "mamba2 beside": HYBRIDS["mamba2 beside attention"],
    "delta_net": HYBRIDS["delta_net"],
    "gemma4": SHARED["gemma4"],
    "gemma3n": SHARED["gemma3n"],
}


# Each head has an A of its own in the first one, and a B in the second.
HEADS = ("key_up", "value_up")


def changes_of(
    model: Model, rank: int, *, parts: tuple[str, ...] = CHANGED, size: float = 0.5
) -> dict[str, LowRank]:
    """Random changes that are `size` times as large as what they are added to."""
    rng, changes = np.random.default_rng(rank), {}
    for name, matrix in model.floats.items():
        _, _, part = name.rpartition(".")
        index = int(name.split(".")[1]) if part in parts else 0
        of_experts = model.weights.layers[index].routing is not None
        if name != f"layers.{index}.{part}" or part not in parts:  # the gate of an embedding
            continue
        if of_experts and part in ("gate", "up", "down"):
            continue
        outputs, inputs = matrix.shape
        shapes = (rank, inputs), (outputs, rank)
        if part in HEADS:
            heads = model.weights.layers[index].heads
            shapes = (rank, inputs), (outputs // heads, rank)
            shapes = tuple(
                (heads, *x) if i == HEADS.index(part) else x for i, x in enumerate(shapes)
            )
        a = rng.standard_normal(shapes[0]).astype("f4") / np.sqrt(inputs).astype("f4")
        b = rng.standard_normal(shapes[1]).astype("f4")
        changes[name] = LowRank(a, size * 3 * b / np.sqrt(rank).astype("f4"))
    return changes


# Shapes that have all linear layers that an adapter may change.
ONE_BY_ONE = {
    "output gate": Shape(4, 2, 32, layers=2, parts=Parts(output_gate=True)),
    "latents": LATENTS["latents"],
    "a shared expert": EXPERTS["a shared expert by its share"],
    "short_conv": HYBRIDS["short_conv"],
    "mamba2 beside": replace(HYBRIDS["mamba2 beside attention"], layers=1),
    "delta_net": HYBRIDS["delta_net"],
}


@functools.cache
def model_of(name: str) -> Model:
    return Model(ONE_BY_ONE[name])


def packed(model: Model, changes: dict[str, LowRank]) -> AdapterWeights:
    return pack_adapter(
        [
            {
                part: changes[f"layers.{i}.{part}"]
                for part in CHANGED
                if f"layers.{i}.{part}" in changes
            }
            for i in range(len(model.weights.layers))
        ]
    )


def run(
    library: ctypes.CDLL,
    model: Model,
    adapter: AdapterWeights | None,
    cuts: list[int],
    *,
    threads: int = 2,
    format: str = "f32",
) -> tuple[np.ndarray, np.ndarray]:
    views = model.views(format)
    step, found = model.step(library, views), []
    for start, end in zip([0, *cuts], cuts, strict=False):
        span = span_of(views, model.tokens[start:end], start, logit_rows=end - start)
        found.append(step.run([replace(span, adapter=adapter)], threads=threads))
    states, logits = zip(*found, strict=True)
    return np.concatenate(states), np.concatenate(logits)


@functools.cache
def reference_of(name: str, rank: int) -> tuple[Model, np.ndarray]:
    model = Model(LAYERS[name])
    changes = changes_of(model, rank)
    states, _ = reference.forward(
        model.weights, model.floats, model.tokens[:21], model.turns, format="f32", adapter=changes
    )
    return model, states


@pytest.mark.parametrize(
    ("name", "rank"),
    list(zip(LAYERS, (1, 8, 6, 16, 64, 3, 5, 12, 9, 4, 2, 8, 7, 16, 6, 5, 11), strict=True)),
    ids=str,
)
@pytest.mark.usefixtures("poisoned")
def test_matches_the_reference(compiled: ctypes.CDLL, name: str, rank: int) -> None:
    model, expected = reference_of(name, rank)
    adapter = packed(model, changes_of(model, rank))
    states, _ = run(compiled, model, adapter, [1, 6, 21])
    plain, _ = run(compiled, model, None, [21])

    def distance(found: np.ndarray) -> float:
        of_rows = np.abs(found - expected).mean(axis=1) / np.abs(expected).mean()
        return float(np.median(of_rows))

    assert distance(plain) > 0.2
    assert distance(states) < (0.01 if model.shape.layers == 1 else 0.03)


def test_each_linear_layer_is_changed_by_its_own_matrices(native_library: ctypes.CDLL) -> None:
    """One at a time, so that none stands in for another."""
    seen = set()
    for name, part in itertools.product(ONE_BY_ONE, CHANGED):
        model = model_of(name)
        changes = changes_of(model, 4, parts=(part,), size=1.0)
        if not changes:
            continue
        seen.add(part)
        expected, _ = reference.forward(
            model.weights,
            model.floats,
            model.tokens[:9],
            model.turns,
            format="f32",
            adapter=changes,
        )
        states, _ = run(native_library, model, packed(model, changes), [9])
        plain, _ = run(native_library, model, None, [9])
        near, far = (np.abs(found - expected).mean() for found in (states, plain))
        assert near < 0.1 * far, (name, part)
    assert seen == {*CHANGED}


@pytest.mark.parametrize(
    ("name", "format"),
    [("everything", "f32"), ("uneven heads", "int8"), ("experts", "int8"), ("output gate", "int8")],
)
def test_cuts_and_threads_make_no_difference(compiled: ctypes.CDLL, name: str, format: str) -> None:
    model = Model(LAYERS[name])
    adapter = packed(model, changes_of(model, 12))
    expected = run(compiled, model, adapter, [140], threads=1, format=format)
    for cuts, threads in (([1, 3, 9, 130, 140], 2), ([131, *range(132, 141)], 3)):
        found = run(compiled, model, adapter, cuts, threads=threads, format=format)
        for ours, theirs in zip(found, expected, strict=True):
            np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("name", [*LAYERS])
@pytest.mark.usefixtures("poisoned")
def test_rows_of_several_adapters_are_as_alone(compiled: ctypes.CDLL, name: str) -> None:
    """Also rows of none, which have the bits of a step without adapters."""
    model = Model(LAYERS[name])
    same = packed(model, changes_of(model, 16))
    adapters = [
        same,
        same,
        None,
        packed(model, changes_of(model, 3, parts=("q", "v", "conv_in", "delta_z", "value_up"))),
        packed(model, changes_of(model, 40, parts=("o", "up", "shared_down", "mamba_o", "k"))),
        None,
    ]
    counts = (1, 1, 7, 30, 1, 2)

    def step(chosen: list[int], threads: int, *, plain: bool = False) -> list[np.ndarray]:
        pools = model.pools("int8", blocks=len(counts))
        spans = [
            replace(
                span_of(
                    [View(blocks, [i]) for blocks in pools],
                    model.tokens[9 * i : 9 * i + counts[i]],
                    0,
                    logit_rows=1,
                ),
                adapter=None if plain else adapters[i],
            )
            for i in chosen
        ]
        built = model.step(compiled, [View(blocks, []) for blocks in pools])
        found = built.run(spans, threads=threads)
        assert found is not None
        return list(found)

    every = range(len(counts))
    together, alone = step([*every], 3), [step([i], 1) for i in every]
    for ours, theirs in zip(together, zip(*alone, strict=True), strict=True):
        np.testing.assert_array_equal(ours, np.concatenate(theirs))
    for i, with_it in enumerate(alone):
        without = step([i], 1, plain=True)
        assert np.array_equal(with_it[1], without[1]) == (adapters[i] is None)


@pytest.mark.usefixtures("poisoned")
def test_rows_before_an_adapter_begins_are_the_models(compiled: ctypes.CDLL) -> None:
    """However the rows are cut into spans."""
    model = Model(LAYERS["everything"])
    adapter = packed(model, changes_of(model, 12))

    def step(cuts: list[tuple[int, int, int]], threads: int) -> tuple[np.ndarray, np.ndarray]:
        """States and logits of spans from, to, and without the adapter up to a row."""
        views, found = model.views("int8"), []
        built = model.step(compiled, views)
        for start, end, plain in cuts:
            span = span_of(views, model.tokens[start:end], start, logit_rows=end - start)
            span = replace(span, adapter=adapter, adapter_start=plain)
            result = built.run([span], threads=threads)
            assert result is not None
            found.append(result)
        states, logits = zip(*found, strict=True)
        return np.concatenate(states), np.concatenate(logits)

    expected = step([(0, 13, 13), (13, 30, 0)], 1)
    for cuts in ([(0, 30, 13)], [(0, 9, 9), (9, 18, 4), (18, 30, 0)]):
        for threads in (1, 3):
            for ours, theirs in zip(step(cuts, threads), expected, strict=True):
                np.testing.assert_array_equal(ours, theirs)
    assert not np.array_equal(step([(0, 30, 30)], 1)[1], expected[1])


def test_an_adapter_of_another_model_is_refused(native_library: ctypes.CDLL) -> None:
    model, other = Model(SHAPES[1]), Model(SHAPES[0])
    views = model.views("f32")
    span = span_of(views, [1], 0, logit_rows=1)
    step = model.step(native_library, views)
    with pytest.raises(ValueError, match="layers of the adapter is 1; needed is 3"):
        step.run([replace(span, adapter=packed(other, changes_of(other, 2)))])
    wide = Model(replace(SHAPES[0], layers=3))
    with pytest.raises(ValueError, match=r"layers\.0\.q is \(576, 192\); needed is \(64, 96\)"):
        step.run([replace(span, adapter=packed(wide, changes_of(wide, 2)))])
    experts = Model(EXPERTS["one of three"])
    views = experts.views("f32")
    matrix = experts.floats["layers.0.down"]
    change = LowRank(np.ones((1, matrix.shape[1]), "f4"), np.ones((matrix.shape[0], 1), "f4"))
    with pytest.raises(ValueError, match="has no down"):
        experts.step(native_library, views).run(
            [
                replace(
                    span_of(views, [1], 0, logit_rows=1), adapter=pack_adapter([{"down": change}])
                )
            ]
        )


def test_rounding_moves_a_change_by_one_percent() -> None:
    """However much the ranks differ, of which one changes nothing."""
    rng = np.random.default_rng(1)
    a, b = rng.standard_normal((8, 576), np.float32), rng.standard_normal((300, 8), np.float32)
    a *= np.float32(10) ** np.arange(-4, 4)[:, None]
    b /= np.float32(10) ** np.arange(-4, 4)
    a[3] = 0
    exact, found = a.T @ b.T, change(np.eye(576), LowRank(a, b))
    assert 0.002 < np.linalg.norm(found - exact) / np.linalg.norm(exact) < 0.012


def test_matrices_that_do_not_fit_are_refused() -> None:
    def change(rank: int, of_b: int, outputs: int, inputs: int) -> LowRank:
        return LowRank(np.ones((rank, inputs), "f4"), np.ones((outputs, of_b), "f4"))

    for wrong in (change(2, 3, 32, 64), change(0, 0, 32, 64), change(2, 2, 32, 48)):
        with pytest.raises(ValueError, match="needed are one rank"):
            pack_adapter([{"q": wrong}])
    with pytest.raises(ValueError, match="an adapter of router"):
        pack_adapter([{"router": change(2, 2, 32, 64)}])


def test_equal_matrices_have_equal_digests() -> None:
    model = Model(SHAPES[1])
    changes = changes_of(model, 4)
    one, other = packed(model, changes), packed(model, changes)
    assert one.digest == other.digest
    moved = {**changes, "layers.0.q": LowRank(changes["layers.0.q"].a, -changes["layers.0.q"].b)}
    assert packed(model, moved).digest != one.digest
    swapped = [dict(layer) for layer in one.layers]
    assert len(swapped) == 3
    first = {"q": changes["layers.0.q"]}
    assert pack_adapter([first, {}]).digest != pack_adapter([{}, first]).digest
