"""What static 8-bit activations cost, and what buys it back: perplexity in a simulation.

    python tests/bench/outliers.py TEXT... [--windows 8]

Inputs of all linear layers of the default model, in Hugging Face transformers and float32, are
rounded to fixed grids (int8 weights per channel cost nothing here and are left out). Scales come
from edgellm's own calibration text; shadow execution is what a grid without clipping would give,
which it equals, and its grids are narrower. Where layers are pruned, those where a shadow saves the
least go without.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from edgellm.export.calibrate import CalibrationOptions, choose_windows
from edgellm.graphs.contract import HOST_TOKENS
from edgellm.kernels import hadamard
from edgellm.llm import load
from edgellm.quantize.basis import random_rotation, spreading
from edgellm.quantize.calibration import Observation, error_share, reach
from edgellm.store.sources import DEFAULT_MODEL, resolve

WINDOW = 512
PERCENTILE, SHADOW_PERCENTILE = 99.99, 99.5
PRUNED = (0.0, 0.5, 0.85, 1.0)
BLOCK = 64
Floats = NDArray[np.float32]
Transform = Callable[[str, torch.Tensor], torch.Tensor]
Inputs = Callable[[str, torch.Tensor], torch.Tensor]


class Simulation:
    """The model with a function on the inputs of linear layers, which have names like 3.down."""

    def __init__(self) -> None:
        path = resolve(DEFAULT_MODEL).path
        self.model = AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.float32
        ).eval()
        self.norms: dict[str, torch.Tensor] = {}
        self.weights: dict[str, torch.Tensor] = {}
        self.change: Inputs | None = None
        for index, layer in enumerate(self.model.model.layers):
            attention, mlp = layer.self_attn, layer.mlp
            self.norms[f"{index}.qkv"] = layer.input_layernorm.weight
            self.norms[f"{index}.gate"] = layer.post_attention_layernorm.weight
            for name, parts in (
                ("qkv", (attention.q_proj, attention.k_proj, attention.v_proj)),
                ("o", (attention.o_proj,)),
                ("gate", (mlp.gate_proj, mlp.up_proj)),
                ("down", (mlp.down_proj,)),
            ):
                self.weights[f"{index}.{name}"] = torch.cat([part.weight for part in parts])
                for part in parts:
                    part.register_forward_pre_hook(self._hook(f"{index}.{name}"))

    def _hook(self, name: str) -> Callable[[torch.nn.Module, tuple[torch.Tensor]], object]:
        def hook(_: torch.nn.Module, inputs: tuple[torch.Tensor]) -> object:
            return None if self.change is None else (self.change(name, inputs[0]),)

        return hook

    @torch.no_grad()
    def perplexity(self, ids: list[int], windows: int, change: Inputs | None) -> float:
        self.change = change
        losses = []
        for start in range(0, windows * WINDOW, WINDOW):
            tokens = torch.tensor([ids[start : start + WINDOW]])
            logits = self.model(tokens).logits[0, :-1]
            losses.append(
                torch.nn.functional.cross_entropy(logits, tokens[0, 1:], reduction="none")
            )
        self.change = None
        return float(torch.cat(losses).mean().exp())

    @torch.no_grad()
    def observe(self, windows: np.ndarray, there: Transform, first: int) -> dict[str, Observation]:
        """Inputs of each layer, tokens before `first` left out."""
        seen: dict[str, Observation] = {}

        def change(name: str, x: torch.Tensor) -> torch.Tensor:
            rows = there(name, x)[:, first:].flatten(0, 1).contiguous().numpy()
            seen.setdefault(name, Observation.of(rows.shape[-1])).add(rows)
            return x

        self.change = change
        for rows in np.split(windows, 8):
            self.model(torch.tensor(rows))
        self.change = None
        return seen


def plain(_: str, x: torch.Tensor) -> torch.Tensor:
    return x


def rotated(simulation: Simulation) -> tuple[Transform, Transform]:
    """Into the basis of the exported graphs, and back."""
    rotation = torch.tensor(random_rotation(simulation.model.config.hidden_size, seed=0)).float()
    block = torch.tensor(hadamard.matrix(BLOCK)).float()

    def runs(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        across = torch.tensor(spreading(x.shape[-1] // BLOCK)).float()
        return x.reshape(-1, len(across), BLOCK), across

    def there(name: str, x: torch.Tensor) -> torch.Tensor:
        if name in simulation.norms:
            return x / simulation.norms[name] @ rotation
        blocks, across = runs(x)
        return (across @ (blocks @ block)).reshape(x.shape)

    def back(name: str, x: torch.Tensor) -> torch.Tensor:
        if name in simulation.norms:
            return x @ rotation.T * simulation.norms[name]
        blocks, across = runs(x)
        return (across.T @ blocks @ block.T).reshape(x.shape)

    return there, back


def smoothing(activations: Floats, weights: Floats, *, alpha: float = 0.5) -> Floats:
    """Return SmoothQuant's factors of inputs, by their largest activations and weights.

    Xiao et al., arXiv:2211.10438, equation 4: max|X_j|^alpha / max|W_j|^(1 - alpha).
    """
    sizes = np.maximum(activations, np.float32(1e-5)), np.maximum(weights, np.float32(1e-5))
    return (sizes[0] ** alpha / sizes[1] ** (1 - alpha)).astype(np.float32)


def smoothed(simulation: Simulation, seen: dict[str, Observation]) -> tuple[Transform, Transform]:
    """Divided by factors where a norm comes before the layer."""
    factors = {
        name: torch.tensor(
            smoothing(seen[name].largest, simulation.weights[name].detach().abs().amax(0).numpy())
        )
        for name in simulation.norms
    }
    one = torch.ones(1)
    return (
        lambda name, x: x / factors.get(name, one),
        lambda name, x: x * factors.get(name, one),
    )


def grid(
    reach: dict[str, float],
    there: Transform,
    back: Transform,
    *,
    shadows: set[str],
    bits: int = 8,
    first: int = HOST_TOKENS,
) -> Inputs:
    """Rounds inputs; tokens before `first` are the host's and stay as they are."""
    half = (1 << bits - 1) - 1

    def change(name: str, x: torch.Tensor) -> torch.Tensor:
        step = reach[name] / half
        codes = torch.round(there(name, x) / step)
        if name not in shadows:
            codes = codes.clamp(-half - 1, half)
        found = back(name, codes * step)
        found[:, :first] = x[:, :first]
        return found

    return change


def largest(seen: dict[str, Observation]) -> dict[str, float]:
    return {name: float(found.largest.max()) for name, found in seen.items()}


def reaches(seen: dict[str, Observation], percentile: float) -> dict[str, float]:
    """Of grids that hold so many of the values."""
    return {
        name: reach(found, bits=8, method="percentile", percentile=percentile)
        for name, found in seen.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("texts", nargs="+", type=Path)
    parser.add_argument("--windows", type=int, default=8)
    arguments = parser.parse_args()
    tokenizer = load(DEFAULT_MODEL, ctx_size=256).engine.tokenizer
    texts = {
        path.name: tokenizer.encode(path.read_text(encoding="utf-8")) for path in arguments.texts
    }
    calibration = choose_windows(tokenizer, CalibrationOptions())
    simulation = Simulation()
    exact = {n: simulation.perplexity(ids, arguments.windows, None) for n, ids in texts.items()}
    print("| activations | " + " | ".join(texts) + " |\n|---" + "|---" * len(texts) + "|")

    def row(label: str, change: Inputs | None) -> None:
        cells = []
        for name, ids in texts.items():
            found = simulation.perplexity(ids, arguments.windows, change)
            cells.append(f"{found:.3f} ({100 * (found / exact[name] - 1):+.2f} %)")
        print(f"| {label} | " + " | ".join(cells) + " |", flush=True)

    def shadow_rows(
        label: str, seen: dict[str, Observation], to: Transform, fro: Transform
    ) -> None:
        wide, narrow = reaches(seen, PERCENTILE), reaches(seen, SHADOW_PERCENTILE)
        saved = {
            n: error_share(o, wide[n], bits=8) - error_share(o, narrow[n], bits=8, clips=False)
            for n, o in seen.items()
        }
        ranked = sorted(saved, key=lambda name: -saved[name])
        for pruned in PRUNED:
            kept = set(ranked[: round((1 - pruned) * len(ranked))])
            change = grid(
                {n: (narrow if n in kept else wide)[n] for n in seen}, to, fro, shadows=kept
            )
            row(f"{label}, {PERCENTILE} % and shadow, {pruned:.0%} pruned", change)

    row("float32", None)
    seen = simulation.observe(calibration, plain, 0)
    row("naive static: 8 bits, largest", grid(largest(seen), plain, plain, shadows=set(), first=0))
    seen = simulation.observe(calibration, plain, HOST_TOKENS)
    row("first token on the host (all below)", grid(largest(seen), plain, plain, shadows=set()))
    shadow_rows("plain", seen, plain, plain)
    to, fro = smoothed(simulation, seen)
    seen = simulation.observe(calibration, to, HOST_TOKENS)
    row("SmoothQuant, largest", grid(largest(seen), to, fro, shadows=set()))
    shadow_rows("SmoothQuant", seen, to, fro)
    to, fro = rotated(simulation)
    seen = simulation.observe(calibration, to, HOST_TOKENS)
    row("rotation, largest", grid(largest(seen), to, fro, shadows=set()))
    shadow_rows("rotation", seen, to, fro)
    wide = {name: 1.25 * found for name, found in largest(seen).items()}
    row("rotation, 16 bits, largest", grid(wide, to, fro, shadows=set(), bits=16))


if __name__ == "__main__":
    main()
