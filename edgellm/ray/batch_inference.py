"""Batch inference for Ray Data: rows with prompts in, rows with answers out.

ds.map_batches(
    edgellm.ray.BatchInference,
    fn_constructor_kwargs={"model": "smollm2-135m-instruct", "threads": 4},
    compute=ray.data.ActorPoolStrategy(size=2),
    num_cpus=4,
    batch_size=64,
)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from edgellm.engine.adapters import AdapterSource
from edgellm.errors import OptionError
from edgellm.generation_options import GenerationArguments
from edgellm.llm import load
from edgellm.options import EngineArguments
from edgellm.store.sources import DEFAULT_MODEL
from edgellm.text.prompt import Message

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from edgellm.generation import Prompt
    from edgellm.results import Completion

Batch = dict[str, "NDArray[Any]"]


class BatchInference:
    """A class for `map_batches`: each actor of its pool loads the model once.

    The rows of a batch are answered together, so `batch_size` should be at least 16. A row that
    fails has an `error`, and the others their answers.

    Args:
        model: model name, as for `edgellm.load`.
        threads: CPU threads of each actor; give it as many CPUs (`num_cpus`).
        prompt: name of the column of prompts: texts, which are continued as they are, or
            conversations, lists of messages with `role` and `content`.
        answer: name of the column of answers that is added, beside `finish_reason`,
            `prompt_tokens`, `answer_tokens` and `error`.
        engine: further fields of `EngineOptions`.
        adapters: adapters (LoRA) that `generation` may name, see `edgellm.load`.
        generation: fields of `GenerationOptions`. With a `seed` every row has the same one, so
            that its answer depends on neither batch nor actor.

    Raises:
        EdgeLLMError: the model cannot be loaded, or an option is not allowed.
    """

    def __init__(
        self,
        model: str = DEFAULT_MODEL,
        *,
        threads: int,
        prompt: str = "prompt",
        answer: str = "answer",
        engine: EngineArguments | None = None,
        adapters: Mapping[str, AdapterSource] | None = None,
        generation: GenerationArguments | None = None,
    ) -> None:
        arguments: EngineArguments = {**(engine or {}), "threads": threads}
        self._llm = load(model, **arguments, adapters=adapters)
        self._options = self._llm.generation_options(**(generation or {}))
        self._prompt = prompt
        self._answer = answer

    def __call__(self, batch: Batch) -> Batch:
        """Answer a batch of rows, and return it with the columns of answers added.

        Raises:
            OptionError: the batch has no column of prompts.
        """
        if self._prompt not in batch:
            raise OptionError(
                f"`prompt` is {self._prompt!r}; the columns are {', '.join(map(repr, batch))}"
            )
        rows = batch[self._prompt]
        completions: list[Completion | None] = [None] * len(rows)
        errors = [""] * len(rows)
        prompts: dict[int, Prompt] = {}
        for number, value in enumerate(rows):
            try:
                prompts[number] = _prompt_of(value)
            except OptionError as error:
                errors[number] = str(error)
        numbers = list(prompts)
        for each in self._llm.batch(list(prompts.values()), options=self._options):
            completions[numbers[each.index]] = each.completion
            errors[numbers[each.index]] = "" if each.error is None else str(each.error)
        return {**batch, **_columns(self._answer, completions, errors)}


def _prompt_of(value: object) -> Prompt:
    """Convert a cell of the column of prompts to a prompt.

    Raises:
        OptionError: the cell is neither a text nor a list of messages.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if not isinstance(value, Sequence) or not value:
        raise OptionError(f"a prompt is {value!r:.100}; a text or a list of messages is expected")
    return [_message(each) for each in value]


def _message(value: object) -> Message:
    if isinstance(value, Mapping):
        role, content = value.get("role"), value.get("content")
        if isinstance(role, str) and isinstance(content, str):
            return Message(role, content)
    raise OptionError(
        f"a message is {value!r:.100}; `role` and `content` are expected, which are texts"
    )


def _columns(
    name: str, completions: Sequence[Completion | None], errors: Sequence[str]
) -> dict[str, NDArray[Any]]:
    """Build the columns of answers, with a value for each row; "" and 0 for a failed row."""
    texts = ["" if c is None else c.text for c in completions]
    reasons = ["error" if c is None else c.finish_reason for c in completions]
    prompts = [0 if c is None else c.stats.prompt_tokens for c in completions]
    tokens = [0 if c is None else len(c.tokens) for c in completions]
    return {
        name: np.array(texts, dtype=object),
        "finish_reason": np.array(reasons, dtype=object),
        "prompt_tokens": np.array(prompts, dtype=np.int64),
        "answer_tokens": np.array(tokens, dtype=np.int64),
        "error": np.array(errors, dtype=object),
    }
