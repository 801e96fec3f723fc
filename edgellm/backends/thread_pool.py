"""ONNX Runtime, with one thread pool and memory for intermediate results for all sessions.

The pool belongs to the process, not to a model: ONNX Runtime takes its size once, and afterwards
every session, also one that the embedding program opens itself, must be made with
`use_per_session_threads = False`. With a pool for each session, a decode chain of 31 small sessions
would take 3.7 ms (without spinning; 64 ms with); with the shared pool it takes 2.4 ms.

Sessions of the CPU provider share an arena as well: one for each of 31 sessions kept 160 MB after a
prompt in chunks of 128 (SmolLM2-135M), more than the model's packed weights.
"""

from __future__ import annotations

import os
import threading
from typing import Any

from edgellm.errors import OptionError
from edgellm.machine import usable_cores


def onnx_runtime() -> Any:
    """Import ONNX Runtime without its telemetry and return the module.

    Since 1.32 its builds for Linux report its use to Microsoft as well.
    """
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # read when the library is loaded
    import onnxruntime

    return onnxruntime


_pool_threads: int | None = None
_STARTING = threading.Lock()


def start(threads: int | None, *, spare: int = 0) -> int:
    """Make ONNX Runtime's thread pool, or check that the existing pool has the wanted size.

    Args:
        threads: threads of the pool and of other work together; None: those of the existing pool,
            else all usable cores.
        spare: number of these threads for other work, if that leaves the pool one.

    Returns:
        Number of threads of the pool and of other work together. An existing pool with all usable
        cores leaves no thread to spare.

    Raises:
        OptionError: the pool has another size already.
    """
    global _pool_threads
    wanted = max(1, (threads or usable_cores()) - spare)
    with _STARTING:
        if _pool_threads is None:
            ort = onnx_runtime()

            ort.set_global_thread_pool_sizes(wanted, 1)
            place = ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT
            usual = ort.OrtArenaCfg(0, -1, -1, -1)
            ort.create_and_register_allocator(ort.OrtMemoryInfo("Cpu", *place), usual)
            _pool_threads = wanted
        elif threads is not None and wanted != _pool_threads:
            raise OptionError(
                f"`threads` is {threads}, of which ONNX Runtime would take {wanted}, but a model "
                f"was loaded with {_pool_threads} in its pool; all models of a process share one "
                "pool"
            )
    if threads is not None:
        return threads
    return max(_pool_threads, min(_pool_threads + spare, usable_cores()))


def session_options() -> Any:
    """Return options for a session: it uses the pool, or one thread if there is no pool."""
    ort = onnx_runtime()

    options = ort.SessionOptions()
    # Since ONNX Runtime 1.32 int8 weights and 16-bit activations become a MatMulNBits, which would
    # round the activations to 8 bits (1 % of a segment's outputs); level 1 stands for float32.
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
    if _pool_threads is None:
        options.intra_op_num_threads = 1
    else:
        options.use_per_session_threads = False
    return options
