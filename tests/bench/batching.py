"""How fast several sequences decode together, and how long streams stand still for long prompts.

    python tests/bench/batching.py MODEL.gguf [--sequences 1,4,8,16] [--python INTERPRETER]
    python tests/bench/batching.py MODEL.gguf --gaps [--streams 5] [--prompt 4000]
        [--scheduling stall_free,layered] [--prefill cpu --precision w8a8 --decode native]

Decode: sequences of `--context` tokens each, then `--tokens` more of each, greedily, with
everyone's prompts in the KV cache before the clock starts. edgellm through `LLM.batch`; llama.cpp
through its C interface, one `llama_batch` a step; OpenVINO GenAI through its
`ContinuousBatchingPipeline`. Runtimes and numbers of sequences take turns; medians of `--rounds`.

Gaps: streams decode while prompts come one by one, and a short one behind three long ones, in
each kind of scheduling; how often the weights were read while a prompt was computed, and by how
many of these calls for the prompt alone; in chunks, how many segments ran for it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from workers import Message, Worker, serve, started

if TYPE_CHECKING:
    from edgellm.backends.batch import Rows, Span
    from edgellm.llm import LLM

RUNTIMES = ("edgellm", "llama.cpp", "llama.cpp no-fa", "openvino")
CTX_SIZE = 1024
# Of one step of OpenVINO's scheduler: no prompt of these is cut.
STEP_TOKENS = 4096
# Time for the spinning threads of one runtime to fall asleep before the next one starts.
PAUSE_S = 0.3


class Batched(Protocol):
    """A runtime that continues prompts together; gives the seconds from their first tokens on."""

    def decode(self, prompts: list[list[int]], count: int) -> float: ...


class EdgeLLM:
    def __init__(self, model: str, *, sequences: int, threads: int, kv: str) -> None:
        from edgellm.llm import load

        size = CTX_SIZE * (sequences + 2)
        self.llm = load(model, ctx_size=CTX_SIZE, cache_size=size, threads=threads)

    def decode(self, prompts: list[list[int]], count: int) -> float:
        for prompt in prompts:  # what is cached is not computed again
            self.llm.generate(prompt, max_tokens=1)
        start = time.perf_counter()
        batch = self.llm.batch(
            prompts, max_tokens=count, ignore_eos=True, temperature=0, speculate=False
        )
        assert all(len(answer.result().tokens) == count for answer in batch)
        return time.perf_counter() - start


class LlamaCpp:
    def __init__(self, model: str, *, sequences: int, threads: int, kv: str) -> None:
        from runtimes import LlamaCpp as Loaded

        self.loaded = Loaded(
            model,
            ctx_size=CTX_SIZE * sequences,
            threads=threads,
            kv=kv,
            genai="",
            sequences=sequences,
        )

    def decode(self, prompts: list[list[int]], count: int) -> float:
        self.loaded.clear()
        tokens = [self.loaded.eval_many([(i, 0, prompt)])[0] for i, prompt in enumerate(prompts)]
        start = time.perf_counter()
        for step in range(count):
            rows = [(i, len(prompts[i]) + step, [token]) for i, token in enumerate(tokens)]
            tokens = self.loaded.eval_many(rows)
        return time.perf_counter() - start


class OpenVino:
    def __init__(self, model: str, *, sequences: int, threads: int, kv: str) -> None:
        import numpy as np
        import openvino as ov
        import openvino_genai as ov_genai

        self.api, self.ov, self.numpy = ov_genai, ov, np
        scheduler = ov_genai.SchedulerConfig()
        scheduler.max_num_batched_tokens = STEP_TOKENS
        scheduler.max_num_seqs = sequences
        scheduler.num_kv_blocks = CTX_SIZE * (sequences + 1) // 32
        scheduler.dynamic_split_fuse = True
        self.pipeline = ov_genai.ContinuousBatchingPipeline(
            model, scheduler, "CPU", {"INFERENCE_NUM_THREADS": threads}
        )

    def decode(self, prompts: list[list[int]], count: int) -> float:
        config = self.api.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = count + 1
        config.ignore_eos, config.do_sample = True, False
        handles = [
            self.pipeline.add_request(
                i, self.ov.Tensor(self.numpy.asarray([prompt], self.numpy.int64)), config
            )
            for i, prompt in enumerate(prompts)
        ]
        while not all(handle.can_read() for handle in handles):
            self.pipeline.step()
        start = time.perf_counter()
        while self.pipeline.has_non_finished_requests():
            self.pipeline.step()
        return time.perf_counter() - start


CLASSES: dict[str, Any] = {"edgellm": EdgeLLM, "llama.cpp": LlamaCpp, "openvino": OpenVino}


def work(arguments: argparse.Namespace) -> None:
    """The worker's side; see `serve`."""
    name, _, kv = arguments.work.partition(" ")

    def load() -> tuple[Callable[[Message], Message], Message]:
        most = max(counts_of(arguments))
        runtime: Batched = CLASSES[name](
            arguments.model, sequences=most, threads=arguments.threads, kv=kv
        )
        return lambda question: {"seconds": runtime.decode(**question)}, {}

    serve(load)


def batch_worker(name: str, *, arguments: argparse.Namespace) -> Worker:
    python = sys.executable if name == "edgellm" else arguments.python
    options = ["--work", name, "--sequences", arguments.sequences]
    return Worker(
        name, [python, __file__, arguments.model, *options, "--threads", str(arguments.threads)]
    )


def counts_of(arguments: argparse.Namespace) -> list[int]:
    return [int(count) for count in arguments.sequences.split(",")]


def prompt(seed: int, length: int, vocabulary: int = 10_000) -> list[int]:
    return [(31 * i + 977 * seed + 7) % vocabulary for i in range(length)]


def batching(arguments: argparse.Namespace) -> str:
    """A Markdown table of tokens a second of all sequences together."""
    rates: dict[tuple[int, str], list[float]] = {}
    with started(arguments.runtimes.split(","), partial(batch_worker, arguments=arguments)) as all_:
        for turn in range(arguments.rounds + 1):
            for count in counts_of(arguments):
                prompts = [prompt(100 * turn + count + i, arguments.context) for i in range(count)]
                for worker in (*all_[turn % len(all_) :], *all_[: turn % len(all_)]):
                    time.sleep(PAUSE_S)
                    answer = worker.ask({"prompts": prompts, "count": arguments.tokens})
                    if turn:
                        rate = count * arguments.tokens / answer["seconds"]
                        rates.setdefault((count, worker.name), []).append(rate)
        names = [worker.name for worker in all_]
    medians = {key: statistics.median(found) for key, found in rates.items()}
    first = counts_of(arguments)[0]
    lines = [f"| sequences | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for count in counts_of(arguments):
        cells = []
        for name in names:
            rate, ahead = medians[count, name], medians[count, names[0]] / medians[count, name]
            gain = f"{rate / medians[first, name]:.2f}x of {first}"
            cells.append(
                f"{rate:.0f} ({gain})" if name == names[0] else f"{rate:.0f} ({gain}; {ahead:.2f}x)"
            )
        lines.append(f"| {count} | {' | '.join(cells)} |")
    return "\n".join(lines)


class WeightReads:
    """Counts how often calls of a back end read all weights; a group of layers reads its part."""

    def __init__(self, llm: LLM) -> None:
        self.all = self.for_prompts = 0.0
        self._layers, self._run = len(llm.engine.config.layers), llm.engine.prefill.run
        vars(llm.engine.prefill)["run"] = self.run

    def run(self, spans: Sequence[Span], **options: Any) -> list[Rows]:
        group = spans[0].group
        part = 1.0 if group is None else len(group.layers) / self._layers
        self.all += part
        if len(spans) == 1 and len(spans[0].tokens) > 1:
            self.for_prompts += part
        return self._run(spans, **options)


def gaps(llm: LLM, arguments: argparse.Namespace) -> str:
    """The largest gap of streams while long prompts come one by one, and when those begin."""
    vocabulary, length = llm.engine.config.vocab_size, arguments.prompt
    alone = llm.generate(prompt(999, length, vocabulary), max_tokens=1).stats.ttft_s
    stop, watching = threading.Event(), threading.Event()
    largest, usual = [0.0] * arguments.streams, list[float]()

    def stream(index: int) -> None:
        last = 0.0
        for _ in llm.stream(
            prompt(index, 64, vocabulary),
            max_tokens=3000,
            ignore_eos=True,
            speculate=False,
            seed=1,
            cancel=stop,
        ):
            now = time.perf_counter()
            if watching.is_set() and last:
                largest[index] = max(largest[index], now - last)
            elif last:
                usual.append(now - last)
            last = now

    threads = [
        threading.Thread(target=stream, args=(i,), daemon=True) for i in range(arguments.streams)
    ]
    for thread in threads:
        thread.start()
    time.sleep(2.0)
    watching.set()
    reads = WeightReads(llm)
    long = [prompt(500 + i, length, vocabulary) for i in range(3)]
    stats = [llm.generate(ids, max_tokens=1).stats for ids in long]
    firsts = [each.ttft_s for each in stats]
    ran = [sum(task.processor == "accelerator" for task in each.tasks) for each in stats]
    watching.clear()
    read, alone_read = reads.all / len(long), reads.for_prompts / len(long)
    stop.set()
    for thread in threads:
        thread.join()
    return (
        f"largest gap of {arguments.streams} streams {1e3 * max(largest):.0f} ms (without prompts "
        f"{1e3 * statistics.median(usual):.0f}, median); first token of a prompt of {length} after "
        f"{statistics.median(firsts):.2f} s, alone {alone:.2f} s; weights read "
        f"{read:.0f} times for each, {alone_read:.0f} of them by calls of a prompt alone"
        + (f"; segments run {statistics.median(ran):.0f} times" if any(ran) else "")
    )


def short_behind_long(llm: LLM, arguments: argparse.Namespace) -> str:
    """When a prompt of 40 tokens begins that comes while three long ones are computed."""
    vocabulary, length = llm.engine.config.vocab_size, arguments.prompt
    waited = []
    for turn in range(arguments.rounds):
        long = [prompt(2000 + 10 * turn + i, length, vocabulary) for i in range(3)]
        threads = [
            threading.Thread(target=lambda ids: llm.generate(ids, max_tokens=1), args=(ids,))
            for ids in long
        ]
        for thread in threads:
            thread.start()
        time.sleep(0.5 + 0.4 * turn)
        ids = prompt(3000 + turn, 40, vocabulary)
        start = time.perf_counter()
        next(iter(llm.stream(ids, max_tokens=2)))
        waited.append(time.perf_counter() - start)
        for thread in threads:
            thread.join()
    text = ", ".join(f"{1e3 * seconds:.0f}" for seconds in waited)
    return f"40 tokens behind three prompts of {length}: first token after {text} ms"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("model", help="a GGUF file")
    parser.add_argument("--runtimes", default=",".join(RUNTIMES))
    parser.add_argument("--sequences", default="1,4,8,16")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--gaps", action="store_true", help="streams and prompts, edgellm alone")
    parser.add_argument("--scheduling", default="stall_free", help="of --gaps; several in a row")
    parser.add_argument("--prefill", default="auto", help="of --gaps")
    parser.add_argument("--precision", help="of --gaps")
    parser.add_argument("--decode", default="auto", help="of --gaps")
    parser.add_argument("--time-target-ms", type=float, default=100)
    parser.add_argument("--streams", type=int, default=5)
    parser.add_argument("--prompt", type=int, default=4000)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--python", default=sys.executable, help="interpreter that has the peers")
    parser.add_argument("--work", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        return work(arguments)
    from edgellm.llm import load
    from edgellm.machine import cpu_name

    print(f"{Path(arguments.model).name}, {cpu_name()}, {arguments.threads} threads\n")
    if not arguments.gaps:
        return print(batching(arguments))
    for scheduling in arguments.scheduling.split(","):
        with load(
            arguments.model,
            ctx_size=4096,
            cache_size=32768,
            threads=arguments.threads,
            scheduling=scheduling,
            prefill=arguments.prefill,
            precision=arguments.precision,
            decode=arguments.decode,
            time_target_ms=arguments.time_target_ms,
        ) as llm:
            print(f"{scheduling}: {gaps(llm, arguments)}", flush=True)
            print(f"{scheduling}: {short_behind_long(llm, arguments)}", flush=True)


if __name__ == "__main__":
    main()
