from __future__ import annotations

from pathlib import Path

import pytest
from breadth import one_in
from hf_formats import FORMATS
from hf_golden import ROUNDED
from hf_matrix import PAGE, Result, judge, row

# Formats whose codes, or groups of inputs, no packed kind holds.
REPACKED = {
    "GPTQ, act-order",
    "compressed-tensors FP8",
    "compressed-tensors NVFP4",
    "FP8 in blocks",
    "FP8, one scale",
    "bitsandbytes nf4",
    "bitsandbytes nf4, nested",
}


@pytest.mark.parametrize(
    "backends", [("C++",), pytest.param(("f32", "C++"), marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("name", one_in(3, FORMATS))
def test_every_format_stands_for_what_its_judges_say(
    tmp_path: Path, edgellm_home: Path, name: str, backends: tuple[str, ...]
) -> None:
    result = judge(name, tmp_path, backends)
    assert result.read < 1e-7
    assert (result.packed is None) == (name in REPACKED)
    # offsets, and scales that the file has in float32, are rounded to halves
    assert result.packed is None or result.packed < 2**-10
    golden = FORMATS[name].golden
    assert golden is None or result.golden <= max(1e-7, ROUNDED.get(golden, 0))
    assert result.logits.get("f32", 0) < 1e-5
    assert result.logits.get("C++", 0) < 0.05


def test_the_page_has_every_format() -> None:
    listed = {line.split(" | ")[0] for line in PAGE.read_text(encoding="utf-8").splitlines()}
    assert {f"| {name}" for name in FORMATS} <= listed


def test_a_row_says_what_is_not_exact() -> None:
    result = Result("int8_symmetric", 0, None, 0.0025, {"f32": 4e-7, "C++": 0.01})
    cells = row("compressed-tensors NVFP4", result)
    assert cells[2:5] == ["exact", "rounded", "2.5e-03 (compressed-tensors 0.20.0)"]
