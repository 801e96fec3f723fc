from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from random_checkpoint import CONFIGS, RandomCheckpoint

from edgellm import (
    BundleError,
    ExportError,
    ModelFormatError,
    OptionError,
    UnsupportedModelError,
    load,
)
from edgellm.export import export
from edgellm.export.precisions import PRECISIONS
from edgellm.export.source_checkpoint import weight_files
from edgellm.graphs.checkpoint import open_checkpoint
from edgellm.store import bundle
from edgellm.store.bundle import open_bundle
from edgellm.store.manifest import MANIFEST
from edgellm.store.precision_support import ROTATED, first_supported, why_not
from edgellm.store.prepare import prepare

MakeModel = Callable[..., Path]


def export_tiny(model: Path, out: Path, **options: object) -> None:
    export(model, out, name="tiny", source=str(model), **options)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def exported(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("exported") / "bundle"
    export_tiny(tiny_model, out)
    return out


@pytest.fixture
def bundle_path(exported: Path, tmp_path: Path) -> Path:
    """A copy of the tiny model's bundle."""
    return Path(shutil.copytree(exported, tmp_path / "bundle"))


def test_manifest_says_what_is_there(bundle_path: Path) -> None:
    manifest = json.loads((bundle_path / MANIFEST).read_text())
    assert manifest["format"] == "edgellm-bundle"
    assert manifest["precisions"]["w8a8"]["chunk_sizes"] == [32, 128]
    assert manifest["precisions"]["int4"]["import_report"]["requantized_tensors"] == 14
    assert 0 < manifest["precisions"]["int4"]["import_report"]["mean_relative_error"] < 0.15
    assert manifest["tokenizer"] == {"bos": "<s>", "add_bos": False, "eos": ["</s>"], "fim": {}}
    assert manifest["versions"]["onnxruntime"]
    on_disk = {str(p.relative_to(bundle_path)) for p in bundle_path.rglob("*") if p.is_file()}
    assert set(manifest["files"]) == on_disk - {MANIFEST, ".checked.json"}
    for chunk in (".c32", ".c128", ""):
        assert f"w8a8/002{chunk}.onnx" in manifest["files"]


def test_what_cannot_be_rotated_is_refused_by_name(
    make_model: MakeModel, edgellm_home: Path, tmp_path: Path
) -> None:
    model = make_model(model_type="olmo2")
    for precision in ROTATED:
        with pytest.raises(
            UnsupportedModelError, match=rf"precision {precision} .*olmo2.*Take f32 or .*int4"
        ):
            export_tiny(model, tmp_path / "bundle", precisions=[precision])
    assert not (tmp_path / "bundle").exists()
    export_tiny(model, tmp_path / "bundle")
    assert set(open_bundle(tmp_path / "bundle").manifest.precisions) == {"packed", "f32", "int4"}
    with pytest.raises(UnsupportedModelError, match=r"precision w8a8 .*Take f32 or f16"):
        load(str(model), precision="w8a8")
    with pytest.raises(UnsupportedModelError, match="Take `prefill` and `decode` native"):
        first_supported(("w8a16-qdq",), open_bundle(tmp_path / "bundle").config)


@pytest.mark.parametrize("model_type", ["starcoder2", "gemma2"])
def test_why_a_model_cannot_be_rotated(make_model: MakeModel, model_type: str) -> None:
    config = open_checkpoint(make_model(model_type=model_type)).config
    reason = why_not("w8a8", config)
    assert reason is not None
    assert ("take a mean" if model_type == "starcoder2" else "commute with rotating it") in reason
    assert all(why_not(precision, config) is None for precision in set(PRECISIONS) - {*ROTATED})


def test_all_files_of_a_split_model_count(tmp_path: Path) -> None:
    names = ["m [1]-00001-of-00002.gguf", "m [1]-00002-of-00002.gguf"]
    for name in (*names, "m [1]-00001-of-00003.gguf", "m [1].gguf", "m 1.gguf"):
        (tmp_path / name).touch()
    for given, expected in ((names[0], names), ("m [1].gguf", ["m [1].gguf"])):
        checkpoint = RandomCheckpoint(CONFIGS["llama"], path=tmp_path / given)
        assert [path.name for path in weight_files(checkpoint)] == expected


def test_two_exports_are_the_same(tiny_model: Path, exported: Path, tmp_path: Path) -> None:
    export_tiny(tiny_model, tmp_path / "again")
    assert (tmp_path / "again" / MANIFEST).read_text() == (exported / MANIFEST).read_text()


def facts(path: Path) -> tuple[int, int, int]:
    """What changes when a file is written, and not when it is read."""
    stat = path.stat()
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


def test_precisions_are_added_without_touching_the_others(
    tiny_model: Path, bundle_path: Path
) -> None:
    before = facts(bundle_path / "w8a8" / "weights.bin")
    export_tiny(tiny_model, bundle_path, precisions=["w8a8", "f32"])
    manifest = open_bundle(bundle_path, verify=True).manifest
    assert set(manifest.precisions) == {"packed", "w8a8", "int4", "f32"}
    assert manifest.precisions["f32"].chunk_sizes == (32, 128)
    assert facts(bundle_path / "w8a8" / "weights.bin") == before
    assert [p.name for p in bundle_path.parent.iterdir()] == ["bundle"]


@pytest.mark.parametrize("name", ["int4/weights.bin", "w8a8/001.onnx", "tokenizer.json"])
@pytest.mark.parametrize("damage", ["delete", "truncate", "extend", "flip"])
def test_damaged_files_are_refused(bundle_path: Path, name: str, damage: str) -> None:
    path = bundle_path / name
    data = path.read_bytes()
    if damage == "delete":
        path.unlink()
    elif damage == "truncate":
        path.write_bytes(data[:-1])
    elif damage == "extend":
        path.write_bytes(data + b"\0")
    else:
        middle = len(data) // 2
        path.write_bytes(data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :])
    with pytest.raises(BundleError, match=rf"{name}.*export the model again"):
        open_bundle(bundle_path)


def test_a_damaged_bundle_is_rebuilt(tiny_model: Path, bundle_path: Path) -> None:
    (bundle_path / "int4" / "weights.bin").write_bytes(b"damaged")
    export_tiny(tiny_model, bundle_path, force=True)
    open_bundle(bundle_path, verify=True)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "damaged manifest"),
        ("[]", "not the manifest"),
        ('{"format": "other"}', "not the manifest"),
        ('{"format": "edgellm-bundle", "format_version": 99}', "format 99"),
        (
            '{"format": "edgellm-bundle", "format_version": 7}',
            "another version of edgellm.*export the model",
        ),
        ("{" * 100_000, "damaged manifest"),
    ],
)
def test_foreign_manifests(bundle_path: Path, content: str, words: str) -> None:
    (bundle_path / MANIFEST).write_text(content)
    with pytest.raises(BundleError, match=words):
        open_bundle(bundle_path)


def test_manifest_cannot_name_files_elsewhere(bundle_path: Path) -> None:
    manifest = json.loads((bundle_path / MANIFEST).read_text())
    manifest["files"]["../../secret"] = {"bytes": 1, "sha256": "0"}
    (bundle_path / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(BundleError, match="outside the bundle"):
        open_bundle(bundle_path)


def test_a_second_look_reads_no_weights(bundle_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_bundle(bundle_path)
    monkeypatch.setattr(bundle, "sha256_of", lambda path: pytest.fail(f"hashed {path}"))
    open_bundle(bundle_path)
    with pytest.raises(pytest.fail.Exception, match="hashed"):
        open_bundle(bundle_path, verify=True)


def test_other_folders_are_never_replaced(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "diary.txt").write_text("dear diary")
    for force in (False, True):
        with pytest.raises(BundleError, match="not a bundle"):
            export_tiny(tiny_model, tmp_path / "mine", force=force)
    assert (tmp_path / "mine" / "diary.txt").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"precisions": ["w3"]}, "w3: allowed are f32, f16, w4a16, w8a8, int4, w8a16-qdq"),
        ({"precisions": []}, "allowed are"),
        ({"chunk_sizes": [0]}, "1 to 4096"),
        ({"chunk_sizes": []}, "1 to 4096"),
    ],
)
def test_bad_options(tiny_model: Path, tmp_path: Path, options: dict, words: str) -> None:
    with pytest.raises(OptionError, match=words):
        export_tiny(tiny_model, tmp_path / "out", **options)


def test_failed_export_leaves_nothing(make_model: MakeModel, tmp_path: Path) -> None:
    model = make_model()
    (model / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(ModelFormatError):
        export_tiny(model, tmp_path / "out" / "bundle")
    assert list((tmp_path / "out").iterdir()) == []


def test_full_disk(tiny_model: Path, tmp_path: Path) -> None:
    """A limit on file size stands for a full disk: writes fail half-way in the same way."""
    code = (
        "import resource, signal, sys; from pathlib import Path;"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000));"
        "from edgellm.export import export; from edgellm import ExportError\n"
        "try: export(Path(sys.argv[1]), Path(sys.argv[2]), name='x', source='x')\n"
        "except ExportError as error: print(error)"
    )
    out = tmp_path / "out" / "bundle"
    found = subprocess.run(
        [sys.executable, "-c", code, str(tiny_model), str(out)], capture_output=True, text=True
    )
    assert "disk is full" in found.stdout, found.stderr
    assert list(out.parent.iterdir()) == []


def test_unwritable_folder(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ExportError, match="file"):
        export_tiny(tiny_model, tmp_path / "file" / "bundle")


@pytest.mark.slow
def test_two_processes_export_once(tiny_model: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from edgellm.export import export;"
        "seen = [];"
        "export(Path(sys.argv[1]), Path(sys.argv[2]), name='x', source='x',"
        " precisions=['packed'], progress=lambda *a: seen.append(a)); print(len(seen))"
    )
    command = [sys.executable, "-c", code, str(tiny_model), str(tmp_path / "bundle")]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    steps = sorted(int(p.communicate()[0]) for p in processes)
    assert [p.returncode for p in processes] == [0, 0]
    assert steps[0] == 0
    assert steps[1] > 0
    open_bundle(tmp_path / "bundle", verify=True)


@pytest.mark.slow
def test_killed_export_leaves_no_bundle(tiny_model: Path, tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path; from edgellm.export import export\n"
        "def kill(progress):\n"
        "    if progress.done == 5: os.kill(os.getpid(), signal.SIGKILL)\n"
        "export(Path(sys.argv[1]), Path(sys.argv[2]), name='x', source='x', progress=kill)"
    )
    out = tmp_path / "bundle"
    killed = subprocess.run([sys.executable, "-c", code, str(tiny_model), str(out)])
    assert killed.returncode == -signal.SIGKILL
    assert not out.exists()
    export(tiny_model, out, name="x", source="x", precisions=["packed"])
    open_bundle(out, verify=True)
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.slow
def test_default_model_exports_within_its_budget(smollm2_gguf: Path, tmp_path: Path) -> None:
    """Under 1.5 GB of memory; what can be taken over exactly is."""
    code = (
        "import sys; from pathlib import Path; from edgellm.export import export;"
        "from edgellm.machine import peak_memory_bytes;"
        "b = export(Path(sys.argv[1]), Path(sys.argv[2]), name='x', source='x');"
        "print(b.manifest.precisions['int4'].import_report['exact_tensors'],"
        " peak_memory_bytes())"
    )
    found = subprocess.run(
        [sys.executable, "-c", code, str(smollm2_gguf), str(tmp_path / "bundle")],
        capture_output=True,
        text=True,
        check=True,
    )
    exact, peak = map(int, found.stdout.split())
    assert exact == 210
    assert peak < 1.5e9
    shutil.rmtree(tmp_path / "bundle")


@pytest.mark.parametrize(("change", "again"), [(-1, True), (0, False), (1, False)])
def test_bundle_of_an_earlier_format_is_made_again(
    tiny_model: Path, edgellm_home: Path, change: int, again: bool
) -> None:
    path = prepare(str(tiny_model), precisions=("f32",)).path / MANIFEST
    manifest = json.loads(path.read_text())
    manifest["format_version"] += change
    manifest["name"] = "before"
    path.write_text(json.dumps(manifest))
    if change > 0:
        with pytest.raises(BundleError, match="this edgellm reads format"):
            prepare(str(tiny_model), precisions=("f32",))
    else:
        name = prepare(str(tiny_model), precisions=("f32",)).manifest.name
        assert (name != "before") == again
