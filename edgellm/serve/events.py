"""What comes of an ask.

Begun, PromptProgress..., then for each sample Delta... and End
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from edgellm.generation_options import GenerationOptions
from edgellm.results import FinishReason, Piece, Stats
from edgellm.tool_use import ToolCallDelta

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from edgellm.engine.engine import Engine


@dataclass(frozen=True)
class Client:
    """Who asks.

    Attributes:
        salt: of the names of its blocks in the KV cache: only asks with the same one find them.
        owner: see `GenerationOptions`.
    """

    salt: str = ""
    owner: str = ""


@dataclass(frozen=True)
class Begun:
    """An ask was taken in; what is wrong with it was raised before.

    Attributes:
        model: the id of the model that answers.
        prompt: the tokens of the prompt.
        options: of the answers.
    """

    model: str
    prompt: tuple[int, ...]
    options: GenerationOptions
    engine: Engine


@dataclass(frozen=True)
class PromptProgress:
    """How far a prompt is: tokens of it that are computed, of those that were not cached."""

    done: int
    total: int


@dataclass(frozen=True)
class Delta:
    """What has come of an answer since its last one; several tokens that are there at once.

    Attributes:
        sample: which of the answers, from 0.
        text: to be shown; may be empty.
        pieces: its tokens, and what is known of each.
        reasoning: what the model thinks, which is not in `text`.
        calls: of tools, which are not either.
    """

    sample: int
    text: str
    pieces: tuple[Piece, ...]
    reasoning: str = ""
    calls: tuple[ToolCallDelta, ...] = ()


@dataclass(frozen=True)
class End:
    """The end of an answer, behind its last `Delta`."""

    sample: int
    finish_reason: FinishReason
    stats: Stats


@dataclass(frozen=True)
class Embeddings:
    """Vectors `[E]` of length 1, and how many tokens each is of."""

    model: str
    vectors: list[NDArray[np.float32]]
    tokens: list[int]


Event: TypeAlias = Begun | PromptProgress | Delta | End
