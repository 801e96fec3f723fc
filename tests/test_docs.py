"""What README shows is run."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import make_api_reference
import pytest

from edgellm.backends.registry import NATIVE
from edgellm.backends.selection import select
from edgellm.cli.main import COMMANDS
from edgellm.cli.main import edgellm as command_line
from edgellm.options import EngineOptions

ROOT = Path(__file__).parent.parent
FOLDERS = ("edgellm", "graphs", "kernels", "quantize", "cli")
README = (ROOT / "README.md").read_text(encoding="utf-8")


def fenced(mark: str) -> str:
    found = re.search(rf"<!-- {mark} -->\n```\w+\n(.*?)```", README, re.DOTALL)
    assert found, f"README has no block marked {mark}"
    return found[1]


def fenced_output(mark: str) -> str:
    """The block behind a marked one."""
    found = re.search(rf"<!-- {mark} -->\n```\w+\n.*?```\n\n```\n(.*?)```", README, re.DOTALL)
    assert found, f"README has no output behind {mark}"
    return found[1]


@pytest.mark.usefixtures("smollm2")
def test_python_example() -> None:
    found = subprocess.run(
        [sys.executable, "-c", fenced("python example")],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert found.returncode == 0, found.stderr
    assert "Paris" in found.stdout
    assert f"{{'{select(EngineOptions()).prefill}':" in found.stdout
    if select(EngineOptions()).prefill == NATIVE:  # other arithmetic may find other words
        assert found.stdout == fenced_output("python example")


def test_hints_name_packages() -> None:
    """Extras can be installed from a clone alone, and a reader of hints may have none."""
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    files += [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    named = [
        f"{path}: {found}"
        for path in files
        for found in re.findall(r"edgellm\[\w+\]", path.read_text(encoding="utf-8"))
    ]
    assert named == []


def test_commands_take_the_arguments_that_readme_gives_them() -> None:
    lines = re.findall(r"```sh\n(.*?)```", README, re.DOTALL)
    commands = [
        shlex.split(part, comments=True)[1:]
        for line in "".join(lines).replace("\\\n", "").splitlines()
        for part in line.replace("MODEL...", "MODEL").split(" && ")
        if part.startswith("edgellm ") and " | " not in part
    ]
    assert len(commands) > 8
    for words in commands:
        group = command_line.make_context("edgellm", list(words))
        name, command, rest = command_line.resolve_command(group, words)
        assert command is not None
        command.make_context(name, rest, parent=group)


def test_every_command_is_named() -> None:
    for name in COMMANDS:
        assert re.search(rf"edgellm (?:[a-z]+ \| )*{name}\b", README), name


def test_the_python_reference_is_what_docstrings_say() -> None:
    """If not: python tests/helpers/make_api_reference.py"""
    assert (
        make_api_reference.REFERENCE.read_text(encoding="utf-8") == make_api_reference.reference()
    )


def test_links_lead_to_files() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
    broken = [
        f"{page.name}: {target}"
        for page in pages
        for target in re.findall(r"\]\(([\w./-]+?)(?:#[\w-]*)?\)", page.read_text(encoding="utf-8"))
        if not (page.parent / target).exists()
    ]
    assert broken == []
