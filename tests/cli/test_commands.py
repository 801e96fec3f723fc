"""The command line as a user has it: a process, its streams and its exit code."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from breadth import one_in

from edgellm.backends.selection import select
from edgellm.cli.main import run_command
from edgellm.errors import ProviderError
from edgellm.options import EngineOptions
from edgellm.store.bundle import Bundle, open_bundle

Cli = Callable[..., subprocess.CompletedProcess[str]]
QUESTION = "Name the capital of France."
GREEDY = ("--temp", "0")
DEFAULTS = select(EngineOptions())


@pytest.mark.parametrize(
    ("arguments", "stdin"),
    one_in(
        3,
        [
            (["-p", QUESTION], ""),
            (["smollm2-135m-instruct", QUESTION], ""),
            (["-m", "smollm2-135m-instruct", "-p", QUESTION], ""),
            ([], f"{QUESTION}\n"),
            (["-f", "-"], f"{QUESTION}\r\n"),
            (["smollm2-135m-instruct", "-"], QUESTION),
        ],
    ),
    ids=["-p", "positional", "-m", "pipe", "-f -", "-"],
)
@pytest.mark.usefixtures("smollm2")
def test_answers_with_paris(cli: Cli, arguments: list[str], stdin: str) -> None:
    found = cli("run", *arguments, *GREEDY, stdin=stdin)
    assert found.returncode == 0, found.stderr
    assert "Paris" in found.stdout
    assert found.stderr == ""


def test_json_and_stats(cli: Cli, smollm2: Bundle) -> None:
    found = cli("run", "-p", QUESTION, *GREEDY, "--json", "-n", "4", "-s", "7")
    result = json.loads(found.stdout)
    assert result["generation_tokens"] == 4
    assert result["seed"] == 7
    assert result["prefill"] == {DEFAULTS.prefill: 26}
    found = cli("run", "-p", QUESTION, *GREEDY, "-n", "1", "--stats")
    precision = DEFAULTS.prefill_precision(smollm2.config)
    assert f"26 on {DEFAULTS.prefill} {precision}" in found.stderr


@pytest.mark.usefixtures("smollm2")
def test_json_schema(cli: Cli) -> None:
    found = cli("run", "-p", "A number?", *GREEDY, "-j", '{"type": "integer"}', "-n", "20")
    assert isinstance(json.loads(found.stdout), int)


def test_grammar(cli: Cli, tiny_bundle: str, tmp_path: Path) -> None:
    file = tmp_path / "g.gbnf"
    file.write_text('root ::= "yes" | "no"\n')
    for options in (["--grammar", file.read_text()], ["--grammar-file", str(file)]):
        found = cli("run", "-m", tiny_bundle, "-p", "A", "--raw", *options)
        assert found.stdout.strip() in ("yes", "no")


def test_raw_and_escape(cli: Cli, tiny_bundle: str) -> None:
    plain, escaped = (
        cli("run", tiny_bundle, r"a\nb", "--raw", "--json", "-n", "1", *GREEDY, *more)
        for more in ([], ["-e"])
    )
    assert json.loads(plain.stdout)["prompt_tokens"] == 4
    assert json.loads(escaped.stdout)["prompt_tokens"] == 3


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["run", "-p", ""], 2, "prompt is empty"),
        (["run"], 2, "prompt is empty"),
        (["run", "-p", "x", "--temp", "-1"], 2, "--temp is -1.0"),
        (["run", "-p", "x", "--temp", "hot"], 2, "--temp"),
        (["run", "-p", "x", "--top-p", "2"], 2, "--top-p is 2.0"),
        (
            ["run", "-p", "x", "-n", "-5"],
            2,
            "'--max-tokens': -5 is not in the range x>=-1",
        ),
        (["run", "-p", "x", "-c", "1000000000"], 2, "allowed with this model are 1024 at most"),
        (["run", "-p", "x", "--kv-format", "int2"], 2, "--kv-format"),
        (["run", "-p", "x", "--prefill", "tpu"], 2, "edgellm devices"),
        (["run", "-p", "x", "--prefill", "cuda"], 1, "onnxruntime-gpu"),
        (["run", "-p", "x", "-l", "abc"], 2, "TOKEN"),
        (["run", "-p", r"a\x", "-e"], 2, "escape in the prompt"),
        (["run", "-p", "x", "--raw", "-sys", "y"], 2, "--raw"),
        (["run", "-p", "x", "--nonsense"], 2, "--nonsense"),
        (["run", "a", "-m", "b", "-p", "x"], 2, "named twice"),
        (["run", "no-such-model", "x"], 1, "smollm2-135m-instruct"),
        (["run", "-p", "x", "-l", "5+inf"], 2, "--logit-bias is inf"),
        (["run", "-p", "x", "-l", "999+1"], 2, "999 is not in the vocabulary"),
        (["run", "-p", "x", "-c", "-3"], 2, "--ctx-size is -3"),
        (["run", "-p", "x", "-t", "0"], 2, "--threads is 0"),
        (["run", "--prefix", "a", "-p", "x"], 2, "leave out a prompt"),
        (["run", "--prefix", "a", "-j", "{}", "--raw"], 2, "--json-schema, --raw"),
        (["run", "--prefix", "a", "--grammar", "a"], 2, "leave out --grammar"),
        (["run", "-p", "x", "-j", "{}", "--grammar", "a"], 2, "--json-schema and --grammar"),
        (["run", "-p", "x", "--grammar", "root ::= (("], 2, "the grammar cannot be used"),
        (["run", "-p", "x", "--grammar-file", "/no/such/file"], 2, "No such file"),
        (["run", "--suffix", "a", "-e", "-sys", "b"], 2, "--system-prompt, --escape"),
        (["run", "-p", "x", "-f", "/no/such/file"], 2, "No such file"),
        (["run", "-p", "long " * 5000], 1, "context holds 1024"),
        (["perplexity", "/no/such/file"], 2, "No such file"),
        (["bench", "-p", "x"], 2, "512,2048"),
        (["bench", "-p", "100000"], 2, "do not fit into a context of"),
        (["export", "--precisions", "w1"], 2, "w1"),
        (["export", "--chunk-sizes", "big", "-o", "out"], 2, "32,128"),
        (["rm", "no-such-model"], 1, "edgellm ls"),
        (["nonsense"], 2, "No such command"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else None,
)
def test_bad_input_is_one_clear_line(
    cli: Cli, tiny_bundle: str, arguments: list[str], code: int, words: str
) -> None:
    needs_model = arguments[0] in ("run", "bench", "perplexity", "export") and not {
        "-m",
        "no-such-model",
    } & set(arguments)
    found = cli(*arguments, *(["-m", tiny_bundle] if needs_model else []))
    assert found.returncode == code, found.stderr
    assert words in found.stderr
    assert found.stdout == ""
    assert "Traceback" not in found.stderr
    lines = [li for li in found.stderr.strip().splitlines() if not li.startswith(("Usage", "Try"))]
    assert len([line for line in lines if line]) == 1


@pytest.mark.parametrize(
    "arguments", [["-p", "B"], ["-", "-p", "B"], ["-f", "-", "-p", "B"]], ids=str
)
def test_what_is_piped_in_stands_before_the_question(
    cli: Cli, tiny_bundle: str, arguments: list[str]
) -> None:
    more = ["--raw", "--json", "-n", "0"]
    piped = cli("run", "-m", tiny_bundle, *arguments, *more, stdin="A A\n")
    whole = cli("run", "-m", tiny_bundle, "-p", "A A\n\nB", *more)
    assert piped.returncode == whole.returncode == 0, piped.stderr
    tokens = [json.loads(result.stdout)["prompt_tokens"] for result in (piped, whole)]
    assert tokens[0] == tokens[1]


def test_a_question_in_the_place_of_the_model(cli: Cli) -> None:
    result = cli("run", "What is 2+2?")
    assert result.returncode == 1
    assert "edgellm run -p 'What is 2+2?'" in result.stderr


def test_why_an_answer_ended(cli: Cli, tiny_bundle: str) -> None:
    found = cli("run", tiny_bundle, "a", "--raw", "--json", "-n", "2", *GREEDY)
    assert json.loads(found.stdout)["finish_reason"] == "length"
    cut = cli("run", tiny_bundle, "a", "--raw", "-n", "2", "-j", '{"type": "array"}', *GREEDY)
    assert cut.returncode == 1
    assert "cut off (length)" in cut.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("redirection", "code", "words"),
    [
        ("<&-", 2, "prompt is empty"),
        ("-p a --raw -n 2 >&-", 1, "standard output is closed"),
        ("-p a --raw -n 2 2>&-", 0, ""),
        ("-p a --raw -n 2 <&- 2>&-", 0, ""),
    ],
)
def test_closed_streams(tiny_bundle: str, redirection: str, code: int, words: str) -> None:
    command = f"{sys.executable} -m edgellm.cli.main run -m {tiny_bundle} {redirection}"
    result = subprocess.run(["sh", "-c", command], capture_output=True, text=True)
    assert result.returncode == code, result.stderr
    assert words in result.stderr
    assert "Traceback" not in result.stderr
    assert bool(result.stdout) == (code == 0)


def test_invalid_utf8_on_stdin(cli: Cli, tiny_bundle: str) -> None:
    found = cli("run", tiny_bundle, stdin=b"abc\xff\xfe")
    assert found.returncode == 2
    assert "not valid UTF-8 at byte 3 (0xff)" in found.stderr


def test_model_files_that_are_wrong(cli: Cli, tmp_path: Path) -> None:
    cases = {
        "empty.gguf": (b"", "not a GGUF file"),
        "zip.gguf": (b"PK\3\4", "not a GGUF file"),
        "cut.gguf": (b"GGUF\3\0\0\0", "damaged or truncated"),
    }
    for name, (data, words) in cases.items():
        (tmp_path / name).write_bytes(data)
        found = cli("run", str(tmp_path / name), "x", env={"EDGELLM_HOME": str(tmp_path / "home")})
        assert found.returncode == 1
        assert words in found.stderr
        assert len(found.stderr.strip().splitlines()) == 1
    assert [p for p in (tmp_path / "home").rglob("*") if p.is_file() and p.suffix != ".lock"] == []


def test_export_ls_show_rm(cli: Cli, tiny_model: Path, tmp_path: Path) -> None:
    env = {"EDGELLM_HOME": str(tmp_path / "home")}
    assert cli("ls", env=env).stdout == ""
    exported = cli("export", str(tiny_model), env=env)
    assert exported.returncode == 0, exported.stderr
    assert "16 rounded again" in exported.stderr
    assert str(tiny_model) in cli("ls", env=env).stdout
    shown = cli("show", str(tiny_model), "--verify", env=env).stdout
    for words in ("llama", "default prefill", "default decode", "memory", "weights held"):
        assert words in shown
    folder = cli("ls", env=env).stdout.split()[-1]
    assert cli("rm", folder, env=env).returncode == 0
    assert cli("ls", env=env).stdout == ""
    out = tmp_path / "here"
    assert cli("export", str(tiny_model), "-o", str(out), "--chunk-sizes", "16", env=env).stdout
    assert (out / "w8a8" / "000.c16.onnx").exists()
    assert cli("run", str(out), "Hi", "-n", "2", env=env).returncode == 0


def test_perplexity_json(cli: Cli, tiny_bundle: str, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("one two three four five six seven eight nine ten " * 20)
    found = cli("perplexity", str(tmp_path / "text"), "-m", tiny_bundle, "--window", "64", "--json")
    result = json.loads(found.stdout)
    assert result["tokens"] == 15 * 63
    precision = DEFAULTS.prefill_precision(open_bundle(Path(tiny_bundle)).config)
    assert (result["precision"], result["kv_format"]) == (precision, "int8")
    # random weights know nothing: about as many choices as there are tokens
    assert 200 < result["perplexity"] < 2000
    decode = cli(
        "perplexity", str(tmp_path / "text"), "-m", tiny_bundle, "--window", "64", "--json",
        "--through", "decode", "--max-windows", "1",
    )  # fmt: skip
    expected = DEFAULTS.decode_precision(open_bundle(Path(tiny_bundle)).config)
    assert json.loads(decode.stdout)["precision"] == expected


def test_bench_outputs(cli: Cli, tiny_bundle: str) -> None:
    arguments = ("bench", tiny_bundle, "-p", "40", "-n", "3", "-d", "0,16", "-r", "2")
    results = json.loads(cli(*arguments, "-o", "json").stdout)
    assert [r["test"] for r in results] == ["pp40", "tg3", "pp40 @ d16", "tg3 @ d16"]
    for result in results:
        assert {"commit", "cpu", "threads", "prefill_precision", "decode_precision"} <= set(result)
        assert len(result["samples_s"]) == 2
        assert result["tokens_per_second"] > 0
    assert "| pp40 @ d16 |" in cli(*arguments).stdout


@pytest.mark.parametrize(
    "schedule",
    [
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("serial", "in-order")),
        "out-of-order",
    ],
)
def test_trace_of_every_schedule(
    process: Cli, tiny_bundle: str, tmp_path: Path, schedule: str
) -> None:
    """In processes: ONNX Runtime has one pool of threads for each, of a size of its schedule's."""
    where = ("--prefill", "cpu", "--precision", "w8a8", "--schedule", schedule, "-t", "2")
    trace = tmp_path / "trace.json"
    prompt = ("--raw", "-p", "abc " * 60, "-n", "1", *GREEDY)
    found = process("run", tiny_bundle, *where, *prompt, "--trace", str(trace), "--json")
    assert found.returncode == 0, found.stderr
    events = json.loads(trace.read_text())["traceEvents"]
    names = {event["name"] for event in events}
    assert {"segment 0", "segment 2", "attention 1", "commit"} < names
    assert 0 < json.loads(found.stdout)["bubble_rate"] < 1


def test_trace_that_cannot_be_written(cli: Cli, tiny_bundle: str, tmp_path: Path) -> None:
    found = cli("run", tiny_bundle, "-p", "a", "--trace", str(tmp_path))
    assert found.returncode == 2
    assert "directory" in found.stderr.lower()


def test_devices(cli: Cli) -> None:
    lines = cli("devices").stdout.splitlines()
    assert any(line.startswith("cpu") and " usable" in line for line in lines)
    assert any("not usable  not in this build" in line for line in lines)


def test_help_imports_no_command(cli: Cli) -> None:
    found = cli("--help")
    assert found.returncode == 0
    measuring = ("bench", "perplexity", "quality", "devices")
    for name in ("run", "export", "pull", "ls", "show", "rm", *measuring):
        assert f"  {name}" in found.stdout


def test_interrupt_stops_the_answer(smollm2: Bundle) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "edgellm.cli.main", "run", str(smollm2.path), "Count to 1000.",
         "--ignore-eos", "--context-policy", "shift", *GREEDY],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,  # `communicate` does not give what a buffer has taken
    )  # fmt: skip
    assert process.stdout is not None
    first = process.stdout.read(1)
    assert first
    process.send_signal(signal.SIGINT)
    out, err = process.communicate()
    assert process.returncode == 130
    assert (first + out).endswith(b"\n")
    assert b"Traceback" not in err


@pytest.mark.slow
def test_reader_that_goes_away(smollm2: Bundle) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "edgellm.cli.main", "run", str(smollm2.path), "Count to 1000.",
         "--ignore-eos", "-n", "200", *GREEDY],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    assert process.stdout is not None
    process.stdout.read(1)
    process.stdout.close()
    assert process.stderr is not None
    with process.stderr:
        err = process.stderr.read()
    process.wait()
    assert err == b""


def test_flags_in_messages_exist() -> None:
    from edgellm.cli.output import _ENDED
    from edgellm.cli.run import run

    known = {option for parameter in run.params for option in parameter.opts}
    named = {flag for text in _ENDED.values() for flag in re.findall(r"--[a-z-]+", text)}
    assert named
    assert named <= known


def test_an_answer_is_shown_though_its_trace_cannot_be_written(cli: Cli, tiny_bundle: str) -> None:
    arguments = ["run", tiny_bundle, "a", "--raw", "-n", "2", "--json"]
    result = cli(*arguments, "--trace", "/no/such/folder/trace")
    assert result.returncode == 2
    assert json.loads(result.stdout)["generation_tokens"] == 2


@pytest.mark.skipif(os.name != "posix", reason="Windows cannot look into a pipe")
def test_an_idle_pipe_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    said = []

    def say(message: str) -> None:
        said.append(message)
        os.close(writer)  # the end that is waited for

    monkeypatch.setattr("edgellm.cli.run._PATIENCE_S", 0)
    monkeypatch.setattr("edgellm.cli.run.say", say)
    with os.fdopen(reader) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        arguments = ["run", str(tmp_path), "-p", "a"]  # an empty folder
        assert run_command(arguments, interrupted=threading.Event()) == 1
    assert "waiting for the end of standard input" in said[0]


@pytest.mark.parametrize(
    "error",
    [ProviderError("qnn does not load: interrupted"), OSError("interrupted"), ValueError("broken")],
)
def test_an_error_that_ctrl_c_became(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries that are interrupted in C raise errors of their own."""

    def load(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("edgellm.cli.progress.load", load)
    interrupted = threading.Event()
    interrupted.set()
    assert run_command(["plan", "10"], interrupted=interrupted) == 130


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "code"),
    [(["run", "no-such-model", "x"], 1), (["--version"], 0), (["run"], 2)],
    ids=str,
)
def test_exit_codes_of_a_process(process: Cli, arguments: list[str], code: int) -> None:
    found = process(*arguments)
    assert found.returncode == code
    assert len(found.stderr.splitlines()) == (code != 0)
