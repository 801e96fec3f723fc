"""Opening of the selected models, each in the file of its back end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, cast

from edgellm.backends.forward import Host, Model
from edgellm.backends.parts import Parts
from edgellm.backends.registry import NATIVE, STEPS, BackendFile, backend_file
from edgellm.backends.segments import ModelHead
from edgellm.backends.step_backend import StepModel
from edgellm.store.precision_support import needs_host


@dataclass(frozen=True)
class OpenModels:
    """The models that prefill and decode run on.

    Attributes:
        steps: models of packed weights, by the name of their back end.
        graphs: models of ONNX Runtime graphs, by precision.
    """

    steps: Mapping[str, StepModel]
    graphs: Mapping[str, Model]


class StepBackendFile(BackendFile, Protocol):
    """Functions in the file of a back end that takes packed weights."""

    def open_model(self, parts: Parts) -> tuple[StepModel, ModelHead]:
        """Open the model; return it, and its LM head and embedding by themselves.

        Raises:
            UnsupportedModelError: the kernels do not take the model's sizes.
            MemoryEstimateError: the model does not fit on the device.
        """


def open_models(parts: Parts) -> OpenModels:
    """Open the selected models; a model that serves both prefill and decode is opened once."""
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

    host = cast(Host, steps[NATIVE]) if needs_host(config) else None
    return OpenModels(steps, chunked.open_models(parts, precisions, head, host))
