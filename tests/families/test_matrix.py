from __future__ import annotations

from pathlib import Path

import pytest
from matrix import ALLOWED, BACKENDS, MEDIAN, errors, is_refused, shown, usable
from tiny_families import FAMILIES

from edgellm.graphs.checkpoint import open_checkpoint
from edgellm.store.precision_support import needs_host

# Triton's interpreter takes 15 s for each; its tests of the step have the other parts.
TRITON = (
    *("gemma3_text", "qwen3_moe_mixed", "gpt_oss", "lfm2_narrow", "qwen3_5_text_even"),
    *("falcon_h1", "glm4_moe_lite", "gemma4_text", "gemma4_experts"),
)
PLAIN_EXPERTS = ("qwen3_moe", "qwen3_moe_mixed", "olmoe", "mixtral", "granitemoe")
SPECIAL_EXPERTS = (
    *("qwen2_moe", "glm4_moe", "gpt_oss", "lfm2_moe"),
    *("granitemoehybrid_experts", "qwen3_5_moe_text", "qwen3_next"),
    "gemma4_experts",
    *("deepseek_v2", "deepseek_v2_groups", "deepseek_v3", "glm4_moe_lite"),
)
DELTA_NETS = ("qwen3_5_text", "qwen3_5_text_even")
MAMBAS = (
    *("granitemoehybrid_mamba", "granitemoehybrid_narrow"),
    *("falcon_h1", "falcon_h1_normed"),
)
WITH_STATES = ("lfm2", "lfm2_narrow", *MAMBAS, *DELTA_NETS)
SHARING = ("gemma3n_text", "gemma4_text", "gemma4_unified")
NATIVE_ALONE = (*SPECIAL_EXPERTS, *WITH_STATES, *SHARING)
# Families of which the median token is judged.
UNSTEADY = (*PLAIN_EXPERTS, *SPECIAL_EXPERTS, *DELTA_NETS, "falcon_h1_normed")


@pytest.mark.parametrize("name", FAMILIES)
def test_packed_weights_compute_what_transformers_computes(
    tmp_path: Path, edgellm_home: Path, name: str
) -> None:
    """The graphs of ONNX Runtime are judged part by part in tests/graphs/test_segment.py.

    docs/models.md says "no" where a back end lacks a part, and nowhere else.
    """
    if name in NATIVE_ALONE and not usable("C++"):
        pytest.skip("some of its parts need the C++ kernels")
    backend = "C++" if usable("C++") else "f32"
    error = errors(name, tmp_path, [backend])[backend]
    assert isinstance(error, float)
    assert error < (MEDIAN if name in UNSTEADY else ALLOWED[backend])
    config = open_checkpoint(tmp_path).config
    refused = {column for column in BACKENDS if is_refused(column, config)}
    assert {column for column, cell in shown(name).items() if cell == "no"} == refused


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", FAMILIES)
def test_every_other_back_end_computes_what_transformers_computes(
    tmp_path: Path, edgellm_home: Path, name: str
) -> None:
    backends = [b for b in BACKENDS if b != "C++" and (b != "Triton" or name in TRITON)]
    found = errors(name, tmp_path, backends)
    config = open_checkpoint(tmp_path).config
    for backend, error in found.items():
        if is_refused(backend, config):
            assert isinstance(error, str)
            assert "does not compute" in error
        else:
            assert isinstance(error, float), error
            # where C++ kernels decode, they round
            rounds = "C++" if needs_host(config) else backend
            assert error < (MEDIAN if name in UNSTEADY else ALLOWED[rounds]), backend
