"""Qualcomm's provider for x86: the real compiler, and the HTP in an emulator."""

from __future__ import annotations

import faulthandler
import importlib.util
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from edgellm import ProviderError
from edgellm.backends import compile_cache
from edgellm.backends.providers import open_session, status
from edgellm.graphs.builder import GraphBuilder
from edgellm.llm import LLM, load
from edgellm.progress import Progress
from edgellm.store.bundle import open_bundle
from edgellm.store.home import compiled_dir

STATIC = "w8a16-qdq"

pytestmark = [
    pytest.mark.npu,
    pytest.mark.skipif(
        importlib.util.find_spec("onnxruntime_qnn") is None,
        reason="onnxruntime-qnn has no wheel here",
    ),
]


@pytest.fixture(scope="module")
def bundle_path(
    export_static: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    return export_static(tmp_path_factory.mktemp("qnn") / "bundle")


def on_htp(path: Path, **options: dict[str, str]) -> LLM:
    return load(str(path), prefill="qnn", decode="reference", **options)


def test_devices_say_that_it_is_emulated() -> None:
    found = status("qnn")
    assert found.usable
    assert "emulated" in found.device


@pytest.mark.slow
def test_every_segment_runs_whole_on_the_htp(
    bundle_path: Path,
    edgellm_home: Path,
    logits_and_places: Callable[[LLM, list[int]], tuple[np.ndarray, dict[str, int]]],
) -> None:
    """The same graphs on the CPU provider differ by what half precision between products costs."""
    htp = on_htp(bundle_path)
    placement = htp.engine.prefill.placement
    assert placement.complete
    assert placement.nodes == {"QNNExecutionProvider": 2 * 3}
    cpu = load(str(bundle_path), prefill="cpu", precision=STATIC, decode="reference")
    for count in (1, 2, 33, 34, 140):
        tokens = np.random.default_rng(count).integers(0, 256, count).tolist()
        (found, places), (expected, _) = (logits_and_places(llm, tokens) for llm in (htp, cpu))
        assert places == {"reference": 1, **({"qnn": count - 1} if count > 1 else {})}
        assert np.abs(found - expected).max() < 0.03 * np.abs(expected).max()


@pytest.mark.slow
def test_compiled_once(bundle_path: Path, edgellm_home: Path) -> None:
    steps: list[Progress] = []
    bundle = open_bundle(bundle_path)

    def compiled() -> Path:
        return compile_cache.compiled(
            bundle,
            STATIC,
            provider="qnn",
            provider_options={},
            progress=steps.append,
        )

    folder = compiled()
    assert steps[0] == Progress("compiling 000.c32.onnx", 0, 6)
    assert steps[-1] == Progress("compiled", 6, 6)
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    steps.clear()
    assert compiled() == folder
    assert not steps
    damaged = folder / "001.c32_qnn.bin"
    content = damaged.read_bytes()
    damaged.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert compiled() == folder
    assert steps[-1] == Progress("compiled", 6, 6)
    assert {path.name for path in folder.iterdir()} == set(before)
    assert damaged.read_bytes() != content[:-1] + bytes([content[-1] ^ 1])


@pytest.mark.slow
def test_interrupted_compilation_leaves_nothing(bundle_path: Path, edgellm_home: Path) -> None:
    def interrupt(news: Progress) -> None:
        if news.done == 2:
            raise KeyboardInterrupt

    bundle = open_bundle(bundle_path)
    with pytest.raises(KeyboardInterrupt):
        compile_cache.compiled(
            bundle, STATIC, provider="qnn", provider_options={}, progress=interrupt
        )
    assert not [path for path in compiled_dir().iterdir() if path.suffix != ".lock"]


def test_compiler_that_crashes(
    bundle_path: Path, edgellm_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile_cache, "_print_to_stderr", faulthandler._sigsegv)
    with pytest.raises(ProviderError, match="its compiler crashed"):
        on_htp(bundle_path)


@pytest.mark.slow
def test_device_that_the_compiler_does_not_know(bundle_path: Path, edgellm_home: Path) -> None:
    with pytest.raises(ProviderError, match="qnn"):
        on_htp(bundle_path, provider_options={"soc_model": "999999"})
    assert not [path for path in compiled_dir().iterdir() if path.suffix != ".lock"]


def test_a_node_that_the_htp_does_not_take_is_named_or_left_to_the_cpu(tmp_path: Path) -> None:
    graph = GraphBuilder("mixed")
    product = graph.op("Mul", *[graph.input("x", (3, 3))] * 2)
    path = tmp_path / "mixed.onnx"
    ir.save(graph.build({"y": (graph.op("Det", product), ())}), path)
    with pytest.raises(ProviderError, match=r"does not take 1 nodes.*Det.*`allow_fallback`"):
        open_session(path, provider="qnn")
    session, placement = open_session(path, provider="qnn", allow_fallback=True)
    assert placement.nodes == {"QNNExecutionProvider": 1, "CPUExecutionProvider": 1}
    assert not placement.complete
    assert placement.place == "qnn+cpu"
    x = np.diag([1.0, 2.0, 3.0]).astype(np.float32)
    assert session.run(None, {"x": x})[0] == pytest.approx(36.0, rel=1e-2)
