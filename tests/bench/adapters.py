"""How fast sequences with adapters decode together, and prompts, beside the model as it is.

    python tests/bench/adapters.py MODEL.gguf [--sequences 8] [--rank 16] [--tokens 32]

Random adapters of all linear layers, one for each sequence; as many sequences without; and all with
the same one. They take turns; medians of `--rounds`, and of the shares of each round, as other work
may slow some rounds. A prompt of 512 tokens with an adapter and without behind that.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from edgellm.generation import BatchRequest
from edgellm.generation_options import GenerationOptions
from edgellm.graphs.architecture import architecture
from edgellm.graphs.config import ModelConfig
from edgellm.graphs.tensors import layer_tensors
from edgellm.llm import LLM, load
from edgellm.machine import cpu_name

CONTEXT = 64
PROMPT = 512


def write_adapter(folder: Path, config: ModelConfig, *, rank: int, seed: int) -> Path:
    """A folder of PEFT for a model whose matrices are not fused."""
    rng, tensors = np.random.default_rng(seed), {}
    names = architecture(config.model_type, gguf=False, origin="model").hf_names
    for index in range(config.layer_count):
        for spec in layer_tensors(config, index):
            name = names.get(spec.name)
            if spec.role != "linear" or not isinstance(name, str):
                continue
            module = "base_model.model." + name.format(index).removesuffix(".weight")
            outputs, inputs = spec.shape
            a = rng.standard_normal((rank, inputs), np.float32)
            b = rng.standard_normal((outputs, rank), np.float32)
            tensors[f"{module}.lora_A.weight"] = a
            tensors[f"{module}.lora_B.weight"] = b * np.float32(1e-4)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config_json = {"peft_type": "LORA", "r": rank, "lora_alpha": rank}
    (folder / "adapter_config.json").write_text(json.dumps(config_json))
    return folder


def decode(
    llm: LLM, prompts: Sequence[list[int]], names: Sequence[str | None], count: int
) -> float:
    """Seconds of `count` tokens of each prompt, which is in the KV cache before."""

    def asked(tokens: int) -> list[BatchRequest]:
        return [
            BatchRequest(
                prompt=prompt,
                options=GenerationOptions(
                    adapter=name,
                    max_tokens=tokens,
                    temperature=0,
                    ignore_eos=True,
                    speculate=False,
                ),
            )
            for prompt, name in zip(prompts, names, strict=True)
        ]

    assert all(answer.result() for answer in llm.batch(asked(1)))
    start = time.perf_counter()
    assert all(len(answer.result().tokens) == count for answer in llm.batch(asked(count)))
    return time.perf_counter() - start


def prefill(llm: LLM, name: str | None, number: int) -> float:
    tokens = [3 + (number * 7919 + i * 31) % 5000 for i in range(PROMPT)]
    start = time.perf_counter()
    llm.generate(tokens, adapter=name, max_tokens=1)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int)
    chosen = parser.parse_args()
    count = chosen.sequences
    with tempfile.TemporaryDirectory() as root:
        llm = load(
            chosen.model,
            ctx_size=1024,
            cache_size=1024 * (2 * count + 4),
            threads=chosen.threads,
            prefill="native",
            decode="native",
        )
        config = llm.engine.config
        for i in range(count):
            folder = write_adapter(Path(root) / str(i), config, rank=chosen.rank, seed=i)
            llm.load_adapter(str(i), folder)
        size = sum(each.weights.nbytes for each in llm.engine.adapters.loaded.values()) / count
        print(f"{cpu_name()}, {llm.threads} threads, {llm.name}, rank {chosen.rank}:")
        print(f"an adapter has {size / 1e6:.1f} MB")
        prompts = [[3 + (97 * i + j) % 5000 for j in range(CONTEXT)] for i in range(count)]
        kinds: dict[str, list[str | None]] = {
            "none": [None] * count,
            f"{count} adapters": [str(i) for i in range(count)],
            "the same one": ["0"] * count,
        }
        seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
        for _ in range(chosen.rounds + 1):
            for kind, names in kinds.items():
                seconds[kind].append(decode(llm, prompts, names, chosen.tokens))
        base = seconds["none"][1:]
        for kind, values in seconds.items():
            rate = count * chosen.tokens / statistics.median(values[1:])
            share = statistics.median(a / b for a, b in zip(base, values[1:], strict=True))
            print(f"decode of {count}, {kind}: {rate:.1f} tokens/s, {share:.0%} of none")
        times: dict[str | None, list[float]] = {None: [], "0": []}
        for number in range(chosen.rounds + 1):
            for name, found in times.items():
                found.append(prefill(llm, name, number))
        plain, adapted = (statistics.median(found[1:]) for found in times.values())
        print(
            f"prompt of {PROMPT}: {PROMPT / plain:.0f} tokens/s, {PROMPT / adapted:.0f} with an "
            f"adapter, {plain / adapted:.0%}"
        )


if __name__ == "__main__":
    main()
