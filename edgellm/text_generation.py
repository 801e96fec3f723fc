"""Continuation of texts: one text, several answers to one text, or many texts together."""

from __future__ import annotations

import threading
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence, Sized
from typing import Unpack, overload

from edgellm.batch import BatchAnswer, BatchRequest, Prompt, answers, is_many, prompt_tokens
from edgellm.checks import check_hooks, check_number
from edgellm.engine.context import Context
from edgellm.engine.engine import Engine
from edgellm.engine.request import LogitFilter
from edgellm.engine.stream import Pending, aiterate, iterate
from edgellm.generation_options import (
    GenerationArguments,
    GenerationOptions,
    chosen_options,
)
from edgellm.progress import Progress, ProgressCallback
from edgellm.results import Completion, Piece, completion
from edgellm.session import Session


class TextGeneration:
    """Methods of `LLM` for prompts without a chat template."""

    @property
    def engine(self) -> Engine:
        """Engine that runs the model."""
        raise NotImplementedError

    @overload
    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        n: None = None,
        options: GenerationOptions | None = None,
        cancel: threading.Event | None = None,
        progress: ProgressCallback | None = None,
        logit_filter: LogitFilter | None = None,
        **arguments: Unpack[GenerationArguments],
    ) -> Completion: ...

    @overload
    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        n: int,
        options: GenerationOptions | None = None,
        cancel: threading.Event | None = None,
        progress: ProgressCallback | None = None,
        logit_filter: LogitFilter | None = None,
        **arguments: Unpack[GenerationArguments],
    ) -> list[Completion]: ...

    @overload
    def generate(
        self,
        prompt: list[str] | list[list[int]],
        *,
        n: int | None = None,
        options: GenerationOptions | None = None,
        cancel: threading.Event | None = None,
        progress: ProgressCallback | None = None,
        logit_filter: LogitFilter | None = None,
        **arguments: Unpack[GenerationArguments],
    ) -> list[Completion]: ...

    def generate(
        self,
        prompt: str | Sequence[int] | list[str] | list[list[int]],
        *,
        n: int | None = None,
        options: GenerationOptions | None = None,
        cancel: threading.Event | None = None,
        progress: ProgressCallback | None = None,
        logit_filter: LogitFilter | None = None,
        **arguments: Unpack[GenerationArguments],
    ) -> Completion | list[Completion]:
        """Continue a text, or token ids, without chat template; see `chat` for questions.

        A special token that is written out in the text, such as `<|im_end|>`, is that token.
        An answer that was stopped is returned as far as it got, see `Session.generate`.

        Args:
            prompt: text or token ids; or a list of prompts, which are answered together as in
                `batch`, with the answers in order.
            n: number of answers to each prompt, which is computed once; with a seed, answer i has
                the seed that is larger by i. With `n`, answers come as a list, those to the same
                prompt one after the other.
            options, cancel, logit_filter: see `Session.stream`.
            progress: callback told how far a single prompt is, or how many answers are there.
            arguments: fields of `GenerationOptions`, over those of `options`.
        """
        if n is not None or is_many(prompt):
            prompts = prompt if is_many(prompt) else [prompt]
            answers = self.batch(
                prompts,  # type: ignore[arg-type]
                n=1 if n is None else n,
                options=options,
                cancel=cancel,
                progress=progress,
                logit_filter=logit_filter,
                **arguments,
            )
            return _in_order(answers)
        pieces = self.stream(
            prompt,  # type: ignore[arg-type]
            options=options,
            cancel=cancel,
            progress=progress,
            logit_filter=logit_filter,
            **arguments,
        )
        return completion(list(pieces))

    def stream(
        self,
        prompt: str | Sequence[int],
        *,
        options: GenerationOptions | None = None,
        cancel: threading.Event | None = None,
        progress: ProgressCallback | None = None,
        logit_filter: LogitFilter | None = None,
        **arguments: Unpack[GenerationArguments],
    ) -> Iterator[Piece]:
        """Stream the answer of `generate`, piece by piece."""
        pending = self._pending(prompt, options, cancel, progress, logit_filter, arguments)
        return iterate(self.engine.loop, pending)

    def batch(
        self,
        prompts: Iterable[Prompt | BatchRequest],
        *,
        n: int = 1,
        options: GenerationOptions | None = None,
        cancel: threading.Event | None = None,
        progress: ProgressCallback | None = None,
        logit_filter: LogitFilter | None = None,
        **arguments: Unpack[GenerationArguments],
    ) -> Iterator[BatchAnswer]:
        """Continue many prompts together, each as `generate` would; answers come as they finish.

        A prompt that fails, for example because it is too long, has an error in its answer.

        Args:
            prompts: prompts, perhaps from a generator; some are taken ahead.
            n, options, cancel, logit_filter: see `generate`.
            progress: callback told how many answers are there.
            arguments: fields of `GenerationOptions`, over those of `options`.
        """
        pending = self._batch(prompts, n, options, cancel, progress, logit_filter, arguments)
        return iterate(self.engine.loop, pending)

    @overload
    async def agenerate(
        self,
        prompt: str | Sequence[int],
        *,
        n: None = None,
        options: GenerationOptions | None = None,
        cancel: threading.Event | None = None,
        progress: ProgressCallback | None = None,
        logit_filter: LogitFilter | None = None,
        **arguments: Unpack[GenerationArguments],
    ) -> Completion: ...

    @overload
    async def agenerate(
        self,
        prompt: str | Sequence[int],
        *,
        n: int,
        options: GenerationOptions | None = None,
        cancel: threading.Event | None = None,
        progress: ProgressCallback | None = None,
        logit_filter: LogitFilter | None = None,
        **arguments: Unpack[GenerationArguments],
    ) -> list[Completion]: ...

    @overload
    async def agenerate(
        self,
        prompt: list[str] | list[list[int]],
        *,
        n: int | None = None,
        options: GenerationOptions | None = None,
        cancel: threading.Event | None = None,
        progress: ProgressCallback | None = None,
        logit_filter: LogitFilter | None = None,
        **arguments: Unpack[GenerationArguments],
    ) -> list[Completion]: ...

    async def agenerate(
        self,
        prompt: str | Sequence[int] | list[str] | list[list[int]],
        *,
        n: int | None = None,
        options: GenerationOptions | None = None,
        cancel: threading.Event | None = None,
        progress: ProgressCallback | None = None,
        logit_filter: LogitFilter | None = None,
        **arguments: Unpack[GenerationArguments],
    ) -> Completion | list[Completion]:
        """Continue prompts as `generate` does, for asyncio; see `Session.astream`."""
        if n is not None or is_many(prompt):
            prompts = prompt if is_many(prompt) else [prompt]
            answers = self.abatch(
                prompts,  # type: ignore[arg-type]
                n=1 if n is None else n,
                options=options,
                cancel=cancel,
                progress=progress,
                logit_filter=logit_filter,
                **arguments,
            )
            return _in_order([answer async for answer in answers])
        pieces = self.astream(
            prompt,  # type: ignore[arg-type]
            options=options,
            cancel=cancel,
            progress=progress,
            logit_filter=logit_filter,
            **arguments,
        )
        return completion([piece async for piece in pieces])

    def astream(
        self,
        prompt: str | Sequence[int],
        *,
        options: GenerationOptions | None = None,
        cancel: threading.Event | None = None,
        progress: ProgressCallback | None = None,
        logit_filter: LogitFilter | None = None,
        **arguments: Unpack[GenerationArguments],
    ) -> AsyncGenerator[Piece, None]:
        """Stream the answer as `stream` does, for asyncio; see `Session.astream`."""
        pending = self._pending(prompt, options, cancel, progress, logit_filter, arguments)
        return aiterate(self.engine.loop, pending)

    def abatch(
        self,
        prompts: Iterable[Prompt | BatchRequest],
        *,
        n: int = 1,
        options: GenerationOptions | None = None,
        cancel: threading.Event | None = None,
        progress: ProgressCallback | None = None,
        logit_filter: LogitFilter | None = None,
        **arguments: Unpack[GenerationArguments],
    ) -> AsyncGenerator[BatchAnswer, None]:
        """Continue prompts as `batch` does, for asyncio; see `Session.astream`.

        The prompts are taken in another thread.
        """
        pending = self._batch(prompts, n, options, cancel, progress, logit_filter, arguments)
        return aiterate(self.engine.loop, pending)

    def _pending(
        self,
        prompt: str | Sequence[int],
        options: GenerationOptions | None,
        cancel: threading.Event | None,
        progress: ProgressCallback | None,
        logit_filter: LogitFilter | None,
        arguments: GenerationArguments,
    ) -> Pending[Piece]:
        context = Context(self.engine, prompt_tokens(self.engine, prompt))
        with Session(self.engine, context, closes=True) as session:
            yield from session._pending(options, cancel, progress, logit_filter, arguments)

    def _batch(
        self,
        prompts: Iterable[Prompt | BatchRequest],
        n: int,
        options: GenerationOptions | None,
        cancel: threading.Event | None,
        progress: ProgressCallback | None,
        logit_filter: LogitFilter | None,
        arguments: GenerationArguments,
    ) -> Pending[BatchAnswer]:
        check_hooks(cancel, progress, logit_filter)
        check_number("n", n, 1, 1024, whole=True)
        chosen = chosen_options(self.engine.bundle.manifest, options, arguments)
        total = n * len(prompts) if isinstance(prompts, Sized) else None
        done = 0
        running = answers(
            self.engine, prompts, chosen, n=n, cancel=cancel, logit_filter=logit_filter
        )
        for item in running:
            if isinstance(item, BatchAnswer):
                done += 1
                if progress is not None:
                    progress(Progress("answers", done, total or done))
            yield item


def _in_order(answers: Iterable[BatchAnswer]) -> list[Completion]:
    """Return the completions, in the order of their prompts."""
    ordered = sorted(answers, key=lambda answer: (answer.index, answer.sample))
    return [answer.result() for answer in ordered]
