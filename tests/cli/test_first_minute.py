"""What a new user sees on a terminal: whole screens, typed into a shell."""

from __future__ import annotations

import json
import os
import re
import signal
import textwrap
from collections.abc import Callable
from functools import partial
from pathlib import Path
from subprocess import CompletedProcess

import pytest

pytest.importorskip("termios", reason="needs a pseudo-terminal")

from terminal import CTRL_C, Terminal

from edgellm.kernels.native import library

Shell = Callable[..., Terminal]
Cli = Callable[..., CompletedProcess[str]]

PARIS = 'edgellm run $MODEL -p "Name the capital of France." --temp 0'
# Goes on counting, a number a row, until somebody stops it.
ENDLESS = r'edgellm run $MODEL --raw -e -p "1\n2\n3\n4\n5\n" --temp 0 --ignore-eos'
ENDLESS += " --context-policy shift"
LIVE = re.compile(r"\d+ tokens, [\d.]+ tokens/s")
STATS = "[ 8 tokens, N t/s ]"
ALL_STATS = (
    "[ prompt: 36 tokens (0 cached, 36 on HERE), N t/s | first token: N ms | "
    "generation: 8 tokens, N t/s | peak memory: N MB | seed: N ]"
)
WIDE = 220  # columns for a whole line of statistics
needs_full_device = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")


def slow(*values: object, marks: pytest.MarkDecorator | None = None) -> object:
    """Parameters of a test that stays out of the quick run."""
    return pytest.param(*values, marks=[pytest.mark.slow, *([marks] if marks else [])])


def masked(text: str) -> str:
    """The text without what another run or another machine shows otherwise."""
    text = re.sub(r"\d+(\.\d+)?(?= (t/s|ms|MB))|(?<=seed: )\d+", "N", text)
    # measured times decide whether there are drafts
    text = re.sub(r" \| drafts: \d+ of \d+ by \w+", "", text)
    return re.sub(r"(?<= on )\w+ [\w-]+(?=\))", "HERE", text)


def unwrapped(rows: list[str], columns: int) -> str:
    """Rows as one text, for a line that goes over several."""
    return "".join(row.ljust(columns) for row in rows).rstrip()


def wrapped(text: str, columns: int) -> list[str]:
    """The rows that a text takes."""
    rows = []
    for line in text.split("\n"):
        rows += [line[i : i + columns].rstrip() for i in range(0, len(line) or 1, columns)]
    return rows


def type_and_wait(terminal: Terminal, command: str) -> list[str]:
    """The rows between a command line and the prompt after it."""
    columns = terminal.vt100.columns
    first = terminal.row + len(wrapped(f"$ {command}", columns))
    terminal.enter(command)
    terminal.wait_for_prompt("$ ")
    return terminal.all_rows[first : terminal.row]


def live_line(terminal: Terminal) -> str | None:
    """The speed in the last row, where nothing scrolls, if it stands there."""
    last = terminal.vt100.display[-1].rstrip()
    below = terminal.vt100.margins is not None
    return last if below and LIVE.fullmatch(last) else None


def exit_code(terminal: Terminal) -> int:
    return int(type_and_wait(terminal, "echo $?")[0])


def test_one_answer(shell: Shell) -> None:
    terminal = shell(columns=WIDE)
    type_and_wait(terminal, PARIS)
    screen = ["$ " + PARIS, "The capital of France is Paris.", STATS, "$"]
    shown = masked(terminal.text).splitlines()
    if library() is None and shown[2].startswith(
        "[ weights of "
    ):  # rounded again, for ONNX Runtime
        del shown[2]
    assert shown == screen
    assert terminal.is_tidy
    assert exit_code(terminal) == 0


@pytest.mark.slow
def test_one_answer_in_40_columns_and_in_the_last_row(shell: Shell) -> None:
    terminal = shell(rows=12, columns=40)
    type_and_wait(terminal, "seq 30")
    answer, *stats = type_and_wait(terminal, f"{PARIS} --stats")
    assert answer == "The capital of France is Paris."
    assert masked(unwrapped(stats, 40)) == ALL_STATS
    assert terminal.is_tidy


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "columns", "keeps_wrap"), [(8, 80, True), (12, 40, False)])
def test_answer_longer_than_the_screen(
    shell: Shell, rows: int, columns: int, keeps_wrap: bool
) -> None:
    story = 'edgellm run $MODEL -p "Write a story." --temp 0 -n 200'
    terminal = shell(rows=rows, columns=columns, keeps_wrap=keeps_wrap)
    type_and_wait(terminal, f"{story} > story 2>&1 --no-stats")
    shown = type_and_wait(terminal, story)
    text = (terminal.folder / "story").read_text().removesuffix("\n")
    rows_of = partial(textwrap.wrap, width=columns, break_on_hyphens=False)
    answer = [row for line in text.split("\n") for row in rows_of(line) or [""]]
    assert len(answer) > 10
    assert shown[: len(answer)] == answer
    assert re.fullmatch(
        r"\[ 200 tokens, .* ended: length.*\]", unwrapped(shown[len(answer) :], columns)
    )


@pytest.mark.slow
def test_speed_stands_in_the_last_row_meanwhile(shell: Shell) -> None:
    terminal = shell(rows=10, columns=60)
    type_and_wait(terminal, "seq 20")
    terminal.enter(ENDLESS)
    terminal.wait_for(lambda: live_line(terminal) is not None)
    first = live_line(terminal)
    terminal.wait_for(lambda: live_line(terminal) not in (None, first))
    terminal.send(CTRL_C)
    terminal.wait_for_prompt("$ ")
    assert "tokens/s" not in terminal.text
    assert terminal.is_tidy
    terminal.enter("seq 30")
    terminal.wait_for_prompt("$ ")
    assert terminal.all_rows[-2:] == ["30", "$"]


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "columns"), [(8, 30), (16, 100)])
def test_window_that_changes_during_an_answer(shell: Shell, rows: int, columns: int) -> None:
    terminal = shell(rows=12, columns=60)
    type_and_wait(terminal, "seq 20")
    terminal.enter(ENDLESS)
    terminal.wait_for(lambda: live_line(terminal) is not None and terminal.row > 40)
    terminal.resize(rows=rows, columns=columns)
    resized_at = terminal.row
    terminal.wait_for(lambda: live_line(terminal) is not None and terminal.row > resized_at + 20)
    assert terminal.vt100.margins == (0, rows - 2)
    assert terminal.vt100.cursor.y < rows - 1
    terminal.send(CTRL_C)
    terminal.wait_for_prompt("$ ")
    # a line that the answer begins just as the window changes may stand in the status line's row
    assert terminal.text.count("tokens/s") <= 1
    assert terminal.is_tidy


@pytest.mark.slow
def test_interrupt_keeps_what_is_there(shell: Shell) -> None:
    terminal = shell(columns=WIDE)
    terminal.enter(ENDLESS)
    terminal.wait_for(lambda: live_line(terminal) is not None and terminal.row > 5)
    so_far = terminal.all_rows[1:5]
    terminal.send(CTRL_C)
    terminal.wait_for_prompt("$ ")
    rows = terminal.all_rows
    assert rows[1:5] == so_far == ["6", "7", "8", "9"]
    # the terminal's driver echoes the key
    assert re.fullmatch(r"(\^C)?\[ \d+ tokens, .* ended: cancelled \]", rows[-2])
    assert terminal.is_tidy
    assert exit_code(terminal) == 130


@pytest.mark.slow
def test_termination_puts_the_terminal_in_order(shell: Shell) -> None:
    terminal = shell(rows=10)
    terminal.enter(ENDLESS)
    terminal.wait_for(lambda: live_line(terminal) is not None and terminal.row > 12)
    terminal.send_signal(signal.SIGTERM)
    terminal.wait_for_prompt("$ ")
    assert terminal.is_tidy
    assert "tokens/s" not in terminal.text
    assert exit_code(terminal) == 143


@pytest.mark.slow
def test_filled_gap_ends_its_line_on_a_terminal(shell: Shell) -> None:
    terminal = shell(columns=300)
    command = (
        'edgellm infill $MODEL --prefix "The quick" --suffix " jumps." --temp 0 -n 6 --template'
    )
    hint, answer, stats = type_and_wait(terminal, command)
    assert hint == "[ asked in words: this is no fill-in-the-middle ]"
    assert not answer.startswith("[")
    assert "[" not in answer
    assert re.fullmatch(r"\[ 6 tokens, \d+ t/s, ended: length .* \]", stats)
    assert type_and_wait(terminal, f"{command} --no-stats > gap") == [hint]
    assert (terminal.folder / "gap").read_text() == answer


@pytest.mark.slow
def test_no_escape_codes_on_a_dumb_terminal(shell: Shell) -> None:
    terminal = shell(columns=WIDE, env={"TERM": "dumb"})
    type_and_wait(terminal, PARIS)
    assert masked(terminal.text).splitlines()[1:] == ["The capital of France is Paris.", STATS, "$"]
    assert b"\x1b[" not in terminal.raw


@pytest.mark.parametrize(
    "redirection",
    [
        *map(
            slow,
            [
                "2>/dev/null",
                "2>&-",
                "--no-stats </dev/null",
                "--no-stats <&-",
                "--no-stats | cat",
                "--no-stats | tee log",
            ],
        ),
        slow("--no-stats | head -1"),
    ],
)
def test_answer_through_other_streams(shell: Shell, redirection: str) -> None:
    terminal = shell(columns=WIDE)
    rows = type_and_wait(terminal, f"{PARIS} {redirection}")
    assert rows == ["The capital of France is Paris."]
    assert exit_code(terminal) == 0


@pytest.mark.slow
def test_statistics_beside_a_pipe(shell: Shell) -> None:
    terminal = shell(columns=WIDE)
    rows = type_and_wait(terminal, f"{PARIS} > answer")
    assert list(map(masked, rows)) == [STATS]
    assert (terminal.folder / "answer").read_text() == "The capital of France is Paris.\n"


@pytest.mark.slow
def test_reader_that_wants_one_line(shell: Shell) -> None:
    terminal = shell(columns=WIDE)
    (first,) = type_and_wait(terminal, f"{ENDLESS} 2>&1 | head -1")
    assert first == "6"
    assert terminal.is_tidy


@pytest.mark.parametrize(
    ("command", "code", "words"),
    [
        slow("edgellm run $MODEL <&-", 2, "the prompt is empty"),
        slow(f"{PARIS} >&-", 1, "standard output"),
        slow(f"{PARIS} >/dev/full", 1, "No space left", marks=needs_full_device),
        slow("edgellm --help >/dev/full", 1, "No space left", marks=needs_full_device),
        slow('edgellm run "What is 2+2?"', 1, "edgellm run -p 'What is 2+2?'"),
        slow("edgellm run no-such-model.gguf", 1, "no such file"),
    ],
)
def test_one_line_says_what_is_wrong(shell: Shell, command: str, code: int, words: str) -> None:
    terminal = shell(columns=300)
    (line,) = type_and_wait(terminal, command)
    assert line.startswith("edgellm: ")
    assert words in line
    assert exit_code(terminal) == code


@pytest.mark.slow
def test_all_streams_closed(shell: Shell) -> None:
    terminal = shell()
    assert type_and_wait(terminal, f"{PARIS} <&- >&- 2>&-") == []
    assert exit_code(terminal) == 1


@pytest.mark.slow
@pytest.mark.usefixtures("smollm2")
def test_piped_text_stands_before_the_question(cli: Cli, tmp_path: Path) -> None:
    text, question = "The sky over Mars is red.", "What colour is the sky over Mars?"
    options = ("--temp", "0", "-n", "24", "--json")
    (tmp_path / "x").write_text(f"{text}\n")
    expected, *found = (
        json.loads(result.stdout)
        for result in (
            cli("run", "-p", f"{text}\n\n{question}", *options),
            cli("run", "-p", question, *options, stdin=f"{text}\n"),
            cli("run", "-", "-p", question, *options, stdin=f"{text}\n"),
            cli("run", "-f", str(tmp_path / "x"), "-p", question, *options),
            cli("run", "-f", "-", "-p", question, *options, stdin=f"{text}\n"),
        )
    )
    alone = json.loads(cli("run", "-p", question, *options).stdout)
    for result in found:
        assert result["text"] == expected["text"]
        assert result["prompt_tokens"] == expected["prompt_tokens"] > alone["prompt_tokens"]
