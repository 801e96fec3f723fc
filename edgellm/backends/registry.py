"""Back ends by name: what `prefill` and `decode` can be, and the file that opens each.

A file is imported when its back end is chosen; native and Triton kernels run a token through all
layers in one call, the others run graphs of ONNX Runtime with attention between them.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, cast

if TYPE_CHECKING:
    from edgellm.backends.forward import Model
    from edgellm.backends.segments import ModelHead
    from edgellm.backends.selection import Selection
    from edgellm.backends.step_model import StepModel
    from edgellm.cache.kv_cache import KVCache
    from edgellm.kernels.rope import RopeTable
    from edgellm.options import EngineOptions
    from edgellm.progress import ProgressCallback
    from edgellm.store.bundle import Bundle

AUTO = "auto"
NATIVE = "native"
TRITON = "triton"
PORTABLE = "portable"
REFERENCE = "reference"
CHUNKED = "chunked"
# These take packed weights.
STEPS = (NATIVE, TRITON)
# All but the last compute tokens apart from prefill, where that is not theirs as well.
DECODE_BACKENDS = (AUTO, NATIVE, TRITON, PORTABLE, REFERENCE, CHUNKED)

_FILES = {
    NATIVE: "edgellm.backends.native",
    TRITON: "edgellm.backends.triton",
    "cuda": "edgellm.backends.cuda",
}
# Of all other execution providers, and of decode in graphs.
_GRAPHS = "edgellm.backends.chunked"


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What the back ends of one engine are opened with.

    Attributes:
        ropes: the tables that layers name by their index, for the whole context.
        threads: of the process.
        progress: told while graphs are compiled for an accelerator.
    """

    bundle: Bundle
    options: EngineOptions
    selection: Selection
    cache: KVCache
    ropes: Sequence[RopeTable]
    threads: int
    progress: ProgressCallback | None


@dataclass(frozen=True)
class OpenModels:
    """The models that prefill and decode run on.

    Attributes:
        steps: those of packed weights, by back end.
        graphs: the others, by precision.
    """

    steps: Mapping[str, StepModel]
    graphs: Mapping[str, Model]


class BackendFile(Protocol):
    """What the file of a back end has."""

    def require(self, name: str) -> None:
        """Refuse it where it cannot be used.

        Args:
            name: as in `prefill` and `decode`.

        Raises:
            OptionError: it is not there, or there is none of that name.
            ProviderError: an execution provider cannot be used here.
        """


class StepBackendFile(BackendFile, Protocol):
    """The file of a back end that takes packed weights."""

    def open_model(self, parts: Parts) -> tuple[StepModel, ModelHead]:
        """The model, and its LM head and embedding by themselves.

        Raises:
            UnsupportedModelError: its kernels do not take the model's sizes.
            MemoryEstimateError: it does not fit on the device.
        """


def backend_file(name: str) -> BackendFile:
    """The file of a back end, imported."""
    return cast(BackendFile, importlib.import_module(_FILES.get(name, _GRAPHS)))


def open_models(parts: Parts) -> OpenModels:
    """Open what was selected; a model that serves both prefill and decode is opened once."""
    selection, config = parts.selection, parts.bundle.config
    chosen = {selection.prefill, selection.host(config)}
    steps: dict[str, StepModel] = {}
    head: ModelHead | None = None
    for name in STEPS:
        if name in chosen:
            file = cast(StepBackendFile, backend_file(name))
            steps[name], head = file.open_model(parts)
    precisions = selection.graph_precisions(config)
    if not precisions:
        return OpenModels(steps, {})
    from edgellm.backends import chunked

    return OpenModels(steps, chunked.open_models(parts, precisions, head))
