"""How much of what is around a gap goes into its prompt, as llama.cpp's server shares it out."""

from __future__ import annotations

from dataclasses import dataclass

# Most tokens of the file with the gap: llama.cpp's default batch.
_FILE = 2048
# Tokens of an answer that nobody has limited, for which room is kept.
_ANSWER = 256
# Markers, begin token, and the line with the path.
_MARKERS = 16


@dataclass(frozen=True)
class Budget:
    """Most tokens of each part: the end of the prefix, the beginning of the suffix, the end of the
    other files."""

    prefix: int
    suffix: int
    extra: int


def budget(ctx_size: int, *, max_tokens: int | None) -> Budget:
    """Three parts of the prefix to one of the suffix, in half of the context at most; other files
    have the rest."""
    answer = _ANSWER if max_tokens is None else max_tokens
    room = max(4, ctx_size - min(answer, ctx_size // 2) - _MARKERS)
    file = min(_FILE, room // 2)
    return Budget(prefix=3 * (file // 4), suffix=file // 4, extra=room - file)
