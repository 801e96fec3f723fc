"""ONNX Runtime's thread pool, one for all sessions of the process.

The pool belongs to the process, not to a model: ONNX Runtime takes its size once, and afterwards
every session, also one that the embedding program opens itself, must be made with
`use_per_session_threads = False`. A pool a session instead would run a decode chain of 31 small
sessions in 3.7 ms (without spinning; 64 ms with) where the shared one takes 2.4 ms.
"""

from __future__ import annotations

import threading
from typing import Any

from edgellm.backends.onnx_runtime import onnx_runtime
from edgellm.errors import OptionError
from edgellm.machine import usable_cores

_pool_threads: int | None = None
_STARTING = threading.Lock()


def start(threads: int | None, *, spare: int = 0) -> int:
    """Make the pool, or check that the one that is there has the wanted size.

    Args:
        threads: of the pool and others together; None takes the pool that is there, else all
            usable cores.
        spare: threads of these that are for others, if that leaves one.

    Returns:
        How many threads the pool and the others are together. A pool that has all usable cores
        already leaves nothing to spare.

    Raises:
        OptionError: the pool has another size already.
    """
    global _pool_threads
    wanted = max(1, (threads or usable_cores()) - spare)
    with _STARTING:
        if _pool_threads is None:
            ort = onnx_runtime()

            ort.set_global_thread_pool_sizes(wanted, 1)
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


def size(threads: int | None) -> int:
    """Threads for work that does not go through the pool; None takes all usable cores."""
    return threads or usable_cores()


def session_options() -> Any:
    """Options for a session in this process, with or without the pool."""
    ort = onnx_runtime()

    options = ort.SessionOptions()
    # Since ONNX Runtime 1.32 int8 weights and 16-bit activations become a MatMulNBits, which would
    # round those to 8 bits (1 % of what a segment gives); 1 stands for float32.
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
    if _pool_threads is None:
        options.intra_op_num_threads = 1
    else:
        options.use_per_session_threads = False
    return options
