"""Writes docs/python-api.md from the docstrings of what `edgellm` exports.

python tests/helpers/make_api_reference.py
"""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path
from typing import Any

import edgellm

REFERENCE = Path(__file__).parent.parent.parent / "docs" / "python-api.md"
_HEAD = """# Python API

All that `import edgellm` gives, written by `python tests/helpers/make_api_reference.py`. How it is
used is in [Python](python.md).
"""
# Their fields are those of the dataclass of the same name.
_SKIPPED = {"EngineArguments", "GenerationArguments", "ToolArguments"}


def text_of(thing: Any) -> str:
    """A docstring, indented as code where it lists things."""
    lines = inspect.cleandoc(thing.__doc__ or "").splitlines()
    shown, inside = list[str](), False
    for line in lines:
        inside = bool(line.startswith(" ") or not line) and inside
        if line in ("Args:", "Attributes:", "Raises:", "Returns:"):
            inside = True
            shown.append(f"*{line[:-1]}*\n")
        elif inside and line.startswith("    ") and not line.startswith("     "):
            name, colon, rest = line.strip().partition(": ")
            shown.append(f"* `{name}`: {rest}" if colon else f"* {line.strip()}")
        elif inside and line:
            shown[-1] += f" {line.strip()}"
        else:
            shown.append(line)
    return "\n".join(shown).strip()


def signature_of(name: str, function: Any) -> str:
    signature = inspect.signature(function)
    names = [
        str(p).split(":")[0].split("=")[0].strip() if p.kind is not p.KEYWORD_ONLY else f"{p.name}="
        for p in signature.parameters.values()
        if p.name != "self"
    ]
    return f"{name}({', '.join(names)})"


def of_class(name: str, kind: type) -> list[str]:
    parts = [f"## {name}", text_of(kind)]
    if dataclasses.is_dataclass(kind):
        listed = "*Attributes*" in parts[-1]
        fields = [f"`{field.name}`" for field in dataclasses.fields(kind)]
        parts += [] if listed else ["*Fields*: " + ", ".join(fields)]
    for member, value in inspect.getmembers_static(kind):
        if member.startswith("_"):
            continue
        if isinstance(value, property) and value.__doc__:
            parts += [f"### {name}.{member}", text_of(value)]
        elif inspect.isfunction(value) and value.__doc__:
            parts += [f"### {signature_of(f'{name}.{member}', value)}", text_of(value)]
    return parts


def reference() -> str:
    """The whole page."""
    parts, errors = [_HEAD.strip()], ["## Errors"]
    for name in sorted(set(edgellm.__all__) - _SKIPPED, key=str.lower):
        thing = getattr(edgellm, name)
        if inspect.isclass(thing) and issubclass(thing, Exception):
            errors.append(f"* `{name}`: {text_of(thing)}")
        elif inspect.isclass(thing):
            parts += of_class(name, thing)
        elif inspect.isfunction(thing):
            parts += [f"## {signature_of(name, thing)}", text_of(thing)]
    return "\n\n".join([*parts, errors[0], "\n".join(errors[1:])]) + "\n"


if __name__ == "__main__":
    REFERENCE.write_text(reference(), encoding="utf-8")
