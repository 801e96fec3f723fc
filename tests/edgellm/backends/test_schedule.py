from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest

from edgellm.backends.schedule import POLICIES, Policy, Schedule, Step, Task, simulate

STEPS = [
    Step("embedding", "host"),
    Step("segment 0", "accelerator"),
    Step("attention 0", "host", ordered=True),
    Step("segment 1", "accelerator"),
    Step("attention 1", "host", ordered=True),
    Step("segment 2", "accelerator"),
    Step("commit", "host", ordered=True),
]


def random_seconds(seed: int) -> Callable[[Task], float]:
    table = np.random.default_rng(seed).exponential(1.0, (50, len(STEPS))) + 0.01
    return lambda task: float(table[task])


def makespan(policy: Policy, chunks: int, seconds: Callable[[Task], float]) -> float:
    return simulate(STEPS, chunks, policy=policy, seconds=seconds)[-1][2]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("chunks", [1, 2, 3, 9])
@pytest.mark.parametrize("window", [1, 2, 4])
def test_every_rule_holds(policy: Policy, chunks: int, window: int) -> None:
    for seed in range(5):
        done = simulate(STEPS, chunks, policy=policy, seconds=random_seconds(seed), window=window)
        times = {task: (start, end) for task, start, end in done}
        assert sorted(times) == list(itertools.product(range(chunks), range(len(STEPS))))
        for (chunk, step), (start, _) in times.items():
            if step:
                assert times[Task(chunk, step - 1)][1] <= start
            if STEPS[step].ordered and chunk:
                assert times[Task(chunk - 1, step)][1] <= start
            if chunk >= window:
                assert times[Task(chunk - window, len(STEPS) - 1)][1] <= start
        for processor in ("accelerator", "host"):
            spans = sorted(t for task, t in times.items() if STEPS[task[1]].processor == processor)
            assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))


def test_one_at_a_time_takes_the_sum() -> None:
    seconds = random_seconds(0)
    total = sum(seconds(Task(*t)) for t in itertools.product(range(3), range(len(STEPS))))
    assert makespan("serial", 3, seconds) == pytest.approx(total)


def test_out_of_order_fills_the_gaps() -> None:
    """Equal steps: in order, both processors wait for each other; out of order they rarely do."""
    found = [makespan(policy, 8, lambda _: 1.0) for policy in ("serial", "in-order")]
    out_of_order = makespan("out-of-order", 8, lambda _: 1.0)
    assert found[0] == 8 * len(STEPS)
    assert out_of_order < 0.65 * found[1] < found[1] <= found[0]
    assert out_of_order >= 8 * 4  # what the host has to do


def test_in_order_is_the_order_of_a_serial_run() -> None:
    done = simulate(STEPS, 5, policy="in-order", seconds=random_seconds(3))
    for processor in ("accelerator", "host"):
        tasks = [task for task, _, _ in done if STEPS[task.step].processor == processor]
        assert tasks == sorted(tasks)


def test_the_host_takes_what_feeds_the_accelerator_most() -> None:
    """Chunk 0 stands before a short segment, chunk 1 before a long one."""
    steps = [Step("a", "host"), Step("b", "accelerator")]
    seconds = {Task(0, 1): 1.0, Task(1, 1): 5.0}
    schedule = Schedule(steps, 2, policy="out-of-order", seconds=lambda t: seconds.get(t, 0.0))
    assert schedule.take("host") == Task(1, 0)
    assert schedule.take("accelerator") is None
    schedule.finish(Task(1, 0))
    assert schedule.take("accelerator") == Task(1, 1)
    assert schedule.take("host") == Task(0, 0)


def test_the_accelerator_leaves_what_keeps_the_host_longest() -> None:
    steps = [Step("a", "accelerator"), Step("b", "host")]
    seconds = {Task(0, 1): 5.0, Task(1, 1): 1.0}
    schedule = Schedule(steps, 2, policy="out-of-order", seconds=lambda t: seconds.get(t, 0.0))
    assert schedule.take("accelerator") == Task(1, 0)


def test_attention_waits_for_the_chunk_before() -> None:
    """So a segment that is followed by it brings the host nothing, and is taken first."""
    schedule = Schedule(STEPS, 2, policy="out-of-order", seconds=lambda _: 1.0)
    for task in (Task(0, 0), Task(1, 0)):
        assert schedule.take("host") == task
        schedule.finish(task)
    for task in (Task(1, 1), Task(0, 1)):
        assert schedule.take("accelerator") == task
        schedule.finish(task)
    assert schedule.take("host") == Task(0, 2)
    assert schedule.take("host") is None  # attention of chunk 1 waits for that of chunk 0
