"""Commands that measure: values that are not allowed, and Ctrl-C."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from edgellm.backends.int8_support import int8_products_are_exact
from edgellm.backends.selection import select
from edgellm.export import export
from edgellm.measure.doctor import Check, Examined
from edgellm.options import EngineOptions
from edgellm.store.bundle import Bundle

TEXT = "The quick brown fox jumps over the lazy dog. " * 5_000


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["bench", "-p", "-5"], "'--n-prompt': -5 tokens; allowed is 0 or more"),
        (["bench", "-n", "8,-2"], "'--n-gen': -2 tokens; allowed is 0 or more"),
        (["bench", "-d", "-1"], "'--n-depth': -1 tokens"),
        (["bench", "-d", "1,,2"], "'--n-depth': '1,,2'"),
        (["bench", "-r", "0"], "'--repetitions': 0 is not in the range x>=1"),
        (["bench", "-p", "0", "-n", "0"], "nothing to measure"),
        (["bench", "-p", "90", "-c", "64"], "pp90 needs 90 tokens"),
        (["bench", "-p", "9" * 30], "takes no more"),
        (["perplexity", "-", "--window", "1"], "'--window': 1 is not in the range x>=2"),
        (["perplexity", "-", "--window", "65", "-c", "64"], "65; allowed is 2 to the context size"),
        (["perplexity", "-", "--max-windows", "0"], "'--max-windows': 0"),
        (["quality", "-f", "-", "-c", "64"], "512; allowed is 2 to the context size"),
        (["plan", "0"], "PROMPT_LENGTH]': 0 is"),
        (["plan", "65", "-c", "64"], "--ctx-size"),
        (["plan", "5", "-t", "0"], "--threads is 0"),
        (["doctor", "-c", "-5"], "--ctx-size is -5"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else None,
)
def test_values_that_are_not_allowed(
    cli: Callable[..., subprocess.CompletedProcess[str]],
    smollm2: Bundle,
    arguments: list[str],
    words: str,
) -> None:
    found = cli(*arguments, "-m", str(smollm2.path), stdin="some text")
    assert found.returncode == 2, found.stderr
    assert words in found.stderr
    assert found.stdout == ""
    assert "Traceback" not in found.stderr


def test_doctor_is_brief_where_all_is_well(
    cli: Callable[..., subprocess.CompletedProcess[str]],
    tiny_bundle: str,
    tiny_model: Path,
    tmp_path: Path,
) -> None:
    bundle = shutil.copytree(tiny_bundle, tmp_path / "tiny")
    if not int8_products_are_exact():  # prompts run in float32 there
        export(tiny_model, bundle, name="tiny", source=str(tiny_model), precisions=("f32",))
    where = ("doctor", str(bundle), "--prefill", "cpu", "--decode", "portable", "-c", "64")
    found = cli(*where)
    assert found.returncode == 0, found.stdout
    setting, machine, subject, last = found.stdout.splitlines()
    assert setting.startswith("tiny: prefill cpu")
    assert "decode portable" in setting
    assert "edgellm 0." in machine
    assert " segments, " in subject
    assert " prompts, head: passed; nearest to its limit: " in subject
    every = cli(*where, "--verbose").stdout.splitlines()
    assert every[-1] == last == f"all {len(every) - 4} checks passed"
    assert all(line.startswith("ok    ") for line in every[3:-1])


def test_doctor_says_what_failed_and_what_to_do(
    cli: Callable[..., subprocess.CompletedProcess[str]],
    tiny_bundle: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    results = [
        Examined("f32 on cpu"),
        *(
            Check(f"segment {index}", error, 0.1)
            for index, error in enumerate((0.7, math.nan, 0.0))
        ),
        Examined("packed on native"),
        Check("head", 0.0, 0.1),
    ]
    monkeypatch.setattr("edgellm.cli.doctor.examine", lambda *_, **__: iter(results))
    found = cli("doctor", tiny_bundle)
    assert found.returncode == 1
    assert found.stdout.splitlines()[2:6] == [
        "WRONG segment 0: error 0.7, allowed 0.1",
        "WRONG segment 1: error nan, allowed 0.1",
        "f32 on cpu: 3 segments: 2 of 3 wrong",
        "packed on native: head: passed; nearest to its limit: head, 0 of 0.1",
    ]
    assert "2 of 4 checks failed: segment 0, segment 1\nWhat to do: " in found.stdout


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="needs a pseudo-terminal")
@pytest.mark.parametrize(
    "arguments",
    [
        ["perplexity", "TEXT", "--window", "16"],
        ["bench", "-n", "1000", "-r", "1000"],
        ["perplexity", "TEXT", "--window", "16", "--through", "decode"],
        ["quality"],
        ["quality", "-f", "TEXT", "--window", "16", "--max-windows", "1000"],
        ["plan", "3000", "--prefill", "cpu", "--schedule", "out-of-order"],
        ["doctor"],
        ["doctor", "--prefill", "cpu"],
    ],
    ids=" ".join,
)
def test_an_interrupt_ends_the_command(
    smollm2: Bundle, tmp_path: Path, arguments: list[str]
) -> None:
    from terminal import CTRL_C, Terminal

    (tmp_path / "TEXT").write_text(TEXT)
    wanted = select(EngineOptions(prefill="cpu")).prefill_precision(smollm2.config)
    if "cpu" in arguments and wanted not in smollm2.manifest.precisions:
        pytest.skip(f"on this processor the provider computes in {wanted}, which is not exported")
    bundle = tmp_path / "bundle"
    shutil.copytree(smollm2.path, bundle, copy_function=os.link)
    command = [sys.executable, "-m", "edgellm.cli.main", *arguments, "-m", str(bundle)]
    with Terminal(command, folder=tmp_path) as terminal:
        terminal.wait_for(lambda: len(terminal.raw) > 0)  # progress, or a first result
        terminal.send(CTRL_C)
        assert terminal.exit_code() == 130, terminal.text
        assert "Traceback" not in terminal.text
    assert list(bundle.rglob(".partial*")) == []
