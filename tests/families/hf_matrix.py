"""One small checkpoint in each quantized format of Hugging Face folders, beside its judges.

    python tests/families/hf_matrix.py        writes the table of docs/precisions.md

The checkpoints are random Llamas whose linear layers are all of one format. Their weights are
judged by the numbers that the reference packing of `hf_weights.py` packed, and their logits by
transformers in float32 with these numbers for weights, or with what it reads from the folder
itself where it can. Where a library of the format runs on a CPU, a weight that it quantized is
read too, and judged by what the library makes of it (see `hf_golden.py`).
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from hf_formats import FORMATS, LIBRARIES
from hf_golden import CASES, array, write_tensors
from hf_weights import write_safetensors
from matrix import errors_of, replace_table, usable
from tiny_models import make, save_tokenizer

from edgellm.export import export
from edgellm.graphs.checkpoint import open_checkpoint
from edgellm.graphs.hf_quantization import quantization_of
from edgellm.graphs.safetensors_folder import SafetensorsFolder
from edgellm.kernels.quantized import dequantize
from edgellm.store.bundle import open_bundle
from edgellm.store.manifest import ImportSummary

COLUMNS = ("format", "packed as", "as read", "as packed", "library's weights", "f32", "C++")
PAGE = Path(__file__).parent.parent.parent / "docs" / "precisions.md"
SIZES = {"vocab_size": 320, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
# The name of a linear layer in a folder -> its canonical name (see graphs/tensors.py).
CANONICAL = {f"self_attn.{name}_proj": name for name in "qkvo"} | {
    f"mlp.{name}_proj": name for name in ("gate", "up", "down")
}


@dataclass(frozen=True)
class Result:
    """
    Attributes:
        kinds: what the packed weights of the linear layers are.
        read: the largest error of a weight as it is read, over the largest weight of its layer.
        packed: the same of the codes, scales and offsets that are taken over; None where none are.
        golden: the largest error of a weight that the library quantized, over the largest weight.
        logits: back end -> the largest error of a logit, over the largest logit.
    """

    kinds: str
    read: float
    packed: float | None
    golden: float | None
    logits: Mapping[str, float | str]


def make_checkpoint(name: str, folder: Path) -> tuple[Any, dict[str, np.ndarray]]:
    """A Llama in a format, and what judges it: a float32 model, and its weights by canonical name.

    Every linear layer is of the format; the embedding, the LM head and norms are float32.
    """
    import torch
    import transformers
    from safetensors.numpy import load_file

    model = make("llama", folder, **SIZES)
    save_tokenizer(folder)
    tensors, weights = load_file(folder / "model.safetensors"), {}
    rng = np.random.default_rng(len(name))
    for key, layer in model.named_modules():
        if not key.endswith("_proj"):
            continue
        del tensors[f"{key}.weight"]
        parts, values = FORMATS[name].make(rng, *layer.weight.shape)
        tensors |= {key + suffix: part for suffix, part in parts.items()}
        with torch.no_grad():
            layer.weight.copy_(torch.tensor(values))
        _, _, number, module = key.split(".", 3)
        weights[f"layers.{number}.{CANONICAL[module]}"] = values
    write_safetensors(folder / "model.safetensors", tensors)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **FORMATS[name].config}))
    if FORMATS[name].loads:
        read = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        return read.eval(), weights
    return model, weights


def judge(name: str, folder: Path, backends: Iterable[str] = ("f32", "C++")) -> Result:
    """What becomes of a format, beside what the judges say that it stands for."""
    model, weights = make_checkpoint(name, folder)
    checkpoint = open_checkpoint(folder)
    read, packed = [], []
    for key, expected in weights.items():
        tensor = checkpoint.tensor(key)
        read.append(_error(tensor.float32(), expected))
        if tensor.quantized is not None:
            packed.append(_error(dequantize(tensor.quantized()), expected))
    logits = errors_of(model, folder, backends)
    if not usable("C++"):  # else it has been exported
        export(folder, folder / "bundle", name="tiny", source=str(folder), precisions=("packed",))
    summary = ImportSummary.of(open_bundle(folder / "bundle").precision("packed").import_report)
    linear = (taken for storage, taken in summary.taken.items() if storage != "F32")
    kinds = {kind for taken in linear for kind in taken}
    return Result(
        kinds=", ".join(sorted(kinds)),
        read=max(read),
        packed=max(packed) if len(packed) == len(weights) else None,
        golden=_golden_error(FORMATS[name].golden, folder),
        logits=logits,
    )


def _error(values: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(values - expected).max() / np.abs(expected).max())


def _golden_error(case: str | None, folder: Path) -> float | None:
    if case is None:
        return None
    golden = folder / "golden"
    golden.mkdir()
    write_tensors(golden / "model.safetensors", CASES[case]["tensors"])
    quantization = quantization_of(CASES[case]["config"], SafetensorsFolder(golden), origin=case)
    assert quantization is not None
    tensor = quantization.tensor("m")
    assert tensor is not None
    return _error(tensor.float32(), array(CASES[case]["expected"]))


def table() -> str:
    """A row for each format."""
    lines = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    for name in FORMATS:
        with tempfile.TemporaryDirectory() as folder:
            lines.append(f"| {' | '.join(row(name, judge(name, Path(folder))))} |")
        print(lines[-1], file=sys.stderr)
    return "\n".join(lines) + "\n"


def row(name: str, result: Result) -> list[str]:
    case = FORMATS[name].golden
    return [
        name,
        f"`{result.kinds}`",
        _shown(result.read),
        "rounded" if result.packed is None else _shown(result.packed),
        "" if case is None else f"{_shown(result.golden)} ({LIBRARIES[case.split()[0]]})",
        *(f"{error:.1e}" for error in result.logits.values()),
    ]


def _shown(error: float | None) -> str:
    return f"{error:.1e}" if error else "exact"


if __name__ == "__main__":
    replace_table(PAGE, table())
