"""Default text for measuring a model: prose and code that come with Python."""

from __future__ import annotations

import argparse
import dataclasses
import inspect

from edgellm.errors import OptionError

# Chapters of the manual; none that models are calibrated on (see `export/calibration_text.py`).
_TOPICS = ("typesseq", "objects", "exceptions", "formatstrings", "debugger")
_MODULES = (argparse, dataclasses)
# Characters after which prose and code alternate, some four windows of 512 tokens.
_PIECE = 8000


def sample_text() -> str:
    """Return prose and code in turn, some 200,000 characters; the text depends on Python's version.

    Raises:
        OptionError: this Python came without its manual or without the sources of its library.
    """
    try:
        from pydoc_data import topics  # large, and rarely needed

        prose = "\n\n".join(topics.topics[name] for name in _TOPICS)
        code = "".join(map(inspect.getsource, _MODULES))
    except (ImportError, KeyError, OSError):
        raise OptionError(
            "this Python came without the manual and sources that stand in for a text; give one"
        ) from None
    count = min(len(prose), len(code)) // _PIECE
    starts = range(0, count * _PIECE, _PIECE)
    return "\n\n".join(text[i : i + _PIECE] for i in starts for text in (prose, code))
