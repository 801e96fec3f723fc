"""Gaps that a model fills exactly, through the command line, a process for each.

    python tests/bench/infill.py FOLDER [--count 300]

FOLDER holds the model and `gaps.py`, which prints cases as {"prefix", "middle", "suffix"} a line.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path


def filled(model: Path, prefix: str, suffix: str) -> str:
    command = [sys.executable, "-P", "-m", "edgellm.cli.main", "infill", str(model), "--temp", "0"]
    command += ["-n", "16", "--prefix", prefix, "--suffix", suffix]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--count", type=int, default=300)
    arguments = parser.parse_args()
    printed = subprocess.run(
        [sys.executable, arguments.model / "gaps.py", str(arguments.count), "0"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    cases = [json.loads(line) for line in printed.splitlines()]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        right = list(
            pool.map(
                lambda case: (
                    filled(arguments.model, case["prefix"], case["suffix"]) == case["middle"]
                ),
                cases,
            )
        )
    print(f"{sum(right)} of {len(right)} exactly, {sum(right) / len(right):.2%}")


if __name__ == "__main__":
    main()
