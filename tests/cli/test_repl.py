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
from edgellm.llm import LLM, load
from edgellm.store.bundle import Bundle


@pytest.fixture
def llm(request: pytest.FixtureRequest, chosen_llm: LLM, smollm2: Bundle) -> LLM:
    """The default model, or with a parameter one of that context size."""
    if not hasattr(request, "param"):
        return chosen_llm
    return load(str(smollm2.path), ctx_size=request.param)


@pytest.fixture
def typed(llm: LLM, edgellm_home: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[object]:
    with create_pipe_input() as pipe, create_app_session(input=pipe, output=DummyOutput()):

        def run(*lines: str) -> tuple[int, str, str]:
            pipe.send_text("".join(f"{line}\r" for line in lines))
            code = chat(
                llm, sampling={"temperature": 0.0, "max_tokens": 12}, system=None, stats="none"
            )
            captured = capsys.readouterr()
            return code, captured.out, captured.err

        yield run


def test_a_conversation(typed: object, tmp_path: Path) -> None:
    file = tmp_path / "chat.json"
    code, out, err = typed(  # type: ignore[operator]
        "Name the capital of France.",
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
        "Name the capital of France.",
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


def test_commands_say_that_they_worked(typed: object, tmp_path: Path) -> None:
    file = tmp_path / "über.json"
    _, _, err = typed(  # type: ignore[operator]
        "Say “ü”.",
        f"/save {file}",
        "/set temperature 0.5",
        "/fork a",
        "/clear",
        "/switch a",
        f"/load {file}",
        f"/save {tmp_path}/no/such/folder/file",
        f"/load {tmp_path}",
        "/load ~nobody-here/file",
        "/save ~nobody-here/file",
        "/exit",
    )
    assert "“ü”" in file.read_text(encoding="utf-8")
    for words in (
        f"saved in {file}; the conversation has 1 questions",
        "temperature is 0.5",
        "kept as a;",
        "cleared; the conversation has 0 questions",
        "switched to a;",
        f"loaded {file};",
        "there is no folder",
        f"{tmp_path}: not a conversation",
        "there is no such user",
    ):
        assert words in err, words
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize(
    "text",
    ["", "{}", "[1]", '[{"role": "user"}]', '[{"role": "me", "content": "x"}]', "[" * 100_000],
    ids=len,
)
def test_files_that_are_no_conversation(typed: object, tmp_path: Path, text: str) -> None:
    file = tmp_path / "chat.json"
    file.write_text(text)
    _, _, err = typed(f"/load {file}", "/exit")  # type: ignore[operator]
    assert f"{file}: not a conversation" in err


def test_one_loaded_message_has_no_answer_before_it(typed: object, tmp_path: Path) -> None:
    file = tmp_path / "chat.json"
    file.write_text('[{"role": "assistant", "content": "Yes."}]')
    code, _, err = typed(f"/load {file}", "/regen", "/rewind", "/exit")  # type: ignore[operator]
    assert code == 0
    assert "no answer to generate again" in err


def test_history_that_cannot_be_kept(
    typed: object, edgellm_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    edgellm_home.mkdir()
    (edgellm_home / "history").mkdir()  # in the way, for root too
    code, _, err = typed("/exit")  # type: ignore[operator]
    assert code == 0
    assert "no history is kept" in err


def test_history_is_private(typed: object, edgellm_home: Path) -> None:
    typed("/show", "/exit")  # type: ignore[operator]
    assert (edgellm_home / "history").stat().st_mode & 0o777 == 0o600


def test_greedy_is_plain_also_when_it_is_chosen_later(typed: object) -> None:
    _, _, err = typed("/set temperature 0.7", "/show", "/set temperature 0", "/show", "/exit")  # type: ignore[operator]
    assert "temperature        0.7" in err
    assert "temperature        0.0" in err
    assert err.rindex("repeat_penalty     1.0") > err.rindex("temperature        0.0")


@pytest.mark.parametrize("llm", [96], indirect=True)
def test_a_full_context_says_what_to_do(typed: object) -> None:
    code, out, err = typed("Count to ten. " * 3, "Go on. " * 30, "/rewind", "Hello", "/exit")  # type: ignore[operator]
    assert code == 0
    assert "/set context_policy shift" in err
    assert "/clear" in err
    assert "rewound" in err
    assert out
