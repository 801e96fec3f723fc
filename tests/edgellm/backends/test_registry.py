"""Back ends by name: each in a file that is imported when it is chosen."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from edgellm import OptionError
from edgellm.backends.selection import select
from edgellm.kernels.native import library
from edgellm.llm import load
from edgellm.options import EngineOptions

LIBRARIES = ("torch", "triton", "onnxruntime")
FILES = ("device_model", "native", "triton")


def imported_by_loading(model: Path, **options: str) -> set[str]:
    """Libraries and files of back ends that a process of its own has imported afterwards."""
    code = (
        "import json, sys, edgellm\n"
        f"edgellm.load({str(model)!r}, **{options!r}).generate([5, 9, 14], max_tokens=2)\n"
        "print(json.dumps(sorted(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    modules = set(json.loads(run.stdout))
    files = {name for name in FILES if f"edgellm.backends.{name}" in modules}
    return files | (modules & set(LIBRARIES))


@pytest.mark.slow
@pytest.mark.skipif(library() is None, reason="the native kernels are not built")
def test_only_what_was_chosen_is_imported(tiny_model: Path) -> None:
    native = {"prefill": "native", "decode": "native"}
    graphs = {"prefill": "cpu", "decode": "portable"}
    for options in (native, graphs):
        load(str(tiny_model), **options)  # exports what is not there yet
    assert imported_by_loading(tiny_model, **native) == {"native"}
    assert imported_by_loading(tiny_model, **graphs) == {"onnxruntime"}


@pytest.mark.parametrize("prefill", ["portable", "reference", "tpu", ""])
def test_what_cannot_prefill(prefill: str) -> None:
    with pytest.raises(OptionError, match=r"`prefill` is .*allowed are auto, native, triton, cpu"):
        select(EngineOptions(prefill=prefill))
