from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir
import pytest

from edgellm import ProviderError
from edgellm.backends.chunk import RunningChunk
from edgellm.backends.forward import Model
from edgellm.backends.providers import CPU
from edgellm.backends.segments import Segments
from edgellm.backends.self_test import Check, check_prompts, check_segments
from edgellm.engine.engine import Engine
from edgellm.llm import load
from edgellm.store.bundle import Bundle, open_bundle
from edgellm.store.home import compiled_dir
from edgellm.store.manifest import MANIFEST

needs_qnn = pytest.mark.skipif(
    importlib.util.find_spec("onnxruntime_qnn") is None,
    reason="onnxruntime-qnn is not installed: it has no wheel for this system",
)


@pytest.fixture(scope="module")
def bundle_path(
    export_static: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    return export_static(tmp_path_factory.mktemp("self-test") / "bundle", chunk_sizes=(32,))


def static(path: Path, *, ctx_size: int | None = None) -> Engine:
    options = {"prefill": "cpu", "precision": "w8a16-qdq", "decode": "reference"}
    return load(str(path), ctx_size=ctx_size, **options).engine


def failed(checks: Iterable[Check]) -> list[str]:
    return [check.name for check in checks if not check.passed]


def test_what_is_whole_passes(bundle_path: Path) -> None:
    engine = static(bundle_path)
    model = engine.prefill.model
    checks = [*check_segments(engine.bundle, model.segments)]
    checks += check_prompts(engine.bundle, model, engine.cache, engine.decoder)
    assert [check.name for check in checks] == [
        *(f"segment {index} in chunks of 32" for index in range(3)),
        *(f"prompt of {count} in chunks of 32" for count in (1, 31, 32, 33, 64)),
        "head",
    ]
    assert failed(checks) == []
    assert all(check.error > 0 for check in checks)
    assert engine.cache.used_blocks == 0


def test_prompts_are_no_longer_than_the_context(
    export_static: Callable[..., Path], make_model: Callable[..., Path], tmp_path: Path
) -> None:
    model = make_model(max_position_embeddings=40)
    engine = static(export_static(tmp_path / "bundle", model=model, chunk_sizes=(32,)))
    checks = [*check_prompts(engine.bundle, engine.prefill.model, engine.cache, engine.decoder)]
    names = [f"prompt of {count} in chunks of 32" for count in (1, 31, 32, 33, 39)]
    assert [check.name for check in checks] == [*names, "head"]
    assert failed(checks) == []


@pytest.mark.parametrize(("ctx_size", "counts"), [(34, (1, 31, 32, 33)), (20, (1, 19)), (1, ())])
def test_prompts_fit_into_a_smaller_context(
    bundle_path: Path, ctx_size: int, counts: tuple[int, ...]
) -> None:
    engine = static(bundle_path, ctx_size=ctx_size)
    checks = [*check_prompts(engine.bundle, engine.prefill.model, engine.cache, engine.decoder)]
    names = [f"prompt of {count} in chunks of 32" for count in counts]
    assert [check.name for check in checks] == [*names, "head"]
    assert failed(checks) == []


def test_wrong_segment_is_named(bundle_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = static(bundle_path)
    segments = engine.prefill.model.segments
    run = segments.run

    def broken(index: int, chunk: int, inputs: Any) -> list[np.ndarray]:
        outputs = run(index, chunk, inputs)
        if index == 1:
            outputs[1][5] *= -1  # one row
        return outputs

    monkeypatch.setattr(segments, "run", broken)
    assert failed(check_segments(engine.bundle, segments)) == ["segment 1 in chunks of 32"]


def test_garbage_at_the_edge_of_a_chunk_is_caught(
    bundle_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last token of a full chunk sees nothing of what came before."""
    engine = static(bundle_path)
    model = engine.prefill.model

    def attend(layer: int, chunk: RunningChunk) -> None:
        Model.attend(model, layer, chunk)
        attention = chunk.buffers.attention[layer]
        if len(chunk.tokens) == len(attention):
            attention[-1] = 0

    monkeypatch.setattr(model, "attend", attend)
    monkeypatch.setattr(model, "_actions", model._program())
    checks = check_prompts(engine.bundle, model, engine.cache, engine.decoder)
    assert failed(checks) == [f"prompt of {count} in chunks of 32" for count in (32, 33, 64)]


def damaged(bundle: Path, copy: Path, name: str, at: int, count: int) -> Path:
    """The same bundle with `count` other bytes in a file, which the manifest says are right."""
    shutil.copytree(bundle, copy, copy_function=os.link)
    path = copy / name
    data = bytearray(path.read_bytes())
    data[at : at + count] = bytes(byte ^ 0x5A for byte in data[at : at + count])
    path.unlink()
    path.write_bytes(data)
    manifest = json.loads((copy / MANIFEST).read_text())
    manifest["files"][name]["sha256"] = hashlib.sha256(data).hexdigest()
    (copy / MANIFEST).unlink()
    (copy / MANIFEST).write_text(json.dumps(manifest))
    (copy / ".checked.json").unlink(missing_ok=True)
    return copy


@pytest.mark.parametrize(
    ("name", "words"),
    [("w8a16-qdq", "WRONG segment 1 in"), ("head-int8", "WRONG head"), ("reference", "WRONG")],
)
def test_damage_that_no_checksum_shows(
    bundle_path: Path, tmp_path: Path, cli: Callable[..., Any], name: str, words: str
) -> None:
    file = f"{name}/weights.bin"
    middle = (bundle_path / file).stat().st_size // 2
    path = damaged(bundle_path, tmp_path / "damaged", file, middle, 512)
    options = ("--prefill", "cpu", "--precision", "w8a16-qdq", "--decode", "reference")
    found = cli("doctor", str(path), *options)
    assert found.returncode == 1
    assert words in found.stdout
    assert "checks failed" in found.stdout


@pytest.mark.parametrize("layer", [0, 14, 29])
def test_damage_of_a_page_of_real_weights(smollm2_all: Bundle, tmp_path: Path, layer: int) -> None:
    """4 KB of down_proj's 885 KB: an error of a sixth in its product."""
    precision = "w8a16-qdq"
    weights = f"{precision}/weights.bin"
    model = onnx_ir.load(smollm2_all.path / precision / f"{layer + 1:03d}.onnx")
    tensor = model.graph.initializers[f"layers.{layer}.down"].const_value
    assert isinstance(tensor, onnx_ir.ExternalTensor)
    path = damaged(smollm2_all.path, tmp_path / "damaged", weights, tensor.offset + 200_000, 4096)
    bundle = open_bundle(path)
    segments = Segments(bundle, precision, provider=CPU, threads=2)
    wrong = [f"segment {layer + 1} in chunks of {chunk}" for chunk in (32, 128)]
    assert failed(check_segments(bundle, segments)) == wrong


def test_an_export_that_is_wrong_is_no_measure(bundle_path: Path) -> None:
    """However large the error was when a precision was exported, it does not excuse garbage."""
    engine = static(bundle_path)
    model, bundle = engine.prefill.model, engine.bundle
    entry = bundle.precision("w8a16-qdq")
    wrong = replace(entry, errors=dict.fromkeys(entry.errors, 1.4))
    precisions = {**bundle.manifest.precisions, "w8a16-qdq": wrong}
    bundle = replace(bundle, manifest=replace(bundle.manifest, precisions=precisions))
    checks = [*check_segments(bundle, model.segments)]
    checks += check_prompts(bundle, model, engine.cache, engine.decoder)
    assert max(check.limit for check in checks) <= 0.5


@pytest.mark.slow
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
    back_ends = ("--prefill", "qnn", "--decode", "reference")
    found = cli("doctor", str(bundle_path), *back_ends, "--verbose")
    assert found.returncode == 1
    assert "ok    segment 0 in chunks of 32" in found.stdout
    assert "WRONG segment 1 in chunks of 32" in found.stdout
    (folder / "checked").unlink()
    with pytest.raises(ProviderError, match=r"self-test: segment 1 in .* is wrong"):
        load(str(bundle_path), prefill="qnn", decode="reference")
