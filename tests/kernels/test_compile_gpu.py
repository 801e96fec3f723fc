"""Every Triton kernel becomes machine code for the GPUs that it is for, without one of them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import edgellm.kernels.gpu.device

pytest.importorskip("torch")
pytest.importorskip("triton")

KERNELS = Path(edgellm.kernels.gpu.device.__file__).parent.parent
REPORT = Path(__file__).parents[1] / "bench" / "compile_report.py"
WITH_EXPERTS = "Qwen3-30B-A3B"
WITH_LATENTS = "DeepSeek-V2-Lite"
WITH_STATES = "LFM2-1.2B,Qwen3.5-0.8B,Granite-4.0-H-1B,Falcon-H1-1.5B"
WITH_EMBEDDINGS = "Gemma-4-E2B,Gemma-3n-E2B"
WITH_ADAPTERS = "SmolLM2-with-adapters"
EVERY_KERNEL = (
    f"SmolLM2-135M,{WITH_ADAPTERS},{WITH_EXPERTS},{WITH_LATENTS},{WITH_STATES},{WITH_EMBEDDINGS}"
)
# Models that together have every part of a layer that a kernel is compiled for.
WITH_PARTS = (
    "Gemma-2-2B,Gemma-3-1B,OLMo-2-1B,Hunyuan-1.8B,StarCoder2-3B,Llama-with-biases,"
    "gpt-oss-20b,Ling-mini-2.0,Qwen1.5-MoE-A2.7B,Gemma-4-26B-A4B"
)
# Kinds of weights with the most to do, a weight of a layer each; the others do a part of that.
KINDS = "int8_affine,int5_affine,int4_k,int5_k,int6_k,iq4_nl,iq4_xs"

OPTIONS = ("--kinds=int4_affine", "--once")


def report(folder: Path, *arguments: str) -> list[list[str]]:
    """The report's lines, in words; a kernel that spills registers fails the test."""
    apart = ("TRITON_INTERPRET", "PYTHONSAFEPATH")  # it imports from its own folder
    environment = {k: v for k, v in os.environ.items() if k not in apart}
    found = subprocess.run(
        [sys.executable, str(REPORT), *arguments],
        capture_output=True,
        text=True,
        env={**environment, "TRITON_CACHE_DIR": str(folder)},
    )
    assert found.returncode == 0, found.stdout + found.stderr
    lines = [line.split() for line in found.stdout.splitlines()[1:]]
    assert all(int(line[4]) == 0 for line in lines)
    return lines


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_kernels_and_parts_of_models_compile_and_spill_nothing(tmp_path: Path, target: str) -> None:
    """Every kernel for both targets, and parts of models for one; no code is compiled twice."""
    models = f"{EVERY_KERNEL},{WITH_PARTS}" if target == "sm_80" else EVERY_KERNEL
    lines = report(tmp_path, f"--models={models}", "--formats=int8", *OPTIONS, target)
    written = "".join(path.read_text() for path in KERNELS.glob("*/gpu*.py"))
    kernels = set(re.findall(r"def (\w+_kernel)\(", written))
    assert len(kernels) >= 7
    assert {line[0] for line in lines} == kernels - {"seal_kernel"}
    if target == "sm_80":
        assert_has_parts(lines)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_packed_formats_compile_and_spill_nothing(tmp_path: Path, target: str) -> None:
    # heads of 128 numbers, with keys by channel, need the most registers
    models = f"--models=SmolLM2-135M,{WITH_EXPERTS}"
    formats, kernels = "--formats=k8v4,k4v4,k4v2", "--kernels=attention,append,seal"
    lines = report(tmp_path, models, formats, kernels, *OPTIONS, target)
    assert {line[0] for line in lines} == {"attention_kernel", "append_kernel", "seal_kernel"}


def assert_has_parts(lines: list[list[str]]) -> None:
    settings = {word for line in lines for word in line[6:]}
    parts = {
        "NORM=each",
        "NORM=whole",
        "NORM=after_rope",
        "ACTIVATION=gelu_tanh",
        "ACTIVATION=silu",
        "ACTIVATION=clamped_swiglu",
        "GROUPS=8",
    }
    names = "CAP BIAS UP_BIAS GATED LAYER ADD SINKS SIGMOID SELECTION SHARED SHARE"
    switches = {f"{name}=True" for name in names.split()}
    assert parts | switches <= settings
    assert {"attention_kernel", "product_kernel"} <= {
        line[0] for line in lines if "CAP=True" in line
    }


@pytest.mark.slow
def test_kinds_of_weights_compile_and_spill_nothing(tmp_path: Path) -> None:
    lines = report(tmp_path, "--models=Llama-3-8B", "--formats=int8", f"--kinds={KINDS}", "sm_86")
    for kernel in ("product_kernel", "gemm_kernel"):
        settings = " ".join(word for line in lines if line[0] == kernel for word in line[6:])
        assert all(f"KIND={kind}" in settings for kind in KINDS.split(","))
