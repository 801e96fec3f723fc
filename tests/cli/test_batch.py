"""Files of many prompts."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from waiting import until

from edgellm.cli.batch import _write_line
from edgellm.llm import LLM
from edgellm.store.bundle import Bundle

Cli = Callable[..., subprocess.CompletedProcess[str]]
QUESTION = "Name the capital of France."


def lines(*values: dict[str, Any]) -> str:
    return "".join(json.dumps(value) + "\n" for value in values)


def answers(text: str) -> dict[Any, dict[str, Any]]:
    found = [json.loads(line) for line in text.splitlines()]
    return {answer.get("id", answer.get("index")): answer for answer in found}


def test_answers_are_those_of_single_prompts(cli: Cli, chosen_llm: LLM, tmp_path: Path) -> None:
    file, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    biased = {"temperature": 0, "max_tokens": 5, "logit_bias": {"2": -50.0}, "stop": ["zebra"]}
    said = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": QUESTION}]
    file.write_text(
        lines(
            {"id": "capital", "prompt": QUESTION, "temperature": 0},
            {"messages": said, "seed": 3},
            {"id": 7, "prompt": "<|im_end|> is what?", **biased},
            {"prefix": "def f(", "suffix": "):"},
        )
        + "\n"
        + lines({"id": "long", "prompt": "too long " * 9000}),
        encoding="utf-8",
    )
    done = cli("run", "--batch", str(file), "-o", str(out), "-n", "12", "--stats")
    assert done.returncode == 1
    assert done.stdout == ""
    assert "2 of 5 lines failed" in done.stderr
    assert "5 answers" in done.stderr
    found = answers(out.read_text(encoding="utf-8"))
    assert set(found) == {"capital", 1, 7, 3, "long"}
    chat = chosen_llm.chat(max_tokens=12, temperature=0)
    assert found["capital"]["text"] == chat.send(QUESTION).text
    assert "Paris" in found["capital"]["text"]
    brief = chosen_llm.chat(system="Be brief.", max_tokens=12)
    exact = chosen_llm.engine.decoder.exact_rows  # else company changes the last bits
    assert found[1]["text"] == brief.send(QUESTION, seed=3).text or not exact
    assert found[1]["seed"] == 3
    biased = {**biased, "logit_bias": {2: -50.0}}
    alone = chosen_llm.chat(**biased).send("<|im_end|> is what?")  # type: ignore[arg-type]
    assert found[7]["text"] == alone.text or not exact
    assert found[7]["finish_reason"] == alone.finish_reason or not exact
    assert found[7]["generation_tokens"] <= 5
    assert "fill-in-the-middle" in found[3]["error"]
    assert "the context holds" in found["long"]["error"]


@pytest.mark.usefixtures("smollm2")
def test_standard_streams_and_options_of_all(cli: Cli) -> None:
    text = "\ufeff" + lines(
        {"id": "raw", "prompt": "The capital of France is"},
        {"id": "hot", "prompt": "One, two,", "temperature": 1.5, "seed": 1},
    )
    done = cli("run", "--batch", "-", "--raw", "--temp", "0", "-n", "4", stdin=text)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    found = answers(done.stdout)
    assert "Paris" in found["raw"]["text"]
    assert found["hot"]["seed"] == 1
    json_lines = lines(*({"prompt": "A number?"} for _ in range(3)))
    schema = '{"type": "integer"}'
    done = cli("run", "--batch", "-", "-j", schema, "--temp", "0", "-n", "20", stdin=json_lines)
    assert done.returncode == 0, done.stderr
    assert all(isinstance(json.loads(a["text"]), int) for a in answers(done.stdout).values())
    system = cli("run", "--batch", "-", "-sys", "Say no.", "-n", "1", stdin=lines({"prompt": "a"}))
    plain = cli("run", "--batch", "-", "-n", "1", stdin=lines({"prompt": "a"}))
    assert system.stdout != plain.stdout


FIRST = {"prompt": "Hello"}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "line 2 of the batch: not JSON: Expecting property name"),
        ("[1]", 'a JSON object with one of "prompt", "messages", or "prefix" and "suffix"'),
        ("{}", 'one of "prompt", "messages", or "prefix" and "suffix" is expected'),
        ('{"prompt": "a", "suffix": "b"}', "is expected"),
        ('{"prompt": "a", "max_token": 3}', "unknown field 'max_token'; allowed are id, prompt"),
        ('{"prompt": "a", "max_tokens": "3"}', "\"max_tokens\" is '3'; allowed is a whole number"),
        ('{"prompt": "a", "logit_bias": {"x": 1}}', '"logit_bias" has token ids as its names'),
        ('{"prompt": "a", "logit_bias": [1]}', '"logit_bias" is [1]; a dict'),
        ('{"prompt": "a", "stop": 5}', '"stop" is'),
        ('{"prompt": 3}', '"prompt" is 3; a text'),
        ('{"prompt": " "}', '"prompt" is'),
        ('{"prefix": null}', '"prefix" is null'),
        ('{"prompt": "a", "id": [1]}', '"id" is a text or a whole number'),
        ('{"prompt": "a", "id": "first"}', "\"id\" 'first' is that of line 1"),
        ('{"messages": []}', 'each with a "role" (system, user, assistant)'),
        ('{"messages": [{"role": "tool", "content": "a"}]}', "(system, user, assistant)"),
        ('{"messages": [{"role": "user"}]}', 'and a "content"'),
        ('{"messages": "Hello"}', '"messages" is a list'),
        (b'{"prompt": "\xff"}', "not valid UTF-8 at byte 12"),
        ("[" * 100_000, "not JSON that can be read"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_wrong_line_is_named_before_anything_is_answered(
    cli: Cli, tmp_path: Path, line: str | bytes, words: str
) -> None:
    data = lines({"id": "first", **FIRST}).encode()
    data += line if isinstance(line, bytes) else line.encode()
    out = tmp_path / "out.jsonl"
    done = cli("run", "no-such-model", "--batch", "-", "-o", str(out), stdin=data)
    assert done.returncode == 2
    assert "line 2 of the batch: " in done.stderr
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert not out.exists()


def test_what_has_no_place_beside_it(cli: Cli, tmp_path: Path) -> None:
    file, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    file.write_text(lines(FIRST))
    out.write_text("precious")
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    for arguments, words in (
        (["--batch", str(file), "-p", "a"], "leave out -p"),
        (["--batch", str(file), "--trace", "x", "-e"], "leave out -e, --trace"),
        (["-p", "a", "-o", str(out)], "--output and --force are for --batch"),
        (["--batch", str(file), "-o", str(out)], "--force replaces it"),
        (["--batch", str(file), "-o", str(file), "--force"], "is the file with the prompts"),
        (["--batch", str(file), "-o", str(tmp_path / "no" / "x")], "there is no folder"),
        (["--batch", str(tmp_path / "none")], "none: No such file"),
        (["--batch", str(empty)], "the batch has no lines"),
        (["--batch", str(file), "--raw", "-sys", "a"], "no place for a system prompt"),
        (["--batch", str(file), "--temp", "-1"], '"temperature" is -1'),
    ):
        done = cli("run", *arguments)
        assert done.returncode == 2, arguments
        assert words in done.stderr, arguments
    assert out.read_text() == "precious"
    assert file.read_text() == lines(FIRST)


@pytest.mark.slow
def test_ctrl_c_keeps_what_was_answered(smollm2: Bundle, tmp_path: Path) -> None:
    file, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    short = [{"id": i, "prompt": "Hello", "max_tokens": 1} for i in range(5)]
    endless = [{"prompt": "Count to 1000.", "ignore_eos": True} for _ in range(2000)]
    file.write_text(lines(*short, *endless))
    process = subprocess.Popen(
        [sys.executable, "-m", "edgellm.cli.main", "run", str(smollm2.path), "--batch", str(file),
         "-o", str(out)],
        stderr=subprocess.PIPE,
    )  # fmt: skip
    until(lambda: out.exists() and out.read_bytes().count(b"\n") == 5)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate()
    assert process.returncode == 130
    assert b"5 of 2005 lines were answered" in err
    assert set(answers(out.read_text())) == set(range(5))


def test_half_a_line_is_taken_back(tmp_path: Path) -> None:
    class Full:
        """A file on a disk with room for 20 bytes."""

        def __init__(self) -> None:
            self.data = b""

        def write(self, data: bytes) -> int:
            room = 20 - len(self.data)
            if room == 0:
                raise OSError("No space left on device")
            self.data += data[:room]
            return min(room, len(data))

        def tell(self) -> int:
            return len(self.data)

        def truncate(self, size: int) -> None:
            self.data = self.data[:size]

        def seekable(self) -> bool:
            return True

        def flush(self) -> None:
            pass

    out: Any = Full()
    _write_line(out, {"id": "\ud800"})
    assert json.loads(out.data) == {"id": "\ud800"}
    with pytest.raises(OSError, match="No space"):
        _write_line(out, {"id": "b"})
    assert out.data.endswith(b"}\n")
    assert json.loads(out.data) == {"id": "\ud800"}
