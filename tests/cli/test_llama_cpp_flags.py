"""Command lines that people bring from llama.cpp and other programs."""

from __future__ import annotations

import json
from collections.abc import Callable
from subprocess import CompletedProcess

import pytest

Cli = Callable[..., CompletedProcess[str]]


@pytest.mark.parametrize(
    ("flags", "ignored"),
    [
        (["-ngl", "99"], "-ngl"),
        (["-ngl", "-1"], "-ngl"),
        (["-fa", "1"], "-fa"),
        (["--n-gpu-layers=99"], "-ngl"),
        (["-fa"], "-fa"),
        (["-fa", "on"], "-fa"),
        (["--jinja"], "--jinja"),
        (["-cnv"], "-cnv"),
        (["-ub", "256"], "-ub"),
        (["--no-mmap"], "--no-mmap"),
    ],
)
def test_flags_without_use_are_said_to_be_ignored(
    cli: Cli, tiny_bundle: str, flags: list[str], ignored: str
) -> None:
    plain = cli("run", "-m", tiny_bundle, "-p", "a", "-n", "2", "-s", "1")
    found = cli("run", *flags, "-m", tiny_bundle, "-p", "a", "-n", "2", "-s", "1")
    assert (found.returncode, found.stdout) == (0, plain.stdout), found.stderr
    assert found.stderr.startswith(f"edgellm: {ignored} is ignored: ")
    assert plain.stderr == ""


def test_values_that_look_like_flags(cli: Cli, tiny_bundle: str) -> None:
    """A prompt or a suffix may be any text."""
    for text in ("-b", "--jinja", "-hf", "-ngl=5"):
        found = cli("run", "-m", tiny_bundle, "-p", text, "--raw", "--json", "-n", "1")
        assert json.loads(found.stdout)["prompt_tokens"] == len(text)
        assert found.stderr == ""


def test_flags_with_another_name(cli: Cli, tiny_bundle: str) -> None:
    plain = cli("run", tiny_bundle, "a", "--raw", "--kv-format", "f16", "-n", "3", "-s", "1")
    found = cli("run", tiny_bundle, "a", "-no-cnv", "-ctk", "f16", "-ctv", "f16", "--n-predict",
                "3", "-s", "1")  # fmt: skip
    assert (found.returncode, found.stdout) == (0, plain.stdout), found.stderr
    hub = cli("run", "-hf", "org/no-such-repository:Q4_K_M", "-p", "a", env={"HF_HUB_OFFLINE": "1"})
    assert "hf:org/no-such-repository:Q4_K_M" in hub.stderr
    twice = cli("run", tiny_bundle, "-hf", "org/repo", "-p", "a")
    assert "the model is named twice" in twice.stderr


@pytest.mark.parametrize(
    ("command", "meant"), [("list", "ls"), ("chat", "run"), ("serv", "serve"), ("ps", "ls")]
)
def test_commands_of_others(cli: Cli, command: str, meant: str) -> None:
    found = cli(command)
    assert found.returncode == 2
    assert f"Did you mean {meant}?" in found.stderr


def test_models_with_short_names(cli: Cli) -> None:
    head, *rows = cli("ls", "--available").stdout.splitlines()
    assert head.split() == ["NAME", "FILE", "MEMORY", "FOR"]
    assert rows[0].split()[:3] == ["smollm2-135m-instruct", "98", "MB"]
    assert len(rows) >= 10
    near = cli("run", "qwen3", "hi")
    assert near.returncode == 1
    assert "qwen3-4b" in near.stderr


def test_a_base_model_goes_on(cli: Cli, base_bundle: str) -> None:
    raw = cli("run", "-m", base_bundle, "-p", "a b", "--raw", "-n", "3", "--temp", "0")
    plain = cli("run", "-m", base_bundle, "-p", "a b", "-n", "3", "--temp", "0")
    assert plain.stdout == raw.stdout
    assert "base model" in plain.stderr
    system = cli("run", "-m", base_bundle, "-p", "a b", "-sys", "be kind")
    assert system.returncode == 1
    assert "no chat template" in system.stderr
