from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgellm.backends.chunked_backend import ChunkedBackend
from edgellm.backends.planner import Costs, MeasuredPrompt
from edgellm.backends.registry import STEPS
from edgellm.engine import costs
from edgellm.engine.costs import from_json
from edgellm.export import export
from edgellm.llm import LLM, load
from edgellm.measure.explain import keep_prompt
from edgellm.store.bundle import COSTS, Bundle, open_bundle


@pytest.fixture(scope="module")
def unmeasured(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("costs") / "bundle"
    # w8a8 or, where the processor's int8 products saturate, f32
    precisions = ("packed", "int4", "w8a8", "f32")
    export(tiny_model, out, name="tiny", source=str(tiny_model), precisions=precisions)
    return out


@pytest.fixture
def folder(unmeasured: Path, tmp_path: Path) -> str:
    return str(shutil.copytree(unmeasured, tmp_path / "bundle"))


def kept(folder: str) -> dict[str, Any]:
    measured: dict[str, Any] = json.loads((Path(folder) / COSTS).read_text())["measured"]
    return measured


def test_measured_once(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = load(folder, prefill="cpu").engine
    (values,) = kept(folder).values()
    assert set(values["chunks"]) == {"32", "128"}
    assert set(values["step"]) == ({"8", "128"} if engine.decoder.name in STEPS else set())
    for samples in (*values["chunks"].values(), *values["step"].values()):
        assert 1 <= len(samples) <= 5
        assert min(samples) > 0
    monkeypatch.setattr(costs, "measure", lambda *_: pytest.fail("measured again"))
    load(folder, prefill="cpu")
    assert open_bundle(Path(folder), verify=True)


def test_measuring_leaves_no_prefix_behind(folder: str) -> None:
    assert load(folder, prefill="cpu").engine.cache.cached_prefix([0] * 200) == 0


def test_a_small_context_bounds_what_is_timed(folder: str) -> None:
    """Seconds are divided by the tokens that were computed, not by those that were meant."""
    engine = load(folder, prefill="cpu", ctx_size=20).engine
    (values,) = kept(folder).values()
    assert set(values["step"]) == ({"8", "20"} if engine.decoder.name in STEPS else set())


def test_other_decoders_are_measured_again(folder: str) -> None:
    load(folder, prefill="cpu")
    load(folder, prefill="cpu", decode="portable")
    assert len(kept(folder)) == (1 if load(folder).engine.decoder.name == "portable" else 2)


@pytest.mark.slow
def test_other_threads_are_measured_again(folder: str) -> None:
    """In processes of their own: the pool of one has one size."""
    code = "import sys, edgellm; edgellm.load(sys.argv[1], prefill='cpu', threads=int(sys.argv[2]))"
    for threads in ("1", "2"):
        subprocess.run([sys.executable, "-c", code, folder, threads], check=True)
    assert sorted(key.split(" | ")[2] for key in kept(folder)) == ["1", "2"]


def test_costs_of_an_earlier_format_are_not_used(folder: str) -> None:
    load(folder, prefill="cpu")
    (key,) = kept(folder)
    old = {key: {"chunks": {"32": 0.01, "128": 0.05}, "call": 0.0, "token": 4.48e-4}}
    for content in (old, {"format": 1, "measured": old}):
        (Path(folder) / COSTS).write_text(json.dumps(content))
        load(folder, prefill="cpu")
        assert "step" in kept(folder)[key]


def test_damaged_costs_are_measured_again(folder: str) -> None:
    for content in ("", "[]", "{", "{}", '{"format": 2, "measured": 3}', "[" * 100_000):
        (Path(folder) / COSTS).write_text(content)
        load(folder, prefill="cpu")
        assert kept(folder), content


def test_damaged_values_are_measured_again(folder: str) -> None:
    load(folder, prefill="cpu")
    ((key, values),) = kept(folder).items()
    damages: tuple[dict[str, Any] | None, ...] = (
        None,
        {},
        {"step": 1},
        {"step": {"x": [1.0]}},
        {"step": {"0": [1.0]}},
        {"step": {"8": []}},
        {"step": {"8": [float("nan")]}},
        {"chunks": {"32": [0.0], "128": [1.0]}},
        {"chunks": {"32": [1.0]}},
        {"prompt": 7},
        {"prompt": [7, [1.0], [-1.0]]},
    )
    for damage in damages:
        damaged = {key: damage and {**values, **damage}}
        (Path(folder) / COSTS).write_text(json.dumps({"format": 2, "measured": damaged}))
        load(folder, prefill="cpu")
        assert from_json(kept(folder)[key], (32, 128)) is not None, damage
        assert kept(folder)[key]["prompt"] is None


def test_the_longest_whole_prompt_is_kept(folder: str) -> None:
    engine = load(folder, prefill="cpu").engine
    assert isinstance(engine.prefill, ChunkedBackend)
    found = []
    for tokens, seconds in ((20, 9.0), (200, 1.0), (150, 9.0), (200, 2.0), (300, 3.0)):
        keep_prompt(engine, MeasuredPrompt(tokens, (seconds,), (0.5, 0.75)))
        (values,) = kept(folder).values()
        found.append(values["prompt"] and values["prompt"][:2])
    if engine.decoder.name not in STEPS:
        assert found == [None] * 5
        return
    assert found == [None, [200, [1.0]], [200, [1.0]], [200, [2.0]], [300, [3.0]]]
    again = load(folder, prefill="cpu").engine.prefill.costs
    assert replace(again, prompt=None) == engine.prefill.costs


@pytest.mark.slow
def test_the_plan_is_followed(
    smollm2_all: Bundle,
    monkeypatch: pytest.MonkeyPatch,
    logits_and_places: Callable[[LLM, list[int]], tuple[np.ndarray, dict[str, int]]],
) -> None:
    """A tail in the native step and one in a padded chunk continue a text alike."""
    llm = load(str(smollm2_all.path), prefill="cpu")
    engine = llm.engine
    if engine.decoder.name != "native":
        pytest.skip("installed without a compiler")
    tokens = engine.tokenizer.encode("The quick brown fox jumps over the lazy dog. " * 16)[:140]
    found = []
    for planned in (Costs({128: (1.0,)}, {1: (0.11,), 2: (0.12,)}), Costs({128: (1.0,)})):
        monkeypatch.setattr(engine.prefill, "costs", planned)
        logits, places = logits_and_places(llm, tokens)
        assert places == ({"cpu": 128, "native": 12} if planned.call else {"cpu": 140})
        found.append(int(logits.argmax()))
    assert found[0] == found[1]
