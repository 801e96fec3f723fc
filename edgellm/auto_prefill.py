"""What `--prefill auto` comes to on this machine: an accelerator, once it was measured faster."""

from __future__ import annotations

from edgellm import thread_pool
from edgellm.bundle import Bundle
from edgellm.costs import known_costs
from edgellm.errors import ProviderError
from edgellm.options import EngineOptions
from edgellm.providers import AUTO, NATIVE, PROVIDERS, status


def faster_provider(bundle: Bundle, options: EngineOptions) -> str | None:
    """The provider that computes a long prompt faster than the native kernels, for `auto`.

    Only costs that an earlier start measured count, on this machine, with this bundle and these
    versions (`--prefill NAME`, or `edgellm plan N --prefill NAME`): nothing is exported or compiled
    to find out. Short prompts stay native all the same (see `planner.py`).
    """
    if options.prefill != AUTO or options.prefill_backend != NATIVE:
        return None
    found = {name: _advantage(bundle, options, name) for name in PROVIDERS}
    best = max(found, key=lambda name: found[name])
    if found[best] <= 1 or not status(best).usable:
        return None
    return best


def _advantage(bundle: Bundle, options: EngineOptions, provider: str) -> float:
    """How many times faster a provider computes a token than the native step; 0 is unknown."""
    flavour = PROVIDERS[provider].flavours[0]
    if flavour not in bundle.manifest.flavours:
        return 0.0
    sizes = bundle.flavour(flavour).chunk_sizes
    threads = thread_pool.size(options.threads)
    try:
        costs = known_costs(bundle.path, provider, flavour, sizes, threads=threads)
    except ProviderError:
        return 0.0
    if costs is None:
        return 0.0
    cheapest = min(seconds / size for size, seconds in costs.chunks.items())
    return costs.token / cheapest if cheapest else 0.0
