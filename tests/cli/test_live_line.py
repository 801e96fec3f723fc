"""The last line of a terminal, while an answer is written above it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

pytest.importorskip("termios", reason="needs a pseudo-terminal")

from terminal import Screen, Terminal

from edgellm.cli.output import LiveLine
from edgellm.store.bundle import Bundle

# Lines that end at, before and behind the last column of windows of 10 and 13 columns.
TEXT = "".join(f"{'abcdefghij' * 3}"[:length] + f"{length}\n" for length in range(6, 28))
WIDE = "".join("x" * length + "日本語🙂é\ty\n" for length in range(8))
SIZES = [(8, 30), (20, 60), (6, 11), (5, 90), (30, 40)]


def pieces(text: str) -> Iterator[str]:
    """A text in parts of 1, 2, 3 ... characters."""
    at, length = 0, 1
    while at < len(text):
        yield text[at : at + length]
        at, length = at + length, length % 7 + 1


@pytest.fixture
def show(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Writes an answer on a screen, with the last line after every piece."""
    monkeypatch.setattr("edgellm.cli.output._INTERVAL_S", 0)
    monkeypatch.setenv("TERM", "xterm")

    def write(
        screen: Screen,
        text: str,
        *,
        enabled: bool = True,
        after: Callable[[int], object] = str,
    ) -> None:
        with monkeypatch.context() as patch, ExitStack() as stack:
            for name in ("stdout", "stderr"):
                file = stack.enter_context(os.fdopen(os.dup(screen.side), "w", encoding="utf-8"))
                patch.setattr(sys, name, file)
            with LiveLine(enabled=enabled) as line:
                for number, piece in enumerate(pieces(text)):
                    line.write(piece)
                    line.show(f"{number} so far")
                    screen.sync()
                    after(number)
            sys.stdout.write("end\n")
        screen.sync()

    return write


@pytest.mark.parametrize("text", [TEXT, WIDE, "short", ""], ids=["TEXT", "WIDE", "short", "empty"])
@pytest.mark.parametrize(
    ("above", "rows", "columns"), [(0, 4, 10), (3, 4, 10), (9, 3, 13), (40, 30, 13), (0, 2, 10)]
)
@pytest.mark.parametrize("keeps_wrap", [True, False])
def test_text_is_as_it_is_without(
    show: Callable[..., None], text: str, above: int, rows: int, columns: int, keeps_wrap: bool
) -> None:
    shown = []
    for enabled in (True, False):
        with Screen(rows=rows, columns=columns, keeps_wrap=keeps_wrap) as screen:
            os.write(screen.side, b"above\n" * above)
            show(screen, text, enabled=enabled)
            assert screen.is_tidy
            assert (b" so " in screen.raw) == (enabled and rows >= 3 and text != "")
            # to make room for the line, one more row may have scrolled off
            shown.append([row for row in screen.all_rows if row])
    assert shown[0] == shown[1]


@pytest.mark.parametrize("reflows", [True, False])
@pytest.mark.parametrize("first", range(len(SIZES)))
def test_windows_of_other_sizes(show: Callable[..., None], first: int, reflows: bool) -> None:
    # without spaces, which at a row's end cannot be seen
    text = "".join(f"line{i}\n" if i % 7 else f"{i}longer{'.' * i}\n" for i in range(60))
    with Screen(rows=12, columns=50, reflows=reflows) as screen:

        def resize(number: int) -> None:
            if number % 20 == 19:
                rows, columns = SIZES[(first + number // 20) % len(SIZES)]
                screen.resize(rows=rows, columns=columns)

        show(screen, text, after=resize)
        assert screen.is_tidy
        assert " so " not in screen.text
        if reflows:  # else a narrower window cuts what stands in it
            assert "".join(screen.all_rows) == f"{text}end\n".replace("\n", "")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "term"), [(("--no-stats",), "xterm"), ((), "dumb"), (("--json",), "xterm")]
)
def test_nothing_where_it_is_not_wanted(
    smollm2: Bundle, options: tuple[str, ...], term: str
) -> None:
    arguments = ("run", str(smollm2.path), "--temp", "0", "-n", "40", "-p", "Hello", *options)
    command = [sys.executable, "-m", "edgellm.cli.main", *arguments]
    with Terminal(command, env={**os.environ, "TERM": term}) as terminal:
        assert terminal.exit_code() == 0
        assert b"\x1b[" not in terminal.raw


def test_nothing_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with LiveLine(enabled=True) as line:
        line.write("\x1b[2Jan answer")
        line.show("12 tokens")
    assert capsys.readouterr() == ("\x1b[2Jan answer", "")


def test_an_answer_does_not_command_the_terminal(show: Callable[..., None]) -> None:
    """Sequences that are cut into pieces do not, either."""
    text = "a\x1b]52;c;aGk=\x07b\x1b[2J\x9b3;1Hc\r\x7f\x08\x00d\te\n"
    for skipped in range(8):
        with Screen() as screen:
            show(screen, "x" * skipped + text, enabled=False)
            expected = f"{'x' * skipped}a]52;c;aGk=b[2J3;1Hcd\te".expandtabs()
            assert screen.rows == [expected, "end"]


PROSE = "The quick brown fox, who is unbelievably tired, jumps over a lazy dog: so it goes. "
CODE = "```py\nif a_long_name and another_long_name: pass\n```\n| a | b c d e f g h i j k l m |\n"


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("columns", [13, 14, 15, 16, 17, 18, 40])
@pytest.mark.parametrize("keeps_wrap", [True, False])
def test_words_are_not_cut(
    show: Callable[..., None], columns: int, enabled: bool, keeps_wrap: bool
) -> None:
    text = PROSE * 3 + "\n" + CODE + PROSE + "日本語" * 20 + " " + "x" * 100 + " end\n"
    with Screen(rows=60, columns=columns, keeps_wrap=keeps_wrap) as screen:
        show(screen, text, enabled=enabled)
        assert screen.is_tidy
        rows = [row.rstrip() for row in screen.all_rows if row]
    first = rows.index("```py")
    assert " ".join(rows[:first]) == (PROSE * 3).strip()
    last = rows.index("```", first)
    assert "".join(rows[first + 1 : last]).replace(" ", "") == CODE.split("\n")[1].replace(" ", "")
    assert len(rows[first + 1]) >= columns - 1  # as it is, up to the edge
    whole = "".join(rows[last + 1 :]).replace(" ", "")
    assert whole == "".join(text.split("```")[2].split()) + "end"
    assert "unbelievably" in " ".join(rows[last:]).split()


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("a b c\tlongword-here\n", ["a b c", "longword-here"]),
        ("alpha\tbeta gamma\n", ["alpha   beta gamma"]),
        ("    - a nested item of a list\n", ["    - a nested", "item of a list"]),
        ("```one line``` of code in a text\n", ["```one line``` of", "code in a text"]),
        ("\u26a0\ufe0f a wide sign in it\n", None),  # no place to move words to is sure
    ],
)
def test_words_behind_other_columns(
    show: Callable[..., None], text: str, rows: list[str] | None, enabled: bool
) -> None:
    with Screen(rows=30, columns=18) as screen:
        show(screen, text, enabled=enabled)
        shown = [row.rstrip() for row in screen.all_rows if row]
        assert shown[-1] == "end"
        assert rows is None or shown[:-1] == rows
        assert rows is not None or b"\x1b[K" not in screen.raw.replace(b"\x1b[2K", b"")


def test_a_line_of_a_window_that_was_wider_is_left_as_it_is(show: Callable[..., None]) -> None:
    with Screen(rows=30, columns=60, reflows=True) as screen:

        def narrow(number: int) -> None:
            if number == 10:
                screen.resize(rows=30, columns=40)

        show(screen, PROSE * 2 + "\n" + PROSE + "\n", after=narrow)
        text = "".join("".join(screen.all_rows).split())
    assert text.count("overalazydog:soitgoes.") == 3
    assert text.count("unbelievably") == 3
