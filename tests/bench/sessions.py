"""What is not computed twice: prefixes, branches and keystrokes.

    python tests/bench/sessions.py [--infill-model FOLDER]

Times to the first token as ratios to a cold start, memory and disk after many prompts, blocks that
branches hold, and what a full context costs with `shift`, turn and turn about; greedy text must be
the same everywhere. The typing trace needs a model with infill tokens.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from pydoc_data import topics

import psutil

from edgellm.engine.one_sequence import compute_prompt, compute_tokens
from edgellm.kernels.sampling import log_sum_exp
from edgellm.llm import LLM, load
from edgellm.options import EngineArguments
from edgellm.store.sources import DEFAULT_MODEL

SYSTEM_TOKENS = 2950
QUESTION = "What is a list?"
KEYSTROKES = 40
PROMPTS = 200
DISK_BUDGET = 64 << 20
SHIFT_CTX, STRIDE = 1024, 60


def system_prompt(llm: LLM) -> str:
    tokenizer = llm.engine.tokenizer
    return tokenizer.decode(tokenizer.encode(topics.topics["typesseq"])[:SYSTEM_TOKENS])


def ask(llm: LLM, question: str = QUESTION) -> tuple[float, int, str]:
    """Seconds to the first token of a new conversation, cached tokens, and the answer."""
    chat = llm.chat(system=system_prompt(llm), temperature=0, max_tokens=24)
    answer = chat.send(question)
    chat.close()
    return answer.stats.ttft_s, answer.stats.cached_tokens, answer.text


def show_reuse(folder: Path) -> None:
    options: EngineArguments = {"ctx_size": 4096, "kv_cache_dir": folder}
    llm = load(DEFAULT_MODEL, **options)
    chat = llm.chat(system=system_prompt(llm), temperature=0, max_tokens=24)
    cold = chat.send(QUESTION)
    second = chat.send("And a tuple?")
    session, restart = ask(llm), ask(load(DEFAULT_MODEL, **options))
    code = (
        "import json, sys; sys.path.insert(0, sys.argv[1]); import sessions;"
        "from edgellm.llm import load;"
        "llm = load(sessions.DEFAULT_MODEL, ctx_size=4096, kv_cache_dir=sys.argv[2]);"
        "print(json.dumps(sessions.ask(llm)))"
    )
    here = str(Path(__file__).parent)
    command = [sys.executable, "-P", "-c", code, here, str(folder)]  # the installed package
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    other = json.loads(printed)
    same = session[2] == restart[2] == other[2] == cold.text
    print(
        f"system prompt, {cold.stats.prompt_tokens} tokens in all; cold {cold.stats.ttft_s:.2f} s"
    )
    for name, ttft, cached in (
        ("turn 2", second.stats.ttft_s, second.stats.cached_tokens),
        ("second session", *session[:2]),
        ("another process", *other[:2]),
    ):
        ratio = ttft / cold.stats.ttft_s
        print(f"  {name:16} {ttft * 1000:6.0f} ms  {ratio:6.1%} of cold, {cached} tokens cached")
    size = sum(file.stat().st_size for file in folder.iterdir())
    print(f"  on disk {size / 1e6:.1f} MB; answers are {'the same' if same else 'NOT THE SAME'}")


def show_branches() -> None:
    llm = load(DEFAULT_MODEL, ctx_size=4096)
    cache = llm.engine.cache
    session = llm.session()
    session.append(llm.engine.tokenizer.encode(system_prompt(llm))[:2000])
    options = llm.generation_options(temperature=0, max_tokens=8, ignore_eos=True)
    session.generate(options=options)
    alone = cache.used_blocks
    branches = [session.fork() for _ in range(8)]
    for i, branch in enumerate(branches):
        branch.append(f" Number {i}:")
        branch.generate(options=options)
    print(f"8 branches of 2,000 tokens hold {cache.used_blocks} blocks, one holds {alone}")


def show_many_prompts(folder: Path) -> None:
    llm = load(DEFAULT_MODEL, ctx_size=2048, kv_cache_dir=folder, kv_cache_bytes=DISK_BUDGET)
    text = topics.topics["typesseq"]
    resident = []
    for i in range(PROMPTS):
        llm.generate(f"Text {i}: {text[40 * i : 40 * i + 1500]}", temperature=0, max_tokens=4)
        resident.append(psutil.Process().memory_info().rss)
    size = sum(file.stat().st_size for file in folder.iterdir())
    print(
        f"{PROMPTS} prompts of about 400 tokens: resident {resident[PROMPTS // 5] / 1e6:.0f} MB "
        f"after {PROMPTS // 5}, {resident[-1] / 1e6:.0f} MB after all; on disk "
        f"{size / 1e6:.1f} MB of {DISK_BUDGET / 1e6:.1f}"
    )


def show_shift() -> None:
    """Perplexity of a text that is longer than the context, and what making room takes."""
    llm = load(DEFAULT_MODEL, ctx_size=SHIFT_CTX)
    engine = llm.engine
    tokens = engine.tokenizer.encode(topics.topics["typesseq"])[:3000]
    keep, discard = 4, (SHIFT_CTX - 4) // 2
    for name in ("shifted", "computed again"):
        loss, seconds, times = 0.0, 0.0, 0
        sequence = engine.cache.sequence()
        for start in range(0, len(tokens) - STRIDE, STRIDE):
            if len(sequence) + STRIDE > SHIFT_CTX:
                kept = sequence.tokens[:keep] + sequence.tokens[keep + discard :]
                began = time.perf_counter()
                if name == "shifted":
                    sequence.shift(keep=keep, discard=discard)
                else:
                    sequence.truncate(0)
                    compute_prompt(engine.prefill, kept, sequence)
                seconds += time.perf_counter() - began
                times += 1
            logits = compute_tokens(engine.decoder, tokens[start : start + STRIDE], sequence)
            for row, token in zip(logits, tokens[start + 1 :], strict=False):
                loss += log_sum_exp(row) - float(row[token])
        sequence.close()
        count = len(range(0, len(tokens) - STRIDE, STRIDE)) * STRIDE
        print(
            f"  {name}: perplexity {math.exp(loss / count):.3f} over {count} tokens, "
            f"{seconds / times * 1000:.0f} ms each of {times} times"
        )


def show_typing(model: Path) -> None:
    llm = load(str(model), ctx_size=2048)
    suffix = "\n    return total\n\n\n" + "def unused(a, b):\n    c = a + b\n    return c\n" * 20
    typed = "    total = left + right\n    total = total * 2"[:KEYSTROKES]
    for order in ("psm", "spm"):
        for reuse in (False, True):
            times, cached = [], []
            for end in range(1, KEYSTROKES + 1):
                if not reuse:
                    llm = load(str(model), ctx_size=2048)
                prefix = "def add(left, right):\n" + typed[:end]
                found = llm.infill(prefix, suffix, order=order, max_tokens=8, single_line=True)
                times.append(found.stats.ttft_s * 1000)
                cached.append(found.stats.cached_tokens / found.stats.prompt_tokens)
            low, high = statistics.median(times), sorted(times)[int(0.95 * len(times))]
            print(
                f"  {order}, {'with' if reuse else 'without'} reuse: first token after "
                f"{low:.1f} ms (95 %: {high:.1f}), {statistics.median(cached):.0%} cached"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--infill-model", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        show_reuse(Path(folder))
    with tempfile.TemporaryDirectory() as folder:
        show_many_prompts(Path(folder))
    show_branches()
    print(f"a full context of {SHIFT_CTX} tokens")
    show_shift()
    if arguments.infill_model is not None:
        print(f"{KEYSTROKES} keystrokes before a suffix")
        show_typing(arguments.infill_model)


if __name__ == "__main__":
    main()
