"""Choices of `auto`: a GPU with room for the model decodes, and an accelerator that was measured
faster computes prompts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from edgellm.backends.planner import Costs
from edgellm.backends.providers import CPU, PROVIDERS, status
from edgellm.backends.registry import AUTO, NATIVE, STEPS, TRITON
from edgellm.backends.selection import (
    needs_native,
    precisions_of,
    select,
    stops_between_layers,
    usual_host,
)
from edgellm.engine.costs import MARGIN, known_costs
from edgellm.engine.memory import estimate
from edgellm.errors import EdgeLLMError, ProviderError
from edgellm.graphs.contract import WEIGHTS_FILE
from edgellm.kernels.gpu import device
from edgellm.machine import usable_cores
from edgellm.options import EngineOptions
from edgellm.progress import ProgressCallback
from edgellm.store.bundle import Bundle, stretched
from edgellm.store.manifest import PACKED
from edgellm.store.precision_support import Precisions, why_not, why_untried
from edgellm.store.prepare import config_here, prepare


@dataclass(frozen=True)
class AutoChoice:
    """Back end that `--prefill auto` takes, and the reason."""

    prefill: str
    reason: str


def faster_provider(bundle: Bundle, options: EngineOptions) -> str | None:
    """Return the provider that `auto` takes in place of the native kernels; None: none."""
    if options.prefill != AUTO or needs_native(options):
        return None
    if select(options, bundle.config).prefill != NATIVE:
        return None
    choice = auto_choice(bundle, options)
    return None if choice.prefill == NATIVE else choice.prefill


def auto_choice(bundle: Bundle, options: EngineOptions) -> AutoChoice:
    """Choose what computes long prompts where `options.prefill` is `auto`.

    An accelerator takes the place of the native kernels only where an earlier start measured that
    it is faster by more than `MARGIN`, on this machine, with this bundle and these versions
    (`--prefill NAME`, or `edgellm plan N --prefill NAME`): nothing is exported or compiled to find
    out. Short prompts stay native all the same (see `planner.py`). The CPU provider is no
    accelerator: it has the same cores, and rounds more.
    """
    backend = select(options, bundle.config).prefill
    if backend != NATIVE:
        why = "as decode" if backend in STEPS else "the native kernels have no part in decode"
        return AutoChoice(backend, why)
    if all(why_not(f, bundle.config) for each in PROVIDERS.values() for f in each.precisions):
        return AutoChoice(
            NATIVE, f"no graphs of it can be exported: {why_not('f32', bundle.config)}"
        )
    known = dict(_known(bundle, options))
    ranked = sorted(known, key=lambda name: -known[name].advantage())
    if options.scheduling == "layered":
        ranked = [name for name in ranked if stops_between_layers(name)]
    if known and not ranked:
        return AutoChoice(NATIVE, "with `scheduling` layered no prompt is computed on cuda")
    if not ranked:
        return AutoChoice(NATIVE, "no accelerator was measured here with this model")
    for name in ranked:
        if known[name].advantage() > MARGIN and status(name).usable:
            return AutoChoice(name, _times(name, known[name]))
    best = ranked[0]
    if known[best].advantage() > MARGIN:
        return AutoChoice(NATIVE, f"{best} was faster and is not usable: {status(best).reason}")
    return AutoChoice(
        NATIVE,
        f"{_times(best, known[best])}; an accelerator must be {MARGIN:g} times as fast, the "
        "slowest of its times against the fastest native one",
    )


def _known(bundle: Bundle, options: EngineOptions) -> Iterator[tuple[str, Costs]]:
    """Iterate over the accelerators that an earlier start measured, with their times."""
    threads = options.threads or usable_cores()
    for name, provider in PROVIDERS.items():
        usable = (f for f in provider.precisions if why_not(f, bundle.config) is None)
        precision = next(usable, None)
        if name == CPU or precision is None or precision not in bundle.manifest.precisions:
            continue
        sizes = bundle.precision(precision).chunk_sizes
        try:
            measured = known_costs(bundle.path, name, precision, sizes, threads=threads)
        except ProviderError:
            continue
        if measured is not None:
            yield name, measured


def _times(name: str, measured: Costs) -> str:
    prompt = measured.prompt
    if prompt is not None:
        return (
            f"a prompt of {prompt.tokens} tokens took {min(prompt.provider):.3g} s on {name} and "
            f"{min(prompt.native):.3g} s on native"
        )
    return (
        f"a token takes {measured.chunk_token() * 1e6:.0f} us on {name} at the most and "
        f"{measured.native_token() * 1e6:.0f} us on native at the least"
    )


def prepare_for(
    name: str, options: EngineOptions, *, progress: ProgressCallback | None = None
) -> tuple[Bundle, EngineOptions, str | None]:
    """Prepare a model, and choose what decodes it where `options.decode` is `auto`.

    Returns:
        The bundle, the options to load it with, and a note that says why the CPU decodes although
        there is a GPU; None: it does not.

    Raises:
        EdgeLLMError: see `prepare` and `stretch`.
    """
    bundle = prepare(name, precisions=_precisions(name, options), progress=progress)
    bundle = stretched(bundle, options.rope_scale)
    reason = _why_not_on_gpu(bundle, options)
    if reason is None:
        return bundle, options, None
    host = usual_host()
    options = replace(options, decode=host)
    bundle = prepare(name, precisions=precisions_of(options), progress=progress)
    return stretched(bundle, options.rope_scale), options, f"decode {host}, not {TRITON}: {reason}"


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
        reason = why_not(TRITON, bundle.config) or why_untried(TRITON, bundle.config)
        return reason if gpu else None
    try:
        place = device.require()
    except ProviderError as error:
        return str(error).removeprefix(f"{TRITON}: ")
    needed = {
        "for weights": bundle.manifest.files[f"{PACKED}/{WEIGHTS_FILE}"].bytes,
        "for the KV cache": estimate(bundle, options, selection).kv_cache,
    }
    return device.too_large(place, needed)
