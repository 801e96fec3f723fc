"""A shell on a terminal for the tests of the command line."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from edgellm.store.bundle import Bundle


@pytest.fixture
def shell(smollm2: Bundle, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Opens shells on a terminal: `shell(rows=12)`; $MODEL is the default model's bundle.

    The chat's history is in a home of its own.
    """
    if os.name != "posix":
        pytest.skip("needs a pseudo-terminal")
    from terminal import Terminal, bash

    home = tmp_path / "home"
    home.mkdir()
    with ExitStack() as opened:

        def run(*, env: dict[str, str] | None = None, **options: Any) -> Terminal:
            own = {"MODEL": str(smollm2.path), "EDGELLM_HOME": str(home)}
            return opened.enter_context(bash(tmp_path, env={**own, **(env or {})}, **options))

        yield run
