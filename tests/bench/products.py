"""Linear layers in C++ beside the processor's arithmetic: GOP/s and the share of its peak.

    python tests/bench/products.py [--kinds int4_symmetric,int4_k] [--rows 1,4,16,64,512]
                                   [--threads 1,2] [--shape 1536x8960] [--fine]

The peak is that of 8-bit products between registers, in the same instruction set; one row is bound
by memory. The best of some calls, the rounding of the activations included.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import numpy as np

from edgellm.kernels.linear import pack_weight
from edgellm.kernels.linear.native import linear
from edgellm.kernels.native import isa, library
from edgellm.kernels.quantized import KINDS
from edgellm.measure.roofline import peak_flops

sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))

from random_weights import random_weight  # type: ignore[import-not-found]

SECONDS = 0.5


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--rows", type=numbers, default=[1, 4, 16, 64, 512])
    parser.add_argument("--threads", type=numbers, default=[1])
    parser.add_argument("--shape", default="1536x8960", help="inputs x outputs")
    parser.add_argument("--fine", action="store_true", help="activations of 16 bits")
    arguments = parser.parse_args()
    compiled = library()
    if compiled is None:
        parser.error("there are no compiled kernels")
    inputs, outputs = (int(part) for part in arguments.shape.split("x"))
    rng = np.random.default_rng(0)
    for threads in arguments.threads:
        peak = peak_flops(threads)
        assert peak is not None
        print(f"{isa()}, {threads} threads, peak {peak / 1e9:.0f} GOP/s; rows {arguments.rows}")
        for kind in arguments.kinds.split(","):
            weight = pack_weight(random_weight(KINDS[kind], outputs, inputs, rng))
            cells = []
            for rows in arguments.rows:
                x = rng.standard_normal((rows, inputs)).astype(np.float32)
                best, until = np.inf, time.perf_counter() + SECONDS
                while time.perf_counter() < until:
                    start = time.perf_counter()
                    linear(compiled, x, weight, fine=arguments.fine, threads=threads)
                    best = min(best, time.perf_counter() - start)
                rate = 2 * rows * inputs * outputs / best
                cells.append(f"{rate / 1e9:6.0f} {rate / peak:4.0%}")
            print(f"  {kind:16} " + "  ".join(cells), flush=True)


if __name__ == "__main__":
    main()
