"""Choice of `--decode auto` for a model: the GPU, where it has room for it."""

from __future__ import annotations

from dataclasses import replace

from edgellm.backends.registry import AUTO, TRITON
from edgellm.backends.selection import precisions_of, select, usual_host
from edgellm.engine.memory import estimate
from edgellm.errors import EdgeLLMError, ProviderError
from edgellm.graphs.contract import WEIGHTS_FILE
from edgellm.kernels.gpu import device
from edgellm.options import EngineOptions
from edgellm.progress import ProgressCallback
from edgellm.store.bundle import Bundle
from edgellm.store.manifest import PACKED
from edgellm.store.precision_support import Precisions, why_not
from edgellm.store.prepare import config_here, prepare


def prepare_for(
    name: str, options: EngineOptions, *, progress: ProgressCallback | None = None
) -> tuple[Bundle, EngineOptions, str | None]:
    """Prepare a model, and choose what decodes it where `options.decode` is `auto`.

    Returns:
        The bundle, the options to load it with, and a note that says why the CPU decodes although
        there is a GPU; None: it does not.

    Raises:
        EdgeLLMError: see `prepare`.
    """
    bundle = prepare(name, precisions=_precisions(name, options), progress=progress)
    reason = _why_not_on_gpu(bundle, options)
    if reason is None:
        return bundle, options, None
    host = usual_host()
    options = replace(options, decode=host)
    bundle = prepare(name, precisions=precisions_of(options), progress=progress)
    return bundle, options, f"decode {host}, not {TRITON}: {reason}"


def _precisions(name: str, options: EngineOptions) -> Precisions:
    """Return the precisions that the options ask for.

    Raises:
        UnsupportedModelError: a model on this machine has parts that the back end does not compute.
            That comes before advice to install it.
        OptionError, ProviderError: see `select`.
    """
    try:
        return precisions_of(options)
    except EdgeLLMError:
        config = config_here(name)
        if config is not None:
            select(options, config)
        raise


def _why_not_on_gpu(bundle: Bundle, options: EngineOptions) -> str | None:
    """Return why the GPU that `auto` would take cannot decode; None: it can, or is not taken."""
    selection = select(options, bundle.config)
    if options.decode != AUTO or options.prefill == TRITON:
        return None
    if selection.decode != TRITON:
        gpu = select(options).decode == TRITON
        return why_not(TRITON, bundle.config) if gpu else None
    try:
        place = device.require()
    except ProviderError as error:
        return str(error).removeprefix(f"{TRITON}: ")
    needed = {
        "for weights": bundle.manifest.files[f"{PACKED}/{WEIGHTS_FILE}"].bytes,
        "for the KV cache": estimate(bundle, options, selection).kv_cache,
    }
    return device.too_large(place, needed)
