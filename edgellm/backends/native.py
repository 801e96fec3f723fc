"""The native back end: packed weights in C++ kernels, through all layers in one call.

The back end needs the extension that is compiled when edgellm is installed, and a model whose heads
fit into the registers and panels of the kernels.
"""

from __future__ import annotations

from edgellm.backends.native_model import NativeModel, PackedHead
from edgellm.backends.packed_weights import open_packed_weights
from edgellm.backends.parts import Parts
from edgellm.errors import OptionError, UnsupportedModelError
from edgellm.graphs.config import ModelConfig
from edgellm.kernels.linear import PANEL
from edgellm.kernels.native import MAX_HEAD_DIM, library


def require(_: str) -> None:
    """See `BackendFile.require`."""
    if library() is None:
        raise OptionError(
            "`decode` or `prefill` is 'native': the kernels were not built when edgellm was "
            "installed; install a C++ compiler and reinstall, or take `decode` portable and "
            "`prefill` cpu"
        )


def open_model(parts: Parts) -> tuple[NativeModel, PackedHead]:
    """See `StepBackendFile.open_model`."""
    compiled = library()
    assert compiled is not None
    _check_sizes(parts.bundle.config)
    weights = open_packed_weights(parts.bundle)
    pools = [group.blocks for group in parts.cache.groups]
    selection = parts.selection
    # with two devices, where the CPU plays the accelerator, the host has one core
    two = selection.scheduling(parts.options.scheduling) == "two_devices"
    threads = 1 if two and selection.shares_cpu else parts.threads
    model = NativeModel(compiled, weights, parts.ropes, pools, threads=threads)
    return model, model.head


def _check_sizes(config: ModelConfig) -> None:
    if config.head_dim > MAX_HEAD_DIM:
        raise UnsupportedModelError(
            f"head_dim is {config.head_dim}; the native kernels take at most {MAX_HEAD_DIM}. Take "
            "`decode` portable and `prefill` cpu"
        )
    if config.kv_size % PANEL:
        raise UnsupportedModelError(
            f"kv_heads * head_dim is {config.kv_size}; the native kernels take multiples of "
            f"{PANEL}. Take `decode` portable and `prefill` cpu"
        )
