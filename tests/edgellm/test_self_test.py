from __future__ import annotations

import hashlib
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgellm import ProviderError
from edgellm.home import compiled_dir
from edgellm.llm import load
from edgellm.self_test import check_prompts, check_segments, relative_error

needs_qnn = pytest.mark.skipif(
    importlib.util.find_spec("onnxruntime_qnn") is None,
    reason="onnxruntime-qnn is not installed: it has no wheel for this system",
)


@pytest.fixture(scope="module")
def bundle_path(
    export_static: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    return export_static(tmp_path_factory.mktemp("self-test") / "bundle", chunk_sizes=(32,))


def test_the_cpu_agrees_with_itself(bundle_path: Path) -> None:
    engine = load(str(bundle_path), prefill="cpu", flavour="w8a16-qdq", decode="reference").engine
    model = engine.prefill.model
    checks = [*check_segments(engine.bundle, model.segments)]
    checks += check_prompts(model, engine.cpu_model("w8a16-qdq"), engine.cache, engine.decoder)
    assert [check.name for check in checks[:3]] == ["000.c32.onnx", "001.c32.onnx", "002.c32.onnx"]
    assert len(checks) == 3 + 5
    assert all(check.passed for check in checks)
    assert engine.cache.used_blocks == 0


def test_wrong_segment_is_named(bundle_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = load(str(bundle_path), prefill="cpu", flavour="w8a16-qdq", decode="reference").engine
    segments = engine.prefill.model.segments
    run = segments.run

    def broken(index: int, chunk: int, inputs: Any) -> list[np.ndarray]:
        outputs = run(index, chunk, inputs)
        if index == 1:
            outputs[1][5] *= -1  # one row
        return outputs

    monkeypatch.setattr(segments, "run", broken)
    checks = list(check_segments(engine.bundle, segments))
    assert [check.passed for check in checks] == [True, False, True]


@pytest.mark.npu
@needs_qnn
def test_wrong_compilation_is_caught_at_the_start_and_by_doctor(
    bundle_path: Path,
    export_static: Callable[..., Path],
    make_model: Callable[..., Path],
    tmp_path: Path,
    edgellm_home: Path,
    cli: Callable[..., Any],
) -> None:
    """A segment with other weights, checksums and all, as a broken compiler would make it."""
    load(str(bundle_path), prefill="qnn", decode="reference")
    (folder,) = [path for path in compiled_dir().iterdir() if path.is_dir()]
    assert (folder / "checked").exists()
    other = export_static(
        tmp_path / "other", model=make_model(initializer_range=0.2), chunk_sizes=(32,)
    )
    load(str(other), prefill="qnn", decode="reference")
    (wrong,) = [path for path in compiled_dir().iterdir() if path.is_dir() and path != folder]
    sums = json.loads((folder / "sha256.json").read_text())
    for name in ("001.c32.onnx", "001.c32_qnn.bin"):
        content = (wrong / name).read_bytes()
        (folder / name).write_bytes(content)
        sums[name] = hashlib.sha256(content).hexdigest()
    (folder / "sha256.json").write_text(json.dumps(sums))
    found = cli("doctor", str(bundle_path), "--prefill", "qnn", "--decode", "reference")
    assert found.returncode == 1
    assert "ok    000.c32.onnx" in found.stdout
    assert "WRONG 001.c32.onnx" in found.stdout
    (folder / "checked").unlink()
    with pytest.raises(ProviderError, match=r"self-test: 001\.c32\.onnx is wrong"):
        load(str(bundle_path), prefill="qnn", decode="reference")


def test_doctor_has_nothing_to_check_on_the_native_kernels(
    bundle_path: Path, cli: Callable[..., Any]
) -> None:
    found = cli("doctor", str(bundle_path), "--prefill", "native")
    assert found.returncode == 2
    assert "--prefill qnn" in found.stderr or "not built" in found.stderr


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_a_number_is_infinitely_wrong(value: float) -> None:
    assert relative_error(np.array([1, value]), np.ones(2)) == np.inf
    assert relative_error(np.zeros(2), np.zeros(2)) == 0
