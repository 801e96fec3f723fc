"""Every family in every back end that takes it, beside what transformers computes.

    python tests/families/matrix.py        writes the table of docs/models.md

Models are tiny and random (see `tiny_families.py`); each is exported in four precisions and runs
prompts shorter and longer than a chunk and than its windows, and some tokens behind them.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from tiny_families import FAMILIES
from tiny_models import logits, make, save_tokenizer

from edgellm.backends.int8_support import int8_products_are_exact
from edgellm.engine.one_sequence import Hooks, compute_prompt, compute_tokens
from edgellm.errors import UnsupportedModelError
from edgellm.export import export
from edgellm.graphs.checkpoint import open_checkpoint
from edgellm.graphs.config import ModelConfig
from edgellm.graphs.state_mixers import DeltaNet
from edgellm.kernels.gpu import device
from edgellm.kernels.native import library
from edgellm.llm import LLM, load
from edgellm.store.precision_support import needs_host, why_not

CHUNK = 8
LENGTHS = (1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 3)
DECODED = 3
# Column -> precisions of the bundle, and options of `load`.
BACKENDS: Mapping[str, tuple[tuple[str, ...], Mapping[str, Any]]] = {
    "f32": (("f32",), {"precision": "f32", "decode": "reference", "kv_format": "f32"}),
    "w8a8": (("w8a8", "int4"), {"precision": "w8a8", "decode": "portable"}),
    "int4": (("f32", "int4"), {"precision": "f32", "decode": "portable"}),
    "C++": (("packed",), {"decode": "native"}),
    "Triton": (("packed",), {"decode": "triton"}),
}
# Of models with parts that the C++ kernels compute between graphs, and which they decode.
BESIDE_HOST: Mapping[str, tuple[tuple[str, ...], Mapping[str, Any]]] = {
    "f32": (("f32", "packed"), {"precision": "f32", "prefill": "cpu", "kv_format": "f32"}),
    "w8a8": (("w8a8", "packed"), {"precision": "w8a8", "prefill": "cpu"}),
}
# What is far from the rounding of 8 bits, and what a part that is left out would exceed.
ALLOWED = {"f32": 1e-4, "w8a8": 0.2, "int4": 0.2, "C++": 0.2, "Triton": 0.2}
# The error of the median token of models with experts or delta nets; without normalized shares, or
# with an expert less, it is 0.11 or more.
MEDIAN = 0.06
PAGE = Path(__file__).parent.parent.parent / "docs" / "models.md"
_BEGIN, _END = "<!-- matrix -->\n", "<!-- end of matrix -->\n"


def usable(backend: str) -> bool:
    """Whether this machine has the back end, or an interpreter of it."""
    if backend == "w8a8":
        return int8_products_are_exact()
    if backend == "C++":
        return library() is not None
    return backend != "Triton" or device.why_not() is None


def errors(name: str, folder: Path, backends: Iterable[str]) -> dict[str, float | str]:
    """As `errors_of`, of a family's model that is made in the folder."""
    model = make(name, folder, vocab_size=320)
    save_tokenizer(folder)
    return errors_of(model, folder, backends)


def errors_of(model: Any, folder: Path, backends: Iterable[str]) -> dict[str, float | str]:
    """The largest error of a logit in each of the back ends that is usable, over the largest logit.

    With experts it is that of the median token: where experts are nearly as good as the next ones,
    rounding chooses, and the token is computed by others, and seen so by those behind it. A delta
    net norms what each head gives, so where that is nearly 0, rounding chooses its sign: in
    transformers too, rounding inputs of linear layers to 8 bits moves logits by 0.4 at some tokens,
    and by 0.24 where a Mamba-2 beside attention norms what it gives.

    A back end that does not take the model has the reason in its place.

    Args:
        model: what transformers has of the folder.
    """
    largest: dict[str, float | str] = {}
    for backend in filter(usable, backends):
        precisions, options = of_backend(backend, open_checkpoint(folder).config)
        try:
            largest[backend] = _error(model, folder, backend, precisions, options)
        except UnsupportedModelError as error:
            largest[backend] = str(error)
    return largest


def of_backend(backend: str, config: ModelConfig) -> tuple[tuple[str, ...], Mapping[str, Any]]:
    """Precisions of the bundle, and options of `load`, of a model in a column of the table."""
    hosted = needs_host(config) and backend in BESIDE_HOST
    return (BESIDE_HOST if hosted else BACKENDS)[backend]


def is_refused(backend: str, config: ModelConfig) -> bool:
    """Whether a back end of the table lacks a part of a model."""
    precisions, options = of_backend(backend, config)
    asked = {*precisions, *options.values()}
    return any(why_not(str(name), config) is not None for name in asked)


def _error(
    model: Any, folder: Path, backend: str, precisions: tuple[str, ...], options: Mapping[str, Any]
) -> float:
    bundle = export(
        folder,
        folder / "bundle",
        name="tiny",
        source=str(folder),
        precisions=precisions,
        chunk_sizes=None if precisions == ("packed",) or (folder / "bundle").exists() else (CHUNK,),
    )
    lengths = LENGTHS[-1:] if backend == "Triton" and device.interpreted() else LENGTHS
    with load(str(bundle.path), **options) as llm:
        found = np.concatenate([_errors_of_prompt(model, llm, length) for length in lengths])
    return float(np.median(found) if unsteady(bundle.config) else found.max())


def unsteady(config: ModelConfig) -> bool:
    """Whether rounding may change a token's logits by much, see `errors_of`."""
    normed = (
        isinstance(x.mixer, DeltaNet) or (x.beside and x.beside.gate_norm) for x in config.layers
    )
    return config.has_experts or any(normed)


def _errors_of_prompt(model: Any, llm: LLM, length: int) -> np.ndarray:
    """The errors of the logits after a prompt, and after each of some tokens behind it."""
    tokens = np.random.default_rng(length).integers(3, 256, length + DECODED).tolist()
    expected = logits(model, tokens)[length - 1 :]
    sequence = llm.engine.cache.sequence()
    rows = [compute_prompt(llm.engine.prefill, tokens[:length], sequence, Hooks())]
    rows += [compute_tokens(llm.engine.decoder, [token], sequence)[0] for token in tokens[length:]]
    sequence.close()
    errors: np.ndarray = np.abs(np.stack(rows) - expected).max(axis=1) / np.abs(expected).max()
    return errors


def table() -> str:
    """A row for each family."""
    columns = [backend for backend in BACKENDS if usable(backend)]
    lines = [f"| family | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for name in FAMILIES:
        with tempfile.TemporaryDirectory() as folder:
            cells = errors(name, Path(folder), columns)
        shown = ("no" if isinstance(cells[c], str) else f"{cells[c]:.1e}" for c in columns)
        lines.append(f"| {name} | {' | '.join(shown)} |")
        print(lines[-1], file=sys.stderr)
    return "\n".join(lines) + "\n"


def shown(name: str) -> dict[str, str]:
    """Return what the page has of a family, by the columns of its table."""
    table = PAGE.read_text(encoding="utf-8").partition(_BEGIN)[2].partition(_END)[0]
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in table.strip().splitlines()]
    return next(dict(zip(rows[0], row, strict=True)) for row in rows if row[0] == name)


def replace_table(page: Path, rows: str) -> None:
    """Put a table between the marks of a page."""
    before, _, rest = page.read_text(encoding="utf-8").partition(_BEGIN)
    after = rest.partition(_END)[2]
    page.write_text(before + _BEGIN + "\n" + rows + "\n" + _END + after, encoding="utf-8")


if __name__ == "__main__":
    if device.why_not() is not None:
        os.environ["TRITON_INTERPRET"] = "1"
    replace_table(PAGE, table())
