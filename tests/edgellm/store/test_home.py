from __future__ import annotations

import os
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from edgellm.store import home
from edgellm.store.home import (
    bundles_dir,
    delete_abandoned,
    delete_abandoned_at_home,
    delete_folder,
    locked,
    partial_folder,
    replacing_file,
    replacing_folder,
)


@pytest.fixture(params=[0o022, 0o077, 0o002], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def age(path: Path, seconds: float) -> None:
    os.utime(path, (time.time() - seconds,) * 2)


def test_permissions_are_those_that_the_user_wants(tmp_path: Path, umask: int) -> None:
    for private, of_files, of_folders in ((False, 0o666, 0o777), (True, 0o600, 0o700)):
        with replacing_file(tmp_path / "file", private=private) as file:
            assert mode(file) == of_files & ~umask
            file.write_text("text")
        with replacing_folder(tmp_path / "folder", private=private) as folder:
            assert mode(folder) == of_folders & ~umask
        assert mode(tmp_path / "file") == of_files & ~umask
        assert mode(tmp_path / "folder") == of_folders & ~umask


def test_missing_parents_are_made_where_that_is_meant(tmp_path: Path) -> None:
    target = tmp_path / "a" / "b"
    for replacing in (replacing_file, replacing_folder):
        with pytest.raises(FileNotFoundError), replacing(target):
            pass
        assert not target.parent.exists()
    with replacing_folder(target, make_parents=True):
        pass
    assert list(target.parent.iterdir()) == [target]


def test_what_fails_leaves_what_was_there(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("before")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").write_text("before")
    with pytest.raises(ZeroDivisionError), replacing_file(tmp_path / "file") as file:
        _ = 1 / file.write_text("")
    with pytest.raises(ZeroDivisionError), replacing_folder(tmp_path / "folder") as folder:
        _ = 1 / (folder / "file").write_text("")
    assert (tmp_path / "file").read_text() == "before"
    assert (tmp_path / "folder" / "file").read_text() == "before"
    assert len(list(tmp_path.iterdir())) == 2


def test_a_full_folder_is_replaced_and_deleted(tmp_path: Path) -> None:
    for text in ("one", "two"):
        with replacing_folder(tmp_path / "folder") as folder:
            (folder / text).write_text(text)
        assert [p.name for p in (tmp_path / "folder").iterdir()] == [text]
    delete_folder(tmp_path / "folder")
    assert list(tmp_path.iterdir()) == []


def test_long_names(tmp_path: Path) -> None:
    with replacing_file(tmp_path / ("ü" * 127)) as file:  # 254 bytes; more than 255 are too many
        file.write_text("text")
    assert len(list(tmp_path.iterdir())) == 1


def test_only_what_is_abandoned_is_deleted(tmp_path: Path) -> None:
    with (
        replacing_file(tmp_path / "new") as new,
        replacing_file(tmp_path / "old") as old,
        replacing_folder(tmp_path / "busy") as busy,
        replacing_folder(tmp_path / "left") as left,
    ):
        (busy / "deep").mkdir()
        (busy / "deep" / "file").touch()
        (left / "file").touch()
        for path in (old, left / "file", left, busy / "deep", busy):
            age(path, home.ABANDONED_S + 1)
        (tmp_path / ".partial").touch()
        age(tmp_path / ".partial", 1e6)
        delete_abandoned(tmp_path)
        assert {p.name for p in tmp_path.iterdir()} == {new.name, busy.name, ".partial"}
        delete_abandoned(tmp_path / "no such folder")
        old.touch()
        left.mkdir()


def test_only_what_was_to_become_one_file_is_deleted(tmp_path: Path) -> None:
    with (
        replacing_file(tmp_path / "a") as first,
        replacing_file(tmp_path / "a-b") as second,
        partial_folder(tmp_path, of="a") as third,
    ):
        delete_abandoned(tmp_path, of="a", abandoned_s=0)
        assert list(tmp_path.iterdir()) == [second]
        first.touch()
        assert not third.exists()


def test_an_export_may_take_hours(edgellm_home: Path) -> None:
    for folder in ("models", "bundles", "prefixes"):
        for name, hours in (("now", 0), ("long", 20), ("killed", 25)):
            path = edgellm_home / folder / f".partial-{name}"
            path.mkdir(parents=True)
            age(path, 3600 * hours)
    delete_abandoned_at_home()
    left = {path.name for path in edgellm_home.rglob(".partial-*")}
    assert left == {".partial-now", ".partial-long"}


def test_locked_by_one_process_at_a_time(edgellm_home: Path, tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from edgellm.store.home import locked\n"
        "with locked(Path(sys.argv[1])):\n"
        "    print('in', flush=True); time.sleep(0.2); print('out', flush=True)"
    )
    log = tmp_path / "log"
    (tmp_path / "link").symlink_to(tmp_path)
    with log.open("w") as file:
        processes = [
            subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=file)
            for path in (tmp_path / "x", tmp_path / "link" / "x", tmp_path / "x")
        ]
        assert [p.wait() for p in processes] == [0, 0, 0]
    assert log.read_text().split() == ["in", "out"] * 3


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
@pytest.mark.parametrize("root", ["/proc/edgellm", "/proc", "/dev/null/home"])
def test_lock_that_cannot_be_made_is_an_error_at_once(
    monkeypatch: pytest.MonkeyPatch, root: str
) -> None:
    monkeypatch.setenv("EDGELLM_HOME", root)
    with pytest.raises(OSError, match=r"directory|exists"), locked(bundles_dir() / "x"):
        pass
