"""What a checkpoint's file says of itself."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from edgellm.export.source_checkpoint import file_type_of, weight_files
from edgellm.graphs.checkpoint import open_checkpoint


@pytest.mark.parametrize(
    ("number", "name"), [(0, "F32"), (2, "Q4_0"), (15, "Q4_K_M"), (9999, ""), ("x", ""), (None, "")]
)
def test_file_types(number: object, name: str) -> None:
    checkpoint: Any = SimpleNamespace(metadata={"general.file_type": number})
    assert file_type_of(checkpoint) == name


def test_file_types_of_files(smollm2_gguf: Path, tiny_model: Path) -> None:
    assert file_type_of(open_checkpoint(smollm2_gguf)) == "Q4_1"
    assert file_type_of(open_checkpoint(tiny_model)) == ""


def test_weights_that_are_there_twice_count_once(tmp_path: Path, tiny_model: Path) -> None:
    shutil.copytree(tiny_model, tmp_path / "model")
    (tmp_path / "model" / "consolidated.safetensors").write_bytes(b"the same in another format")
    files = weight_files(open_checkpoint(tmp_path / "model"))
    assert [file.name for file in files] == ["model.safetensors"]
