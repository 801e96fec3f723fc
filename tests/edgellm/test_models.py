"""The models in EDGELLM_HOME and what this machine runs them on, from Python."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from edgellm import BundleError, SourceError, load
from edgellm.backends.providers import ProviderStatus
from edgellm.devices import devices
from edgellm.kernels.gpu import device
from edgellm.kernels.native import isa
from edgellm.models import delete_model, describe, is_here, list_models, pull

pytestmark = pytest.mark.usefixtures("edgellm_home")


def test_a_model_from_pull_to_delete(tiny_model: Path) -> None:
    assert list_models() == []
    bundle = pull(str(tiny_model))
    (model,) = list_models()
    assert (model.folder, model.bytes, model.damage) == (bundle.path, bundle.bytes, "")
    assert model.precisions == tuple(bundle.manifest.precisions)
    assert is_here(str(tiny_model))
    described = describe(str(tiny_model), verify=True)
    assert described.bundle.path == bundle.path
    assert described.memory.total > described.memory.weights > 0
    assert {use for precision in described.precisions for use in precision.uses} == {
        "prefill",
        "decode",
    }
    assert all(0 < precision.bytes < bundle.bytes for precision in described.precisions)
    assert delete_model(str(tiny_model)) == [str(bundle.path)]
    assert list_models() == []
    with pytest.raises(SourceError, match="no exported model"):
        delete_model(str(tiny_model))


def test_one_precision_is_deleted(tiny_model: Path) -> None:
    for decode in ("portable", "reference"):
        load(str(tiny_model), prefill="cpu", precision="f32", decode=decode)
    assert set(list_models()[0].precisions) == {"f32", "int4"}
    (deleted,) = delete_model(str(tiny_model), precisions=["int4"])
    assert deleted.startswith("int4 of ")
    assert list_models()[0].precisions == ("f32",)


def test_damage_is_told(tiny_model: Path) -> None:
    path = pull(str(tiny_model)).path
    weights = max((p for p in path.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(BundleError):
        describe(str(path), verify=True)
    weights.write_bytes(content[:-1])
    (model,) = list_models()
    assert model.folder == path
    assert weights.name in model.damage
    assert not model.name


def test_what_a_loaded_model_says_of_itself(tiny_model: Path, tmp_path: Path) -> None:
    llm = load(str(tiny_model), prefill="cpu", precision="f32", decode="portable", ctx_size=256)
    assert llm.prefill.startswith("cpu")
    assert llm.prefill.endswith("f32")
    assert llm.decode == "portable int4"
    assert (llm.ctx_size, llm.options.kv_format, llm.name) == (256, "int8", str(tiny_model))
    answer = llm.generate([5, 9, 14] * 20, max_tokens=1)
    answer.stats.write_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())
    assert len(events["traceEvents"]) > len(answer.stats.tasks) > 0


def test_devices_print_errors_of_libraries_alone(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def probe() -> list[ProviderStatus]:
        os.write(2, b" # LIBNATIVE: No alternate configuration present in x - using y.\nlibX: no\n")
        return []

    monkeypatch.setattr("edgellm.devices.statuses", probe)
    assert devices().providers == ()
    assert capfd.readouterr() == ("", "libX: no\n")


def test_devices() -> None:
    found = devices()
    cpu = next(status for status in found.providers if status.name == "cpu")
    assert cpu.usable
    assert found.native == isa()
    assert bool(found.gpu) == (device.why_not() is None) != bool(found.gpu_reason)
