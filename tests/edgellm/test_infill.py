"""Infill with a small model that was trained for it, and what ends an answer."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from waiting import Clock

from edgellm.errors import OptionError, UnsupportedModelError
from edgellm.generation import BatchRequest, Prompt
from edgellm.generation_options import GenerationOptions
from edgellm.infill import Gap, infill_tokens
from edgellm.llm import LLM, load

MODELS = Path(__file__).parents[1] / "models"
# Exact matches of HF transformers in float32 on these cases, of 300.
REFERENCE = 299

Case = dict[str, str]


@pytest.fixture(scope="module")
def model() -> Path:
    """4 M parameters, Qwen2's architecture and infill tokens."""
    return MODELS / "tiny-fim.gguf"


@pytest.fixture(scope="module")
def tiny_fim(model: Path) -> LLM:
    return load(str(model))


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    command = [sys.executable, MODELS / "gaps.py", "300", "0"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True)
    return [json.loads(line) for line in printed.stdout.splitlines()]


def exact(llm: LLM, cases: list[Case]) -> int:
    gaps = [Gap(prefix=case["prefix"], suffix=case["suffix"]) for case in cases]
    answers = llm.batch(gaps, max_tokens=32, temperature=0)
    return sum(each.result().text == cases[each.index]["middle"] for each in answers)


def test_gaps_and_other_prompts_in_one_batch(tiny_fim: LLM, cases: list[Case]) -> None:
    gaps: list[Prompt | BatchRequest] = [
        Gap(prefix=case["prefix"], suffix=case["suffix"]) for case in cases[:5]
    ]
    greedy = GenerationOptions(temperature=0, max_tokens=3)
    answers = tiny_fim.batch([*gaps, BatchRequest(prompt="def", options=greedy)], max_tokens=32,
                             temperature=0)  # fmt: skip
    texts = {answer.index: answer.result().text for answer in answers}
    for i, case in enumerate(cases[:5]):
        assert texts[i] == tiny_fim.infill(case["prefix"], case["suffix"], max_tokens=32).text
    assert texts[5] == tiny_fim.generate("def", options=greedy).text


@pytest.mark.slow
def test_as_many_gaps_as_the_reference_fills(tiny_fim: LLM, cases: list[Case]) -> None:
    assert exact(tiny_fim, cases[:100]) >= 98
    without_suffix = [{**case, "suffix": ""} for case in cases[:100]]
    assert exact(tiny_fim, without_suffix) < 10


@pytest.mark.parametrize("options", [{"prefill": "cpu", "precision": "f32", "decode": "reference"}])
def test_float_graphs_fill_them_too(model: Path, cases: list[Case], options: dict) -> None:
    assert exact(load(str(model), **options), cases[:30]) >= 28


def test_the_tokens_are_the_family_s(tiny_fim: LLM) -> None:
    from edgellm.infill import infill_tokens
    from edgellm.text.fim import Gap

    engine = tiny_fim.engine
    gap = Gap(prefix="x = <|fim_middle|>", suffix=" + 1\n")
    ids = infill_tokens(engine.tokenizer, gap, model="m")
    vocabulary = engine.tokenizer.vocabulary
    assert ids[0] == vocabulary["<|fim_prefix|>"]
    assert ids[-1] == vocabulary["<|fim_middle|>"]
    assert ids.count(vocabulary["<|fim_middle|>"]) == 1
    assert engine.tokenizer.decode(ids) == gap.prefix + gap.suffix


def test_only_what_changed_is_computed(tiny_fim: LLM) -> None:
    """Suffix first: someone types before it, and it stays in the cache."""
    prefix, suffix = "def add(left, right):\n    total = ", "\n    return total\n" * 20
    first = tiny_fim.infill(prefix, suffix, order="spm", max_tokens=1)
    for typed in ("l", "le", "lef"):
        again = tiny_fim.infill(prefix + typed, suffix, order="spm", max_tokens=1)
        assert again.stats.cached_tokens >= first.stats.prompt_tokens - 4
    psm = tiny_fim.infill(prefix + "left", suffix, max_tokens=1)
    assert psm.stats.cached_tokens < 30


def test_a_session_keeps_the_suffix_in_any_order(model: Path) -> None:
    llm = load(str(model), kv_format="f32")
    code = "def add(left, right):\n    total = ", "\n    return total\n" * 20
    with llm.session() as session:
        llm.infill(*code, session=session, max_tokens=1)
        for typed in ("l", "le", "left + "):
            found = llm.infill(code[0] + typed, code[1], session=session, max_tokens=4)
            assert session.composed is not None
            assert session.composed.computed_tokens < 40
            assert session.composed.copied_tokens > 50
            plain = llm.infill(code[0] + typed, code[1], max_tokens=4)
            assert found.text == plain.text
            gap = Gap(prefix=code[0] + typed, suffix=code[1])
            assert list(session.tokens) == infill_tokens(llm.engine.tokenizer, gap, model=llm.name)
        stale = llm.stream_infill(*code, session=session, max_tokens=9)
        next(stale)
        newer = llm.stream_infill(code[0] + "left", code[1], session=session, max_tokens=9)
        next(newer)
        stale.close()
        text = session.tokens
        assert [*newer][-1].finish_reason
        assert session.tokens == text
        cancel = threading.Event()
        cancel.set()
        ended = llm.infill(code[0] + "right", code[1], session=session, cancel=cancel)
        assert ended.finish_reason == "cancelled"
        again = llm.infill(code[0] + "right", code[1], session=session, max_tokens=4)
        assert session.composed is not None
        assert session.composed.copied_tokens > 50
        assert again.text == llm.infill(code[0] + "right", code[1], max_tokens=4).text
    for wrong, words in (
        ({"session": 1}, "an edgellm.Session is expected"),
        ({"session": load(str(model)).session()}, "of another model"),
        ({"session": llm.session(), "recompute": 2}, "`recompute` is 2"),
    ):
        with pytest.raises(OptionError, match=words):
            llm.infill(*code, **wrong)


def test_single_line_and_indentation(tiny_fim: LLM) -> None:
    whole = tiny_fim.infill("def f(a):\n    b = ", "\n\n\nprint(f(1))\n", max_tokens=40)
    line = tiny_fim.infill("def f(a):\n    b = ", "\n\n\nprint(f(1))\n", single_line=True)
    assert "\n" not in line.text
    assert whole.text.startswith(line.text)


def test_time_limit(tiny_fim: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that goes on by a millisecond with each look at it."""
    clock = Clock(per_call=0.001)
    for module in ("request", "answer"):
        monkeypatch.setattr(f"edgellm.engine.{module}.time", clock)
    found = tiny_fim.infill("a = ", "", time_limit_ms=30, ignore_eos=True)
    assert found.finish_reason == "time"
    assert 0 < len(found.tokens) < 2000
    long = "value = left + right\n" * 150
    cut = tiny_fim.infill(long, "", time_limit_ms=1)
    assert (cut.finish_reason, cut.text) == ("time", "")
    assert tiny_fim.infill(long, "", max_tokens=2).finish_reason == "length"


def test_bad_order(tiny_fim: LLM) -> None:
    with pytest.raises(OptionError, match="allowed are psm, spm"):
        tiny_fim.infill("a", "b", order="pms")


def test_a_model_without_the_tokens(llm: LLM) -> None:
    with pytest.raises(UnsupportedModelError, match="no fill-in-the-middle tokens"):
        llm.infill("def f(", "):")
    found = llm.infill("The capital of ", " is Paris.", template=True, max_tokens=3)
    assert found.stats.generation_tokens == 3


Cli = Callable[..., subprocess.CompletedProcess[str]]


def test_command(cli: Cli, model: Path, cases: list[Case], tmp_path: Path) -> None:
    """Exactly the middle goes to stdout, without a line end of its own."""
    right = 0
    for i, case in enumerate(cases[:6]):
        command = ("infill", str(model)) if i % 2 else ("run", str(model))
        found = cli(*command, "--prefix", case["prefix"], "--suffix", case["suffix"], "-n", "32")
        assert found.returncode == 0, found.stderr
        right += found.stdout == case["middle"]
    assert right >= 5
    for name in ("prefix", "suffix"):
        (tmp_path / name).write_text(cases[0][name])
    files = ("--prefix-file", str(tmp_path / "prefix"), "--suffix-file", str(tmp_path / "suffix"))
    found = cli("infill", str(model), *files, "--json")
    answer = json.loads(found.stdout)
    assert answer["text"] == cases[0]["middle"]
    assert answer["prefill"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "nothing stands around the gap"),
        (("--prefix", "a", "--prefix-file", "b"), "prefix is given twice"),
        (("--prefix", "a", "--spm", "--fim-order", "psm"), "different orders"),
        (("--suffix-file", "nowhere"), "nowhere"),
    ],
)
def test_wrong_usage(cli: Cli, arguments: tuple[str, ...], words: str) -> None:
    found = cli("infill", "smollm2-135m-instruct", *arguments)
    assert found.returncode == 2
    assert words in found.stderr
    assert found.stdout == ""


def test_command_without_the_tokens(cli: Cli) -> None:
    found = cli("infill", "--prefix", "a", "--suffix", "b")
    assert found.returncode == 1
    assert "--template" in found.stderr
