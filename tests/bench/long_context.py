"""Costs of a long context, and passkeys found in it, with each way to keep its KV cache smaller.

    python tests/bench/long_context.py [MODEL] [--length 4000]
        [--ways "kv_format=k4v4,kv_format=k4v4 kv_read=512,kv_budget=1024"]

A way is options of `edgellm.load`; the first one has none. Each has the same prompts:

* seconds to the first token behind `--length` tokens of the Python manual, once;
* MB that the KV cache holds for one sequence of `--length` tokens, and ms a token of an answer
  behind it: answers of `--tokens` tokens, turn and turn about, medians of `--rounds`;
* passkeys: a number among repeated sentences (Mohtashami and Jaggi, arXiv:2305.16300), in each of
  `--places` places as far apart, none at an end, asked for behind them, greedily.

    python tests/bench/long_context.py [MODEL] --stream 16000 [--every 1]
        [--ways "ctx_size=2048 keep=0,ctx_size=2048 keep=4,kv_budget=2048 keep=128"]

Perplexity of one text of so many tokens, the chapters of Python's manual and then its library,
computed through one context that forgets as answers with `context_policy` shift do: with `keep`,
where it is full; a way without `keep` ends there. Scored are 2,000 tokens at a time, of `--every`
such parts the last one. Beside it the MB of the KV cache, and of the process after a tenth of the
parts and after all.

    python tests/bench/long_context.py [MODEL] --resident --length 32000
        --ways "kv_format=k8v4,kv_format=k8v4 kv_spill=/var/tmp"

The memory of the process behind an answer of `--tokens` tokens to such a prompt, one way after the
other, by its kinds (Linux), and a checksum of the answer. K and V of the prompt's whole blocks are
made up, the same for each way with a format, so that none but its last tokens are computed.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
import zlib
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from pydoc_data import topics

import numpy as np
import psutil
from fidelity import options_of
from numpy.typing import NDArray

from edgellm.engine.context import Context
from edgellm.engine.one_sequence import Hooks, compute_prompt
from edgellm.generation_options import CONTEXT_POLICIES, GenerationOptions
from edgellm.kernels.kv_blocks import BLOCK
from edgellm.kernels.sampling import log_sum_exp
from edgellm.llm import LLM, load
from edgellm.store.sources import DEFAULT_MODEL

WAYS = "kv_format=k8v4,kv_format=k4v4,kv_format=k4v4 kv_read=1024,kv_format=k4v4 kv_read=512"
WAYS += ",kv_budget=1024"
POLICIES = ",".join(
    ["", *(f"ctx_size=2048 keep={keep}" for keep in (0, 4, 64, 128)), "kv_budget=2048 keep=128"]
)
# Tokens that are scored together, that are appended at a time, and that go through the LM head.
PART, STEP, ROWS = 2000, 250, 50
SENTENCES = (
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
)
KEY = "71432"
HIDDEN = f"The pass key is {KEY}. Remember it. {KEY} is the pass key. "
QUESTION = "\nWhat is the pass key? The pass key is"


def haystack(llm: LLM, length: int, place: float) -> list[int]:
    """Token ids of about `length` tokens of sentences with the key at `place` of them, 0 to 1."""
    encode = llm.engine.tokenizer.encode
    count = length // len(encode(SENTENCES, add_bos=False))
    before = round(place * count)
    return encode(SENTENCES * before + HIDDEN + SENTENCES * (count - before) + QUESTION)


def found(llm: LLM, length: int, places: int) -> int:
    """The number of places where the key is answered."""
    answers = [
        llm.generate(haystack(llm, length, place), max_tokens=8, temperature=0).text
        for place in np.linspace(0, 1, places + 2)[1:-1]
    ]
    return sum(KEY in answer for answer in answers)


def megabytes(llm: LLM) -> float:
    """MB that sequences hold of the KV cache."""
    groups = llm.engine.cache.groups
    return sum(g.pool.used * g.blocks.nbytes / g.blocks.count for g in groups) / 1e6


def costs(llms: list[LLM], arguments: argparse.Namespace) -> list[tuple[float, float, float]]:
    """Seconds to the first token, MB and ms a token of each, behind the same prompt."""
    tokens = text_of(llms[0], arguments.length)[: arguments.length]
    first = []
    with ExitStack() as stack:
        sessions = [stack.enter_context(llm.session()) for llm in llms]
        for session in sessions:
            session.append(tokens)
            start = time.perf_counter()
            session.generate(max_tokens=1, ignore_eos=True)
            first.append(time.perf_counter() - start)
        held = [megabytes(llm) for llm in llms]
        times: list[list[float]] = [[] for _ in llms]
        for turn in range(arguments.rounds):
            order = range(len(llms)) if turn % 2 else reversed(range(len(llms)))
            for i in order:
                start = time.perf_counter()
                sessions[i].generate(max_tokens=arguments.tokens, ignore_eos=True, speculate=False)
                times[i].append((time.perf_counter() - start) / arguments.tokens)
        medians = [1e3 * statistics.median(each) for each in times]
        return list(zip(first, held, medians, strict=True))


@dataclass
class Stream:
    """A text in a context that is shorter, and what scoring it took.

    Attributes:
        perplexities: of each scored part; NaN behind the end of a context that does not shift.
        held: largest MB of the KV cache.
        resident: MB of the process after each part.
    """

    llm: LLM
    tokens: list[int]
    keep: int | None
    perplexities: list[float] = field(default_factory=list)
    held: float = 0.0
    resident: list[float] = field(default_factory=list)

    def score(self, *, every: int) -> None:
        call, context = self.llm.engine.thread.call, Context(self.llm.engine)
        for number, begin in enumerate(range(0, len(self.tokens) - PART, PART), 1):
            scored, loss = number % every == 0, 0.0
            for start in range(begin, begin + PART, STEP):
                following = self.tokens[start + 1 : start + STEP + 1] if scored else []
                part = self.tokens[start : start + STEP]
                loss += call(partial(self._loss, context, part, following))
                self.held = max(self.held, megabytes(self.llm))
            self.resident.append(psutil.Process().memory_info().rss / 1e6)
            if scored:
                self.perplexities.append(math.exp(loss / PART))
                print(f"{begin + PART}: {self.perplexities[-1]:.2f}", file=sys.stderr, flush=True)
        context.close()

    def _loss(self, context: Context, tokens: list[int], following: list[int]) -> float:
        """Compute tokens behind the others, and the loss of those that follow each."""
        if self.keep is None and len(context.tokens) + len(tokens) > context.engine.ctx_size:
            return math.nan
        context.tokens += tokens
        if len(context.tokens) > context.engine.ctx_size:
            context.make_room(CONTEXT_POLICIES["shift"], self.keep or 0)
        parts: list[NDArray[np.float32]] = []
        hooks = Hooks(on_hidden=lambda rows: parts.append(rows.copy())) if following else Hooks()
        prefill, missing = context.engine.prefill, context.tokens[context.cached :]
        compute_prompt(prefill, missing, context.sequence, hooks)
        if not following:
            return 0.0
        states = np.concatenate(parts)[-len(tokens) :]
        pieces = (prefill.logits(states[i : i + ROWS]) for i in range(0, len(states), ROWS))
        scores = (row for piece in pieces for row in piece)
        return sum(
            log_sum_exp(row) - float(row[t]) for row, t in zip(scores, following, strict=True)
        )


def text_of(llm: LLM, length: int) -> list[int]:
    """Tokens of the manual's chapters and then of the library's modules."""
    encode = partial(llm.engine.tokenizer.encode, add_bos=False)
    tokens = encode("\n\n".join(topics.topics.values()))
    for file in sorted(Path(argparse.__file__).parent.glob("*.py")):
        if len(tokens) > length:
            break
        tokens += encode(file.read_text(encoding="utf-8"))
    return tokens[: length + 1]


def streams(arguments: argparse.Namespace) -> None:
    """Print the table of streams."""
    count = arguments.stream // PART // arguments.every
    ends = (PART * arguments.every * i for i in range(1, count + 1))
    print(f"| | {' | '.join(f'{end:,}' for end in ends)} | KV cache | process |")
    print("|---" * (3 + count) + "|", flush=True)
    for way in (arguments.ways or POLICIES).split(","):
        options = options_of(way.split())
        keep = options.pop("keep", None)
        with load(arguments.model, **options) as llm:
            stream = Stream(llm, text_of(llm, arguments.stream), keep)
            stream.score(every=arguments.every)
        cells = ["" if math.isnan(p) else f"{p:.2f}" for p in stream.perplexities]
        resident = stream.resident[len(stream.resident) // 10], stream.resident[-1]
        cells += [f"{stream.held:.1f}", " to ".join(f"{mb:.0f}" for mb in resident)]
        print(f"| {way or 'all'} | {' | '.join(cells)} |", flush=True)


def kinds_of_memory() -> list[float]:
    """MB of this process that are anonymous, of mapped files, and in files in memory."""
    status = Path("/proc/self/status").read_text()
    names = "RssAnon:", "RssFile:", "RssShmem:"
    return [int(status.partition(name)[2].split()[0]) * 1024 / 1e6 for name in names]


def make_up(llm: LLM, tokens: list[int]) -> None:
    """Have the cache find a prefix whose K and V are random numbers."""
    sequence, rng = llm.engine.cache.sequence(), np.random.default_rng(0)
    with sequence.reserved(len(tokens), windowed=False):
        sequence.open_seen(len(tokens))
        sequence.use_host()
        for table in sequence.tables:
            for _, block in table.numbered:
                for part in table.store.blocks.block(block):
                    if part.itemsize == 1:
                        part[...] = rng.integers(0, 256, part.shape, np.uint8).view(part.dtype)
                    else:
                        part[...] = rng.random(part.shape) / 100
        sequence.commit(tokens)
    sequence.close()


def residents(arguments: argparse.Namespace) -> None:
    """Print the table of kinds of memory."""
    print("| | s to the first | ms a token | RssAnon | RssFile | RssShmem | answer |")
    print("|---" * 7 + "|", flush=True)
    room = arguments.length + arguments.tokens + 1
    answer = GenerationOptions(temperature=0, ignore_eos=True, speculate=False)
    for way in (arguments.ways or WAYS).split(","):
        options = {"ctx_size": room, "cache_size": room, **options_of(way.split())}
        with load(arguments.model, **options) as llm, llm.session() as session:
            tokens = text_of(llm, arguments.length)[: arguments.length]
            whole = tokens[: arguments.length // BLOCK * BLOCK]
            llm.engine.thread.call(partial(make_up, llm, whole))
            session.append(tokens)
            start = time.perf_counter()
            first = session.generate(options=answer, max_tokens=1)
            begun = time.perf_counter()
            rest = session.generate(options=answer, max_tokens=arguments.tokens)
            ms = 1e3 * (time.perf_counter() - begun) / arguments.tokens
            memory = " | ".join(f"{mb:.0f}" for mb in kinds_of_memory())
            check = zlib.crc32(repr([*first.tokens, *rest.tokens]).encode())
            cells = f"{way} | {begun - start:.1f} | {ms:.1f} | {memory} | {check:08x}"
            print(f"| {cells} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL)
    parser.add_argument("--ways", help="options, with commas between ways")
    parser.add_argument("--stream", type=int, help="tokens of a text to score; not the rest")
    parser.add_argument("--resident", action="store_true", help="kinds of memory; not the rest")
    parser.add_argument("--every", type=int, default=1, help="of so many parts one is scored")
    parser.add_argument("--length", type=int, default=4000, help="tokens of the context")
    parser.add_argument("--tokens", type=int, default=32, help="of a timed answer")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--places", type=int, default=7, help="of the passkey; 0: none")
    arguments = parser.parse_args()
    if arguments.stream is not None:
        return streams(arguments)
    if arguments.resident:
        return residents(arguments)
    ways = ["", *(arguments.ways or WAYS).split(",")]
    room = arguments.length + (arguments.rounds + 1) * arguments.tokens + 256
    with ExitStack() as stack:
        llms = [
            stack.enter_context(load(arguments.model, ctx_size=room, **options_of(way.split())))
            for way in ways
        ]
        spent = costs(llms, arguments)
        print(
            "| | s to the first | MB | ms a token | passkeys |\n|---|---|---|---|---|", flush=True
        )
        for way, llm, (s, mb, ms) in zip(ways, llms, spent, strict=True):
            hits = found(llm, arguments.length, arguments.places)
            row = f"| {way or 'int8'} | {s:.2f} | {mb:.1f} | {ms:.2f} "
            print(f"{row}| {hits} of {arguments.places} |")


if __name__ == "__main__":
    main()
