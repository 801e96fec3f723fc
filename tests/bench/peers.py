"""edgellm beside other runtimes: the same weights, the same token ids, turn and turn about.

    python tests/bench/peers.py [--model FILE.gguf] [--runtimes edgellm,llama.cpp,openvino,genai]

Each runtime lives in a process of its own, which is loaded once, sleeps while others run, and
answers one question: evaluate these tokens on an empty context, then generate n more greedily; how
long did both take? Rounds are interleaved, so that a slow minute of the machine hits everyone; the
table has medians and their ratios to edgellm. Before anything is timed, everyone continues real
text, and the output says where whoever goes another way leaves.

llama.cpp is used through `llama-cpp-python`, to be built from source for this machine; the others
are `openvino-genai` and `onnxruntime-genai` (the latter needs `--genai FOLDER`, made by its model
builder with `-p int4 -e cpu`). A runtime that is not installed is left out, with a word about it.
`--python` names another interpreter that has the peers, so that edgellm's own environment stays
clean.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from runtimes import CLASSES, Run, Runtime
from workers import Message, Worker, serve, started

TESTS = ("pp20", "pp512", "pp2048", "pp4096", "tg128", "tg64@2048", "tg64@4096")
RUNTIMES = ("edgellm", "llama.cpp", "llama.cpp no-fa", "llama.cpp q8_0", "openvino", "genai")
GATE_TOKENS = 16
# Time for the spinning threads of one runtime to fall asleep before the next one starts.
PAUSE_S = 0.3
TEXT = "The history of the steam engine begins in the first century, when"


def work(arguments: argparse.Namespace) -> None:
    """The worker's side; see `serve`."""
    name, _, kv = arguments.work.partition(" ")
    begin = time.perf_counter()

    def load() -> tuple[Callable[[Message], Message], Message]:
        runtime: Runtime = CLASSES[name](
            arguments.model,
            ctx_size=arguments.ctx_size,
            threads=arguments.threads,
            kv=kv,
            genai=arguments.genai,
        )

        def answer(question: Message) -> Message:
            if "prompt" in question:
                return vars(runtime.run(question["prompt"], question["count"]))
            return {"peak_rss": _peak_rss()}

        return answer, {"load_s": time.perf_counter() - begin}

    serve(load)


def _peak_rss() -> int:
    """getrusage would count the parent, as large as it was when it forked."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


class PeerWorker(Worker):
    """A runtime's process, seen from here."""

    def __init__(self, name: str, arguments: argparse.Namespace, *, ctx_size: int) -> None:
        python = sys.executable if name == "edgellm" else arguments.python
        command = [python, __file__, "--work", name]
        command += ["--model", arguments.model, "--ctx-size", str(ctx_size)]
        command += ["--threads", str(arguments.threads), "--genai", arguments.genai]
        self._start = time.perf_counter()
        super().__init__(name, command)
        self.load_s = float(self.loaded["load_s"])

    def run(self, prompt: list[int], count: int) -> Run:
        return Run(**self.ask({"prompt": prompt, "count": count}))

    def first_token_s(self, prompt: list[int]) -> float:
        """Seconds from the start of the process to its first token; to be called first."""
        self.run(prompt, 0)
        return time.perf_counter() - self._start

    def peak_rss(self) -> int:
        return int(self.ask({})["peak_rss"])


def parse(test: str) -> tuple[int, int]:
    """A test's prompt tokens and generated tokens."""
    if test.startswith("pp"):
        return int(test[2:]), 0
    generated, _, depth = test[2:].partition("@")
    return int(depth or 8), int(generated)


def gate(workers: Sequence[PeerWorker], prompt: list[int]) -> list[str]:
    """Everyone continues real text; the lines say after how many tokens who goes another way.

    Roundings differ, so near-ties do too; a first token that differs means another model or another
    tokenizer, and nothing is timed.
    """
    expected = workers[0].run(prompt, GATE_TOKENS).tokens
    lines = []
    for worker in workers[1:]:
        tokens = worker.run(prompt, GATE_TOKENS).tokens
        same = next(
            (i for i, (a, b) in enumerate(zip(expected, tokens, strict=False)) if a != b),
            GATE_TOKENS,
        )
        if same == 0:
            sys.exit(f"{worker.name}: begins with another token than edgellm; nothing is timed")
        lines.append(f"{worker.name}: the first {same} of {GATE_TOKENS} greedy tokens are the same")
    return lines


def measure(
    workers: Sequence[PeerWorker], tests: Sequence[str], ids: list[int], rounds: int
) -> dict[str, dict[str, float]]:
    """Median tokens per second, by test and runtime."""
    rates: dict[str, dict[str, list[float]]] = {t: {w.name: [] for w in workers} for t in tests}
    for round_ in range(rounds + 1):
        for test in tests:
            prompt, generated = parse(test)
            for worker in [*workers[round_ % len(workers) :], *workers[: round_ % len(workers)]]:
                time.sleep(PAUSE_S)
                run = worker.run(ids[:prompt], generated)
                rate = generated / run.decode_s if generated else prompt / run.prefill_s
                if round_:
                    rates[test][worker.name].append(rate)
    return {t: {n: statistics.median(r) for n, r in row.items()} for t, row in rates.items()}


def starts(
    names: Sequence[str], arguments: argparse.Namespace, ids: list[int]
) -> dict[str, list[float]]:
    """Medians of: seconds from process start to first token, load seconds, peak MB at ctx 2048."""
    measured: dict[str, list[list[float]]] = {name: [] for name in names}
    for _ in range(arguments.rounds + 1):
        for name in names:
            worker = PeerWorker(name, arguments, ctx_size=2048)
            first = worker.first_token_s(ids[:20])
            worker.run(ids[:1900], 100)
            measured[name].append([first, worker.load_s, worker.peak_rss() / 1e6])
            worker.close()
    return {
        n: [statistics.median(c) for c in zip(*rows[1:], strict=True)]
        for n, rows in measured.items()
    }


def table(rows: dict[str, dict[str, float]], names: Sequence[str], *, smaller: bool = False) -> str:
    """A Markdown table; in parentheses how many times better edgellm is."""
    lines = ["| | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for test, row in rows.items():
        cells = []
        for name in names:
            value = row[name]
            ratio = value / row["edgellm"] if smaller else row["edgellm"] / value
            text = f"{value:.0f}" if value >= 10 else f"{value:.2f}"
            cells.append(text if name == "edgellm" else f"{text} ({ratio:.2f}x)")
        lines.append(f"| {test} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def reading(model: str, speeds: dict[str, dict[str, float]], threads: int) -> str:
    """A Markdown table of edgellm's decode: what a token reads, beside what the memory can do."""
    from edgellm.llm import load
    from edgellm.measure.roofline import measure_cpu, work_of

    bundle = load(model, ctx_size=256).engine.bundle
    limit = measure_cpu(threads, int4=False).read_bytes
    lines = [
        f"memory, read by {threads} threads: {limit / 1e9:.1f} GB/s\n",
        "| | MB a token | weights, of the file's bytes | GB/s | of the memory's |",
        "|---|---|---|---|---|",
    ]
    for test, row in speeds.items():
        prompt, generated = parse(test)
        if generated:
            work = work_of(bundle, prompt + generated // 2, precision="packed", kv_format="int8")
            rate = work.decode_bytes * row["edgellm"]
            share = f"{work.weight_share:.3f}" if work.weight_share else ""
            cells = (
                f"{work.decode_bytes / 1e6:.1f} | {share} | {rate / 1e9:.1f} | {rate / limit:.0%}"
            )
            lines.append(f"| {test} | {cells} |")
    return "\n".join(lines)


def requantize(model: Path, target: Path, python: str) -> None:
    """A Q4_0 file of the same model, made by llama.cpp."""
    code = (
        "import llama_cpp as l, sys\n"
        "p = l.llama_model_quantize_default_params()\n"
        "p.ftype, p.allow_requantize, p.nthread = l.LLAMA_FTYPE_MOSTLY_Q4_0, True, 2\n"
        "l.llama_backend_init()\n"
        "sys.exit(l.llama_model_quantize(sys.argv[1].encode(), sys.argv[2].encode(), p))\n"
    )
    partial = target.with_suffix(".partial")
    subprocess.run([python, "-c", code, str(model), str(partial)], check=True, capture_output=True)
    partial.replace(target)


def default_model(python: str) -> str:
    """SmolLM2-135M-Instruct as Q4_0."""
    from edgellm.store.home import models_dir
    from edgellm.store.sources import DEFAULT_MODEL, resolve

    target = models_dir() / "smollm2-135m-instruct-q4_0.gguf"
    if not target.exists():
        requantize(resolve(DEFAULT_MODEL).path, target, python)
    return str(target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", default="", help="a GGUF file  [default: SmolLM2 as Q4_0]")
    parser.add_argument("--runtimes", default=",".join(RUNTIMES))
    parser.add_argument("--tests", default=",".join(TESTS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--speeds-only", action="store_true", help="no starts, no memory")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--python", default=sys.executable, help="interpreter that has the peers")
    parser.add_argument("--genai", default="", help="model folder of onnxruntime-genai")
    parser.add_argument("--ctx-size", type=int, default=8192, help=argparse.SUPPRESS)
    parser.add_argument("--work", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        return work(arguments)
    arguments.model = arguments.model or default_model(arguments.python)
    from edgellm.llm import load
    from edgellm.machine import cpu_name

    tokenizer = load(arguments.model, ctx_size=256).engine.tokenizer
    gate_ids = tokenizer.encode(TEXT)
    tests = [t for t in arguments.tests.split(",") if t]
    longest = max(4096, *(parse(test)[0] for test in tests))
    text = Path(__file__).read_text(encoding="utf-8") * (1 + longest // 1000)
    ids = tokenizer.encode(text)[:longest]
    start = partial(PeerWorker, arguments=arguments, ctx_size=8192)
    with started(arguments.runtimes.split(","), start) as workers:
        names = [worker.name for worker in workers]
        print("\n".join(gate(workers, gate_ids)), flush=True)
        speeds = measure(workers, tests, ids, arguments.rounds)
    print(f"\n{Path(arguments.model).name}, {cpu_name()}, {arguments.threads} threads\n")
    print("tokens/s, medians; in parentheses how many times faster edgellm is\n")
    print(table(speeds, names), flush=True)
    print("\n" + reading(arguments.model, speeds, arguments.threads))
    if arguments.speeds_only:
        return None
    first = starts(names, arguments, ids)
    print("\nsmaller is better; in parentheses how many times smaller edgellm is\n")
    labels = ("process start to first of 20 tokens, s", "load, s", "peak RSS at ctx 2048, MB")
    print(
        table(
            {label: {n: first[n][i] for n in names} for i, label in enumerate(labels)},
            names,
            smaller=True,
        )
    )
    return None


if __name__ == "__main__":
    main()
