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
# Their fields are those of `EngineOptions` and `GenerationOptions`.
_SKIPPED = {"EngineArguments", "GenerationArguments", "__version__"}


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
        if p.name not in ("self", "cls")
    ]
    return f"{name}({', '.join(names)})"


def of_class(name: str, kind: type) -> list[str]:
    parts = [f"## {name}", text_of(kind)]
    fields = inspect.get_annotations(kind)
    if fields:
        lines = [f"{name}: {_typed(kind, name, hint)}" for name, hint in fields.items()]
        parts.append("\n".join(["```text", *lines, "```"]))
    for member, value in inspect.getmembers_static(kind):
        if isinstance(value, classmethod | staticmethod):
            value = value.__func__
        if member.startswith("_"):
            continue
        if isinstance(value, property) and value.__doc__:
            parts += [f"### {name}.{member}", text_of(value)]
        elif inspect.isfunction(value) and value.__doc__:
            parts += [f"### {signature_of(f'{name}.{member}', value)}", text_of(value)]
    return parts


def _typed(kind: type, name: str, hint: object) -> str:
    """A field's type and default."""
    listed = dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ()
    value = {field.name: field.default for field in listed}.get(name, dataclasses.MISSING)
    hint = getattr(hint, "__forward_arg__", hint)
    return f"{hint}" if value is dataclasses.MISSING else f"{hint} = {value!r}"


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
        else:  # the name of a type
            parts += [f"## {name}", f"`{thing}`".replace("typing.", "")]
    return "\n\n".join([*parts, errors[0], "\n".join(errors[1:])]) + "\n"


if __name__ == "__main__":
    REFERENCE.write_text(reference(), encoding="utf-8")
