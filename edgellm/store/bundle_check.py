"""Comparison of a bundle's manifest with the files and arrays that the model's config needs.

The kernels read weights at addresses that follow from the config, and a manifest's sha256 sums
protect it from accidents only. So every array is compared before any is mapped: its type, its
shape, and that it lies inside its file.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from edgellm.errors import BundleError, EdgeLLMError, OptionError
from edgellm.generation_options import GenerationOptions
from edgellm.graphs import contract
from edgellm.graphs.config import ModelConfig
from edgellm.graphs.contract import StoredArray
from edgellm.graphs.mtp import mtp_tensors
from edgellm.graphs.tensors import TensorSpec, model_tensors
from edgellm.kernels.linear import packed_shape
from edgellm.kernels.quantized import GROUP, KINDS
from edgellm.store import key_basis
from edgellm.store.manifest import (
    GENERATION,
    MTP,
    PACKED,
    TOKENIZER,
    ImportSummary,
    Manifest,
    MtpEntry,
    PrecisionEntry,
)
from edgellm.store.reference import PROMPT, ROTATION, ROWS, array_name, error_name

# Array offsets in a `WeightFile` are multiples of this; the kernels load whole cache lines.
_ALIGNMENT = 64
MAX_CHUNK = 4096
# Requirement for one array: its dtype, and the shapes that are allowed.
_Need = tuple[str, tuple[tuple[int, ...], ...]]


def check_manifest(manifest: Manifest, *, origin: str) -> None:
    """Refuse a manifest that does not fit its own config.

    Raises:
        BundleError: a misfit; the message names the array, its type and shape, and those needed.
    """
    checker = _Checker(manifest, origin)
    checker.require_file(TOKENIZER)
    checker.check_generation()
    for name, entry in manifest.precisions.items():
        checker.check_host_tokens(name, entry)
        if name == PACKED:
            specs = model_tensors(manifest.config)
            others = {n: spec for n, spec in specs.items() if not key_basis.is_head_norm(n)}
            checker.check_packed_weights(PACKED, entry, others)
        else:
            checker.check_graphs(name, entry)
        checker.check_report(name, entry.import_report)
    if manifest.mtp is not None:
        checker.check_packed_weights(MTP, manifest.mtp, mtp_tensors(manifest.config))
    for kind, head in manifest.heads.items():
        needs = _head_needs(manifest.config, kind)
        checker.compare(f"head-{kind}: array", head.embedding, needs)
        checker.require_file(f"head-{kind}/{contract.HEAD_FILE}")
        checker.check_report(f"head-{kind}", head.import_report)
    chunks = any(entry.any_size for entry in manifest.precisions.values())
    if chunks and not manifest.config.has_experts:
        checker.check_reference()
    checker.compare("keys: array", manifest.keys, _key_needs(manifest.config))


class _Checker:
    """Checks of one manifest against its config; the methods raise `BundleError`."""

    def __init__(self, manifest: Manifest, origin: str) -> None:
        self._manifest = manifest
        self._config = manifest.config
        self._origin = origin

    def require_file(self, name: str) -> None:
        if name not in self._manifest.files:
            raise self._error(f"file {name} is needed and not listed in the manifest")

    def compare(
        self, what: str, arrays: Mapping[str, StoredArray], needs: Mapping[str, _Need]
    ) -> None:
        """Refuse `arrays` unless each needed array is listed and fits, and no other is listed."""
        for name, (dtype, allowed) in needs.items():
            if name not in arrays:
                raise self._error(f"{what} {name} is missing")
            array = arrays[name]
            if array.dtype != dtype or array.shape not in allowed:
                needed = " or ".join(str(list(shape)) for shape in allowed)
                raise self._error(
                    f"{what} {name} is {array.dtype} {list(array.shape)}; the config needs "
                    f"{dtype} {needed}"
                )
            self._check_place(f"{what} {name}", array)
        unknown = sorted(set(arrays) - set(needs))
        if unknown:
            raise self._error(f"{what} {unknown[0]} belongs to no part of this config")

    def check_packed_weights(
        self, folder: str, entry: PrecisionEntry | MtpEntry, specs: Mapping[str, TensorSpec]
    ) -> None:
        """Refuse arrays of the native kernels, or quantized kinds of them, that do not fit."""
        matrices = {name: spec.shape for name, spec in specs.items() if spec.quantized}
        weights = set(matrices)
        if set(entry.kinds) != weights:
            name = min(set(entry.kinds) ^ weights)
            missing = "missing" if name in weights else "of no weight of this config"
            raise self._error(f"{folder}: the kind of {name} is {missing}")
        for name, kind in entry.kinds.items():
            if kind not in KINDS:
                raise self._error(
                    f"{folder}: {name} is of the unknown kind {kind!r}; known are "
                    + ", ".join(KINDS)
                )
            if matrices[name][1] % KINDS[kind].inputs_multiple:
                raise self._error(
                    f"{folder}: {name} has {matrices[name][1]} inputs; {kind} needs a multiple of "
                    f"{KINDS[kind].inputs_multiple}"
                )
        self.compare(f"{folder}: array", entry.arrays, _panel_needs(specs, entry.kinds))

    def check_generation(self) -> None:
        for name in self._manifest.generation:
            if name not in GENERATION:
                raise self._error(
                    f"generation has the unknown key {name!r}; known are {', '.join(GENERATION)}"
                )
        try:
            GenerationOptions(**self._manifest.generation)
        except OptionError as error:
            raise self._error(f"generation: {error}") from None

    def check_host_tokens(self, name: str, entry: PrecisionEntry) -> None:
        if not 0 <= entry.host_tokens <= contract.HOST_TOKENS:
            raise self._error(
                f"{name}: host_tokens is {entry.host_tokens}; 0 to {contract.HOST_TOKENS} is "
                "allowed"
            )

    def check_report(self, name: str, report: Mapping[str, Any]) -> None:
        try:
            ImportSummary.of(report)
        except EdgeLLMError as error:
            raise self._error(f"{name}: {error}") from None

    def check_graphs(self, name: str, entry: PrecisionEntry) -> None:
        """Refuse a precision for ONNX Runtime whose graph files, head or arrays do not fit."""
        sizes = entry.chunk_sizes
        if not sizes or not all(1 <= size <= MAX_CHUNK for size in sizes):
            raise self._error(
                f"{name}: chunk sizes are {list(sizes)}; needed are numbers from 1 to {MAX_CHUNK}"
            )
        if entry.head not in self._manifest.heads:
            raise self._error(f"{name}: its head {entry.head} is not in the bundle")
        measured = [*map(error_name, range(self._config.layer_count + 1)), PROMPT]
        compared = entry.any_size and not self._config.has_experts
        if compared and not entry.errors.keys() >= set(measured):
            raise self._error(f"{name}: errors of {', '.join(measured)} are needed")
        self._check_shadows(name, entry)
        self.compare(f"{name}: array", entry.arrays, _graph_needs(self._config, entry))
        for part in contract.parts(self._config, entry.cut_segments):
            for size in (*sizes, *([None] if entry.any_size else [])):
                self.require_file(f"{name}/{contract.part_file(part, size)}")

    def check_reference(self) -> None:
        """Refuse arrays of the float32 reference text, with which chunk graphs are compared."""
        arrays = self._manifest.reference
        tokens = arrays.get("tokens")
        if tokens is None or len(tokens.shape) != 1 or tokens.shape[0] < 1:
            raise self._error("reference: array tokens is missing or not a list of tokens")
        self.compare("reference: array", arrays, _reference_needs(self._config, tokens.shape[0]))

    def _check_shadows(self, name: str, entry: PrecisionEntry) -> None:
        layers = {f"layers.{layer}.down" for layer in range(self._config.layer_count)}
        for layer, shadow in entry.shadows.items():
            if layer not in layers:
                raise self._error(f"{name}: shadow {layer} is of no layer of this config")
            if shadow.bits not in (8, 16) or not shadow.scale > 0:
                raise self._error(
                    f"{name}: shadow {layer} has {shadow.bits} bits and the scale {shadow.scale}; "
                    "needed are 8 or 16 bits and a positive scale"
                )

    def _check_place(self, what: str, array: StoredArray) -> None:
        """Refuse an array that is not aligned or does not lie inside its weights file."""
        self.require_file(array.file)
        size = self._manifest.files[array.file].bytes
        end = array.offset + math.prod(array.shape) * np.dtype(array.dtype).itemsize
        if array.offset < 0 or array.offset % _ALIGNMENT or end > size:
            raise self._error(
                f"{what} lies at bytes {array.offset} to {end} of {array.file}; needed is a "
                f"multiple of {_ALIGNMENT} and an end within its {size} bytes"
            )

    def _error(self, message: str) -> BundleError:
        return BundleError(
            f"{self._origin}: {message}; the bundle was made by another version of edgellm or of "
            "another model, or is damaged: export the model again"
        )


def _key_needs(config: ModelConfig) -> dict[str, _Need]:
    return {name: (dtype, (shape,)) for name, (dtype, shape) in key_basis.shapes(config).items()}


def _panel_needs(specs: Mapping[str, TensorSpec], kinds: Mapping[str, str]) -> dict[str, _Need]:
    needs: dict[str, _Need] = {}
    for name, spec in specs.items():
        if name in kinds:
            outputs, inputs = spec.shape
            needs[name] = "uint8", (packed_shape(outputs, inputs, KINDS[kinds[name]]),)
        else:
            needs[name] = _floats(*spec.shape)
    return needs


def _head_needs(config: ModelConfig, kind: str) -> dict[str, _Need]:
    rows, width = config.vocab_size, config.hidden_size
    if kind == "f32":
        return {"values": _floats(rows, width)}
    groups = [size for size in (GROUP, GROUP // 2) if width % size == 0]
    return {
        "codes": ("uint8", tuple((rows, width // size, size) for size in groups)),
        "scale": ("float32", tuple((rows, width // size) for size in groups)),
    }


def _graph_needs(config: ModelConfig, entry: PrecisionEntry) -> dict[str, _Need]:
    needs: dict[str, _Need] = {}
    for name in entry.shadows:
        layer = config.layers[int(name.split(".")[1])]
        needs[name] = "int8", ((layer.mlp.intermediate, config.hidden_size),)
        needs[f"{name}.scale"] = _floats(config.hidden_size)
    if ROTATION in entry.arrays:
        needs[ROTATION] = _floats(config.hidden_size, config.hidden_size)
    return needs


def _reference_needs(config: ModelConfig, tokens: int) -> dict[str, _Need]:
    rows = min(tokens, contract.HOST_TOKENS + ROWS)
    return {
        "tokens": ("int64", ((tokens,),)),
        "embedded": _floats(tokens, config.hidden_size),
        "hidden": _floats(tokens, config.hidden_size),
        "logits": _floats(1, config.vocab_size),
        **{name: _floats(rows, width) for name, width in _segment_rows(config)},
    }


def _segment_rows(config: ModelConfig) -> Iterator[tuple[str, int]]:
    """Yield names and widths of segment inputs and outputs; what another gives is stored once."""
    for part in contract.parts(config):
        rows = contract.part_inputs(config, part) | contract.part_outputs(config, part)
        given = (contract.RESIDUAL, contract.embedded_name(part.index - 1))
        for name, width in rows.items():
            if name not in given:
                yield array_name(part.index, name), width


def _floats(*shape: int) -> _Need:
    return "float32", (shape,)
