"""Events of an ask, from which each dialect makes its reply.

Order: Begun, PromptProgress..., then for each sample Delta... and End.
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
    """The client of a request, as told by its API key.

    Attributes:
        salt: salt of the hashes of its blocks in the KV cache; only asks with the same salt find
            those blocks.
        owner: owner of its answers; see `GenerationOptions`.
    """

    salt: str = ""
    owner: str = ""


@dataclass(frozen=True)
class Begun:
    """Event of an accepted ask; errors in the ask are raised before this event.

    Attributes:
        model: id of the model that answers.
        prompt: tokens of the prompt.
        options: generation options of the answers, within the server's limits.
        engine: engine of the model.
    """

    model: str
    prompt: tuple[int, ...]
    options: GenerationOptions
    engine: Engine


@dataclass(frozen=True)
class PromptProgress:
    """Progress of a prompt's prefill.

    Attributes:
        done: prompt tokens computed so far.
        total: prompt tokens that were not found in the KV cache.
    """

    done: int
    total: int


@dataclass(frozen=True)
class Delta:
    """New part of one answer: all tokens that have come since the answer's last delta.

    Attributes:
        sample: index of the answer among those to the prompt, from 0.
        text: text to be shown; may be empty.
        pieces: tokens of the delta, with their log probabilities.
        reasoning: text of the model's reasoning, which is not in `text`.
        calls: parts of tool calls, which are not in `text` either.
    """

    sample: int
    text: str
    pieces: tuple[Piece, ...]
    reasoning: str = ""
    calls: tuple[ToolCallDelta, ...] = ()


@dataclass(frozen=True)
class End:
    """End of one answer, after its last `Delta`."""

    sample: int
    finish_reason: FinishReason
    stats: Stats


@dataclass(frozen=True)
class Embeddings:
    """Embeddings of several prompts: vectors `[E]` float32 of length 1.

    Attributes:
        tokens: token count of each prompt.
    """

    model: str
    vectors: list[NDArray[np.float32]]
    tokens: list[int]


@dataclass(frozen=True)
class Relevances:
    """Relevance of each of several documents, in their order; see `RankedDocument`.

    Attributes:
        tokens: token count of all prompts together.
    """

    model: str
    values: list[float]
    tokens: int


Event: TypeAlias = Begun | PromptProgress | Delta | End
