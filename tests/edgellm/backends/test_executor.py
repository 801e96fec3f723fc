from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from waiting import until

from edgellm.backends.batch import Span
from edgellm.backends.chunk import Chunk
from edgellm.backends.chunked_backend import ChunkedBackend
from edgellm.backends.forward import execute
from edgellm.backends.schedule import POLICIES, Policy, Processor, Schedule, Step, Task
from edgellm.backends.trace import TaskRecord, bubble_rate, chrome_trace, write_trace
from edgellm.cache.sequence import Sequence
from edgellm.engine.one_sequence import compute_prompt
from edgellm.errors import CancelledError, OptionError
from edgellm.llm import LLM, load

STEPS = [Step("a", "accelerator"), Step("b", "host", ordered=True), Step("c", "accelerator")]
COUNT = 500


@pytest.fixture(scope="module")
def model_llm(tiny_model: Path) -> LLM:
    return load(str(tiny_model), prefill="cpu", precision="f32", kv_format="int8")


@pytest.fixture
def sequence(model_llm: LLM) -> Iterator[Sequence]:
    found = model_llm.engine.cache.sequence()
    yield found
    found.truncate(0)


def scheduled(llm: LLM, policy: Policy) -> ChunkedBackend:
    found = llm.engine.prefill
    assert isinstance(found, ChunkedBackend)
    return ChunkedBackend(found.model, llm.engine.decoder, found.costs, policy=policy)


def chunks_of(llm: LLM, sequence: Sequence) -> list[Chunk]:
    whole = tokens(llm)
    parts = [whole[i : i + 128] for i in range(0, len(whole), 128)]
    return [Chunk([Span(sequence, part)], 128) for part in parts]


def tokens(llm: LLM) -> list[int]:
    return np.random.default_rng(1).integers(3, 250, COUNT).tolist()


def test_every_policy_gives_the_same_bits(model_llm: LLM, sequence: Sequence) -> None:
    """Four chunks at once: the logits, and keys and values of the first and the last layer."""
    results = []
    for policy in POLICIES:
        logits = compute_prompt(scheduled(model_llm, policy), tokens(model_llm), sequence)
        view, _ = sequence.view(0)
        cache = [view.blocks.read(view.table, layer, slice(None), COUNT) for layer in (0, 1)]
        results.append((logits, cache))
        sequence.truncate(0)
    for logits, cache in results[1:]:
        np.testing.assert_array_equal(logits, results[0][0])
        np.testing.assert_array_equal(np.array(cache), np.array(results[0][1]))


def test_chunks_are_reported_in_their_order(model_llm: LLM, sequence: Sequence) -> None:
    seen: list[int] = []
    threads = set()

    def done(_: np.ndarray) -> None:
        seen.append(len(sequence))
        threads.add(threading.current_thread())

    model = scheduled(model_llm, "out-of-order").model
    records = model.run(chunks_of(model_llm, sequence), policy="out-of-order", on_done=done)
    assert seen == sorted(seen)
    assert seen[-1] == len(sequence) == COUNT
    assert threads == {threading.main_thread()}
    chunks = [r for r in records if r.name == "commit"]
    assert [r.chunk for r in chunks] == list(range(len(seen)))
    assert 0 < bubble_rate(records) < 1


@pytest.mark.parametrize("policy", POLICIES)
def test_cancel_keeps_whole_chunks_and_no_other_block(
    model_llm: LLM, sequence: Sequence, policy: Policy
) -> None:
    cancel = threading.Event()
    before = model_llm.engine.cache.used_blocks
    with pytest.raises(CancelledError):
        scheduled(model_llm, policy).model.run(
            chunks_of(model_llm, sequence),
            policy=policy,
            on_done=lambda _: cancel.set(),
            should_stop=cancel.is_set,
        )
    assert len(sequence) == 128
    assert model_llm.engine.cache.used_blocks == before + 1
    found = compute_prompt(scheduled(model_llm, policy), tokens(model_llm)[128:], sequence)
    sequence.truncate(0)
    np.testing.assert_array_equal(
        compute_prompt(scheduled(model_llm, policy), tokens(model_llm), sequence), found
    )


def test_no_tokens_are_refused(model_llm: LLM, tiny_model: Path, sequence: Sequence) -> None:
    native = load(str(tiny_model)).engine.prefill
    for refusing in (scheduled(model_llm, "serial"), native):
        with pytest.raises(OptionError, match="no tokens"):
            compute_prompt(refusing, [], sequence)
    assert len(sequence) == 0


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("failing", [Task(1, 0), Task(1, 1), Task(2, 2)])
def test_an_error_ends_everything(policy: Policy, failing: Task) -> None:
    running: set[Task] = set()

    def run(task: Task) -> None:
        running.add(task)
        time.sleep(0.001)
        running.remove(task)
        if task == failing:
            raise ZeroDivisionError("broken")

    with pytest.raises(ZeroDivisionError, match="broken"):
        execute(STEPS, 4, run, policy=policy, seconds=lambda _: 0.0)
    assert not running


def test_a_broken_schedule_ends_both(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error between two tasks, on the accelerator's side."""
    take = Schedule.take

    def broken(self: Schedule, processor: Processor) -> Task | None:
        if processor == "accelerator":
            raise ZeroDivisionError("broken")
        return take(self, processor)

    monkeypatch.setattr(Schedule, "take", broken)
    with pytest.raises(ZeroDivisionError, match="broken"):
        execute(STEPS, 1, lambda _: None, policy="in-order", seconds=lambda _: 0.0)


def test_a_chunk_is_on_the_accelerator_while_another_is_on_the_host() -> None:
    begun = threading.Event()

    def run(task: Task) -> None:
        if task == Task(0, 1):
            until(begun.is_set)
        if task == Task(1, 0):
            begun.set()

    records = execute(STEPS, 2, run, policy="out-of-order", seconds=lambda _: 0.0)
    assert [r.name for r in records if r.chunk == 0] == ["a", "b", "c"]


def test_bubbles_are_what_the_accelerator_waits() -> None:
    records = [
        TaskRecord("embedding", 0, "host", 0.0, 1.0),
        TaskRecord("segment 0", 0, "accelerator", 1.0, 3.0),
        TaskRecord("attention 0", 0, "host", 3.0, 4.0),
        TaskRecord("segment 1", 0, "accelerator", 4.0, 5.0),
        TaskRecord("commit", 0, "host", 5.0, 9.0),
    ]
    assert bubble_rate(records) == pytest.approx(0.25)
    assert bubble_rate(records[:1]) == bubble_rate([]) == 0.0


def test_trace_file(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    write_trace(path, [TaskRecord("segment 0", 2, "accelerator", 100.5, 100.75)])
    found = json.loads(path.read_text())
    (task,) = [event for event in found["traceEvents"] if event["ph"] == "X"]
    assert (task["ts"], task["dur"], task["args"]) == (0.0, 0.25e6, {"chunk": 2})
    assert chrome_trace([])["otherData"]["accelerator_bubble_rate"] == 0.0
    with pytest.raises(OptionError, match=r"trace .*: Is a directory"):
        write_trace(tmp_path, [])
