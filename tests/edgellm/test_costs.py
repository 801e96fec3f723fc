from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from edgellm import costs
from edgellm.bundle import COSTS, Bundle, open_bundle
from edgellm.llm import load
from edgellm.planner import Costs
from edgellm.prefill import Hooks


@pytest.fixture
def folder(tiny_model: Path, tmp_path: Path) -> str:
    from edgellm.export import export

    export(tiny_model, tmp_path / "bundle", name="tiny", source=str(tiny_model))
    return str(tmp_path / "bundle")


def test_measured_once(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    load(folder, prefill="cpu")
    known = json.loads((Path(folder) / COSTS).read_text())
    (values,) = known.values()
    assert set(values["chunks"]) == {"32", "128"}
    assert all(seconds > 0 for seconds in values["chunks"].values())
    monkeypatch.setattr(costs, "measure", lambda *_: pytest.fail("measured again"))
    load(folder, prefill="cpu")
    assert open_bundle(Path(folder), verify=True)


def test_other_threads_or_decoders_are_measured_again(folder: str) -> None:
    load(folder, prefill="cpu")
    load(folder, prefill="cpu", decode="portable")
    known = json.loads((Path(folder) / COSTS).read_text())
    assert len(known) == (1 if load(folder).engine.decoder.name == "portable" else 2)


@pytest.mark.parametrize("content", ["", "[]", "{", "{}"])
def test_damaged_costs_are_measured_again(folder: str, content: str) -> None:
    (Path(folder) / COSTS).write_text(content)
    load(folder, prefill="cpu")
    assert json.loads((Path(folder) / COSTS).read_text())


@pytest.mark.parametrize("damage", [None, {}, {"token": "x"}, {"token": float("nan")}])
def test_damaged_values_are_measured_again(folder: str, damage: dict[str, Any] | None) -> None:
    load(folder, prefill="cpu")
    path = Path(folder) / COSTS
    ((key, values),) = json.loads(path.read_text()).items()
    path.write_text(json.dumps({key: damage and {**values, **damage}}))
    load(folder, prefill="cpu")
    assert json.loads(path.read_text())[key]["token"] >= 0


def test_the_plan_is_followed(smollm2: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tail in the native step and one in a padded chunk continue a text alike."""
    engine = load(str(smollm2.path), prefill="cpu").engine
    if engine.decoder.name != "native":
        pytest.skip("installed without a compiler")
    tokens = engine.tokenizer.encode("The quick brown fox jumps over the lazy dog. " * 16)[:140]
    found = []
    for planned in (Costs({128: 1.0}, 0.1, 0.01), Costs({128: 1.0})):
        monkeypatch.setattr(engine.prefill, "costs", planned)
        sequence = engine.cache.sequence()
        seen: list[tuple[str, int]] = []
        logits = engine.prefill.run(
            tokens, sequence, Hooks(on_place=lambda *place, seen=seen: seen.append(place))
        )
        assert seen == [("cpu", 128), ("native" if planned.call else "cpu", 12)]
        assert len(sequence) == 140
        found.append(int(logits.argmax()))
        sequence.truncate(0)
    assert found[0] == found[1]
