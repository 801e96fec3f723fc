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
from transformers import AutoModelForCausalLM

from edgellm.calibrate import HOST_TOKENS, CalibrationOptions, choose_windows
from edgellm.kernels import hadamard
from edgellm.llm import load
from edgellm.quantize.rotation import random_rotation, spreading
from edgellm.quantize.smooth import smoothing
from edgellm.sources import DEFAULT_MODEL, resolve

WINDOW = 512
PERCENTILE, SHADOW_PERCENTILE = 99.99, 99.5
PRUNED = (0.0, 0.5, 0.85, 1.0)
BLOCK = 64
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
    def sizes(self, windows: np.ndarray, there: Transform, first: int) -> dict[str, torch.Tensor]:
        """|x| of each layer's inputs `[tokens, K]`, tokens before `first` left out."""
        seen: dict[str, torch.Tensor] = {}

        def change(name: str, x: torch.Tensor) -> torch.Tensor:
            seen[name] = there(name, x)[:, first:].abs().flatten(0, 1)
            return x

        parts: dict[str, list[torch.Tensor]] = {name: [] for name in self.weights}
        for rows in np.split(windows, 8):
            self.change = change
            self.model(torch.tensor(rows))
            for name, found in seen.items():
                parts[name].append(found)
        self.change = None
        return {name: torch.cat(found) for name, found in parts.items()}


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


def smoothed(simulation: Simulation, sizes: dict[str, torch.Tensor]) -> tuple[Transform, Transform]:
    """Divided by factors where a norm comes before the layer."""
    factors = {
        name: torch.tensor(
            smoothing(
                sizes[name].amax(0).numpy(), simulation.weights[name].detach().abs().amax(0).numpy()
            )
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


def lost(sizes: torch.Tensor, reach: float, *, clips: bool = True) -> float:
    """The share of energy that an 8-bit grid loses."""
    step = reach / 127
    codes = torch.round(sizes / step)
    found = (codes.clamp(max=127) if clips else codes) * step
    return float((found - sizes).square().sum() / sizes.square().sum())


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
        label: str, sizes: dict[str, torch.Tensor], to: Transform, fro: Transform
    ) -> None:
        reach, narrow = (
            {n: float(np.percentile(v.numpy(), percentile)) for n, v in sizes.items()}
            for percentile in (PERCENTILE, SHADOW_PERCENTILE)
        )
        saved = {n: lost(v, reach[n]) - lost(v, narrow[n], clips=False) for n, v in sizes.items()}
        ranked = sorted(saved, key=lambda name: -saved[name])
        for pruned in PRUNED:
            kept = set(ranked[: round((1 - pruned) * len(ranked))])
            reaches = {n: narrow[n] if n in kept else reach[n] for n in reach}
            change = grid(reaches, to, fro, shadows=kept)
            row(f"{label}, {PERCENTILE} % and shadow, {pruned:.0%} pruned", change)

    row("float32", None)
    sizes = simulation.sizes(calibration, plain, 0)
    largest = {name: float(v.max()) for name, v in sizes.items()}
    row("naive static: 8 bits, largest", grid(largest, plain, plain, shadows=set(), first=0))
    sizes = simulation.sizes(calibration, plain, HOST_TOKENS)
    largest = {name: float(v.max()) for name, v in sizes.items()}
    row("first token on the host (all below)", grid(largest, plain, plain, shadows=set()))
    to, fro = smoothed(simulation, sizes)
    smooth = {name: float(to(name, v).max()) for name, v in sizes.items()}
    row("SmoothQuant, largest", grid(smooth, to, fro, shadows=set()))
    shadow_rows("plain", sizes, plain, plain)
    shadow_rows("SmoothQuant", {n: to(n, v) for n, v in sizes.items()}, to, fro)
    to, fro = rotated(simulation)
    sizes = simulation.sizes(calibration, to, HOST_TOKENS)
    largest = {name: float(v.max()) for name, v in sizes.items()}
    row("rotation, largest", grid(largest, to, fro, shadows=set()))
    shadow_rows("rotation", sizes, to, fro)
    wide = {name: 1.25 * reach for name, reach in largest.items()}
    row("rotation, 16 bits, largest", grid(wide, to, fro, shadows=set(), bits=16))


if __name__ == "__main__":
    main()
