"""Adapters in the Triton step: rows of one step with several of them, and with none."""

from __future__ import annotations

import ctypes
import itertools
from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
# the interpreter computes in numpy, which warns of the NaN in memory that was never written
pytestmark = [pytest.mark.triton, pytest.mark.filterwarnings("ignore::RuntimeWarning")]

import test_lora  # noqa: E402
from gpu_steps import step_on  # noqa: E402
from model_shapes import HYBRIDS, LATENTS, PARTS, SHAPES, SHARED, Parts, Shape  # noqa: E402
from random_model import Model, View, span_of  # noqa: E402

from edgellm.kernels.lora import CHANGED, LowRank, pack_adapter  # noqa: E402
from edgellm.kernels.lora.gpu import Readers, StepAdapters  # noqa: E402
from edgellm.kernels.lora.reference import change  # noqa: E402
from edgellm.kernels.step import reference  # noqa: E402


@pytest.mark.parametrize(("inputs", "outputs"), [(96, (40, 16)), (576, (70,))])
@pytest.mark.parametrize("rank", [1, 8, pytest.param(17, marks=pytest.mark.smoke), 64])
@pytest.mark.usefixtures("poisoned_tensors")
def test_changes_are_those_of_the_reference(
    triton_device: str, inputs: int, outputs: tuple[int, ...], rank: int
) -> None:
    """Two adapters and none, behind a norm, with biases, and rows in the order of spans."""
    rng = np.random.default_rng(rank)
    names = CHANGED[: len(outputs)]
    x = rng.standard_normal((37, inputs + 3), np.float32)
    norm, bias = rng.standard_normal(inputs, np.float32), rng.standard_normal(sum(outputs), "f4")

    def random(ranks: tuple[int, ...]) -> dict[str, LowRank]:
        return {
            name: LowRank(
                rng.standard_normal((r, inputs), np.float32), rng.standard_normal((n, r), "f4")
            )
            for name, n, r in zip(names, outputs, ranks, strict=False)
        }

    changes = [random((rank, 3)), random((5,)), {}]
    readers = Readers.of(1, dict(zip(names, outputs, strict=True)), triton_device, bias)
    adapters = StepAdapters([readers], rows=50, device=triton_device)
    packed = [None if not of else pack_adapter([{}, of]) for of in changes]
    runs = [(0, 18), (2, 3), (1, 1), (0, 15)]
    for weights in packed[:2]:
        adapters.load(weights)
    tiles = adapters.set([(packed[i], count) for i, count in runs])
    assert tiles == 5
    rows = torch.tensor(x, device=triton_device)[:, 3:]
    on = torch.tensor(norm, device=triton_device)
    found = adapters.of(tiles + 2).rows(readers, rows, norm=on, epsilon=1e-5).cpu().numpy()
    of_row = np.repeat([i for i, _ in runs], [count for _, count in runs])
    exact = x[:, 3:].astype(np.float64)
    exact = exact * norm / np.sqrt((exact**2).mean(1, keepdims=True) + 1e-5)
    for i, of in enumerate(changes):
        parts = [
            change(exact[of_row == i], of[name]) if name in of else np.zeros((sum(of_row == i), n))
            for name, n in zip(names, outputs, strict=True)
        ]
        expected = np.concatenate(parts, axis=1) + bias
        limit = 2e-6 if triton_device == "cpu" else 2e-3
        np.testing.assert_allclose(
            found[of_row == i], expected, atol=limit * np.abs(expected).max()
        )
    assert np.array_equal(found[of_row == 2], np.tile(bias, (3, 1)))


LAYERS = {
    "grouped queries": SHAPES[0],
    "everything": PARTS["everything"],
    "starcoder2": PARTS["starcoder2"],
    "olmo2": PARTS["olmo2"],
    "output gate": Shape(4, 2, 32, layers=2, parts=Parts(output_gate=True)),
    "experts and a shared one": test_lora.LAYERS["a shared expert"],
    "short_conv": HYBRIDS["short_conv"],
    "mamba2": HYBRIDS["mamba2 with groups"],
    "mamba2 beside": HYBRIDS["mamba2 beside attention"],
    "delta_net": HYBRIDS["delta_net"],
    "an MLP beside experts": test_lora.LAYERS["an MLP beside experts"],
    "gemma4": SHARED["gemma4"],
    "gemma3n": SHARED["gemma3n"],
}


def distance(found: np.ndarray, expected: np.ndarray) -> float:
    of_rows = np.abs(found - expected).mean(axis=1) / np.abs(expected).mean()
    return float(np.median(of_rows))


@pytest.mark.parametrize(
    ("name", "rank"), list(zip(LAYERS, (1, 8, 17, 64, 4, 3, 5, 6, 7, 2, 9, 12, 8), strict=True))
)
@pytest.mark.usefixtures("poisoned_tensors")
def test_matches_the_reference(triton_device: str, name: str, rank: int) -> None:
    """Some rows, one more, and more than few, for which mixers have no other code."""
    model = Model(LAYERS[name])
    changes = test_lora.changes_of(model, rank)
    adapter = test_lora.packed(model, changes)
    cuts = (0, 7, 8) if name in HYBRIDS or "mamba2" in name else (0, 7, 8, 43)
    expected, _ = reference.forward(
        model.weights,
        model.floats,
        model.tokens[: cuts[-1]],
        model.turns,
        format="f32",
        adapter=changes,
    )
    views = model.views("f32")
    step, _ = step_on(model, views, triton_device)
    found = []
    for start, end in itertools.pairwise(cuts):
        span = span_of(views, model.tokens[start:end], start, logit_rows=1)
        result = step.run([replace(span, adapter=adapter)])
        assert result is not None
        found.append(result[0])
    assert distance(np.concatenate(found), expected) < 0.04


@pytest.mark.parametrize(
    "name", ["grouped queries", "everything", "experts and a shared one", "mamba2 beside"]
)
@pytest.mark.usefixtures("poisoned_tensors")
def test_rows_of_several_adapters_are_as_alone_and_as_in_cpp(
    triton_device: str, native_library: ctypes.CDLL, name: str
) -> None:
    """Rows of none have the bits of the same step without adapters."""
    model = Model(LAYERS[name])
    adapters = [
        test_lora.packed(model, test_lora.changes_of(model, 8)),
        test_lora.packed(model, test_lora.changes_of(model, 17, parts=("q", "v", "up", "mamba_o"))),
        None,
        test_lora.packed(model, test_lora.changes_of(model, 40, parts=("o", "k", "shared_down"))),
    ]
    order = (0, 0, 2, 1, 3)
    counts = (1, 1, 2, 3, 1)
    pools = model.pools("f32", blocks=len(order))
    spans = [
        replace(
            span_of(
                [View(blocks, [i]) for blocks in pools],
                model.tokens[9 * i : 9 * i + counts[i]],
                0,
                logit_rows=1,
            ),
            adapter=adapters[which],
            adapter_start=2 if counts[i] == 3 else 0,
        )
        for i, which in enumerate(order)
    ]
    step, _ = step_on(model, [View(blocks, []) for blocks in pools], triton_device)
    ends = np.cumsum(counts)[:-1]
    together = np.split(step.run(spans)[0], ends)
    plain = np.split(step.run([replace(span, adapter=None) for span in spans])[0], ends)
    np.testing.assert_array_equal(together[2], plain[2])
    np.testing.assert_array_equal(together[3][:2], plain[3][:2])
    in_cpp = model.step(native_library, [View(blocks, []) for blocks in pools]).run(spans)
    assert distance(np.concatenate(together), in_cpp[0]) < 0.03
    for i, ours in enumerate(together):
        alone, _ = step.run([spans[i]])
        assert distance(ours, alone) < 4e-3
        if i not in (2, 3):
            assert distance(ours, plain[i]) > 0.2


def test_the_next_tokens_of_a_captured_step_have_adapters(triton_device: str) -> None:
    """Others in each step, and again those of the first."""
    model = Model(Shape(2, 1, 32, hidden=64, intermediate=64))
    adapters = [test_lora.packed(model, test_lora.changes_of(model, rank)) for rank in (2, 5)]
    views = model.views("f32")
    step, _ = step_on(model, views, triton_device)
    span = span_of(views, model.tokens[:1], 0, logit_rows=1)
    found = [
        step.best([replace(span, adapter=adapter)])[0].scores
        for adapter in (adapters[0], None, adapters[1], adapters[0])
    ]
    np.testing.assert_array_equal(found[0], found[3])
    assert len({scores.tobytes() for scores in found}) == 3


@pytest.mark.parametrize(
    "name", ["shared", "gemma3n", pytest.param("gemma4", marks=pytest.mark.slow)]
)
@pytest.mark.usefixtures("poisoned_tensors")
def test_rows_that_leave_early_have_their_adapters(triton_device: str, name: str) -> None:
    """Adapters that begin before, among and behind the rows that go on; one sequence has none."""
    model = Model(SHARED[name])
    adapters = [test_lora.packed(model, test_lora.changes_of(model, rank)) for rank in (8, 3)]
    # adapter, its start, tokens, and those that go on
    parts = [(1, 3, 3, 1), (0, 0, 4, 2), (1, 3, 4, 2), (None, 0, 3, 1), (0, 0, 2, 0)]
    pools = model.pools("f32", blocks=len(parts))
    spans, wanted = [], []
    for i, (which, plain, count, rows) in enumerate(parts):
        views = [View(blocks, [i]) for blocks in pools]
        span = span_of(views, model.tokens[5 * i : 5 * i + count], 0, logit_rows=rows)
        adapter = None if which is None else adapters[which]
        spans.append(replace(span, adapter=adapter, adapter_start=plain))
        wanted += [n >= count - rows for n in range(count)]
    step, _ = step_on(model, [View(blocks, []) for blocks in pools], triton_device)
    whole, of_whole = step.run(spans)
    short, of_short = step.run(spans, all_states=False)
    assert distance(short[wanted], whole[wanted]) < 4e-3
    assert distance(of_short, of_whole) < 4e-3
    assert not short[~np.array(wanted)].any()
    without, _ = step.run([replace(span, adapter=None) for span in spans], all_states=False)
    apart = np.abs(short - without)[wanted].mean(axis=1) / np.abs(short[wanted]).mean()
    # the adapter of the first one begins behind it, that of the third one at its last row
    assert ((apart > 0.2) == [False, True, True, False, True, False]).all()


@pytest.mark.slow
@pytest.mark.usefixtures("poisoned_tensors")
def test_captured_chunks_are_those_of_their_adapters_and_rows(
    triton_device: str, native_library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With as many tiles and rows, and with others, in turns."""
    monkeypatch.setattr("edgellm.kernels.step.gpu.MAX_ROWS", 8)
    model = Model(SHARED["shared"])
    adapters = [test_lora.packed(model, test_lora.changes_of(model, rank)) for rank in (8, 3)]
    pools = model.pools("f32", blocks=1)
    views = [View(blocks, [0]) for blocks in pools]
    step, _ = step_on(model, views, triton_device)
    in_cpp = model.step(native_library, views)
    plain = span_of(views, model.tokens[:8], 0, logit_rows=1)
    turns = [(0, 0, False), (0, 0, True), (None, 0, False), (1, 3, False), (1, 0, False)]
    for which, start, all_states in turns:
        adapter = None if which is None else adapters[which]
        span = replace(plain, adapter=adapter, adapter_start=start)
        expected, _ = in_cpp.run([span])
        found, _ = step.run([span], all_states=all_states)
        assert distance(found[-1:], expected[-1:]) < 0.03
        assert found[:-1].any() == all_states


def test_what_triton_does_not_change_is_refused(triton_device: str) -> None:
    model = Model(LATENTS["latents"])
    step, _ = step_on(model, model.views("f32"), triton_device)
    for part in ("v", "key_up"):
        changes = test_lora.changes_of(model, 2, parts=(part,))
        with pytest.raises(ValueError, match=rf"layers\.0\.{part}, which reads latents"):
            step.load_adapter(test_lora.packed(model, changes))
    wide = test_lora.changes_of(model, 600, parts=("up",))
    with pytest.raises(ValueError, match="rank 600; there is room for 512"):
        step.load_adapter(test_lora.packed(model, wide))
    other = Model(SHAPES[0])
    with pytest.raises(ValueError, match="layers of the adapter"):
        step.load_adapter(test_lora.packed(other, test_lora.changes_of(other, 2)))
