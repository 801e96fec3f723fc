"""What callers pass: one typed error that names the parameter, and nothing reaches the kernels."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgellm import (
    BatchRequest,
    EdgeLLMError,
    GenerationOptions,
    Message,
    OptionError,
    SessionFileError,
)
from edgellm.cache.session_file import MAGIC
from edgellm.generation_options import GenerationArguments
from edgellm.llm import LLM, load
from edgellm.options import EngineArguments, EngineOptions

WRONG_TOKENS: list[Any] = [
    [320],
    [-1],
    [2**31],
    [10**9],
    [10**30],
    ["a"],
    [1.5],
    [None],
    [[1]],
    7,
    None,
    b"ab",
    np.array([3.5]),
]


@pytest.fixture(scope="module")
def tiny(tiny_model: Path) -> LLM:
    return load(str(tiny_model))


@pytest.mark.parametrize("tokens", WRONG_TOKENS, ids=repr)
def test_token_ids(tiny: LLM, tokens: Any) -> None:
    with tiny.session() as session:
        session.append([1, 2])
        for call in (session.append, session.replace):
            with pytest.raises(OptionError, match=r"`(text|tokens)`"):
                call(tokens)
        assert session.tokens == (1, 2)
    with pytest.raises(OptionError, match="`prompt`"):
        next(tiny.stream(tokens, max_tokens=1))


def test_right_token_ids(tiny: LLM) -> None:
    with tiny.session() as session:
        for tokens in ([0, 319], (5,), np.array([3, 4]), range(3), []):
            session.append(tokens)  # type: ignore[arg-type]
        assert session.tokens == (0, 319, 5, 3, 4, 0, 1, 2)


@pytest.mark.parametrize(
    "changes",
    [
        {"tokens": [10**9]},
        {"tokens": [-1, 2, 3]},
        {"tokens": "abc"},
        {"tokens": None},
        {"computed": 99},
        {"computed": -1},
        {"computed": "1"},
        {"exact": 99},
        {"model": 3},
        {"nonsense": 1},
    ],
    ids=str,
)
def test_session_files_with_a_fitting_checksum(
    tiny: LLM, tmp_path: Path, changes: dict[str, Any]
) -> None:
    path = tmp_path / "session"
    with tiny.session() as session:
        session.append([5, 6, 7, 8])
        session.generate(max_tokens=1, temperature=0)
        session.save(path)
    data = path.read_bytes()
    body = data[len(MAGIC) + 32 :]
    end = 4 + int.from_bytes(body[:4], "little")
    header = json.dumps({**json.loads(body[4:end]), **changes}).encode()
    body = len(header).to_bytes(4, "little") + header + body[end:]
    path.write_bytes(MAGIC + hashlib.sha256(body).digest() + body)
    with pytest.raises(SessionFileError, match=str(path)):
        tiny.load_session(path)


@pytest.mark.parametrize("header", [b"", b"{", b"[]", b"[" * 100_000, b"null", b"\xff"], ids=len)
def test_session_files_with_an_odd_header(tiny: LLM, tmp_path: Path, header: bytes) -> None:
    body = len(header).to_bytes(4, "little") + header
    path = tmp_path / "session"
    path.write_bytes(MAGIC + hashlib.sha256(body).digest() + body)
    with pytest.raises(SessionFileError, match="header is damaged"):
        tiny.load_session(path)


WRONG_OPTIONS: list[dict[str, Any]] = [
    {"stop": ""},
    {"stop": None},
    {"stop": [""]},
    {"stop": [3]},
    {"stop": {"a": 1}.keys()},  # as an iterator it would be used up before it is needed
    {"stop_tokens": "a"},
    {"stop_tokens": [-1]},
    {"top_k": "4"},
    {"top_k": 1.5},
    {"top_k": True},
    {"temperature": None},
    {"temperature": "0.5"},
    {"temperature": float("nan")},
    {"temperature": [1]},
    {"max_tokens": 1.5},
    {"max_tokens": -1},
    {"max_tokens": "1"},
    {"min_tokens": -1},
    {"min_tokens": None},
    {"seed": 2**64},
    {"seed": "x"},
    {"logit_bias": [1]},
    {"logit_bias": {"a": 1.0}},
    {"logit_bias": {5: float("inf")}},
    {"logit_bias": {5: None}},
    {"ignore_eos": 1},
    {"speculate": "yes"},
    {"context_policy": 3},
    {"repetition_limit": -1},
    {"time_limit_ms": 0},
    {"logprobs": 10**9},
]


@pytest.mark.parametrize("options", WRONG_OPTIONS, ids=str)
def test_sampling_options(tiny: LLM, options: dict[str, Any]) -> None:
    (name,) = options
    for call in (
        lambda: tiny.generate("a", **options),
        lambda: tiny.chat(**options),
        lambda: next(iter(tiny.stream_infill("a", "b", **options))),
    ):
        with pytest.raises(OptionError, match=f"`{name}`"):
            call()


@pytest.mark.parametrize(
    "options",
    [
        {"name": None},
        {"name": 3},
        {"ctx_size": "a"},
        {"ctx_size": 1.5},
        {"ctx_size": -1},
        {"cache_size": 0},
        {"threads": 2000},
        {"threads": "2"},
        {"kv_format": 8},
        {"decode": None},
        {"prefill": 5},
        {"schedule": "fast"},
        {"allow_fallback": "no"},
        {"provider_options": "a=b"},
        {"kv_cache_dir": 4},
        {"kv_cache_dir": ""},
        {"kv_cache_bytes": 5},
        {"kv_spill": 4},
    ],
    ids=str,
)
def test_load(tiny_model: Path, options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(OptionError, match=f"`{name}`"):
        load(**{"name": str(tiny_model), **options})


CALLS: list[tuple[str, Callable[[LLM], object]]] = [
    ("length", lambda llm: llm.session().rewind("1")),  # type: ignore[arg-type]
    ("length", lambda llm: llm.session().rewind(-1)),
    ("path", lambda llm: llm.session().save(3)),  # type: ignore[arg-type]
    ("path", lambda llm: llm.session().save("")),
    ("path", lambda llm: llm.load_session(None)),  # type: ignore[arg-type]
    ("path", lambda llm: llm.load_session("a\0b")),
    ("cancel", lambda llm: llm.generate("a", cancel=True)),  # type: ignore[arg-type]
    ("progress", lambda llm: llm.generate("a", progress=3)),  # type: ignore[arg-type]
    ("logit_filter", lambda llm: llm.generate("a", logit_filter="x")),  # type: ignore[arg-type]
    ("prompt", lambda llm: llm.generate([5, 10**6])),
    ("prompt", lambda llm: next(llm.stream(None))),  # type: ignore[arg-type]
    ("text", lambda llm: llm.session().append([-1])),
    ("options", lambda llm: llm.infill("a", "b", options=3)),  # type: ignore[arg-type]
    ("text", lambda llm: llm.chat().send(None)),  # type: ignore[arg-type]
    ("system", lambda llm: llm.chat(system=5)),  # type: ignore[arg-type]
    ("prefix", lambda llm: llm.infill(None, "b")),  # type: ignore[arg-type]
    ("suffix", lambda llm: llm.infill("a", 4)),  # type: ignore[arg-type]
    ("name", lambda llm: llm.prefix(None, "b")),  # type: ignore[arg-type]
    ("text", lambda llm: llm.prefix("a", 5)),  # type: ignore[arg-type]
    ("logit_filter", lambda llm: llm.generate("a", logit_filter=_nothing_left)),
]


def _nothing_left(logits: Any, tokens: Any) -> None:
    logits[:] = -np.inf


@pytest.mark.parametrize(("name", "call"), CALLS, ids=[str(i) for i in range(len(CALLS))])
def test_calls(tiny: LLM, name: str, call: Callable[[LLM], object]) -> None:
    with pytest.raises(EdgeLLMError, match=f"`{name}`"):
        call(tiny)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda llm, **no: llm.generate("a", **no),
            "`max_tokens` may be meant; allowed are options, cancel, ",
        ),
        (lambda llm, **no: llm.chat(**no), "`max_tokens` may be meant"),
        (lambda llm, **no: llm.chat().send("a", **no), "`max_tokens` may be meant"),
        (lambda llm, **no: llm.session().generate(**no), "`max_tokens` may be meant"),
        (lambda llm, **no: llm.chat(**no), "allowed are tools, tool_choice"),
        (lambda _, **no: load("no model", **no), "; allowed are precision, "),
    ],
)
def test_options_that_there_are_not(tiny: LLM, call: Callable[..., object], words: str) -> None:
    with pytest.raises(TypeError, match=rf"there is no option `max_new_tokens`.*{words}"):
        call(tiny, max_new_tokens=3)


def test_arguments_are_the_fields_of_options() -> None:
    fields = {field.name for field in dataclasses.fields(EngineOptions)}
    assert set(EngineArguments.__annotations__) == fields
    fields = {field.name for field in dataclasses.fields(GenerationOptions)}
    assert set(GenerationArguments.__annotations__) == fields


def test_lists_of_prompts(tiny: LLM) -> None:
    answers = tiny.generate([[1, 2], [3]], max_tokens=2, ignore_eos=True, seed=1)
    assert [len(answer.tokens) for answer in answers] == [2, 2]
    assert [a.text for a in tiny.generate("a", n=1, max_tokens=0)] == [""]
    for wrong in (["a", 3], [[1], [1 << 40]], [[]], []):
        with pytest.raises(OptionError):
            tiny.generate(wrong, max_tokens=1)  # type: ignore[call-overload]
    with pytest.raises(OptionError, match="`n`"):
        tiny.generate("a", n=0)


def test_a_batch_takes_its_prompts_as_there_is_room(tiny: LLM) -> None:
    taken = 0

    def prompts() -> Iterator[list[int]]:
        nonlocal taken
        for _ in range(10_000):
            taken += 1
            yield [1, 2]

    answers = tiny.batch(prompts(), max_tokens=1, seed=1)
    for done in range(1, 200):
        next(answers)
        assert taken <= done + 64
    answers.close()  # type: ignore[attr-defined]
    assert taken < 300


def test_wrong_requests_of_a_batch(tiny: LLM) -> None:
    hello = Message("user", "Hello")
    wrong: list[Any] = [
        BatchRequest(prompt=[hello, 3]),  # type: ignore[list-item]
        [Message("user", 3)],  # type: ignore[arg-type]
        BatchRequest(prompt="a", options={"seed": 1}),  # type: ignore[arg-type]
        BatchRequest(prompt="a", logit_filter=3),  # type: ignore[arg-type]
        None,
        7,
    ]
    right = BatchRequest(prompt="a", options=GenerationOptions(max_tokens=2, ignore_eos=True))
    answers = sorted(tiny.batch([*wrong, right, "a"], max_tokens=1), key=lambda a: a.index)
    assert [type(answer.error) for answer in answers] == [OptionError] * 6 + [type(None)] * 2
    assert [len(answer.result().tokens) for answer in answers[6:]] == [2, 1]


def test_one_wrong_prompt_of_a_batch(tiny: LLM) -> None:
    prompts = [[1, 2], [1 << 40], [3] * (tiny.ctx_size + 1), [4]]
    answers = sorted(tiny.batch(prompts, max_tokens=1, seed=1), key=lambda a: a.index)
    assert [answer.error is None for answer in answers] == [True, False, False, True]
    with pytest.raises(OptionError, match="`prompt`"):
        answers[1].result()
