"""Back ends by name: what `prefill` and `decode` can be, and the file that opens each.

A file is imported when its back end is chosen; native and Triton kernels run a token through all
layers in one call, the others run graphs of ONNX Runtime with attention between them.
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


def backend_file(name: str) -> BackendFile:
    """The file of a back end, imported."""
    return cast(BackendFile, importlib.import_module(_FILES.get(name, _GRAPHS)))
