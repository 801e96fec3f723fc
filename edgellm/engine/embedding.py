"""Embeddings of texts, and relevance of documents to a query by them or by a reranker's yes and no.

An embedding pools the hidden states of a text's tokens after the final norm.

A generative reranker, as Qwen3-Reranker, is asked whether a document meets the requirements of a
query; its relevance is the probability of "yes" beside that of "no" (Zhang et al.,
arXiv:2506.05176).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Literal, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray

from edgellm.backends.batch import Rows
from edgellm.engine.call import Call
from edgellm.engine.context import Context
from edgellm.engine.engine import Engine
from edgellm.engine.loop import WORKING, Pending, finished
from edgellm.engine.request import Request
from edgellm.errors import UnsupportedModelError
from edgellm.generation_options import GenerationOptions
from edgellm.options import Pooling
from edgellm.text.prompt import Message, encode_conversation

_PLAIN = Call(options=GenerationOptions())
T = TypeVar("T")
RequestT = TypeVar("RequestT", bound=Request)
RerankMethod = Literal["auto", "yes_no", "embeddings"]
RERANK_METHODS: tuple[str, ...] = get_args(RerankMethod)
DEFAULT_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_SYSTEM = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".'
)


class EmbeddingRequest(Request):
    """A prompt that is computed for its hidden states alone, in the same steps as answers.

    Attributes:
        embedding: `[E]` float32 of norm 1; None before the end.
    """

    def __init__(
        self,
        context: Context,
        *,
        pooling: Pooling,
        call: Call = _PLAIN,
    ) -> None:
        options = replace(call.options, max_tokens=0, speculate=False, seed=0)
        super().__init__(context, replace(call, options=options), closes=True)
        self.embedding: NDArray[np.float32] | None = None
        self._pooling = pooling
        self._sum: NDArray[np.float64] | None = None

    @property
    def findable(self) -> int:
        return 0 if self._pooling == "mean" else super().findable

    def begin(self) -> None:
        """Begin, see `Request.begin`; a mean uses no cached tokens, as they have no states."""
        super().begin()
        self._sum = None
        if self._pooling == "mean":
            self.context.sequence.truncate(0)

    @property
    def wants_states(self) -> bool:
        return True

    def _candidates(self) -> int:
        return 0  # where a back end gives the best logits alone, it gives no hidden states

    def computed_states(self, rows: Rows) -> None:
        """Pool the hidden states of rows with those of the rows before."""
        hidden = rows.hidden.astype(np.float64)
        if len(hidden) and self._pooling == "last":
            self._sum = hidden[-1]
        elif len(hidden):
            # row by row behind those before: the same bits however steps cut the prompt
            before = np.zeros_like(hidden[:1]) if self._sum is None else self._sum[None]
            self._sum = np.add.reduce(np.concatenate([before, hidden]), axis=0)
        if rows.logits and self._sum is not None:
            length = float(np.linalg.norm(self._sum))
            self.embedding = (self._sum / (length or 1.0)).astype(np.float32)


def embeddings(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    *,
    pooling: Pooling,
    call: Call = _PLAIN,
    salt: str = "",
) -> Pending[NDArray[np.float32]]:
    """Embed prompts of token ids; yields an embedding `[E]` float32 for each, in their order.

    Args:
        call: owner and adapter, and an event after which no more embeddings come.
        salt: see `Context`.

    Raises:
        OptionError, ContextOverflowError: see `Request.check`.
    """
    yield WORKING
    requests = [
        EmbeddingRequest(Context(engine, prompt, salt=salt), call=call, pooling=pooling)
        for prompt in prompts
    ]
    yield from _results(engine, requests, lambda request: request.embedding)


def _results(
    engine: Engine, requests: Sequence[RequestT], result: Callable[[RequestT], T | None]
) -> Pending[T]:
    """Compute requests, and yield the result of each in order, up to one that was cancelled.

    Raises:
        OptionError, ContextOverflowError: see `Request.check`.
    """
    for request in requests:
        request.check()
    with closing(finished(engine.loop, requests)) as pending:
        for item in pending:
            if not isinstance(item, Request):
                yield item
                continue
            answer = result(item)
            if answer is None:
                return
            yield answer


def chosen_method(engine: Engine, method: RerankMethod) -> Literal["yes_no", "embeddings"]:
    """Return the method of a model: by default, yes and no for one named a reranker."""
    if method == "auto":
        return "yes_no" if "rerank" in engine.bundle.manifest.name.lower() else "embeddings"
    return method


class _YesNo:
    """A logit filter that changes nothing, and keeps the scores of two tokens."""

    def __init__(self, yes: int, no: int) -> None:
        self._tokens = [yes, no]
        self.relevance: float | None = None

    def __call__(self, scores: NDArray[np.float32], tokens: Sequence[int], /) -> None:
        yes, no = scores[self._tokens].astype(np.float64)
        self.relevance = float(1 / (1 + np.exp(no - yes)))


def yes_no_prompts(
    engine: Engine, query: str, documents: Sequence[str], *, instruction: str
) -> list[list[int]]:
    """Return the prompt of each document.

    Raises:
        TemplateError: the model has no chat template.
    """
    # a template that can think is told not to, as in the training of Qwen3-Reranker
    template = engine.template
    thinks = template is not None and "enable_thinking" in template.arguments
    arguments = {"enable_thinking": False} if thinks else {}
    return [
        encode_conversation(
            [
                Message("system", _SYSTEM),
                Message(
                    "user",
                    f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}",
                ),
            ],
            template,
            engine.tokenizer,
            template_arguments=arguments,
        )
        for document in documents
    ]


def yes_no(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    *,
    call: Call = _PLAIN,
    salt: str = "",
) -> Pending[float]:
    """Yield the relevance of each prompt's document, from 0 to 1, in order.

    Args:
        call, salt: see `embeddings`.

    Raises:
        UnsupportedModelError: the model has no tokens `yes` and `no`.
        ContextOverflowError: see `Request.check`.
    """
    yield WORKING
    yes, no = _answers(engine)
    options = replace(call.options, max_tokens=1, temperature=0, speculate=False, seed=0)
    judges: dict[Request, _YesNo] = {}
    for prompt in prompts:
        judge = _YesNo(yes, no)
        judged = replace(call, options=options, logit_filter=judge)
        judges[Request(Context(engine, prompt, salt=salt), judged, closes=True)] = judge
    yield from _results(engine, [*judges], lambda request: judges[request].relevance)


def similarities(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    *,
    pooling: Pooling,
    call: Call = _PLAIN,
    salt: str = "",
) -> Pending[float]:
    """Yield the cosine similarity of the first prompt with each other one, in order.

    Args:
        call, salt: see `embeddings`.
    """
    query: NDArray[np.float32] | None = None
    vectors = embeddings(engine, prompts, pooling=pooling, call=call, salt=salt)
    with closing(vectors) as pending:
        for item in pending:
            if not isinstance(item, np.ndarray):
                yield item
            elif query is None:
                query = item
            else:
                yield float(query @ item)


def _answers(engine: Engine) -> tuple[int, int]:
    vocabulary = engine.tokenizer.vocabulary
    try:
        return vocabulary["yes"], vocabulary["no"]
    except KeyError as error:
        raise UnsupportedModelError(
            f"{engine.bundle.manifest.name} has no token {error}, so it cannot say how relevant a "
            "document is; take a reranker such as Qwen3-Reranker, or the method embeddings"
        ) from None
