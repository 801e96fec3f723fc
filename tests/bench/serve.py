"""Servers under load: clients in a closed loop, and streams while long prompts arrive.

    python tests/bench/serve.py MODEL.gguf [--clients 1,5,30] [--python INTERPRETER]
    python tests/bench/serve.py MODEL.gguf --gaps [--streams 5] [--prompt 4000]

Each client sends a request, reads its stream to the end, and sends the next one. Lengths are drawn
as those of ShareGPT's conversations are spread, a tenth as long (log-normal; the same ones for
everyone), prompts are cut from the manual of Python, ends are ignored and decoding is greedy.
Runtimes take turns; with 1 client the first request is not counted.

* `edgellm`: `edgellm serve`, asked over HTTP; `edgellm api`: threads in one process.
* `llama-server`: the one of `xllamacpp`, in the interpreter that `--python` names.
* `openvino`: GenAI's `ContinuousBatchingPipeline`, which has no server: asked in its own process.

TTFT: from the request to the first token. TPOT: from the first to the last token, over the tokens
behind the first. Goodput: requests a second with a TTFT and a TPOT within the limits (as vLLM's
bench).
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from pydoc_data import topics

import numpy as np
from servers import HttpServer
from unserved import InProcess, Request, Timing

RUNTIMES = ("edgellm", "edgellm api", "llama-server", "openvino")
COLUMNS = ("TTFT p50", "p99, s", "TPOT p50", "p99, ms", "tokens/s", "goodput, 1/s")


def workload(count: int, ids: Sequence[int], *, seed: int) -> list[Request]:
    """Requests of log-normal lengths: prompts of 300 tokens, answers of 90, in the middle."""
    random = np.random.default_rng(seed)
    prompts = np.exp(random.normal(math.log(300), 1.0, count)).clip(16, 2048).astype(int)
    answers = np.exp(random.normal(math.log(90), 0.7, count)).clip(8, 256).astype(int)
    starts = random.integers(0, len(ids) - 2048, count)
    return [
        Request([int(token) for token in ids[start : start + length]], int(answer))
        for start, length, answer in zip(starts, prompts, answers, strict=True)
    ]


def row(timings: Sequence[Timing], seconds: float, slo: tuple[float, float]) -> list[float]:
    """What `COLUMNS` says, of a run that took so long."""
    ttft = [timing.first_s for timing in timings]
    tpot = [timing.tpot_s for timing in timings if timing.tokens > 1]
    good = sum(t.first_s <= slo[0] and t.tpot_s <= slo[1] for t in timings)
    tokens = sum(timing.tokens for timing in timings)
    tail, slow = np.percentile(ttft, (50, 99)), 1e3 * np.percentile(tpot, (50, 99))
    return [*map(float, tail), *map(float, slow), tokens / seconds, good / seconds]


def load_table(
    runtimes: Sequence[HttpServer | InProcess],
    ids: list[int],
    options: argparse.Namespace,
) -> str:
    """A Markdown table: a row for each number of clients and runtime."""
    slo = options.slo_ttft, options.slo_tpot / 1e3
    lines = [
        f"| clients | | {' | '.join(COLUMNS)} |",
        "|---" * (len(COLUMNS) + 2) + "|",
    ]
    for clients in map(int, options.clients.split(",")):
        count = max(4 * clients, 12) if options.requests is None else options.requests
        rows: dict[str, list[list[float]]] = {}
        for turn in range(options.rounds):
            requests = workload(count, ids, seed=100 * turn + clients)
            for runtime in runtimes:
                runtime.warm_up(ids[:32])
                start = time.perf_counter()
                timings = runtime.run(requests, clients)
                rows.setdefault(runtime.name, []).append(
                    row(timings, time.perf_counter() - start, slo)
                )
        for name, values in rows.items():
            cells = (f"{value:.3g}" for value in np.median(values, axis=0))
            lines.append(f"| {clients} | {name} | {' | '.join(cells)} |")
            print(lines[-1], file=sys.stderr, flush=True)
    return "\n".join(lines)


def gaps(server: HttpServer, ids: list[int], options: argparse.Namespace) -> str:
    """The largest gap of streams while long prompts come one by one, and when short ones begin."""
    alone = server.run([Request(_rotated(ids, 7, options.prompt), 1)], 1)[0].first_s
    watch = asyncio.run(_streams_and_prompts(server, ids, options))
    waits = [asyncio.run(_behind_long(server, ids, options, turn)) for turn in range(3)]
    shown = ", ".join(f"{1e3 * wait:.0f}" for wait in waits)
    return (
        f"largest gap of {options.streams} streams {1e3 * watch[0]:.0f} ms; first token of a "
        f"prompt of {options.prompt} after {watch[1]:.2f} s, alone {alone:.2f} s\n"
        f"40 tokens behind three prompts of {options.prompt}: first token after {shown} ms"
    )


async def _streams_and_prompts(
    server: HttpServer, ids: list[int], options: argparse.Namespace
) -> tuple[float, float]:
    """The largest gap, and the median time to the first token of three long prompts."""
    async with server.client() as client:
        requests = [Request(_rotated(ids, 50 + i, 64), 3000) for i in range(options.streams)]
        streams = [asyncio.create_task(server.ask(client, request)) for request in requests]
        await asyncio.sleep(2.0)
        begin = time.perf_counter()
        firsts = []
        for i in range(3):
            request = Request(_rotated(ids, 500 + i, options.prompt), 1)
            firsts.append((await server.ask(client, request)).first_s)
        end = time.perf_counter()
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
    times = [sorted(t for t in server.arrivals[id(r)] if begin < t < end) for r in requests]
    largest = max(float(np.diff([begin, *stream, end]).max()) for stream in times)
    return largest, float(np.median(firsts))


async def _behind_long(
    server: HttpServer, ids: list[int], options: argparse.Namespace, turn: int
) -> float:
    """When a prompt of 40 tokens begins that comes while three long ones are computed."""
    async with server.client() as client:
        long = [
            asyncio.create_task(
                server.ask(
                    client,
                    Request(_rotated(ids, 900 + 10 * turn + i, options.prompt), 1),
                )
            )
            for i in range(3)
        ]
        await asyncio.sleep(0.5 + 0.4 * turn)
        short = await server.ask(client, Request(_rotated(ids, 2000 + turn, 40), 2))
        await asyncio.gather(*long)
    return short.first_s


def _rotated(ids: list[int], start: int, count: int) -> list[int]:
    """Tokens of a text that begins nowhere else in the same way."""
    start = (start * 131) % len(ids)
    return (ids[start:] + ids)[:count]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("model", help="a GGUF file")
    parser.add_argument("--runtimes", default=",".join(RUNTIMES))
    parser.add_argument("--clients", default="1,5,30")
    parser.add_argument("--requests", type=int, help="of each run  [default: four for a client]")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--slo-ttft", type=float, default=2.0, help="seconds")
    parser.add_argument("--slo-tpot", type=float, default=100.0, help="milliseconds")
    parser.add_argument("--gaps", action="store_true", help="streams and prompts")
    parser.add_argument("--streams", type=int, default=5)
    parser.add_argument("--prompt", type=int, default=4000)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--python", default=sys.executable, help="interpreter that has the peers")
    options = parser.parse_args()
    from edgellm.llm import load
    from edgellm.machine import cpu_name

    with load(options.model, ctx_size=256) as llm:
        text = "\n\n".join(topics.topics[name] for name in sorted(topics.topics))[:400_000]
        ids = llm.engine.tokenizer.encode(text)
    print(f"{Path(options.model).name}, {cpu_name()}, {options.threads} threads\n")
    most = 8 if options.gaps else max(map(int, options.clients.split(",")))
    with ExitStack() as stack:
        runtimes: list[HttpServer | InProcess] = []
        for name in options.runtimes.split(","):
            kind = HttpServer if name in HttpServer.COMMANDS else InProcess
            try:
                runtime: HttpServer | InProcess = kind(
                    name, options.model, clients=most, options=options
                )
            except RuntimeError as error:
                print(f"{name}: left out: {error}", flush=True)
                continue
            stack.enter_context(runtime)
            runtimes.append(runtime)
        if not options.gaps:
            return print(load_table(runtimes, ids, options))
        for runtime in runtimes:
            if isinstance(runtime, HttpServer):
                print(f"{runtime.name}: {gaps(runtime, ids, options)}", flush=True)


if __name__ == "__main__":
    main()
