"""Back ends by their names in `prefill` and `decode`, and the file that opens each.

A file is imported when its back end is chosen. Native and Triton kernels run a token through all
layers in one call; the other back ends run graphs of ONNX Runtime with attention between them.
"""

from __future__ import annotations

import importlib
from typing import Protocol, cast

AUTO = "auto"
NATIVE = "native"
TRITON = "triton"
PORTABLE = "portable"
REFERENCE = "reference"
CHUNKED = "chunked"
# Back ends that take packed weights.
STEPS = (NATIVE, TRITON)
# All but `chunked` decode apart from prefill, unless the same back end runs prefill as well.
DECODE_BACKENDS = (AUTO, NATIVE, TRITON, PORTABLE, REFERENCE, CHUNKED)

_FILES = {
    NATIVE: "edgellm.backends.native",
    TRITON: "edgellm.backends.triton",
    "cuda": "edgellm.backends.cuda",
}
# The file of all other execution providers, and of decode in graphs.
_GRAPHS = "edgellm.backends.opening"


class BackendFile(Protocol):
    """Functions in the file of a back end."""

    def require(self, name: str) -> None:
        """Refuse a back end where it cannot be used.

        Args:
            name: its name in `prefill` and `decode`.

        Raises:
            OptionError: the back end is not there, or there is no back end of this name.
            ProviderError: an execution provider cannot be used here.
        """


def backend_file(name: str) -> BackendFile:
    """Import the file of a back end and return it."""
    return cast(BackendFile, importlib.import_module(_FILES.get(name, _GRAPHS)))
