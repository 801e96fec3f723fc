"""The chat, typed through a pipe input of prompt_toolkit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

from edgellm.cli.repl import chat
from edgellm.llm import LLM


@pytest.fixture
def typed(llm: LLM, edgellm_home: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[object]:
    with create_pipe_input() as pipe, create_app_session(input=pipe, output=DummyOutput()):

        def run(*lines: str) -> tuple[int, str, str]:
            pipe.send_text("".join(f"{line}\r" for line in lines))
            code = chat(
                llm, sampling={"temperature": 0.0, "max_tokens": 12}, system=None, show_stats=False
            )
            captured = capsys.readouterr()
            return code, captured.out, captured.err

        yield run


def test_a_conversation(typed: object, tmp_path: Path) -> None:
    file = tmp_path / "chat.json"
    code, out, err = typed(  # type: ignore[operator]
        "What is the capital of France?",
        f"/save {file}",
        "/clear",
        "/regen",
        f"/load {file}",
        "/regen",
        "/show",
        "/exit",
    )
    assert code == 0
    assert out.count("Paris") == 2
    assert "no answer to generate again" in err
    assert [m["role"] for m in json.loads(file.read_text())] == ["user", "assistant"]
    assert "temperature" in err


def test_several_lines_and_settings(typed: object) -> None:
    code, out, err = typed(  # type: ignore[operator]
        '"""Say',
        'the word yes."""',
        "/set max_tokens 3",
        "/set max_tokens many",
        "/set nothing 1",
        "/set temperature none",
        "/set speculate no",
        "/set speculate false",
        "/set context_policy forget",
        "/set context_policy shift",
        "/set seed none",
        "/show",
        "/system You are a pirate.",
        "/system",
        "/help",
        "/nonsense",
        "/load /no/such/file",
        "/save",
        "/exit",
    )
    assert code == 0
    assert out.strip()
    for words in (
        "'many' is not a number",
        "NAME one of",
        "'none' is not a number",
        "neither true nor false",
        "allowed are error, shift",
        "context_policy     shift",
        "speculate          False",
        "You are a pirate.",
        "/regen",
        "there is no command /nonsense",
        "No such file",
        "name a file",
    ):
        assert words in err


def test_end_of_input_leaves(typed: object) -> None:
    code, out, _ = typed("", "\x04")  # type: ignore[operator]
    assert code == 0
    assert out == ""


def test_branches(typed: object) -> None:
    code, out, err = typed(  # type: ignore[operator]
        "What is the capital of France?",
        "/fork paris",
        "And of Italy?",
        "/rewind",
        "/regen",
        "/rewind 3",
        "/switch nowhere",
        "/fork",
        "/rewind",
        "/regen",
        "/switch paris",
        "/regen",
        "/infill no gap",
        "/infill a <gap> b",
        "/exit",
    )
    assert code == 0
    assert out.count("Paris") >= 3
    for words in (
        "a number from 1 to 1",
        "kept are paris",
        "write /fork NAME",
        "no answer to generate again",
        "with a <gap> in it",
        "no fill-in-the-middle tokens",
    ):
        assert words in err
