"""Runtimes without a server, asked in processes of their own."""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

from workers import Message, Worker, serve

# Tokens of context for each client: the longest prompt and answer of the workload, and more.
CONTEXT = 4608


@dataclass(frozen=True)
class Request:
    """Token ids of a prompt, and how many more are wanted."""

    prompt: list[int]
    count: int


@dataclass(frozen=True)
class Timing:
    """Seconds to the first token, and from there to the last; tokens of the answer."""

    first_s: float
    rest_s: float
    tokens: int

    @property
    def tpot_s(self) -> float:
        """Seconds for a token behind the first."""
        return self.rest_s / max(self.tokens - 1, 1)


class InProcess:
    """A runtime that is asked in a process of its own."""

    def __init__(self, name: str, model: str, *, clients: int, options: argparse.Namespace) -> None:
        self.name = name
        python = sys.executable if name == "edgellm api" else options.python
        sizes = [str(clients), str(options.threads)]
        self._worker = Worker(name, [python, __file__, name, model, *sizes])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._worker.close()

    def warm_up(self, prompt: list[int]) -> None:
        """Wake its threads; not counted."""
        self.run([Request(prompt, 4)], 1)

    def run(self, requests: Sequence[Request], clients: int) -> list[Timing]:
        """Ask, with so many requests on their way at once."""
        asked = [asdict(request) for request in requests]
        answer = self._worker.ask({"requests": asked, "clients": clients})
        return [Timing(**timing) for timing in answer["timings"]]


class EdgeLLM:
    """`LLM.stream` in threads."""

    def __init__(self, model: str, *, clients: int, threads: int) -> None:
        from edgellm.llm import load

        size = CONTEXT * min(clients + 2, 16)
        self._llm = load(model, ctx_size=CONTEXT, cache_size=size, threads=threads)

    def run(self, requests: list[Request], clients: int) -> list[Timing]:
        waiting, timings = list(reversed(requests)), list[Timing]()

        def ask_all() -> None:
            while True:
                try:
                    request = waiting.pop()
                except IndexError:
                    return
                timings.append(self._ask(request))

        threads = [threading.Thread(target=ask_all) for _ in range(clients)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return timings

    def _ask(self, request: Request) -> Timing:
        start, first, tokens = time.perf_counter(), 0.0, 0
        options = {"max_tokens": request.count, "ignore_eos": True, "temperature": 0}
        for piece in self._llm.stream(request.prompt, **options):  # type: ignore[arg-type]
            first = first or time.perf_counter()
            tokens += piece.token is not None
        return Timing(first - start, time.perf_counter() - first, tokens)


class OpenVino:
    """`ContinuousBatchingPipeline.step`, with requests added as others end."""

    def __init__(self, model: str, *, clients: int, threads: int) -> None:
        import numpy as np
        import openvino as ov
        import openvino_genai as ov_genai

        self._api, self._ov, self._numpy, self._asked = ov_genai, ov, np, 0
        scheduler = ov_genai.SchedulerConfig()
        scheduler.max_num_batched_tokens = 256  # its default
        scheduler.max_num_seqs = clients
        scheduler.num_kv_blocks = CONTEXT * (clients + 1) // 32
        scheduler.dynamic_split_fuse = True
        self._pipeline = ov_genai.ContinuousBatchingPipeline(
            model, scheduler, "CPU", {"INFERENCE_NUM_THREADS": threads}
        )

    def run(self, requests: list[Request], clients: int) -> list[Timing]:
        waiting, timings = list(reversed(requests)), list[Timing]()
        running: list[list[Any]] = []  # handle, start, first, tokens
        while waiting or running:
            while waiting and len(running) < clients:
                running.append([self._add(waiting.pop()), time.perf_counter(), 0.0, 0])
            self._pipeline.step()
            now = time.perf_counter()
            for each in list(running):
                handle = each[0]
                while handle.can_read():
                    for output in handle.read().values():
                        each[3] += len(output.generated_ids)
                    each[2] = each[2] or now
                if str(handle.get_status()).rpartition(".")[2] == "FINISHED":
                    running.remove(each)
                    timings.append(Timing(each[2] - each[1], now - each[2], each[3]))
        return timings

    def _add(self, request: Request) -> Any:
        config = self._api.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = request.count
        config.ignore_eos, config.do_sample = True, False
        self._asked += 1
        ids = self._numpy.asarray([request.prompt], self._numpy.int64)
        return self._pipeline.add_request(self._asked, self._ov.Tensor(ids), config)


CLASSES: dict[str, Any] = {"edgellm api": EdgeLLM, "openvino": OpenVino}


def main() -> None:
    """The worker's side of `InProcess`; see `workers.serve`."""
    name, model, clients, threads = sys.argv[1:]

    def load() -> tuple[Callable[[Message], Message], Message]:
        runtime = CLASSES[name](model, clients=int(clients), threads=int(threads))

        def answer(question: Message) -> Message:
            requests = [Request(**request) for request in question["requests"]]
            timings = runtime.run(requests, question["clients"])
            return {"timings": [asdict(timing) for timing in timings]}

        return answer, {"pid": os.getpid()}

    serve(load)


if __name__ == "__main__":
    main()
