"""Ctrl-C at random moments of every state: how long until it has ended, and what it leaves.

    python -P tests/bench/interrupts.py [--times 20]

A command must end with exit code 130 and say so; a call of the API must raise KeyboardInterrupt,
and the model must answer afterwards as before.
"""

from __future__ import annotations

import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import click

import edgellm
from edgellm.store.home import prefixes_dir

LONG = "One two three four five six seven eight nine ten. " * 330
# State -> arguments, and the seconds between which the signal comes.
COMMANDS: dict[str, tuple[list[str], tuple[float, float]]] = {
    "run: start and load": (["run", "-p", "x"], (0.15, 0.45)),
    "run: prefill": (["run", "-f", "{long}"], (0.7, 1.6)),
    "run: decode": (["run", "-p", "x", "--ignore-eos"], (0.7, 2.0)),
    "infill --template": (["infill", "--template", "--prefix-file", "{long}"], (0.7, 1.6)),
    "cache add": (["cache", "add", "interrupted", "-f", "{long}"], (0.7, 1.6)),
    "export": (["export", "-o", "{folder}/bundle"], (0.5, 4.0)),
    "bench": (["bench", "-p", "512", "-n", "128"], (0.7, 3.0)),
    "perplexity": (["perplexity", "{long}"], (0.7, 1.6)),
    "quality": (["quality"], (0.7, 6.0)),
    "plan": (["plan", "512"], (0.7, 1.6)),
}


@click.command()
@click.option("--times", default=20, show_default=True, help="Interrupts of each state.")
def main(times: int) -> None:
    random.seed(0)
    print("| state | signals | in time | median s | longest s |\n|---|---|---|---|---|")
    for state, (arguments, when) in COMMANDS.items():
        row(state, [interrupt_command(arguments, random.uniform(*when)) for _ in range(times)])
    llm = edgellm.load()
    for state, (call, longest) in calls(llm).items():
        row(state, [interrupt_call(llm, call, random.uniform(0.01, longest)) for _ in range(times)])


def row(state: str, seconds: list[float | None]) -> None:
    """Print a state; None: what was to be interrupted had ended."""
    taken = [s for s in seconds if s is not None]
    figures = f"{statistics.median(taken):.3f} | {max(taken):.3f}" if taken else " | "
    print(f"| {state} | {len(seconds)} | {len(taken)} | {figures} |", flush=True)


def interrupt_command(arguments: list[str], delay: float) -> float | None:
    """Seconds from SIGINT to the end of a command.

    Raises:
        RuntimeError: it ended otherwise than it should, or left something.
    """
    with tempfile.TemporaryDirectory() as folder:
        long = Path(folder) / "long.txt"
        long.write_text(LONG + str(delay))
        words = [a.format(long=long, folder=folder) for a in arguments]
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "edgellm.cli.main", *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        time.sleep(delay)
        start = time.perf_counter()
        ended = process.poll() is not None
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
        seconds = time.perf_counter() - start
        left = [p.name for p in Path(folder).iterdir() if not p.name.startswith("long")]
    if ended:
        return None
    left += [p.name for p in prefixes_dir().glob("*interrupted*")]
    if process.returncode not in (130, -signal.SIGINT) or left or "Traceback" in errors:
        raise RuntimeError(f"{words}: exit code {process.returncode}, left {left}: {errors}")
    return seconds


def calls(llm: edgellm.LLM) -> dict[str, tuple[Callable[[str], object], float]]:
    """State -> a call with a text that no cache knows, and the latest moment of the signal."""
    portable = edgellm.load(prefill="cpu", decode="portable")
    chat = llm.chat(temperature=0)
    return {
        "API: prefill, native": (lambda text: llm.generate(text + LONG, max_tokens=1), 0.8),
        "API: prefill, graphs": (lambda text: portable.generate(text + LONG, max_tokens=1), 0.8),
        "API: decode": (lambda text: llm.generate(text, ignore_eos=True, max_tokens=900), 1.0),
        "API: decode, graphs": (lambda text: portable.generate(text, ignore_eos=True), 1.0),
        "API: chat": (lambda text: chat.send(text + LONG), 0.8),
        "API: infill": (lambda text: llm.infill(text + LONG, "b", template=True), 0.8),
        "API: load": (lambda _: edgellm.load(), 0.15),
    }


def interrupt_call(llm: edgellm.LLM, call: Callable[[str], object], delay: float) -> float | None:
    """Seconds from the signal to the caller's hands; None if the call had ended.

    Raises:
        RuntimeError: the next answer is not as it was.
    """
    start = time.perf_counter()
    signal.setitimer(signal.ITIMER_REAL, delay)
    try:
        call(f"{delay} ")
        signal.setitimer(signal.ITIMER_REAL, 0)
        return None
    except KeyboardInterrupt:
        seconds = time.perf_counter() - start - delay
    answer = llm.generate("The capital of France is", temperature=0, max_tokens=2).text
    if "Paris" not in answer:
        raise RuntimeError(f"after an interrupt at {delay} s the model says {answer!r}")
    return seconds


def raise_interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    signal.signal(signal.SIGALRM, raise_interrupt)
    main()
