from __future__ import annotations

from make_reference import REFERENCE, reference


def test_the_reference_is_what_the_commands_say() -> None:
    """If not: python -P tests/cli/make_reference.py"""
    assert REFERENCE.read_text(encoding="utf-8") == reference()
