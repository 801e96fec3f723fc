"""A model in every type that llama.cpp writes: what edgellm loses, reads and takes for a token.

    python tests/bench/file_types.py MODEL.gguf [--python INTERPRETER] [--types Q4_K_M,IQ4_NL]

llama.cpp (llama-cpp-python, in the interpreter that `--python` names) writes the files, from what
MODEL holds; each is its own judge: the KL divergence is that of what runs by default to float32 on
the weights of the same file (`edgellm quality`, over its default text). Bytes are those of the
matrices that a decode step reads, and how many times as many as in the file. Files and bundles are
made in a temporary folder and deleted one by one.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

# Types by the numbers of llama_ftype in llama.h.
TYPES = {
    "Q2_K": 10, "Q3_K_M": 12, "Q4_0": 2, "Q4_1": 3, "Q4_K_S": 14, "Q4_K_M": 15, "Q5_0": 8,
    "Q5_K_M": 17, "Q6_K": 18, "Q8_0": 7, "IQ4_NL": 25, "IQ4_XS": 30, "IQ3_S": 26, "F16": 1,
    "BF16": 32,
}  # fmt: skip
_QUANTIZE = """
import sys, llama_cpp
parameters = llama_cpp.llama_model_quantize_default_params()
parameters.ftype, parameters.allow_requantize, parameters.nthread = int(sys.argv[3]), True, 2
sys.exit(llama_cpp.llama_model_quantize(
    sys.argv[1].encode(), sys.argv[2].encode(), llama_cpp.ctypes.byref(parameters)))
"""
COLUMNS = ("type", "KL divergence", "same top token", "weights", "MB a token", "of the file's")


def measure(path: Path, *, windows: int) -> list[str]:
    """A row of the table; in a process of its own, which has no other model's memory."""
    from edgellm.llm import load
    from edgellm.measure.benchmark import bench
    from edgellm.measure.quality import quality
    from edgellm.store.manifest import imported

    llm = load(str(path), ctx_size=1024)
    result = quality(llm.engine, max_windows=windows)
    (speed,) = bench(llm.engine, prompts=[0], generations=[64], depths=[0], repetitions=3)
    summary = imported(llm.engine.bundle.manifest, "packed")
    return [
        f"{result.kl_mean:.5f}",
        f"{result.same_top:.2%}",
        summary.details(),
        f"{summary.decode_bytes / 1e6:.1f}",
        f"{summary.decode_bytes / summary.file_bytes:.3f}",
        f"{speed.tokens_per_second:.0f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--types", default=",".join(TYPES))
    parser.add_argument("--windows", type=int, default=4, help="of 512 tokens")
    parser.add_argument("--python", default=sys.executable, help="one that has llama-cpp-python")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        return print(json.dumps(measure(arguments.model, windows=arguments.windows)))
    print(f"| {' | '.join(COLUMNS)} | tokens/s |\n{'|---' * (len(COLUMNS) + 1)}|")
    windows = str(arguments.windows)
    for name in arguments.types.split(","):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / f"{name}.gguf"
            quantize = [arguments.python, "-c", _QUANTIZE, arguments.model, path, str(TYPES[name])]
            subprocess.run(quantize, check=True, capture_output=True)
            row = subprocess.run(
                [sys.executable, "-P", __file__, path, "--measure", "--windows", windows],
                check=True,
                capture_output=True,
                text=True,
                env={**os.environ, "EDGELLM_HOME": f"{folder}/home"},
            )
        cells = json.loads(row.stdout.splitlines()[-1])
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
