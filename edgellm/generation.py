"""Answers to prompts, one or many together: many share steps and so the reading of the weights."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass, field, replace
from typing import Unpack, overload

from edgellm.checks import check_hooks, check_number, check_token_ids
from edgellm.composition import compose
from edgellm.engine.answer import LogitFilter
from edgellm.engine.call import Call, CallArguments, model_call
from edgellm.engine.chat_prompt import AnswerReader, ToolOptions, chat_prompt
from edgellm.engine.context import Context
from edgellm.engine.engine import Engine
from edgellm.engine.loop import WORKING, Pending, Waiting, aiterate, arun, iterate, run
from edgellm.engine.request import Request
from edgellm.engine.samples import forked_requests
from edgellm.errors import EdgeLLMError, OptionError
from edgellm.generation_options import GenerationOptions
from edgellm.infill import Infilling, infill_options, infill_tokens
from edgellm.progress import Progress
from edgellm.results import Completion, Piece, completion
from edgellm.session import Session, check_session
from edgellm.text.fim import Gap
from edgellm.text.prompt import Message, encode_conversation

# A text or token ids, to be continued; messages, for the chat template; a gap, to be filled.
Prompt = str | Sequence[int] | Sequence[Message] | Gap
# Number of answers on their way from which on no further prompt is encoded.
_AT_ONCE = 64


@dataclass(frozen=True, kw_only=True)
class BatchRequest:
    """A prompt of a batch with options of its own.

    Attributes:
        options: options in the place of the batch's; None: the batch's.
        logit_filter: logit filter in the place of the batch's; None: the batch's.
        tool_options: tools that may be called, for a prompt that is messages.
        session: session to fork: what it has of the prompt's first tokens is not computed again, as
            in `Session.replace`. It stays as it is, and the answer has its adapter unless these
            `options` name one.
    """

    prompt: Prompt
    options: GenerationOptions | None = None
    logit_filter: LogitFilter | None = None
    tool_options: ToolOptions | None = None
    session: Session | None = None


@dataclass(frozen=True)
class BatchAnswer:
    """An answer to a prompt of a batch.

    Attributes:
        index: number of the prompt, from 0.
        sample: number of the answer among those to its prompt, from 0.
        completion: the finished answer; None where it failed.
        error: error with which the answer failed.
    """

    index: int
    sample: int
    completion: Completion | None
    error: Exception | None = None

    def result(self) -> Completion:
        """Return the completion.

        Raises:
            Exception: the error with which the answer failed.
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
    reader: AnswerReader | None = None
    pieces: list[Piece] = field(default_factory=list)

    def read(self) -> BatchAnswer | None:
        """Take the pieces that are there; return the answer with the last piece, None before."""
        request = self.request
        finished = request.finished  # before its last piece is taken
        while request.pieces:
            piece = request.next_piece()
            self.pieces.append(piece if self.reader is None else self.reader.read(piece))
        if not finished:
            return None
        try:
            request.raise_error()
        except Exception as error:
            return BatchAnswer(self.index, self.sample, None, error)
        return BatchAnswer(self.index, self.sample, completion(self.pieces))


def answers(
    engine: Engine,
    prompts: Iterable[Prompt | BatchRequest],
    call: Call,
    *,
    n: int = 1,
) -> Pending[BatchAnswer]:
    """Answer prompts, `n` times each; yield the answers as they finish.

    The error of a prompt that fails is in its own answers.

    Args:
        call: call of all answers; where `n` is more than 1 and there is a seed, answer i has the
            seed that is larger by i.
    """
    waiting = enumerate(prompts)
    running: list[_Running] = []
    try:
        while True:
            while len(running) < _AT_ONCE:
                yield WORKING
                index, prompt = next(waiting, (-1, ""))
                if index < 0:
                    break
                try:
                    begun = _begun(engine, index, prompt, call, n=n)
                except (EdgeLLMError, ValueError) as error:
                    yield from (BatchAnswer(index, sample, None, error) for sample in range(n))
                else:
                    running += begun  # before the request is submitted: an interrupt may come
                    engine.loop.submit(begun[0].request)
            if not running:
                return
            yield Waiting([each.request for each in running])
            for each in list(running):
                answer = each.read()
                if answer is not None:
                    running.remove(each)
                    yield answer
    finally:
        for each in running:
            engine.loop.withdraw(each.request)


def _own_call(engine: Engine, request: BatchRequest, common: Call) -> Call:
    """Return a prompt's call: the batch's, with the options and the filter that the prompt has."""
    check_hooks(None, None, request.logit_filter)
    if request.options is not None and not isinstance(request.options, GenerationOptions):
        raise OptionError(
            f"`options` is {request.options!r}; an edgellm.GenerationOptions is expected"
        )
    session, options = request.session, request.options or common.options
    if session is not None:
        check_session(session, engine)
        if request.options is None or request.options.adapter is None:
            options = replace(options, adapter=session._adapter)
    return replace(
        common, options=options, logit_filter=request.logit_filter or common.logit_filter
    )


def _begun(
    engine: Engine, index: int, prompt: Prompt | BatchRequest, common: Call, *, n: int
) -> list[_Running]:
    """Begin the answers to a prompt; all but the first start once the prompt is computed."""
    asked = prompt if isinstance(prompt, BatchRequest) else BatchRequest(prompt=prompt)
    call, chat = _own_call(engine, asked, common), None
    if is_conversation(asked.prompt):
        chat = chat_prompt(
            engine,
            asked.prompt,  # type: ignore[arg-type]
            asked.tool_options or ToolOptions(),
            logit_filter=call.logit_filter,
        )
        call = replace(call, logit_filter=chat.logit_filter)
    tokens = prompt_tokens(engine, asked.prompt) if chat is None else chat.tokens
    if isinstance(asked.prompt, Gap):
        call = replace(call, options=infill_options(engine, call.options))
    requests = forked_requests(
        engine,
        tokens,
        call,
        n=n,
        shown_special=() if chat is None else chat.shown_special,
        begun=None if asked.session is None else asked.session._context.fork(),
    )
    return [
        _Running(index, sample, request, None if chat is None else chat.reader())
        for sample, request in enumerate(requests)
    ]


def prompt_tokens(engine: Engine, prompt: Prompt) -> list[int]:
    """Return the tokens of a prompt.

    Raises:
        OptionError: a value that is no prompt, or a token id that is not in the vocabulary.
        TemplateError: messages, and the model has no chat template that takes them.
        UnsupportedModelError: a gap, and the model has no infill tokens.
    """
    if isinstance(prompt, Gap):
        return infill_tokens(engine.tokenizer, prompt, model=engine.bundle.manifest.name)
    if is_conversation(prompt):
        return encode_conversation(prompt, engine.template, engine.tokenizer)  # type: ignore[arg-type]
    if isinstance(prompt, str):
        return engine.tokenizer.encode(prompt, parse_special=True)
    if isinstance(prompt, BatchRequest):
        raise OptionError("`prompt` is one `BatchRequest`; a list of them is expected")
    return check_token_ids("prompt", prompt, vocab_size=engine.config.vocab_size)


def is_conversation(prompt: object) -> bool:
    """Whether a prompt is a list that begins with a message."""
    return isinstance(prompt, Sequence) and bool(prompt) and isinstance(prompt[0], Message)


def is_many(prompt: object) -> bool:
    """Whether `prompt` is a list of prompts and not one prompt, which is a text or token ids."""
    if isinstance(prompt, str) or not isinstance(prompt, Sequence) or not prompt:
        return False
    return all(isinstance(each, (str, list, tuple, BatchRequest, Gap)) for each in prompt)


class TextGeneration(Infilling):
    """Methods of `LLM` for prompts without a chat template."""

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
        call = replace(self._call(arguments), whole=True)
        pending = self._pending(prompt, call)  # type: ignore[arg-type]
        return completion(list(iterate(self.engine.loop, pending)))

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
        call = replace(self._call(arguments), whole=True)
        pending = self._pending(prompt, call)  # type: ignore[arg-type]
        return completion([piece async for piece in aiterate(self.engine.loop, pending)])

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

    def compose(
        self,
        parts: Sequence[str | Sequence[int]],
        *,
        recompute: float = 0.05,
        parse_special: bool = False,
        adapter: str | None = None,
    ) -> Session:
        """Open a session of texts one after the other, each computed alone once and then copied.

        The answers are near those of the plain context, and not the same. Documents computed alone
        are found again like any other prefix, wherever they stand in the next composition. The
        first and the last part are computed in place.

        Args:
            parts: texts or token ids: what comes first, documents, and a question.
            recompute: share of each document, from its beginning, that is computed in place; with
                1 all are, and the session is a plain one.
            parse_special: whether the text of a special token is that token, for a chat's markers.
            adapter: loaded adapter of the session; None: the model as it is.

        Raises:
            ContextOverflowError: the parts do not fit into the context.
            UnsupportedModelError: K and V of the model, or in the KV cache's format, cannot be
                copied to other positions, and `recompute` is less than 1.
            CacheFullError: answers on their way hold the whole cache.
        """
        work = compose(
            self.engine, parts, recompute=recompute, parse_special=parse_special, adapter=adapter
        )
        return run(self.engine.loop, work)

    async def acompose(
        self,
        parts: Sequence[str | Sequence[int]],
        *,
        recompute: float = 0.05,
        parse_special: bool = False,
        adapter: str | None = None,
    ) -> Session:
        """Open a session as `compose` does, for asyncio; see `Session.astream`."""
        work = compose(
            self.engine, parts, recompute=recompute, parse_special=parse_special, adapter=adapter
        )
        return await arun(self.engine.loop, work)

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
        for item in answers(self.engine, prompts, replace(call, progress=None, whole=True), n=n):
            if isinstance(item, BatchAnswer):
                done += 1
                if call.progress is not None:
                    call.progress(Progress("answers", done, total or done))
            yield item


def _in_order(answers: Iterable[BatchAnswer]) -> list[Completion]:
    """Return the completions, in the order of their prompts."""
    ordered = sorted(answers, key=lambda answer: (answer.index, answer.sample))
    return [answer.result() for answer in ordered]
