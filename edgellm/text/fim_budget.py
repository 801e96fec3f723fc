"""Token budget of an infill prompt, shared as in llama.cpp's server."""

from __future__ import annotations

from dataclasses import dataclass

# Maximum of tokens from the file with the gap: llama.cpp's default batch.
_FILE = 2048
# Tokens to keep free for an answer without `max_tokens`.
_ANSWER = 256
# Tokens to keep free for markers, begin token, and the line with the path.
_MARKERS = 16


@dataclass(frozen=True)
class Budget:
    """Maximum of tokens of each part of an infill prompt.

    Attributes:
        prefix: tokens from the end of the text before the gap.
        suffix: tokens from the beginning of the text after the gap.
        extra: tokens from the end of other files.
    """

    prefix: int
    suffix: int
    extra: int


def budget(ctx_size: int, *, max_tokens: int | None) -> Budget:
    """Share the context among prefix, suffix and other files of an infill prompt.

    Prefix and suffix have 3 to 1 of half the room that the answer leaves, at most 2048 tokens;
    other files have the rest.

    Args:
        ctx_size: tokens of the context.
        max_tokens: limit on the answer's tokens, or None.
    """
    answer = _ANSWER if max_tokens is None else max_tokens
    room = max(4, ctx_size - min(answer, ctx_size // 2) - _MARKERS)
    file = min(_FILE, room // 2)
    return Budget(prefix=3 * (file // 4), suffix=file // 4, extra=room - file)
