"""ONNX Runtime, imported when it is first needed, without its telemetry."""

from __future__ import annotations

import os
from typing import Any


def onnx_runtime() -> Any:
    """Import ONNX Runtime without its telemetry and return the module.

    Since 1.32 its builds for Linux report its use to Microsoft as well.
    """
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # read when the library is loaded
    import onnxruntime

    return onnxruntime
