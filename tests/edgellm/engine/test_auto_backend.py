from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from inspection import play_provider, set_costs
from layered_checks import PROMPTS, in_company

from edgellm.backends import int8_support, selection
from edgellm.backends.providers import CPU
from edgellm.engine import auto_backend
from edgellm.engine.auto_backend import auto_choice, prepare_for
from edgellm.export import export
from edgellm.kernels.native import library
from edgellm.llm import LLM, load
from edgellm.machine import usable_cores
from edgellm.options import EngineOptions
from edgellm.store.bundle import COSTS, open_bundle

NATIVE = EngineOptions(decode="native") if library() else EngineOptions()


@pytest.fixture(scope="module")
def measured_once(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if library() is None:
        pytest.skip("installed without a compiler")
    out = tmp_path_factory.mktemp("measured") / "bundle"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(int8_support, "int8_products_are_exact", lambda: True)
        export(tiny_model, out, name="tiny", source=str(tiny_model))
        load(str(out), prefill="cpu", decode="native")
    return out


@pytest.fixture
def measured(measured_once: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A bundle in which costs of the CPU provider have been measured, in w8a8 on any processor."""
    monkeypatch.setattr(int8_support, "int8_products_are_exact", lambda: True)
    return Path(shutil.copytree(measured_once, tmp_path / "bundle"))


@pytest.fixture
def folder(measured: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same, and the CPU provider plays an accelerator: there is no other one to test with."""
    monkeypatch.setattr(auto_backend, "CPU", "no provider")
    return measured


def kept(folder: Path) -> dict[str, dict[str, object]]:
    found: dict[str, dict[str, object]] = json.loads((folder / COSTS).read_text())["measured"]
    return found


def keep(folder: Path, values: dict[str, dict[str, object]]) -> None:
    (folder / COSTS).write_text(json.dumps({"format": 2, "measured": values}))


def rewrite(
    folder: Path, *, chunk: float, token: float, prompt: list[object] | None = None
) -> None:
    """Pretend that 32 rows of a chunk, and a token in the native step, took so long."""
    ((key, values),) = kept(folder).items()
    sizes = [int(size) for size in values["chunks"]]  # type: ignore[attr-defined]
    chunks = {str(size): [chunk * size / 32] for size in sizes}
    step = {"8": [8 * token], "128": [128 * token]}
    keep(folder, {key: {"chunks": chunks, "step": step, "prompt": prompt}})


def native(folder: Path, threads: int | None = None) -> LLM:
    """What `auto` comes to where decode is native, also on a machine with a GPU."""
    return load(str(folder), decode="native", threads=threads)


def places(llm: LLM, tokens: int) -> dict[str, int]:
    with llm.session() as session:
        session.append([(i + tokens) % 50 for i in range(tokens)])
        return session.generate(max_tokens=1, temperature=0).stats.prefill


def test_a_faster_provider_takes_long_prompts(folder: Path) -> None:
    rewrite(folder, chunk=0.010, token=0.001)
    llm = native(folder)
    assert llm.engine.options.prefill == "cpu"
    assert places(llm, 8) == {"native": 8}
    assert places(llm, 256) == {"cpu": 256}


def test_the_cpu_provider_is_no_accelerator(measured: Path) -> None:
    """However fast it seems."""
    assert CPU == auto_backend.CPU
    rewrite(measured, chunk=1e-5, token=1.0, prompt=[700, [0.01], [9.0]])
    assert native(measured).engine.options.prefill == "auto"
    choice = auto_choice(open_bundle(measured), NATIVE)
    assert choice.prefill == "native"
    assert "no accelerator was measured" in choice.reason


def test_a_whole_chunk_stays_native_where_that_is_cheaper(folder: Path) -> None:
    rewrite(folder, chunk=0.025, token=0.001)
    assert places(native(folder), 20) == {"native": 20}
    assert places(load(str(folder), prefill="cpu", decode="native"), 20) == {"native": 20}


@pytest.mark.parametrize(
    ("chunk", "prompt", "expected", "words"),
    [
        (0.032 / 1.21, None, "cpu", "826 us on cpu"),
        (0.032 / 1.19, None, "native", "1.2 times as fast"),
        (1.0, None, "native", "1.2 times as fast"),
        # measured as a whole, it was slower than its chunks and steps let expect
        (0.010, [700, [1.03, 1.05], [0.46, 0.47]], "native", "700 tokens took 1.03 s on cpu"),
        (0.010, [700, [0.40, 0.45], [0.50, 0.55]], "native", "0.5 s on native"),
        (0.031, [700, [0.20, 0.21], [0.50, 0.55]], "cpu", "0.2 s on cpu and 0.5 s on native"),
    ],
)
def test_what_was_measured_decides(
    folder: Path, chunk: float, prompt: list[object] | None, expected: str, words: str
) -> None:
    rewrite(folder, chunk=chunk, token=0.001, prompt=prompt)
    choice = auto_choice(open_bundle(folder), NATIVE)
    assert choice.prefill == expected
    assert words in choice.reason
    assert places(native(folder), 256) == {expected: 256}


def test_costs_of_other_threads_or_another_version_do_not_count(folder: Path) -> None:
    rewrite(folder, chunk=0.010, token=0.001)
    other = 1 if usable_cores() > 1 else 2
    assert places(native(folder, threads=other), 256) == {"native": 256}
    keep(folder, {f"{key} old": values for key, values in kept(folder).items()})
    assert places(native(folder), 256) == {"native": 256}


@pytest.mark.parametrize("provider", ["qnn", "cuda", "nothing"])
def test_a_provider_that_is_gone_is_not_chosen(folder: Path, provider: str) -> None:
    rewrite(folder, chunk=0.010, token=0.001)
    ((key, values),) = kept(folder).items()
    keep(folder, {key.replace("cpu", provider, 1): values})
    assert places(native(folder), 256) == {"native": 256}


def test_where_the_native_kernels_do_not_run(folder: Path) -> None:
    choice = auto_choice(open_bundle(folder), EngineOptions(decode="portable"))
    assert choice.prefill == "cpu"
    assert "no part in decode" in choice.reason


def test_layered_prompts_in_chunks_where_those_are_faster(folder: Path) -> None:
    rewrite(folder, chunk=0.010, token=0.001)
    options = {"decode": "native", "cache_size": 4096, "ctx_size": 1024}
    llm = load(str(folder), scheduling="layered", **options)
    assert llm.engine.options.prefill == "cpu"
    set_costs(llm, 2e-3)
    answer = in_company(llm, PROMPTS[1])
    assert answer.stats.scheduling == "layered"
    assert answer.stats.prefill.keys() <= {"cpu", "native"}
    assert answer.stats.prefill["cpu"] > 800
    rested = {task.name for task in answer.stats.tasks}
    assert {"rest", "enter"} <= rested


def test_no_layered_prompts_on_a_gpu(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rewrite(folder, chunk=0.010, token=0.001)
    bundle = open_bundle(folder)
    play_provider(monkeypatch, "cuda", like="cpu", bundle=bundle, options=NATIVE)
    choice = auto_choice(bundle, replace(NATIVE, scheduling="layered"))
    assert choice.prefill == "native"
    assert "no prompt is computed on cuda" in choice.reason


def test_a_gpu_is_not_chosen_for_what_none_has_computed(
    measured: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selection, "_usual_decode", lambda: "triton")
    for module in (selection, auto_backend):
        monkeypatch.setattr(module, "why_untried", lambda *_: "it has new parts")
    _, options, note = prepare_for(str(measured), EngineOptions())
    assert (options.decode, note) == ("native", "decode native, not triton: it has new parts")
    assert selection.select(EngineOptions(), open_bundle(measured).config).decode == "native"
