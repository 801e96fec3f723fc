"""Calibration run: a text through the segments in float32, to see how large activations get."""

from __future__ import annotations

import hashlib
import inspect
import math
import pydoc_data.topics
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from edgellm.errors import ExportError, OptionError
from edgellm.export.float_segments import session_on_all_cores
from edgellm.export.window_attention import WindowAttention
from edgellm.graphs import contract
from edgellm.graphs.builder import WeightFile
from edgellm.graphs.checkpoint import Checkpoint
from edgellm.graphs.contract import HOST_TOKENS, Grid
from edgellm.graphs.linear import input_name, is_input
from edgellm.graphs.segment import Segment, author_segment
from edgellm.quantize.calibration import (
    METHODS,
    Method,
    Observation,
    error_share,
    grid_scale,
    reach,
)
from edgellm.store.manifest import ShadowEntry
from edgellm.text.tokenizer import Tokenizer

Floats = NDArray[np.float32]
Rounding = Literal["gptq", "nearest"]
ROUNDINGS: tuple[str, ...] = get_args(Rounding)
# Factor on the reach of 16-bit grids: room for values a little larger than any that were seen.
_HEADROOM = 1.25
# Windows that go through a segment together.
_BATCH = 16


@dataclass(frozen=True, kw_only=True)
class CalibrationOptions:
    """Options for the choice of static activation scales.

    Attributes:
        text: calibration text; None takes Python's manual and library (see
            `default_text`).
        windows: number of windows, runs of consecutive tokens.
        window: tokens in each window.
        seed: seed of the choice of windows, where the text has more.
        method, percentile: reach of the grids of 8-bit tensors, see `quantize/calibration.py`;
            16-bit tensors take `minmax`.
        shadow_share: share of the down_proj layers with 8-bit inputs that get a shadow: the host
            computes what is beyond the grid (see `quantize/calibration.py`), where that saves most.
        shadow_percentile: percentile that the grids of layers with a shadow reach to.
        rounding: rounding of weights: `gptq`, for the inputs that were seen (see
            `quantize/weights.py`; 43 s for a weight `[4096, 14336]`, two cores), or each to the
            `nearest`, which is faster.
    """

    text: str | None = None
    windows: int = 128
    window: int = 64
    seed: int = 0
    method: Method = "percentile"
    percentile: float = 99.99
    shadow_share: float = 0.15
    shadow_percentile: float = 99.5
    rounding: Rounding = "gptq"

    def __post_init__(self) -> None:
        """Check the values of the options.

        Raises:
            OptionError: a value is not allowed.
        """
        if self.method not in METHODS:
            raise OptionError(
                f"calibration method {self.method!r}: allowed are {', '.join(METHODS)}"
            )
        if self.rounding not in ROUNDINGS:
            raise OptionError(
                f"calibration rounding {self.rounding!r}: allowed are {', '.join(ROUNDINGS)}"
            )
        if self.windows < 1:
            raise OptionError(f"calibration windows is {self.windows}; allowed is 1 or more")
        if self.window <= HOST_TOKENS:
            raise OptionError(
                f"calibration window is {self.window}; allowed is {HOST_TOKENS + 1} or more"
            )
        percentiles = {"percentile": self.percentile, "shadow percentile": self.shadow_percentile}
        for name, value in percentiles.items():
            if not 0 < value <= 100:
                raise OptionError(f"calibration {name} is {value}; allowed is above 0, at most 100")
        if not 0 <= self.shadow_share <= 1:
            raise OptionError(f"calibration shadow share is {self.shadow_share}; allowed is 0 to 1")

    def to_json(self) -> dict[str, Any]:
        """Return the options as the manifest has them, with a sha256 in place of the text."""
        text = default_text() if self.text is None else self.text
        return {
            "text": "default" if self.text is None else "given",
            "text_sha256": hashlib.sha256(text.encode()).hexdigest(),
            "windows": self.windows,
            "window": self.window,
            "seed": self.seed,
            "method": self.method,
            "percentile": self.percentile,
            "shadow_share": self.shadow_share,
            "shadow_percentile": self.shadow_percentile,
            "rounding": self.rounding,
        }


def choose_windows(tokenizer: Tokenizer, options: CalibrationOptions) -> NDArray[np.int64]:
    """Choose token ids `[windows, window]`: runs of the calibration text that do not overlap.

    Raises:
        OptionError: the text is too short.
    """
    text = default_text() if options.text is None else options.text
    tokens = np.asarray(tokenizer.encode(text), np.int64)
    count = len(tokens) // options.window
    if count < options.windows:
        raise OptionError(
            f"the calibration text has {len(tokens)} tokens, which is {count} windows of "
            f"{options.window}; {options.windows} were asked for. Take a longer text or fewer "
            "windows (`calibration_windows`)"
        )
    runs = tokens[: count * options.window].reshape(count, options.window)
    chosen = np.random.default_rng(options.seed).choice(count, options.windows, replace=False)
    return runs[np.sort(chosen)]


class Calibrator:
    """Observer of a model's activations, segment by segment from the first to the last.

    Attributes:
        file: weights file of the segment that is observed.
        observations: activations seen so far, by tensor name.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        embedded: Floats,
        options: CalibrationOptions,
        *,
        bits: int,
        file: WeightFile,
    ) -> None:
        """Begin with the embeddings of all windows.

        Args:
            embedded: embeddings `[windows, window, E]` of the windows.
            bits: bits of the inputs of linear layers, 8 or 16.
            file: weights file of the segment that is observed.
        """
        self._config = checkpoint.config
        self._options = options
        self._bits = bits
        self._inputs = [
            {contract.X: windows.reshape(-1, windows.shape[-1])}
            for windows in np.split(embedded, range(_BATCH, len(embedded), _BATCH))
        ]
        self._attention = WindowAttention.of(checkpoint, options.window)
        self.file = file
        self.observations: dict[str, Observation] = {}

    def observe(self, segment: Segment) -> dict[str, Floats]:
        """Run all windows through a segment, whose weights are in `file`, and clear that file.

        Returns:
            Second moments `[K, K]` of the inputs of the segment's linear layers, by `input_name`;
            empty if each weight is rounded to the nearest.

        Raises:
            ExportError: an activation is infinite or not a number.
        """
        self.file.flush()
        path = self.file.folder / contract.part_file(contract.Part(segment.index), None)
        ir.save(author_segment(segment, self._config, chunk=None, grids=None), path)
        try:
            return self._run(path, segment.index)
        except FloatingPointError as error:
            raise ExportError(f"calibration: segment {segment.index} gives {error}") from None
        finally:
            self.file.clear()

    def grids(self, shadows: Mapping[str, ShadowEntry]) -> dict[str, Grid]:
        """Return the grids of all observed tensors; layers with a shadow have narrower ones."""
        plain = {name: self._grid(name, self._reach(name)) for name in self.observations}
        return plain | {input_name(n): Grid(s.scale, s.bits) for n, s in shadows.items()}

    def shadows(self) -> dict[str, ShadowEntry]:
        """Choose the down_proj layers where a shadow saves most; returns them by their names.

        Empty unless inputs have 8 bits. llm.npu ranks layers by max|x| / reach, which asks how far
        a single value is beyond the grid. The ranking here counts all that a grid loses, by
        clipping and by being coarse: with the same number of shadows, the KL divergence to float32
        falls by a third (SmolLM2-135M).
        """
        if self._bits != 8:
            return {}
        entries = {}
        for layer in range(self._config.layer_count):
            name = f"layers.{layer}.down"
            seen = self.observations[input_name(name)]
            far = reach(
                seen, bits=8, method="percentile", percentile=self._options.shadow_percentile
            )
            without = error_share(seen, self._reach(input_name(name)), bits=8)
            saved = without - error_share(seen, far, bits=8, clips=False)
            if saved > 0:
                entries[name] = ShadowEntry(*self._grid(input_name(name), far), saved)
        ranked = sorted(entries, key=lambda name: entries[name].importance, reverse=True)
        count = math.ceil(self._options.shadow_share * self._config.layer_count)
        return {name: entries[name] for name in ranked[:count]}

    def _grid(self, name: str, reach: float) -> Grid:
        bits = self._bits_of(name)
        return Grid(grid_scale(reach, bits=bits), bits)

    def _bits_of(self, name: str) -> int:
        return self._bits if is_input(name) else 16

    def _reach(self, name: str) -> float:
        seen, bits = self.observations[name], self._bits_of(name)
        return reach(
            seen,
            bits=bits,
            method=self._options.method if bits == 8 else "minmax",
            percentile=self._options.percentile,
            headroom=_HEADROOM if bits == 16 else 1.0,
        )

    def _run(self, path: Path, index: int) -> dict[str, Floats]:
        session = session_on_all_cores(path)
        names = [output.name for output in session.get_outputs()]
        seen = names[len(contract.part_outputs(self._config, contract.Part(index))) :]
        moments: dict[str, Floats] = {}
        for i, inputs in enumerate(self._inputs):
            outputs: dict[str, Floats] = dict(zip(names, session.run(None, inputs), strict=True))
            for name in seen:
                rows = self._after_host_tokens(outputs[name])
                self.observations.setdefault(name, Observation.of(rows.shape[-1])).add(rows)
                if is_input(name) and self._options.rounding == "gptq":
                    moments[name] = moments.get(name, np.float32(0)) + rows.T @ rows
            if index < self._config.layer_count:
                self._inputs[i] = {
                    contract.ATTENTION: self._attended(index, outputs[contract.QKV]),
                    contract.RESIDUAL: outputs[contract.RESIDUAL_OUT],
                }
        rows_seen = self._options.windows * (self._options.window - HOST_TOKENS)
        return {name: sums / np.float32(rows_seen) for name, sums in moments.items()}

    def _after_host_tokens(self, rows: Floats) -> Floats:
        windows = rows.reshape(-1, self._options.window, rows.shape[-1])
        return windows[:, HOST_TOKENS:].reshape(-1, rows.shape[-1])

    def _attended(self, layer: int, qkv: Floats) -> Floats:
        windows = qkv.reshape(-1, self._options.window, qkv.shape[-1])
        return np.concatenate([self._attention(layer, window) for window in windows])


# Chapters of the manual; none of those whose perplexities are published is among them.
_TOPICS = (
    "assignment",
    "class",
    "comparisons",
    "context-managers",
    "dynamic-features",
    "function",
    "import",
    "operator-summary",
    "slicings",
    "specialnames",
    "strings",
    "truth",
    "try",
    "with",
    "yield",
)


def default_text() -> str:
    """Return the calibration text: prose and code in turn, about 250,000 characters."""
    prose = [pydoc_data.topics.topics[name] for name in _TOPICS]
    code = inspect.getsource(inspect) + inspect.getsource(textwrap)
    size = -(-len(code) // len(prose))
    pieces = [code[i : i + size] for i in range(0, len(code), size)]
    return "\n\n".join(part for pair in zip(prose, pieces, strict=True) for part in pair)
