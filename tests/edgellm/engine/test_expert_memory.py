"""`expert_memory`: the same answers, what they read, and limits that hold too little."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from breadth import one_in
from click.testing import CliRunner
from matrix import usable
from tiny_models import make, save_tokenizer

from edgellm import load
from edgellm.cli.main import edgellm
from edgellm.cli.output import stats_line
from edgellm.engine import memory
from edgellm.errors import OptionError
from edgellm.export import export
from edgellm.kernels.experts import ExpertUse
from edgellm.options import EngineOptions
from edgellm.results import Stats
from edgellm.store.bundle import Bundle

pytestmark = pytest.mark.skipif(not usable("C++"), reason="experts need the C++ kernels")

PROMPT = list(range(3, 120))
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 24, "ignore_eos": True}
# Three of five experts of 32 inner rows in each of four layers: int8 with a half for 32 inputs.
NEEDED = 4 * 3 * 3 * 32 * 64 * 34 // 32


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return exported("qwen3_moe", tmp_path_factory.mktemp("experts"))


def exported(name: str, folder: Path) -> Bundle:
    make(name, folder, vocab_size=320)
    save_tokenizer(folder)
    return export(
        folder, folder / "bundle", name="tiny", source=str(folder), precisions=("packed",)
    )


def test_answers_are_the_same(bundle: Bundle) -> None:
    path = str(bundle.path)
    with load(path, decode="native") as llm:
        expected = llm.generate(PROMPT, **GREEDY)
        assert expected.stats.experts is None
    with load(path, expert_memory=NEEDED + 7000) as llm:
        assert "experts" not in " ".join(llm.notes)
        found = llm.generate(PROMPT, **GREEDY)
        again = llm.generate(PROMPT, **GREEDY)
    assert found.tokens == again.tokens == expected.tokens
    for answer in (found, again):
        use = answer.stats.experts
        assert use is not None
        # each step goes through three experts or more of each layer
        assert use.hits + use.reads >= 2 * 4 * 3
        assert use.reads > 0
        assert use.bytes_read % use.reads == 0
        assert answer.stats.to_json()["experts"]["bytes_read"] == use.bytes_read


def test_a_limit_below_one_token_is_refused(bundle: Bundle) -> None:
    with pytest.raises(OptionError, match=rf"is {NEEDED - 1} bytes;.*take at least {NEEDED} "):
        load(str(bundle.path), expert_memory=NEEDED - 1)
    with load(str(bundle.path), expert_memory=NEEDED) as llm:
        assert llm.generate(PROMPT, **GREEDY).tokens


def test_the_estimate_has_the_limit(bundle: Bundle) -> None:
    with load(str(bundle.path)) as llm, load(str(bundle.path), expert_memory=NEEDED) as limited:
        left_out = llm.engine.memory.weights - limited.engine.memory.weights
    assert left_out == NEEDED // 3 * 5 - NEEDED


def test_windows_is_refused(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory.sys, "platform", "win32")
    with pytest.raises(OptionError, match="Windows does not take back"):
        load(str(bundle.path), expert_memory=NEEDED)


def test_a_model_without_experts_says_so(tmp_path: Path) -> None:
    path = str(exported("llama", tmp_path).path)
    with load(path, expert_memory=1 << 30) as llm:
        assert "`expert_memory` has no effect: the model has no experts" in llm.notes
        assert llm.generate(PROMPT, **GREEDY).stats.experts is None


@pytest.mark.parametrize("value", [0, -1, 1.5, True])
def test_other_values_are_refused(value: Any) -> None:
    with pytest.raises(OptionError, match="expert_memory"):
        EngineOptions(expert_memory=value)


@pytest.mark.parametrize(
    ("size", "code"), one_in(2, [("1M", 0), ("600KiB", 0), ("1 MB", 2), ("x", 2)])
)
def test_sizes_on_the_command_line(bundle: Bundle, size: str, code: int) -> None:
    arguments = ["bench", str(bundle.path), "-p", "16", "-n", "2", "-r", "1"]
    result = CliRunner().invoke(edgellm, [*arguments, "--expert-memory", size])
    assert result.exit_code == code, result.output
    assert ("% of their uses" in result.output) == (code == 0)
    assert ("write bytes, or a number with K, M or G" in result.output) == (code == 2)


def test_the_line_of_an_answer_says_it() -> None:
    use = ExpertUse(hits=3, reads=1, bytes_read=2_000_000)
    stats = Stats(0.0, 1, 0, 0.0, 1, 0.0, 0, {}, "packed", "native", 0)
    assert "experts" not in stats_line(stats, "stop")
    line = stats_line(replace(stats, experts=use), "stop")
    assert "| experts in memory: 75.0 %, 2 MB read |" in line
