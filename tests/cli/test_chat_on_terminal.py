"""The chat as it stands on the screen: keys, commands, streams that are no terminal."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("termios", reason="needs a pseudo-terminal")

from terminal import CTRL_C, CTRL_D, CTRL_Z, Terminal

from edgellm.kernels.native import library

Shell = Callable[..., Terminal]

PROMPT = ">>> "
FRANCE = "Name the capital of France."
PARIS = "The capital of France is Paris."
WIDE = 220
ENDLESS = "--ignore-eos --context-policy shift --stats"


def start(shell: Shell, options: str = "--no-stats", **terminal_options: object) -> Terminal:
    terminal = shell(**{"columns": WIDE, **terminal_options})
    terminal.enter(f"edgellm run $MODEL --temp 0 {options}")
    terminal.wait_for_prompt(PROMPT)
    return terminal


def said(terminal: Terminal, line: str) -> list[str]:
    """The rows between a line at the chat's prompt and the next prompt."""
    first = terminal.row + 1
    terminal.enter(line)
    terminal.wait_for_prompt(PROMPT)
    return terminal.all_rows[first : terminal.row]


def exit_code(terminal: Terminal) -> int:
    """Of the chat that has just been left."""
    terminal.wait_for_prompt("$ ")
    assert terminal.is_tidy
    terminal.enter("echo code $?")
    terminal.wait_for_prompt("$ ")
    return int(terminal.all_rows[-2].removeprefix("code "))


def test_conversation_as_it_stands_on_the_screen(shell: Shell) -> None:
    terminal = start(shell)
    assert said(terminal, FRANCE) == [PARIS]
    assert said(terminal, "/regen") == [PARIS]
    terminal.enter("/exit")
    assert exit_code(terminal) == 0
    assert terminal.all_rows[1:-3] == [
        "smollm2-135m-instruct - /help lists the commands, /exit leaves",
        f">>> {FRANCE}",
        PARIS,
        ">>> /regen",
        PARIS,
        ">>> /exit",
    ]


@pytest.mark.slow
def test_statistics_after_every_answer(shell: Shell) -> None:
    terminal = start(shell, "")
    answer, stats = said(terminal, FRANCE)
    assert answer == PARIS
    assert re.fullmatch(r"\[ 8 tokens, \d+ t/s \]", stats)
    (more,) = said(terminal, "/stats")
    assert re.fullmatch(r"\[ prompt: 36 tokens .* seed: \d+ \]", more)
    terminal.wait_for(lambda: terminal.is_tidy)


@pytest.mark.slow
def test_interrupted_answer(shell: Shell) -> None:
    terminal = start(shell, ENDLESS)
    terminal.enter(FRANCE)
    terminal.wait_for(PARIS)
    terminal.send(CTRL_C)
    terminal.wait_for_prompt(PROMPT)
    asked = terminal.all_rows.index(PROMPT + FRANCE)
    assert asked == 2 or library() is None  # else a report on the weights is above
    assert terminal.all_rows[asked + 1].startswith(PARIS)
    assert re.fullmatch(r"\[ prompt: .* ended: cancelled \]", terminal.all_rows[-2])
    terminal.wait_for(lambda: terminal.is_tidy)
    terminal.send(CTRL_D)
    assert exit_code(terminal) == 0


@pytest.mark.slow
def test_interrupt_at_the_prompt_clears_the_line(shell: Shell) -> None:
    terminal = start(shell)
    terminal.send("never sent")
    terminal.wait_for(">>> never sent")
    terminal.send(CTRL_C)
    terminal.wait_for_prompt(PROMPT)
    assert said(terminal, FRANCE) == [PARIS]
    terminal.enter('"""never')
    terminal.wait_for_prompt("... ")
    terminal.enter("sent")
    terminal.wait_for_prompt("... ")
    terminal.send(CTRL_C)
    terminal.wait_for_prompt(PROMPT)
    assert said(terminal, "/rewind 2") == ["edgellm: /rewind 2: write a number from 1 to 1"]


@pytest.mark.slow
def test_interrupt_twice_leaves(shell: Shell) -> None:
    terminal = start(shell)
    terminal.send(CTRL_C)
    terminal.wait_for_prompt(PROMPT)
    hint = "\n".join(terminal.all_rows[3:])
    assert "Ctrl-D" in hint
    assert "/exit" in hint
    assert said(terminal, FRANCE) == [PARIS]
    terminal.send(CTRL_C)
    terminal.wait_for_prompt(PROMPT)
    terminal.send(CTRL_C)
    assert exit_code(terminal) == 130


@pytest.mark.slow
def test_commands_say_that_they_worked(shell: Shell) -> None:
    terminal = start(shell)
    assert said(terminal, FRANCE) == [PARIS]
    for command, words in {
        "/save talk.json": "talk.json",
        "/fork france": "france",
        "/set max_tokens 8": "max_tokens",
        "/set temperature 0.0": "temperature",
        "/clear": "",
        "/switch france": "france",
        "/load talk.json": "talk.json",
        "/rewind": "",
        "/system Be brief.": "",
    }.items():
        (line,) = said(terminal, command)
        assert line
        assert words in line
        assert not line.startswith("edgellm: ")
    saved = json.loads((terminal.folder / "talk.json").read_text())
    assert [m["content"] for m in saved][-2:] == [FRANCE, PARIS]


@pytest.mark.slow
def test_log_holds_the_model_s_text_alone(shell: Shell) -> None:
    terminal = shell(columns=WIDE)
    terminal.enter("edgellm run $MODEL --temp 0 | tee log")
    terminal.wait_for_prompt(PROMPT)
    terminal.enter(FRANCE)
    # tee may be late with the end of its line
    terminal.wait_for(lambda: PARIS in terminal.text and terminal.rows[-1].endswith(">>>"))
    terminal.enter("/exit")
    assert exit_code(terminal) == 0
    assert (terminal.folder / "log").read_text() == f"{PARIS}\n"
    # one more where tee's line ended behind the prompt, which is drawn again with what is typed
    assert terminal.text.count(">>>") in (2, 3)
    assert terminal.text.count(FRANCE) == 1
    assert terminal.text.count("[ 8 tokens, ") == 1


@pytest.mark.slow
def test_errors_to_a_file(shell: Shell) -> None:
    terminal = start(shell, "2> errors")
    assert said(terminal, FRANCE) == [PARIS]
    assert said(terminal, "/nonsense") == []
    terminal.enter("/exit")
    assert exit_code(terminal) == 0
    assert "there is no command /nonsense" in (terminal.folder / "errors").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("length", [100, 5000])
def test_pasted_text_is_one_message(shell: Shell, length: int) -> None:
    terminal = start(shell, "--no-stats -n 4", rows=12, columns=100)
    lines = "\n".join(f"line {i} of a text" for i in range(length // 20))
    terminal.paste(lines)
    terminal.wait_for(lines.splitlines()[-1])
    terminal.send("\r")
    terminal.wait_for_prompt(PROMPT)
    said(terminal, "/save talk.json")
    question, _ = json.loads((terminal.folder / "talk.json").read_text())
    assert question == {"role": "user", "content": lines}


@pytest.mark.slow
def test_history_that_cannot_be_kept(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "home" / "history").mkdir()
    terminal = start(shell)
    assert said(terminal, FRANCE) == [PARIS]
    assert said(terminal, "/nonsense") == [
        "edgellm: there is no command /nonsense; /help lists them"
    ]
    terminal.send(CTRL_D)
    assert exit_code(terminal) == 0
    assert "Traceback" not in terminal.text


@pytest.mark.slow
def test_history_comes_back(shell: Shell) -> None:
    for line in (None, FRANCE):
        terminal = start(shell)
        if line is None:
            assert said(terminal, FRANCE) == [PARIS]
        else:
            terminal.send("\x1b[A")
            terminal.wait_for(f">>> {line}")
        terminal.send(CTRL_C if line else CTRL_D)
        terminal.wait_for_prompt(PROMPT if line else "$ ")


@pytest.mark.slow
def test_dumb_terminal(shell: Shell) -> None:
    terminal = start(shell, env={"TERM": "dumb"})
    # prompt_toolkit writes a dumb terminal's prompt before it takes the keys
    terminal.wait_for_raw_keys()
    assert said(terminal, FRANCE) == [PARIS]
    # prompt_toolkit shows the cursor once, before the first row
    assert b"\x1b[" not in terminal.raw.partition(b"smollm2")[2]


@pytest.mark.slow
def test_two_interrupts_at_once_leave_a_tidy_terminal(shell: Shell) -> None:
    terminal = start(shell, ENDLESS)
    terminal.enter(FRANCE)
    terminal.wait_for(PARIS)
    terminal.send(CTRL_C + CTRL_C)
    terminal.wait_for(lambda: bool(re.search(r"\n(>>>|\$)( |\n)*$", terminal.text)))
    terminal.wait_for(lambda: terminal.is_tidy)


@pytest.mark.slow
def test_a_paste_during_an_answer_waits_as_one_message(shell: Shell) -> None:
    """The paste is larger than the terminal's queue, behind which no Ctrl-C would be heard."""
    terminal = start(shell, ENDLESS)
    terminal.enter(FRANCE)
    terminal.wait_for(PARIS)
    lines = [f"line {i} of a text that is pasted" for i in range(200)]
    terminal.paste("\n".join(lines))
    terminal.send(CTRL_C)
    terminal.wait_for("ended: cancelled")
    terminal.wait_for(lines[-1])
    terminal.send(CTRL_C)
    terminal.wait_for_prompt(PROMPT)
    assert terminal.text.count("[ prompt: ") == 1
    said(terminal, "/save talk.json")
    saved = json.loads((terminal.folder / "talk.json").read_text())
    assert [message["role"] for message in saved] == ["user", "assistant"]


@pytest.mark.slow
def test_stopped_and_gone_on_with(shell: Shell) -> None:
    terminal = start(shell, ENDLESS)
    terminal.enter(FRANCE)
    terminal.wait_for(lambda: terminal.vt100.margins is not None)
    terminal.send(CTRL_Z)
    terminal.wait_for_prompt("$ ")
    assert terminal.is_tidy
    assert "tokens/s" not in terminal.text
    terminal.enter("fg")
    terminal.wait_for(lambda: terminal.vt100.margins is not None)
    terminal.send("typed meanwhile")
    terminal.send(CTRL_C)
    terminal.wait_for(f"{PROMPT}typed meanwhile")
    assert terminal.text.count("typed meanwhile") == 1
    terminal.send(CTRL_C)
    terminal.wait_for_prompt(PROMPT)
    terminal.send(CTRL_D)
    assert exit_code(terminal) == 0
