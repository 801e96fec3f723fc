"""OpenAI's `/v1/embeddings`."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgellm.serve.ask import EmbeddingAsk
from edgellm.serve.http.endpoint import Call, Route
from edgellm.serve.http.fields import Fields
from edgellm.serve.http.streaming import Reply, json_reply
from edgellm.serve.openai.completions import read_prompts
from edgellm.serve.openai.sampling import MOST_MS
from edgellm.serve.request_error import RequestError

_MOST_DIMENSIONS = 1 << 20


async def embeddings(call: Call) -> Reply:
    fields = await call.fields()
    in_base64 = fields.choice("encoding_format", ("float", "base64")) == "base64"
    dimensions = read_dimensions(fields)
    ask = EmbeddingAsk(
        model=fields.text("model"),
        prompts=read_texts(fields, "input"),
        time_limit_ms=fields.whole("time_limit_ms", 1, MOST_MS),
    )
    embedded = await call.answering.embed(ask, call.client)
    data = []
    for index, vector in enumerate(embedded.vectors):
        cut = shortened(vector, dimensions)
        data.append({"object": "embedding", "index": index, "embedding": _shown(cut, in_base64)})
    total = sum(embedded.tokens)
    return json_reply(
        {
            "object": "list",
            "data": data,
            "model": embedded.model,
            "usage": {"prompt_tokens": total, "total_tokens": total},
        }
    )


def read_dimensions(fields: Fields) -> int | None:
    """Read the wanted length of each embedding; None: the model's own."""
    return fields.whole("dimensions", 1, _MOST_DIMENSIONS)


def read_texts(fields: Fields, name: str) -> tuple[str | tuple[int, ...], ...]:
    """Read a text, token ids, or a list of texts and lists of token ids; none may be empty."""
    prompts = read_prompts(fields, name)
    if not all(prompts):
        raise fields.wrong(name, "texts that are not empty")
    return tuple(prompt for prompt in prompts if isinstance(prompt, str | tuple))


def shortened(vector: NDArray[np.float32], dimensions: int | None) -> NDArray[np.float32]:
    """Return the first `dimensions` values of a vector `[E]`, scaled to length 1 again.

    Raises:
        RequestError: the vector has fewer values.
    """
    if dimensions is None or dimensions == len(vector):
        return vector
    if dimensions > len(vector):
        raise RequestError(
            "invalid_request",
            f"`dimensions` is {dimensions}; the model's embeddings have {len(vector)}",
            param="dimensions",
        )
    cut = vector[:dimensions].astype(np.float64)
    return (cut / (float(np.linalg.norm(cut)) or 1.0)).astype(np.float32)


def _shown(vector: NDArray[np.float32], in_base64: bool) -> Any:
    if in_base64:
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    return vector.tolist()


ROUTES = (
    Route("/v1/embeddings", {"POST": embeddings}),
    Route("/embeddings", {"POST": embeddings}),
)
