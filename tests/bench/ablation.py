"""llm.npu's five bars on this machine: what each of its ideas brings, at some prompt lengths.

    python tests/bench/ablation.py [--lengths 64,256,1024]

An accelerator is played by ONNX Runtime's CPU provider on all cores but one; the last core is the
host's. The first bar has all cores. Each bar is a process of its own; times are of its best run.
`edgellm plan` simulates faster accelerators.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from threading import Event
from typing import Any

from edgellm.backends.chunked_backend import ChunkedBackend
from edgellm.backends.schedule import Policy
from edgellm.export import export
from edgellm.llm import load
from edgellm.machine import peak_memory_bytes
from edgellm.measure.explain import measure
from edgellm.store.prepare import prepare
from edgellm.store.sources import DEFAULT_MODEL, resolve

CHUNK = 128
BARS: dict[str, tuple[str, Policy, bool]] = {
    "CPU, float32": ("f32", "serial", False),
    "static graphs rebuilt for each length": ("f32", "in-order", True),
    "+ shared chunk graphs": ("f32", "in-order", False),
    "+ int8 with shadow outliers": ("w8a8-qdq", "in-order", False),
    "+ out-of-order": ("w8a8-qdq", "out-of-order", False),
}


def work(bar: str, length: int, folder: Path) -> dict[str, Any]:
    """One bar at one length; building is what has to be done anew for a prompt of that length."""
    precision, schedule, rebuilt = BARS[bar]
    begin = time.perf_counter()
    path = folder / "shared"
    if rebuilt:
        path = folder / f"length-{length}"
        source = resolve(DEFAULT_MODEL)
        precisions = (precision, "packed", "int4")
        export(
            source.path, path, name="ablation", source=source.spec, precisions=precisions,
            chunk_sizes=(length,),
        )  # fmt: skip
    engine = load(str(path), prefill="cpu", precision=precision, schedule=schedule).engine
    build_s = time.perf_counter() - begin if rebuilt else 0.0
    assert isinstance(engine.prefill, ChunkedBackend)
    ((samples, idle),) = measure(engine, length, engine.prefill, stop=Event())
    seconds = min(samples)
    return {
        "tokens_per_second": length / seconds,
        "with_build": length / (seconds + build_s),
        "build_s": build_s,
        "sessions": len(engine.prefill.model.segments.parts),
        "peak_mb": peak_memory_bytes() / 1e6,
        "idle": idle,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--lengths", default="64,256,1024")
    parser.add_argument("--work", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        bar, length, folder = arguments.work
        print(json.dumps(work(bar, int(length), Path(folder))))
        return
    with tempfile.TemporaryDirectory() as folder:
        source = prepare(DEFAULT_MODEL, precisions=("packed", "int4", "f32", "w8a8-qdq"))
        (Path(folder) / "shared").symlink_to(source.path)
        print("| | tokens | t/s | t/s with building | building, s | graphs | peak MB | idle |")
        print("|---" * 8 + "|")
        for bar in BARS:
            for length in arguments.lengths.split(","):
                command = [sys.executable, __file__, "--work", bar, length, folder]
                found = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
                print(
                    f"| {bar} | {length} | {found['tokens_per_second']:.0f} | "
                    f"{found['with_build']:.0f} | {found['build_s']:.1f} | {found['sessions']} | "
                    f"{found['peak_mb']:.0f} | {found['idle']:.0%} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
