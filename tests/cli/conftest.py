"""Fixtures of the command line: commands in a process of their own, and a shell on a terminal."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from edgellm.cli.options import say_if_kernels_are_missing
from edgellm.export import export
from edgellm.store.bundle import Bundle


@pytest.fixture(autouse=True)
def _said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests are no first run."""
    monkeypatch.setattr("edgellm.cli.options.say_if_kernels_are_missing", lambda: None)


@pytest.fixture(scope="session")
def tiny_bundle(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    out = tmp_path_factory.mktemp("bundles") / "tiny"
    export(tiny_model, out, name="tiny", source=str(tiny_model))
    return str(out)


@pytest.fixture(scope="session")
def base_bundle(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The tiny model without a chat template."""
    folder = tmp_path_factory.mktemp("base")
    shutil.copytree(tiny_model, folder / "model")
    file = folder / "model" / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    del settings["chat_template"]
    file.write_text(json.dumps(settings))
    export(folder / "model", folder / "bundle", name="base", source="base")
    return str(folder / "bundle")


@pytest.fixture
def process() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs the command in a process of its own: `process("run", "Hi")`."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "edgellm.cli.main", *arguments]
        return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)

    return run


@pytest.fixture
def shell(
    smollm2: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Any]]:
    """Opens shells on a terminal: `shell(rows=12)`; $MODEL is the default model's bundle.

    The chat's history is in a home of its own.
    """
    if os.name != "posix":
        pytest.skip("needs a pseudo-terminal")
    from terminal import Terminal, bash

    home = tmp_path / "home"
    home.mkdir()
    with monkeypatch.context() as patch:
        patch.setenv("EDGELLM_HOME", str(home))
        say_if_kernels_are_missing()
    with ExitStack() as opened:

        def run(*, env: dict[str, str] | None = None, **options: Any) -> Terminal:
            own = {"MODEL": str(smollm2.path), "EDGELLM_HOME": str(home)}
            return opened.enter_context(bash(tmp_path, env={**own, **(env or {})}, **options))

        yield run
