from __future__ import annotations

from pathlib import Path

import pytest
from matrix import ALLOWED, BACKENDS, MEDIAN, errors, usable
from tiny_families import FAMILIES

# Triton's interpreter takes 15 s for each; its tests of the step have the other parts.
TRITON = ("gemma3_text", "qwen3_moe_mixed")
WITH_EXPERTS = ("qwen3_moe", "qwen3_moe_mixed", "olmoe", "mixtral", "granitemoe")


@pytest.mark.parametrize("name", FAMILIES)
def test_packed_weights_compute_what_transformers_computes(
    tmp_path: Path, edgellm_home: Path, name: str
) -> None:
    """The graphs of ONNX Runtime are judged part by part in tests/graphs/test_segment.py."""
    if name in WITH_EXPERTS and not usable("C++"):
        pytest.skip("experts need the C++ kernels")
    backend = "C++" if usable("C++") else "f32"
    error = errors(name, tmp_path, [backend])[backend]
    assert isinstance(error, float)
    assert error < (MEDIAN if name in WITH_EXPERTS else ALLOWED[backend])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", FAMILIES)
def test_every_back_end_computes_what_transformers_computes(
    tmp_path: Path, edgellm_home: Path, name: str
) -> None:
    backends = [b for b in BACKENDS if b != "Triton" or name in TRITON]
    for backend, error in errors(name, tmp_path, backends).items():
        if name in WITH_EXPERTS and backend == "int4":
            assert isinstance(error, str)
            assert "has experts" in error
        elif isinstance(error, str):
            assert backend == "w8a8"
            assert "does not bear" in error
        else:
            assert error < (MEDIAN if name in WITH_EXPERTS else ALLOWED[backend]), backend
