"""What people are told of how weights came in."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from edgellm import BundleError
from edgellm.export.weight_reader import ImportReport
from edgellm.graphs.checkpoint import open_checkpoint
from edgellm.llm import load
from edgellm.store.bundle import Bundle, open_bundle
from edgellm.store.manifest import MANIFEST, ImportSummary, imported, rounding_notes


@pytest.fixture(scope="module")
def bundle(export_static: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    out = tmp_path_factory.mktemp("report") / "bundle"
    precisions = ("f32", "f16", "w8a8", "int4", "packed")
    return open_bundle(export_static(out, precisions=precisions))


def report_of(*rows: tuple[str, str, str, float | None]) -> ImportSummary:
    report = ImportReport()
    for row in rows:
        report.took(*row)
    return ImportSummary.of(json.loads(json.dumps(report.to_json())))


def test_one_line() -> None:
    found = report_of(
        ("layers.0.q", "Q4_0", "int4", None),
        ("layers.0.k", "Q6_K", "int8", 0.001),
        ("layers.3.down", "Q6_K", "int8", 0.005),
        ("layers.3.up", "Q6_K", "int4", 0.0),
    )
    assert str(found) == (
        "2 of 4 tensors as in the file, 2 rounded again (largest error 0.5 % in layers.3.down)"
    )
    assert found.details() == (
        f"{found}, mean error 0.3 %: 1 Q4_0 as int4, 1 Q6_K as int4, 2 Q6_K as int8"
    )
    assert found.storage == {"Q4_0": 1, "Q6_K": 3}
    assert found.kinds == {"int4": 2, "int8": 2}


def test_nothing_rounded() -> None:
    found = report_of(("head", "F32", "f32", None))
    assert found.details() == "all 1 tensors as in the file: 1 F32 as f32"


def test_two_reports_as_one() -> None:
    head = report_of(("head", "F16", "int8", 0.02), ("embedding", "F32", "f32", None))
    rest = report_of(("layers.0.q", "F16", "int4", 0.08))
    for found in (head.joined(rest), rest.joined(head)):
        assert (found.exact_tensors, found.requantized_tensors) == (1, 2)
        assert found.mean_relative_error == pytest.approx(0.05)
        assert (found.worst_tensor, found.worst_relative_error) == ("layers.0.q", 0.08)
        assert found.taken == {"F16": {"int4": 1, "int8": 1}, "F32": {"f32": 1}}


def test_each_precision(bundle: Bundle) -> None:
    """Two layers of seven matrices, embedding and head; w8a8 has Q and K as one."""
    kinds = {name: imported(bundle.manifest, name).kinds for name in bundle.manifest.precisions}
    assert kinds == {
        "f32": {"f32": 16},
        "f16": {"f16": 14, "int8_symmetric": 2},
        "w8a8": {"int8": 2 * 5, "int16": 2, "int8_symmetric": 2},
        "int4": {"int8_symmetric": 16},
        "packed": {"int8_symmetric": 16},
    }
    errors = {
        n: imported(bundle.manifest, n).worst_relative_error for n in bundle.manifest.precisions
    }
    assert errors["f32"] == 0 < errors["f16"] <= errors["packed"] <= errors["w8a8"] < 0.02
    assert errors["int4"] == errors["packed"]
    assert imported(bundle.manifest, "packed").storage == {"F32": 16}


def test_errors_are_those_of_what_was_written(bundle: Bundle) -> None:
    from edgellm.kernels.quantized import dequantize
    from edgellm.quantize.weights import quantize_groups

    checkpoint = open_checkpoint(Path(bundle.manifest.source))
    summary = imported(bundle.manifest, "packed")
    exact = checkpoint.tensor(str(summary.worst_tensor)).float32()
    rounded = dequantize(quantize_groups(exact))
    error = np.linalg.norm(rounded - exact) / np.linalg.norm(exact)
    assert summary.worst_relative_error == pytest.approx(error, rel=1e-5)


def test_halves_are_exact_in_halves(
    export_static: Callable[..., Path], make_model: Callable[..., Path], tmp_path: Path
) -> None:
    model = make_model(dtype=torch.float16)
    path = export_static(tmp_path / "bundle", model=model, precisions=("f16",))
    found = imported(open_bundle(path).manifest, "f16")
    assert (found.exact_tensors, found.requantized_tensors) == (14, 2)
    assert found.taken == {"F16": {"f16": 14, "int8_symmetric": 2}}


def test_notes_name_the_precision_where_there_are_two(bundle: Bundle) -> None:
    (note,) = rounding_notes(bundle.manifest, {"f32"} | {"packed"})
    assert note.startswith("weights of packed: 0 of 16 tensors as in the file, 16 rounded again")
    (note,) = rounding_notes(bundle.manifest, {"packed"})
    assert note.startswith("weights: 0 of 16 ")
    assert list(rounding_notes(bundle.manifest, {"f32"})) == []


def test_loading_says_it(bundle: Bundle, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "edgellm")
    load(str(bundle.path), prefill="cpu", precision="f32", decode="reference")
    assert caplog.records == []
    load(str(bundle.path), prefill="cpu", precision="f32", decode="portable")
    (record,) = caplog.records
    assert record.getMessage().startswith("tiny: weights of int4: 0 of 16 tensors as in")


def test_the_commands_say_it(bundle: Bundle, cli: Callable[..., Any]) -> None:
    flags = ("--prefill", "cpu", "--precision", "f32", "--decode", "portable")
    found = cli("run", str(bundle.path), "-p", "Hello", "--raw", "-n", "2", "--stats", *flags)
    *_, note, stats = found.stderr.splitlines()
    assert note.startswith("[ weights of int4: 0 of 16 tensors as in the file, 16 rounded again")
    assert stats.startswith("[ prompt: ")
    shown = cli("show", str(bundle.path)).stdout
    (line,) = [line for line in shown.splitlines() if "F32 as f32" in line]
    assert line.split(maxsplit=1) == ["weights", "all 16 tensors as in the file: 16 F32 as f32"]
    assert "mean error" in shown
    assert "16 F32 as int8_symmetric" in shown


@pytest.mark.parametrize(
    ("key", "value"),
    [("exact_tensors", "many"), ("worst_relative_error", None), ("taken", {"F32": 3}), ("x", 1)],
)
def test_a_report_that_is_none(bundle: Bundle, tmp_path: Path, key: str, value: object) -> None:
    manifest = json.loads((bundle.path / MANIFEST).read_text())
    manifest["precisions"]["f32"]["import_report"][key] = value
    for file in bundle.path.rglob("*"):
        if file.is_file() and file.name != MANIFEST:
            copy = tmp_path / file.relative_to(bundle.path)
            copy.parent.mkdir(exist_ok=True)
            copy.hardlink_to(file)
    (tmp_path / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(BundleError, match=f"f32: import_report.*{key}"):
        open_bundle(tmp_path)
