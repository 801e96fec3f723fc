"""Batches of rows, as Ray Data hands them to an actor; without Ray."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_adapters import pairs_of, write_peft

from edgellm.backends import thread_pool
from edgellm.errors import OptionError
from edgellm.kernels.native import library
from edgellm.llm import LLM, load
from edgellm.ray import BatchInference
from edgellm.store.bundle import Bundle

# ONNX Runtime's pool has a size already, that of fixture `pool`.
THREADS = 1 if library() is not None else thread_pool.start(None)


@pytest.fixture(scope="module")
def actor(tiny_model: Path) -> BatchInference:
    return BatchInference(
        str(tiny_model),
        threads=THREADS,
        generation={"max_tokens": 8, "seed": 4, "ignore_eos": True},
    )


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> LLM:
    return load(str(tiny_model))


def rows(*prompts: Any, name: str = "prompt") -> dict[str, np.ndarray[Any, Any]]:
    column = np.empty(len(prompts), dtype=object)
    column[:] = prompts
    return {name: column, "id": np.arange(len(prompts))}


def test_each_row_has_the_answer_that_it_has_alone(actor: BatchInference, llm: LLM) -> None:
    prompts = [f"the {i} best things " * (i + 1) for i in range(9)]
    out = actor(rows(*prompts))
    assert list(out) == [
        *("prompt", "id", "answer", "finish_reason", "prompt_tokens", "answer_tokens", "error")
    ]
    assert list(out["id"]) == list(range(9))
    assert set(out["error"]) == {""}
    for prompt, answer, count in zip(prompts, out["answer"], out["prompt_tokens"], strict=True):
        alone = llm.generate(prompt, max_tokens=8, seed=4, ignore_eos=True)
        assert count == alone.stats.prompt_tokens
        assert answer == alone.text or not llm.engine.decoder.exact_rows
    assert set(out["answer_tokens"]) == {8}


def test_a_row_that_fails_leaves_the_others_alone(actor: BatchInference) -> None:
    bad: list[Any] = ["x" * 5000, 7, [], [{"role": "user"}], ["hello"], None]
    out = actor(rows("good", *bad, "good"))
    assert out["answer"][0] == out["answer"][-1] != ""
    assert [bool(error) for error in out["error"]] == [False, *[True] * 6, False]
    assert "tokens" in out["error"][1]
    assert "a list of messages" in out["error"][2]
    assert "`role` and `content`" in out["error"][4]
    assert list(out["finish_reason"][1:-1]) == ["error"] * 6
    assert set(out["answer"][1:-1]) == {""}


def test_columns_have_the_names_that_one_gives_them(tiny_model: Path) -> None:
    actor = BatchInference(
        str(tiny_model),
        threads=THREADS,
        prompt="text",
        answer="reply",
        generation={"max_tokens": 2},
    )
    assert "reply" in actor(rows("hello", name="text"))
    with pytest.raises(OptionError, match="'prompt', 'id'"):
        actor(rows("hello"))
    assert len(actor(rows(name="text"))["reply"]) == 0


def test_rows_are_answered_with_an_adapter(tiny_model: Path, tmp_path: Path) -> None:
    folder = write_peft(tmp_path / "it", pairs_of(tiny_model, size=1.0))
    options: dict[str, Any] = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
    actor = BatchInference(
        str(tiny_model),
        threads=THREADS,
        adapters={"it": folder},
        generation={**options, "adapter": "it"},
    )
    with load(str(tiny_model), adapters={"it": folder}) as llm:
        expected = [llm.generate("ab", adapter=name, **options).text for name in ("it", None)]
    assert actor(rows("ab"))["answer"][0] == expected[0] != expected[1]


def test_conversations(smollm2: Bundle) -> None:
    actor = BatchInference(
        str(smollm2.path), threads=THREADS, generation={"max_tokens": 10, "temperature": 0}
    )
    chat = [{"role": "user", "content": "Name the capital of France."}]
    out = actor(rows(chat, np.array(chat, dtype=object)))
    assert "Paris" in out["answer"][0]
    assert out["answer"][0] == out["answer"][1]


def test_options_are_checked(tiny_model: Path) -> None:
    with pytest.raises(OptionError, match="max_tokens"):
        BatchInference(str(tiny_model), threads=THREADS, generation={"max_tokens": -7})
    with pytest.raises(OptionError, match="threads"):
        BatchInference(str(tiny_model), threads=0)
