"""How fast several sequences decode together, and how long streams stand still for long prompts.

    python tests/bench/batching.py MODEL [--sequences 1,4,8,16] [--tokens 64] [--context 128]
    python tests/bench/batching.py MODEL --gaps [--streams 5] [--prompt 4000]

Decode: prompts of `--context` tokens, then `--tokens` each through the loop, in turns with the
other numbers of sequences; the median of `--rounds` rounds.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time

from edgellm.llm import LLM, load


def prompt(llm: LLM, seed: int, length: int) -> list[int]:
    vocabulary = llm.engine.config.vocab_size
    return [(31 * i + 977 * seed + 7) % vocabulary for i in range(length)]


def decode_rate(llm: LLM, sequences: int, *, tokens: int, context: int, first: int) -> float:
    """Tokens per second of all sequences together, from when all have their first token on."""
    prompts = [prompt(llm, first + i, context) for i in range(sequences)]
    for each in prompts:  # in the cache, so that the steps below are decode steps
        llm.generate(each, max_tokens=1)
    start = time.perf_counter()
    answers = list(llm.batch(prompts, max_tokens=tokens, ignore_eos=True, speculate=False, seed=1))
    seconds = time.perf_counter() - start
    return sum(len(answer.result().tokens) for answer in answers) / seconds


def batching(llm: LLM, args: argparse.Namespace) -> None:
    counts = [int(count) for count in args.sequences.split(",")]
    rates: dict[int, list[float]] = {count: [] for count in counts}
    for turn in range(args.rounds):
        for count in counts:
            rates[count].append(
                decode_rate(
                    llm, count, tokens=args.tokens, context=args.context, first=100 * turn + count
                )
            )
    one = statistics.median(rates[counts[0]])
    print(f"| sequences | tokens/s | times {counts[0]} |\n|---|---|---|")
    for count in counts:
        rate = statistics.median(rates[count])
        print(f"| {count} | {rate:.1f} | {rate / one:.2f} |", flush=True)


def gaps(llm: LLM, args: argparse.Namespace) -> None:
    """The largest gap of streams with prompts of their own while long prompts come one by one."""
    alone = llm.generate(prompt(llm, 999, args.prompt), max_tokens=1).stats.ttft_s
    arrived, largest = threading.Event(), [0.0] * args.streams

    def stream(index: int) -> None:
        last: float | None = None
        for _ in llm.stream(
            prompt(llm, index, 64), max_tokens=args.tokens_of_streams, ignore_eos=True, seed=1
        ):
            now = time.perf_counter()
            if last is not None and arrived.is_set():
                largest[index] = max(largest[index], now - last)
            last = now

    threads = [threading.Thread(target=stream, args=(i,), daemon=True) for i in range(args.streams)]
    for thread in threads:
        thread.start()
    time.sleep(1.0)
    arrived.set()
    firsts = [
        llm.generate(prompt(llm, 500 + i, args.prompt), max_tokens=1).stats.ttft_s for i in range(3)
    ]
    short = llm.generate(prompt(llm, 700, 40), max_tokens=1).stats.ttft_s
    arrived.clear()
    print(
        f"largest gap {1e3 * max(largest):.0f} ms; prompt of {args.prompt}: first token after "
        f"{statistics.median(firsts):.2f} s, alone {alone:.2f} s; 40 tokens: {short:.3f} s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--sequences", default="1,4,8,16")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--gaps", action="store_true")
    parser.add_argument("--streams", type=int, default=5)
    parser.add_argument("--prompt", type=int, default=4000)
    parser.add_argument("--tokens-of-streams", type=int, default=2000)
    args = parser.parse_args()
    llm = load(args.model, ctx_size=4200 if args.gaps else 1024, cache_size=32768)
    (gaps if args.gaps else batching)(llm, args)


if __name__ == "__main__":
    main()
