from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from threading import Event

import numpy as np
import pytest
from spill import on_disk

from edgellm.backends.chunked_backend import ChunkedBackend
from edgellm.backends.planner import PlannedChunk
from edgellm.backends.schedule import POLICIES, Policy, Step
from edgellm.backends.selection import select
from edgellm.export import export
from edgellm.kernels.native import library
from edgellm.llm import LLM, load
from edgellm.measure import explain
from edgellm.measure.explain import Profile, measure, predict, profile
from edgellm.measure.roofline import Machine, measure_cpu, measure_gpu, work_of
from edgellm.options import EngineOptions
from edgellm.store.bundle import Bundle

STEPS = [
    Step("segment 0", "accelerator"),
    Step("attention 0", "host", ordered=True),
    Step("segment 1", "accelerator"),
]
DEFAULTS = select(EngineOptions())
# Attention takes 1 s at the start of a sequence and 3 s after 100 tokens.
FOUND = Profile(STEPS, {50: [2.0, 1.0, 2.0]}, {50: [2.0, 3.0, 2.0]}, 100, {1: 0.5}, 0.25)


@pytest.fixture(scope="module")
def bundle_path(
    export_static: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    portable = () if library() is not None else ("int4", "w8a8")
    out = tmp_path_factory.mktemp("plan") / "bundle"
    return export_static(out, precisions=("f32", "packed", *portable))


@pytest.fixture(scope="module")
def chunked_llm(bundle_path: Path) -> LLM:
    return load(str(bundle_path), prefill="cpu", precision="f32", decode="reference")


@pytest.mark.parametrize("policy", POLICIES)
def test_pieces_of_the_host_and_the_head_count_as_they_are(policy: Policy) -> None:
    assert predict(FOUND, [PlannedChunk(None, 1)], policy).seconds == 0.75


def test_attention_grows_with_what_came_before() -> None:
    chunks = [PlannedChunk(None, 1), PlannedChunk(50, 50), PlannedChunk(50, 30)]
    found = predict(FOUND, chunks, "serial")
    attention = (1 + 2 * 1 / 100) + (1 + 2 * 51 / 100)
    assert found.seconds == pytest.approx(0.5 + 4 * 2.0 + attention + 0.25)
    assert found.bubbles == pytest.approx(attention / (attention + 8.0))


def test_a_faster_accelerator_leaves_the_host_as_it_is() -> None:
    chunks = [PlannedChunk(50, 50)] * 4
    slow, fast = (predict(FOUND, chunks, "serial", accelerator_speed=s) for s in (1.0, 4.0))
    assert slow.seconds - fast.seconds == pytest.approx(4 * 4.0 * 0.75)
    overlapped = predict(FOUND, chunks, "out-of-order")
    assert overlapped.seconds < slow.seconds
    assert overlapped.bubbles < slow.bubbles


def test_profile_leaves_no_trace(chunked_llm: LLM) -> None:
    engine = chunked_llm.engine
    assert isinstance(engine.prefill, ChunkedBackend)
    chunks = [*engine.prefill.plan(300), PlannedChunk(None, 2)]
    before = engine.cache.used_blocks
    found = profile(engine, engine.prefill, chunks, stop=Event())
    assert engine.cache.used_blocks == before
    assert engine.cache.cached_prefix([0] * 200) == 0
    sizes = {piece.size for piece in chunks} - {None}
    assert set(found.shallow) == set(found.deep) == sizes
    assert set(found.host) == {2}
    assert all(len(steps) == len(engine.prefill.model.steps) for steps in found.deep.values())


def test_work_of_the_default_model(smollm2: Bundle) -> None:
    """106.2 million weights in layers, read as 4.5 to 5 bits each, and the head in 8.5."""
    work = work_of(smollm2, 0, precision="packed", kv_format="int8")
    assert work.prefill_flops == 2 * 30 * 576 * (576 + 960 + 3 * 1536)
    assert 0.5 < work.decode_bytes / (106.2e6 * 5 / 8 + 28.3e6 * 8.5 / 8) < 1.1
    assert work.weight_share == pytest.approx(1, abs=1e-3)  # all Q4_1 and Q8_0
    deep = work_of(smollm2, 1280, precision="packed", kv_format="int8")
    assert deep.decode_bytes - work.decode_bytes == 1280 * 12240  # codes, and a float32 each 64
    assert deep.prefill_flops - work.prefill_flops == 2 * 30 * 576 * 1280


def test_work_in_a_window(make_model: Callable[..., Path], tmp_path: Path) -> None:
    """Only what a token sees is multiplied and read."""
    work = {}
    for window in (64, 1024):
        model = make_model(model_type="mistral", sliding_window=window)
        bundle = export(model, tmp_path / str(window), name="m", source="m", precisions=["packed"])
        work[window] = work_of(bundle, 256, precision="packed", kv_format="f16")
    row = 2 * 2 * 2 * 16 * 2  # layers, K and V, KV heads, channels, bytes
    assert work[1024].decode_bytes - work[64].decode_bytes == (256 - 64) * row
    seen = [np.minimum(np.arange(256) + 0.5, window).mean() for window in (64, 1024)]
    flops = 2 * 2 * 2 * 96 * (seen[1] - seen[0])
    assert work[1024].prefill_flops - work[64].prefill_flops == pytest.approx(flops, rel=1e-2)


@pytest.mark.parametrize("int4", [False, True])
def test_a_cpu_has_limits(int4: bool) -> None:
    found = measure_cpu(1, int4=int4)
    assert min(found.flops, found.read_bytes) > 1e8
    assert found.kind == ("int4 kernel, CPU" if int4 and library() else "float32, CPU")
    assert (found.peak is not None) == (int4 and library() is not None)


@pytest.mark.triton
def test_a_gpu_has_limits(triton_device: str) -> None:
    found = measure_gpu()
    assert min(found.flops, found.read_bytes) > 1e6
    assert ("interpreted" in found.kind) == (triton_device == "cpu")


@pytest.mark.slow
def test_command(bundle_path: Path, cli: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    model = ("-m", str(bundle_path))
    found = cli("plan", "70", *model, "--prefill", "cpu", "--precision", "f32")
    assert found.returncode == 0, found.stderr
    assert "chunks: " in found.stdout
    assert "with an accelerator 10 times" in found.stdout
    assert found.stdout.count("predicted, out-of-order") == 3
    assert "measured, serial" in found.stdout
    compared = library() is not None and DEFAULTS.decode == "native"
    assert ("faster at this length: " in found.stdout) == compared
    assert f"--prefill auto takes {DEFAULTS.prefill}: " in found.stdout
    assert "GB/s" in found.stdout
    refused = cli("plan", "9000", *model)
    assert refused.returncode == 2
    assert "as far as the model goes" in refused.stderr
    of_default = cli("plan", "40", *model)
    assert of_default.stdout.count("measured, ") == 1  # there is nothing else to compare with
    assert "faster at this length" not in of_default.stdout
    assert "KV cache: " in of_default.stdout
    assert "of them kept" not in of_default.stdout


@pytest.mark.skipif(library() is None, reason="budgets need the native kernels")
def test_the_size_of_the_cache_follows_its_options(
    bundle_path: Path,
    tmp_path: Path,
    cli: Callable[..., subprocess.CompletedProcess[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(explain, "measure_cpu", lambda *_, **__: Machine(1e9, "a CPU", 1e9))

    def cache(*options: str) -> tuple[float, str]:
        shown = cli("plan", "40", "-m", str(bundle_path), "-c", "1024", *options).stdout
        (line,) = (each for each in shown.splitlines() if each.startswith("KV cache: "))
        return float(line.split()[2]), line.partition("; ")[2]

    whole, text = cache()
    assert text == "contexts of 1024 tokens"
    kept, text = cache("--kv-budget", "640")
    assert text == "contexts of 1024 tokens, 640 of them kept"
    assert kept < whole
    _, text = cache("--kv-format", "k4v4", "--kv-read", "512")
    assert text.endswith("; a token of an answer reads 512 at most")
    whole, _ = cache("--kv-format", "k4v4")
    here, text = cache("--kv-format", "k4v4", "--kv-spill", str(on_disk(tmp_path)))
    assert here < whole
    assert text.endswith(f" MB more in a file of {tmp_path}")


def test_an_interrupt_leaves_no_block_behind(
    chunked_llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = chunked_llm.engine
    before = engine.cache.used_blocks

    def interrupted(hidden: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(engine.prefill, "logits", interrupted)
    with pytest.raises(KeyboardInterrupt):
        measure(engine, 40, engine.prefill, stop=Event())
    assert engine.cache.used_blocks == before
