"""Experts within a limit of memory: the same results, and memory that goes back to the system."""

from __future__ import annotations

import ctypes
import mmap
import tempfile
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from model_shapes import Parts, Shape
from random_model import Model, span_of

from edgellm.kernels.experts import ExpertUse, Routing
from edgellm.kernels.linear import PackedWeights
from edgellm.kernels.step import FusedStep, LayerWeights

MEMORY = Path("/dev/shm")
SHAPE = Shape(
    *(4, 2, 32),
    hidden=256,
    intermediate=2048,
    layers=2,
    parts=Parts(routing=Routing(experts=12, used=2)),
)


@dataclass(frozen=True)
class Mapped:
    """A model whose matrices lie in a mapped file."""

    model: Model

    @property
    def layers(self) -> list[LayerWeights]:
        return list(self.model.weights.layers)

    @property
    def expert(self) -> int:
        """Bytes of an expert, the same in all layers."""
        return sum(len(part) for _, part in self.parts(0, 0))

    def parts(self, layer: int, expert: int) -> list[tuple[int, np.ndarray]]:
        """Addresses and bytes of the matrices of an expert."""
        here = self.layers[layer]
        assert here.gate is not None
        found = []
        for panels in (here.gate, here.up, here.down):
            size = panels.data.nbytes // 12
            part = panels.data.reshape(-1)[expert * size : (expert + 1) * size]
            found.append((part.ctypes.data, part))
        return found

    def present(self, layer: int, expert: int) -> float:
        """Share of the whole pages of an expert that are in this process."""
        page, there = mmap.PAGESIZE, []
        with Path("/proc/self/pagemap").open("rb") as pages:
            for address, part in self.parts(layer, expert):
                first, end = -(-address // page), (address + len(part)) // page
                pages.seek(8 * first)
                entries = np.frombuffer(pages.read(8 * (end - first)), np.uint64)
                there.append(entries >> np.uint64(63))
        return float(np.concatenate(there).mean())


@pytest.fixture(scope="module")
def mapped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapped]:
    """In files in memory, where there are such: on disks a page brings megabytes with it."""
    if not MEMORY.exists():
        yield made(tmp_path_factory.mktemp("experts"))
        return
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        yield made(Path(folder))


def made(folder: Path) -> Mapped:
    model = Model(SHAPE)

    def moved(panels: PackedWeights, name: str) -> PackedWeights:
        file = folder / name
        panels.data.tofile(file)
        data = np.memmap(file, np.uint8, "r").reshape(panels.data.shape)
        return replace(panels, data=np.asarray(data))

    layers = [
        replace(
            layer,
            gate=moved(layer.gate, f"gate{index}"),
            up=moved(layer.up, f"up{index}"),
            down=moved(layer.down, f"down{index}"),
        )
        for index, layer in enumerate(model.weights.layers)
    ]
    model.weights = replace(model.weights, layers=layers)
    return Mapped(model)


def steps(
    library: ctypes.CDLL, mapped: Mapped, cuts: list[int], limit: int | None
) -> tuple[FusedStep, list[np.ndarray]]:
    """A step for each cut, and its logits."""
    model = mapped.model
    views, found = model.views("int8"), []
    pools = [view.blocks for view in views]
    step = FusedStep(library, model.weights, model.ropes, pools, expert_memory=limit)
    for start, end in zip([0, *cuts], cuts, strict=False):
        span = span_of(views, model.tokens[start:end], start, logit_rows=end - start)
        result = step.run([span], threads=2)
        assert result is not None
        found.append(result[1])
    return step, found


CUTS = [3, 40, *range(41, 100)]


@pytest.mark.slow
@pytest.mark.parametrize("experts", [4, 5, 7, 24])
def test_results_are_the_same(native_library: ctypes.CDLL, mapped: Mapped, experts: int) -> None:
    _, expected = steps(native_library, mapped, CUTS, None)
    step, found = steps(native_library, mapped, CUTS, experts * mapped.expert)
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    memory = step.expert_memory
    assert memory is not None
    assert 0 < memory.resident <= experts * mapped.expert
    use = memory.use
    assert use.bytes_read == use.reads * mapped.expert
    if experts == 24:  # all of them: each is read once
        assert use.reads == memory.resident // mapped.expert <= 24
    assert 0 < use.hit_rate < 1


def test_those_used_last_stay(native_library: ctypes.CDLL, mapped: Mapped) -> None:
    """Step by step beside a list in the order of use."""
    model, limit = mapped.model, 5
    views = model.views("int8")
    pools = [view.blocks for view in views]
    step = FusedStep(
        native_library, model.weights, model.ropes, pools, expert_memory=limit * mapped.expert
    )
    memory, order, hits, reads, clock = step.expert_memory, OrderedDict(), 0, 0, 0
    assert memory is not None
    for position in range(60):
        token = model.tokens[position : position + 1]
        step.run([span_of(views, token, position, logit_rows=0)])
        for layer in range(2):
            clock += 1
            used = sorted(np.flatnonzero(memory._used[layer] == clock).tolist())
            # the first layer's may have been given back for the second one's
            assert len(used) == 2 or layer == 0
            for expert in used:
                hits += (layer, expert) in order
                reads += (layer, expert) not in order
                order[layer, expert] = True
                order.move_to_end((layer, expert))
            while len(order) > limit:
                order.popitem(last=False)
    assert (memory.use.hits, memory.use.reads) == (hits, reads)
    assert {(int(a), int(b)) for a, b in np.argwhere(memory._used)} == set(order)


def test_what_a_step_computes_with_stays(native_library: ctypes.CDLL, mapped: Mapped) -> None:
    """A step of another thread gives back none of it; what is over the limit goes in the end."""
    model, limit = mapped.model, 4
    views, others = model.views("int8"), model.views("int8")
    pools = [view.blocks for view in views]
    step = FusedStep(
        native_library, model.weights, model.ropes, pools, expert_memory=limit * mapped.expert
    )
    memory = step.expert_memory
    assert memory is not None
    held: list[np.ndarray] = []

    def between() -> bool:
        """Before each layer of the first step another one runs to its end."""
        if memory._holders.any():
            before = np.argwhere(memory._holders)
            tables = [replace(view, table=[4, 3]) for view in others]
            step.run([span_of(tables, model.tokens[40:60], 0, logit_rows=0)])
            held.append(memory._used[tuple(before.T)])
        return False

    span = span_of(views, model.tokens[:40], 0, logit_rows=0)
    assert step.run([span], should_stop=between) is not None
    assert len(held) == 1
    assert len(held[0]) > limit
    assert held[0].all()
    assert not memory._holders.any()
    assert memory.resident <= limit * mapped.expert
    assert memory.resident == np.count_nonzero(memory._used) * mapped.expert


@pytest.mark.skipif(not MEMORY.exists(), reason="counts pages as Linux shows them")
def test_pages_go_back_to_the_system(native_library: ctypes.CDLL, mapped: Mapped) -> None:
    step, _ = steps(native_library, mapped, CUTS, 4 * mapped.expert)
    memory = step.expert_memory
    assert memory is not None
    kept = {(int(a), int(b)) for a, b in np.argwhere(memory._used)}
    shares = {(a, b): mapped.present(a, b) for a in range(2) for b in range(12)}
    assert len(kept) == 4
    assert all(shares[each] == 1 for each in kept)
    # the system maps some pages around those that are read, and so of an expert's neighbours
    for (layer, expert), share in shares.items():
        if (layer, expert) not in kept:
            beside = sum((layer, expert + step) in kept for step in (-1, 1))
            assert share <= 0.25 * beside


def test_a_model_without_experts_has_no_limit(native_library: ctypes.CDLL) -> None:
    model = Model(Shape(4, 2, 32))
    pools = [view.blocks for view in model.views("int8")]
    step = FusedStep(native_library, model.weights, model.ropes, pools, expert_memory=1)
    assert step.expert_memory is None


def test_counts_of_a_part() -> None:
    use = ExpertUse(hits=5, reads=3, bytes_read=90).since(ExpertUse(hits=2, reads=2, bytes_read=60))
    assert use == ExpertUse(hits=3, reads=1, bytes_read=30)
    assert (use.hit_rate, ExpertUse().hit_rate) == (0.75, 1.0)
