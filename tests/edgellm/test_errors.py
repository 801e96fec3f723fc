from __future__ import annotations

import pytest

from edgellm.errors import first_line


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (RuntimeError("\n one\ntwo\n"), "one"),
        (RuntimeError(""), "RuntimeError"),
        (OSError(" \n "), "OSError"),
        (KeyError(), "KeyError"),
    ],
)
def test_every_error_has_a_line(error: Exception, line: str) -> None:
    assert first_line(error) == line
