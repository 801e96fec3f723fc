"""Many prompts at once: they share steps, and so the reading of the weights."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace

from edgellm.engine.context import Context
from edgellm.engine.engine import Engine
from edgellm.engine.request import LogitFilter, Request
from edgellm.errors import EdgeLLMError
from edgellm.generation_options import GenerationOptions
from edgellm.results import Completion, Piece, completion

Prompt = str | SequenceOf[int]
# Prompts in the hands of the loop at once; the rest is not even encoded.
_AT_ONCE = 64


@dataclass(frozen=True)
class BatchAnswer:
    """One answer of many.

    Attributes:
        index: which of the prompts it is to, from 0.
        sample: which of the answers to this prompt.
        completion: None where it failed.
        error: why it failed.
    """

    index: int
    sample: int
    completion: Completion | None
    error: Exception | None = None

    def result(self) -> Completion:
        """The completion.

        Raises:
            Exception: the answer's error.
        """
        if self.completion is None:
            assert self.error is not None
            raise self.error
        return self.completion


@dataclass
class _Running:
    """An answer on its way."""

    index: int
    sample: int
    request: Request
    pieces: list[Piece] = field(default_factory=list)

    def read(self) -> BatchAnswer | None:
        """Take the pieces that are there; gives the answer with the last one."""
        request = self.request
        finished = request.finished  # before its last piece is taken
        while request.pieces:
            self.pieces.append(request.next_piece())
        if not finished:
            return None
        if request.error is not None:
            return BatchAnswer(self.index, self.sample, None, request.error)
        return BatchAnswer(self.index, self.sample, completion(self.pieces))


def answers(
    engine: Engine,
    prompts: Iterable[Prompt],
    options: GenerationOptions,
    *,
    n: int = 1,
    cancel: threading.Event | None = None,
    logit_filter: LogitFilter | None = None,
) -> Iterator[BatchAnswer]:
    """Answer prompts, `n` times each, as they finish.

    A prompt that fails does so in its own answers.

    Args:
        options: of all answers; where `n` is more than 1 and there is a seed, answer i has the seed
            that is larger by i.
    """
    waiting = enumerate(prompts)
    running: list[_Running] = []
    try:
        while True:
            while len(running) < _AT_ONCE:
                index, prompt = next(waiting, (-1, ""))
                if index < 0:
                    break
                try:
                    begun = _begun(engine, index, prompt, options, n, cancel, logit_filter)
                except (EdgeLLMError, ValueError) as error:
                    yield from (BatchAnswer(index, sample, None, error) for sample in range(n))
                else:
                    running += begun  # before it is submitted: an interrupt may come in between
                    engine.loop.submit(begun[0].request)
            if not running:
                return
            engine.loop.advance([each.request for each in running])
            for each in list(running):
                answer = each.read()
                if answer is not None:
                    running.remove(each)
                    yield answer
    finally:
        for each in running:
            engine.loop.withdraw(each.request)


def _begun(
    engine: Engine,
    index: int,
    prompt: Prompt,
    options: GenerationOptions,
    n: int,
    cancel: threading.Event | None,
    logit_filter: LogitFilter | None,
) -> list[_Running]:
    """The answers to a prompt, all but the first of which begin where it has been computed."""
    seeds = [secrets.randbits(32) if options.seed is None else options.seed + i for i in range(n)]
    requests = []
    for seed in seeds:
        context = Context(engine)
        context.append("prompt", prompt, parse_special=True)
        requests.append(
            Request(
                context,
                replace(options, seed=seed),
                cancel=cancel,
                logit_filter=logit_filter,
                closes=True,
            )
        )
    first, *others = requests
    first.check()
    first.forks = others
    return [_Running(index, sample, request) for sample, request in enumerate(requests)]


def is_many(prompt: object) -> bool:
    """Whether it is a list of prompts and not one prompt, which is a text or token ids."""
    if isinstance(prompt, str) or not isinstance(prompt, SequenceOf) or not prompt:
        return False
    return all(isinstance(each, (str, list, tuple)) for each in prompt)
