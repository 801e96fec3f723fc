"""Copies of weights that are kept: as they are told, and none that no back end needs."""

from __future__ import annotations

import mmap
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgellm.backends import segments
from edgellm.backends.selection import Selection
from edgellm.engine.memory import HOST, Copy, weight_copies
from edgellm.kernels.native import library
from edgellm.llm import load
from edgellm.measure.explain import resident
from edgellm.models import describe
from edgellm.store import manifest
from edgellm.store.bundle import Bundle
from edgellm.store.manifest import forget_pages, map_arrays
from edgellm.store.prepare import prepare

TOKENS = [7 * i % 50 + 3 for i in range(70)]


@pytest.fixture(scope="module")
def bundle(tiny_model: Path) -> Bundle:
    return prepare(str(tiny_model), precisions=("packed", "f32", "w8a8"))


def held(bundle: Bundle, **names: Any) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes by owner on the host, and on a device."""
    copies = weight_copies(bundle, Selection(policy="serial", **names))
    host = {copy.owner: copy.bytes for copy in copies if copy.place == HOST}
    return host, {copy.owner: copy.bytes for copy in copies if copy.place != HOST}


def test_copies_are_those_of_the_files(bundle: Bundle) -> None:
    files = {name: entry.bytes for name, entry in bundle.manifest.files.items()}
    packed, f32 = files["packed/weights.bin"], files["f32/weights.bin"]
    native, _ = held(bundle, prefill="native", decode="native")
    # the tiny model has an LM head of its own
    arrays = map_arrays(bundle.path, bundle.precision("packed").arrays)
    assert native["embedding and LM head"] == sum(arrays[x].nbytes for x in ("embedding", "head"))
    assert sum(native.values()) == packed
    head = files["head-f32/weights.bin"]
    assert held(bundle, prefill="cpu", decode="native", precision="f32") == (
        {**native, "f32": f32, "head-f32": head},
        {},
    )
    assert held(bundle, prefill="openvino", decode="native", precision="f32") == (
        {**native, "head-f32": head},
        {"f32 in 2 chunk sizes": 2 * f32},
    )
    chunked, _ = held(bundle, prefill="cpu", decode="chunked", precision="f32")
    assert chunked == {"f32": f32, "head-f32": head}
    host, device = held(bundle, prefill="triton", decode="triton")
    assert (host, sum(device.values())) == ({}, packed)


@pytest.mark.skipif(library() is None, reason="packed weights need the C++ kernels")
@pytest.mark.parametrize("precision", ["f32", "w8a8"])
def test_no_copy_is_opened_twice(
    bundle: Bundle, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph for each segment; besides packed ones at most a float32 LM head is opened."""
    opened: list[Path] = []
    mapped: list[Path] = []
    open_session, memmap = segments.open_session, np.memmap

    def opening(path: Path, **options: Any) -> Any:
        opened.append(path)
        return open_session(path, **options)

    def mapping(path: Path, **options: Any) -> Any:
        mapped.append(path)
        return memmap(path, **options)

    monkeypatch.setattr(segments, "open_session", opening)
    monkeypatch.setattr(manifest.np, "memmap", mapping)
    llm = load(str(bundle.path), prefill="cpu", precision=precision, decode="native")
    llm.generate(TOKENS, max_tokens=2, ignore_eos=True)
    graphs = [f"{precision}/{index:03}.onnx" for index in range(3)]
    head = ["head-f32/head.onnx"] if precision == "f32" else []
    assert sorted(opened) == sorted(bundle.path / name for name in graphs + head)
    folders = [path.parent.name for path in mapped]
    assert folders.count("packed") == 1
    assert set(folders) <= {"packed", "keys", *(name.split("/")[0] for name in head)}
    weights = sum(copy.bytes for copy in llm.engine.memory.copies)
    assert llm.engine.memory.weights == weights


@pytest.mark.skipif(sys.platform != "linux", reason="reads what Linux tells of mapped files")
def test_mapped_files_are_measured(bundle: Bundle, tmp_path: Path) -> None:
    # models of other tests may have the files themselves open, and let go of them meanwhile
    bundle = replace(bundle, path=shutil.copytree(bundle.path, tmp_path / "own"))
    path = bundle.path / "packed" / "weights.bin"
    pages = -(-path.stat().st_size // mmap.PAGESIZE) * mmap.PAGESIZE
    assert resident(bundle).mapped == {}
    arrays = map_arrays(bundle.path, bundle.precision("packed").arrays)
    sums = {name: int(array.view(np.uint8).sum()) for name, array in arrays.items()}
    found = resident(bundle)
    assert found.mapped["packed"] == pages
    assert found.total > sum(found.mapped.values())
    forget_pages(arrays["embedding"])
    assert resident(bundle).mapped == {}
    assert sums == {name: int(array.view(np.uint8).sum()) for name, array in arrays.items()}
    forget_pages(np.zeros(8))  # is not mapped


@pytest.mark.skipif(library() is None, reason="packed weights need the C++ kernels")
def test_every_way_to_run_is_described(bundle: Bundle) -> None:
    copies = describe(str(bundle.path)).copies
    assert {"cpu in f32", "accelerator in f32", "cpu in w8a8"} < set(copies)
    assert "accelerator in w8a8" not in copies
    assert Copy("f32", HOST, bundle.manifest.files["f32/weights.bin"].bytes) in copies["cpu in f32"]


@pytest.mark.skipif(library() is None, reason="packed weights need the C++ kernels")
def test_float32_graphs_keep_a_float32_head(bundle: Bundle) -> None:
    """Packed weights of a float checkpoint have a rounded one, which decode reads."""
    logprobs = []
    for decode in ("reference", "native"):
        llm = load(str(bundle.path), prefill="cpu", precision="f32", kv_format="f32", decode=decode)
        answer = llm.generate(TOKENS, max_tokens=2, temperature=0, logprobs=1, ignore_eos=True)
        logprobs.append(answer.logprobs[0])
    np.testing.assert_allclose(logprobs[0], logprobs[1], atol=1e-5)
