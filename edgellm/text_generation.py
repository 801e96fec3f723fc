"""Continuation of texts, one or many together, and texts for gaps."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence, Sized
from dataclasses import replace
from typing import Unpack, overload

from edgellm.batch import BatchAnswer, BatchRequest, Prompt, answers, is_many, prompt_tokens
from edgellm.checks import check_number, check_text
from edgellm.engine.call import Call, CallArguments, model_call
from edgellm.engine.context import Context
from edgellm.engine.engine import Engine
from edgellm.engine.loop import Pending, aiterate, iterate
from edgellm.infill import stream_infill
from edgellm.progress import Progress
from edgellm.results import Completion, Piece, completion
from edgellm.session import Session
from edgellm.text.fim import Gap, Order


class TextGeneration:
    """Methods of `LLM` for prompts without a chat template."""

    @property
    def engine(self) -> Engine:
        """Engine that runs the model."""
        raise NotImplementedError

    @overload
    def generate(
        self, prompt: str | Sequence[int], *, n: None = None, **arguments: Unpack[CallArguments]
    ) -> Completion: ...

    @overload
    def generate(
        self, prompt: str | Sequence[int], *, n: int, **arguments: Unpack[CallArguments]
    ) -> list[Completion]: ...

    @overload
    def generate(
        self,
        prompt: list[str] | list[list[int]],
        *,
        n: int | None = None,
        **arguments: Unpack[CallArguments],
    ) -> list[Completion]: ...

    def generate(
        self,
        prompt: str | Sequence[int] | list[str] | list[list[int]],
        *,
        n: int | None = None,
        **arguments: Unpack[CallArguments],
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
            arguments: see `CallArguments`; with `n` or a list, `progress` is told how many answers
                are there.
        """
        if n is not None or is_many(prompt):
            prompts = prompt if is_many(prompt) else [prompt]
            answers = self.batch(prompts, n=1 if n is None else n, **arguments)  # type: ignore[arg-type]
            return _in_order(answers)
        return completion(list(self.stream(prompt, **arguments)))  # type: ignore[arg-type]

    def stream(
        self, prompt: str | Sequence[int], **arguments: Unpack[CallArguments]
    ) -> Iterator[Piece]:
        """Stream the answer of `generate`, piece by piece."""
        pending = self._pending(prompt, self._call(arguments))
        return iterate(self.engine.loop, pending)

    def batch(
        self,
        prompts: Iterable[Prompt | BatchRequest],
        *,
        n: int = 1,
        **arguments: Unpack[CallArguments],
    ) -> Iterator[BatchAnswer]:
        """Continue many prompts together, each as `generate` would; answers come as they finish.

        A prompt that fails, for example because it is too long, has an error in its answer.

        Args:
            prompts: prompts, perhaps from a generator; some are taken ahead.
            n, arguments: see `generate`.
        """
        pending = self._batch(prompts, n, self._call(arguments))
        return iterate(self.engine.loop, pending)

    @overload
    async def agenerate(
        self, prompt: str | Sequence[int], *, n: None = None, **arguments: Unpack[CallArguments]
    ) -> Completion: ...

    @overload
    async def agenerate(
        self, prompt: str | Sequence[int], *, n: int, **arguments: Unpack[CallArguments]
    ) -> list[Completion]: ...

    @overload
    async def agenerate(
        self,
        prompt: list[str] | list[list[int]],
        *,
        n: int | None = None,
        **arguments: Unpack[CallArguments],
    ) -> list[Completion]: ...

    async def agenerate(
        self,
        prompt: str | Sequence[int] | list[str] | list[list[int]],
        *,
        n: int | None = None,
        **arguments: Unpack[CallArguments],
    ) -> Completion | list[Completion]:
        """Continue prompts as `generate` does, for asyncio; see `Session.astream`."""
        if n is not None or is_many(prompt):
            prompts = prompt if is_many(prompt) else [prompt]
            answers = self.abatch(prompts, n=1 if n is None else n, **arguments)  # type: ignore[arg-type]
            return _in_order([answer async for answer in answers])
        pieces = self.astream(prompt, **arguments)  # type: ignore[arg-type]
        return completion([piece async for piece in pieces])

    def astream(
        self, prompt: str | Sequence[int], **arguments: Unpack[CallArguments]
    ) -> AsyncGenerator[Piece, None]:
        """Stream the answer as `stream` does, for asyncio; see `Session.astream`."""
        pending = self._pending(prompt, self._call(arguments))
        return aiterate(self.engine.loop, pending)

    def abatch(
        self,
        prompts: Iterable[Prompt | BatchRequest],
        *,
        n: int = 1,
        **arguments: Unpack[CallArguments],
    ) -> AsyncGenerator[BatchAnswer, None]:
        """Continue prompts as `batch` does, for asyncio; see `Session.astream`.

        The prompts are taken in another thread.
        """
        pending = self._batch(prompts, n, self._call(arguments))
        return aiterate(self.engine.loop, pending)

    def infill(
        self,
        prefix: str,
        suffix: str,
        *,
        extra: Sequence[tuple[str, str]] = (),
        path: str = "main",
        repository: str | None = None,
        order: Order | None = None,
        single_line: bool = False,
        template: bool = False,
        **arguments: Unpack[CallArguments],
    ) -> Completion:
        """Return the text that belongs between a prefix and a suffix; greedy unless told otherwise.

        Args:
            extra: other files, each a path and its text.
            path: path of the file with the gap; used only with other files or a repository.
            repository: name of the files' repository.
            order: order of the parts: `psm`, `spm`, or None for the order of the model's training.
                With `spm` the suffix keeps its place in the KV cache while the prefix grows.
            single_line: whether to stop at the end of the line.
            template: whether to ask in words through the chat template, for models without infill
                tokens.
            arguments: see `CallArguments`; `min_indent` and `time_limit_ms` are for editors.

        Raises:
            UnsupportedModelError: the model has no infill tokens, and `template` is not set.
        """
        pieces = self.stream_infill(
            prefix,
            suffix,
            extra=extra,
            path=path,
            repository=repository,
            order=order,
            single_line=single_line,
            template=template,
            **arguments,
        )
        return completion(list(pieces))

    def stream_infill(
        self,
        prefix: str,
        suffix: str,
        *,
        extra: Sequence[tuple[str, str]] = (),
        path: str = "main",
        repository: str | None = None,
        order: Order | None = None,
        single_line: bool = False,
        template: bool = False,
        **arguments: Unpack[CallArguments],
    ) -> Iterator[Piece]:
        """Stream the text of `infill`, piece by piece."""
        for argument, value in (("prefix", prefix), ("suffix", suffix), ("path", path)):
            check_text(argument, value)
        gap = Gap(prefix=prefix, suffix=suffix, extra=extra, path=path, repository=repository)
        if arguments.get("options") is None:
            arguments.setdefault("temperature", 0.0)
        call = self._call(arguments)
        if single_line:
            stop = [*call.options.stop, "\n"]
            call = replace(call, options=replace(call.options, stop=stop))
        return stream_infill(self.engine, gap, call, order=order, template=template)

    def _call(self, arguments: CallArguments) -> Call:
        return model_call(self.engine, arguments)

    def _pending(self, prompt: str | Sequence[int], call: Call) -> Pending[Piece]:
        context = Context(self.engine, prompt_tokens(self.engine, prompt))
        with Session(self.engine, context, closes=True) as session:
            yield from session._pending(call)

    def _batch(
        self, prompts: Iterable[Prompt | BatchRequest], n: int, call: Call
    ) -> Pending[BatchAnswer]:
        check_number("n", n, 1, 1024, whole=True)
        total = n * len(prompts) if isinstance(prompts, Sized) else None
        done = 0
        for item in answers(self.engine, prompts, replace(call, progress=None), n=n):
            if isinstance(item, BatchAnswer):
                done += 1
                if call.progress is not None:
                    call.progress(Progress("answers", done, total or done))
            yield item


def _in_order(answers: Iterable[BatchAnswer]) -> list[Completion]:
    """Return the completions, in the order of their prompts."""
    ordered = sorted(answers, key=lambda answer: (answer.index, answer.sample))
    return [answer.result() for answer in ordered]
