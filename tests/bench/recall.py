"""The share of attention that keys of a long prompt have which `prefill_mass` reads.

    python tests/bench/recall.py MODEL.gguf [--length 8000] [--masses 0.99,0.98,0.95] [--every 4]

Queries and keys are those of transformers in float32, of the first text of `fidelity.py`'s; the
panels of 16 keys are those of `heavy_panels` in `kernels/attention/reference.py`. For each layer
and head, and every so many blocks of queries from token 4,096 on:

* recall: weights of the softmax that the keys read have, on average of all queries and heads, and
  of the tenth and the hundredth part of them that has least;
* best: the same average for as many panels, chosen by the weights of all queries themselves, none
  of them without being asked;
* last 64: for as many, chosen by the weights of the block's last 64 queries, as MInference
  (arXiv:2407.02490) estimates its vertical lines.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from fidelity import Judge, default_texts, windows_of
from numpy.typing import NDArray

from edgellm.kernels.attention.reference import heavy_panels
from edgellm.kernels.kv_blocks import BLOCK, DENSE_POSITIONS, PANEL

Floats = NDArray[np.float32]


def weights_of(q: Floats, k: Floats, scale: float) -> Floats:
    """Weights of panels `[128, n / 16]`; queries `[128, D]` are at the end of `[n, D]`."""
    scores = q @ k.T * scale
    later = np.arange(len(k)) > len(k) - BLOCK + np.arange(BLOCK)[:, None]
    scores[later] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    of_panels: Floats = weights.reshape(BLOCK, -1, PANEL).sum(-1)
    return of_panels


class Recall:
    """Counts of one share of the attention."""

    def __init__(self, mass: float) -> None:
        self.mass = mass
        self.of_rows: list[Floats] = []
        self.best: list[float] = []
        self.last: list[float] = []
        self.read: list[float] = []

    def add(self, q: Floats, k: Floats, weights: Floats, scale: float) -> None:
        taken = heavy_panels(q, k, self.mass, scale=scale)
        self.read.append(len(taken) / weights.shape[-1])
        self.of_rows.append(weights[..., taken].sum(-1).ravel())
        for found, queries in ((self.best, weights), (self.last, weights[-64:])):
            largest = np.argsort(-queries.sum(0))[: len(taken)]
            found.append(float(weights[..., largest].sum(-1).mean()))

    def __str__(self) -> str:
        rows = np.concatenate(self.of_rows)
        tenth, hundredth = np.quantile(rows, (0.1, 0.01))
        return (
            f"{self.mass}: keys read {np.mean(self.read):.1%}, recall {rows.mean():.2%}, a tenth "
            f"has less than {tenth:.2%}, a hundredth less than {hundredth:.2%}; best "
            f"{np.mean(self.best):.2%}, last 64 {np.mean(self.last):.2%}"
        )


def main() -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("model")
    parser.add_argument("--length", type=int, default=8000)
    parser.add_argument("--masses", default="0.99,0.98,0.95")
    parser.add_argument("--every", type=int, default=4)
    arguments = parser.parse_args()
    recalls = [Recall(float(mass)) for mass in arguments.masses.split(",")]
    judge = Judge(Path(arguments.model))
    plain = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def attend(module: Any, query: Any, key: Any, value: Any, *rest: Any, **options: Any) -> Any:
        q, k = query[0].numpy(), key[0].numpy()
        group, scale = len(q) // len(k), options.get("scaling") or query.shape[-1] ** -0.5
        ends = range(DENSE_POSITIONS + BLOCK, k.shape[1] + 1, BLOCK * arguments.every)
        for end in ends:
            for head, rows in enumerate(q[:, end - BLOCK : end]):
                keys = k[head // group, :end]
                weights = weights_of(rows, keys, scale)
                for recall in recalls:
                    recall.add(rows, keys, weights, scale)
        return plain(module, query, key, value, *rest, **options)

    ALL_ATTENTION_FUNCTIONS["sdpa"] = attend
    name, text = next(iter(default_texts().items()))
    [window] = windows_of(arguments.model, text, 1, arguments.length)
    judge.logits(window)
    print(f"{arguments.model}, {len(window)} tokens of {name}")
    print(*recalls, sep="\n")


if __name__ == "__main__":
    main()
