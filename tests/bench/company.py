"""Answers together and each alone: the same tokens, texts and log-probabilities, bit for bit.

    python tests/bench/company.py MODEL     # one with infill tokens, such as Qwen2.5-Coder

Thirty requests with lengths, temperatures, seeds and limits of their own: texts, questions, answers
in JSON, and gaps to be filled. Each is answered by itself first; then all at once, with room for
all; then all at once where the KV cache holds three contexts, so that requests are preempted; and
then four answers to each of some prompts, begun where the prompt ends.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from pydoc_data import topics

from edgellm import BatchRequest, Completion, GenerationOptions, load
from edgellm.infill import Gap
from edgellm.llm import LLM
from edgellm.text.prompt import Message

CTX_SIZE = 1024
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "year": {"type": "integer"}},
    "required": ["name", "year"],
}


def requests(llm: LLM) -> list[BatchRequest]:
    """Thirty, of four sorts in turns."""
    prose = topics.topics["typesseq"]
    code = Path(argparse.__file__).read_text(encoding="utf-8")
    schema = llm.json_filter(json.dumps(SCHEMA))
    made = []
    for i in range(30):
        options = GenerationOptions(
            temperature=(0.0, 0.7, 1.2)[i % 3],
            seed=i,
            max_tokens=40 + 17 * (i % 8),
            logprobs=i % 3,
            repeat_penalty=1.0 + 0.1 * (i % 2),
        )
        length = (60, 900, 2000, 300)[i // 4 % 4]
        prompt: str | list[Message] | Gap = prose[97 * i : 97 * i + length]
        if i % 4 in (1, 2):
            prompt = [Message("user", f"Name a scientist of the {i}th century.")]
        elif i % 4 == 3:
            prompt = Gap(
                prefix=code[97 * i : 97 * i + 800], suffix=code[97 * i + 900 : 97 * i + 1300]
            )
        made.append(
            BatchRequest(
                prompt=prompt, options=options, logit_filter=schema if i % 4 == 2 else None
            )
        )
    return made


def together(llm: LLM, asked: Sequence[BatchRequest], *, n: int = 1) -> list[Completion]:
    answers = sorted(llm.batch(asked, n=n), key=lambda answer: (answer.index, answer.sample))
    return [answer.result() for answer in answers]


def same(ours: Completion, theirs: Completion) -> bool:
    return all(
        getattr(ours, name) == getattr(theirs, name)
        for name in ("tokens", "text", "logprobs", "finish_reason")
    )


def report(name: str, llm: LLM, found: list[Completion], expected: list[Completion]) -> None:
    equal = sum(map(same, found, expected))
    counts = llm.engine.loop.counts
    rows = counts.prefill_rows + counts.decode_rows
    print(
        f"{name}: {equal} of {len(expected)} the same; {counts.steps} steps with {rows} rows, "
        f"{counts.preempted} preemptions",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    model = parser.parse_args().model

    def loaded(contexts: int) -> LLM:
        return load(model, ctx_size=CTX_SIZE, cache_size=contexts * CTX_SIZE)

    llm = loaded(40)
    asked = requests(llm)
    expected = [completion for each in asked for completion in together(llm, [each])]
    report("alone", llm, expected, expected)
    for name, contexts in (("together", 40), ("together, a cache of three contexts", 3)):
        llm = loaded(contexts)
        report(name, llm, together(llm, asked), expected)
    llm, some = loaded(40), asked[::5]
    each = [completion for one in some for completion in together(llm, [one], n=4)]
    llm = loaded(40)
    report("four answers to each of six prompts", llm, together(llm, some, n=4), each)
    alone = [done for i, done in enumerate(expected) if i % 5 == 0]
    report("the first of the four beside the one alone", llm, each[::4], alone)


if __name__ == "__main__":
    main()
