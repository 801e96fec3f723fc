"""Adapters of a loaded model (LoRA, Hu et al., arXiv:2106.09685), by name."""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from edgellm.backends.batch import Backend, StepBackend
from edgellm.backends.registry import AUTO, NATIVE, STEPS
from edgellm.checks import check_number, check_path, check_text
from edgellm.errors import ModelFormatError, OptionError, UnsupportedModelError
from edgellm.graphs.config import ModelConfig
from edgellm.graphs.lora import changes_of, open_adapter, pack_changes
from edgellm.kernels.lora import AdapterWeights, LowRank, packed_bytes
from edgellm.options import EngineOptions
from edgellm.store.bundle import Bundle
from edgellm.store.key_basis import KeyBasis, of_rows, open_key_basis

# Folder or file of an adapter, perhaps with a factor of its changes.
AdapterSource = str | Path | tuple[str | Path, float]
# Position of a token that an adapter never comes to.
NEVER = sys.maxsize


@dataclass(frozen=True, eq=False)
class LoadedAdapter:
    """Adapter in memory. Answers that use it keep it, also after it was unloaded.

    Attributes:
        scale: factor of all its changes, over that of its file.
        invocation: see `StoredAdapter`.
    """

    name: str
    path: Path
    scale: float
    weights: AdapterWeights
    invocation: tuple[int, ...] = ()

    @property
    def digest(self) -> str:
        """Digest of all its changes: adapters with the same one compute the same."""
        return " ".join([self.weights.digest, *map(str, self.invocation)])

    def start(self, tokens: Sequence[int]) -> int:
        """Return the position from which on it changes a prompt; `NEVER` without invocation."""
        called, size = list(self.invocation), len(self.invocation)
        if not called:
            return 0
        ends = range(len(tokens) - size, -1, -1)
        return next((i for i in ends if list(tokens[i : i + size]) == called), NEVER)


class Adapters:
    """Adapters that answers of a model may name, from any thread."""

    def __init__(self, bundle: Bundle, *, prefill: Backend, decoder: Backend) -> None:
        self._bundle = bundle
        self._prefill, self._decoder = prefill, decoder
        self._loaded: Mapping[str, LoadedAdapter] = {}
        self._lock = threading.Lock()

    @property
    def loaded(self) -> Mapping[str, LoadedAdapter]:
        """All adapters, in the order in which they were loaded."""
        return self._loaded

    def get(self, name: str | None) -> LoadedAdapter | None:
        """Return the adapter of a name; None for the model as it is.

        Raises:
            OptionError: no adapter has this name.
        """
        if name is None:
            return None
        if name not in self._loaded:
            known = ", ".join(self._loaded) or "none"
            raise OptionError(f"`adapter` is {name[:100]!r}; loaded are {known} (`load_adapter`)")
        return self._loaded[name]

    def load(self, name: str, path: str | Path, *, scale: float = 1.0) -> LoadedAdapter:
        """Read an adapter, see `LLM.load_adapter`."""
        check_text("name", name)
        check_number("scale", scale, -1000, 1000)
        where = check_path("path", path)
        if not name.strip():
            raise OptionError("the name of an adapter is empty")
        kernels = self._kernels(name)
        self._require_free(name)
        weights, invocation = _read(self._bundle, where, scale=scale)
        adapter = LoadedAdapter(name, where, float(scale), weights, invocation)
        with self._lock:
            self._require_free(name)
            kernels.load_adapter(weights)
            self._loaded = {**self._loaded, name: adapter}
        return adapter

    def unload(self, name: str) -> None:
        """Forget an adapter, see `LLM.unload_adapter`."""
        with self._lock:
            self.get(name)
            self._loaded = {key: each for key, each in self._loaded.items() if key != name}

    def _require_free(self, name: str) -> None:
        if name in self._loaded:
            raise OptionError(
                f"an adapter {name!r} is loaded already, from {self._loaded[name].path}; unload it "
                "first, or take another name"
            )

    def _kernels(self, name: str) -> StepBackend:
        """Return the kernels that take adapters.

        Raises:
            UnsupportedModelError: prompts or answers are computed elsewhere.
        """
        prefill, decoder = self._prefill, self._decoder
        if prefill is decoder and isinstance(decoder, StepBackend):
            return decoder
        raise UnsupportedModelError(
            f"the adapter {name!r} needs the native kernels or Triton's for prompts and answers, "
            f"and this model computes prompts on {prefill.name} and answers on {decoder.name}; "
            "load it with `prefill` and `decode` native, or both triton, or merge the adapter "
            "with `edgellm export --lora`"
        )


def adapter_bytes(adapters: Mapping[str, AdapterSource] | None) -> int:
    """Return the bytes in memory of adapters that are to be loaded; matrices are not read for it.

    Raises:
        ModelFormatError, UnsupportedModelError: see `open_adapter`.
    """
    sources = (adapters or {}).values()
    paths = (source[0] if isinstance(source, tuple) else source for source in sources)
    changes = (each for path in paths for each in open_adapter(Path(path)).changes.values())
    return sum(packed_bytes(change.a.shape, change.b.shape) for change in changes)


def for_adapters(options: EngineOptions) -> EngineOptions:
    """Return options in which `auto` means kernels that take adapters, those of C++ if any do."""
    named = [name for name in (options.decode, options.prefill) if name in STEPS]
    kernels = named[0] if named else NATIVE
    decode = kernels if options.decode == AUTO else options.decode
    prefill = kernels if options.prefill == AUTO else options.prefill
    return replace(options, decode=decode, prefill=prefill)


def _read(bundle: Bundle, path: Path, *, scale: float) -> tuple[AdapterWeights, tuple[int, ...]]:
    """Read an adapter, packed for the weights of a bundle, and its invocation.

    Raises:
        ModelFormatError, UnsupportedModelError: see `open_adapter` and `changes_of`.
    """
    config, stored = bundle.config, open_adapter(path)
    if max(stored.invocation, default=0) >= config.vocab_size:
        raise ModelFormatError(
            f"{path}: begins at the token {max(stored.invocation)}; the model has "
            f"{config.vocab_size}"
        )
    basis = open_key_basis(bundle.path, bundle.manifest.keys, config)
    layers = changes_of(stored, config)
    packed = pack_changes(
        [
            {
                name: _in_basis(change, basis, config, index, name, scale=scale)
                for name, change in changes.items()
            }
            for index, changes in enumerate(layers)
        ]
    )
    return packed, stored.invocation


def _in_basis(
    change: LowRank, basis: KeyBasis, config: ModelConfig, layer: int, name: str, *, scale: float
) -> LowRank:
    """Return a change in the key basis of a bundle, as `EqualizedCheckpoint` has its weights."""
    b = np.float32(scale) * change.b
    attends = name in ("q", "k") and config.layers[layer].attention.latent is None
    if attends and config.layers[layer].attention.qk_norm == "none":
        attention = config.layers[layer].attention
        heads = attention.heads if name == "q" else attention.kv_heads
        exponents = of_rows(basis.exponents[layer], attention, heads=heads).astype(np.int32)
        b = np.ldexp(b, exponents[:, None] if name == "q" else -exponents[:, None])
    return replace(change, b=b)
