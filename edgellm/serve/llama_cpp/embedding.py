"""llama.cpp's `/embedding`, whose reply has a list of one vector for each text."""

from __future__ import annotations

from edgellm.serve.ask import EmbeddingAsk
from edgellm.serve.http.endpoint import Call, Route
from edgellm.serve.http.streaming import Reply, json_reply
from edgellm.serve.llama_cpp.fields import INT32_MAX, hard, unsupported
from edgellm.serve.llama_cpp.text import model_id
from edgellm.serve.openai.embeddings import read_texts

# llama.cpp's number for the scaling of vectors to length 1.
_EUCLIDEAN = 2


async def embedding(call: Call) -> Reply:
    fields = await call.fields()
    if hard(fields, ("embd_normalize",), -1, INT32_MAX) not in (None, _EUCLIDEAN):
        raise unsupported("embd_normalize", "vectors are of length 1")
    texts = read_texts(fields, "input" if "input" in fields else "content")
    ask = EmbeddingAsk(model=model_id(call, fields), prompts=texts)
    embedded = await call.answering.embed(ask, call.client)
    return json_reply(
        [
            {"index": index, "embedding": [vector.tolist()]}
            for index, vector in enumerate(embedded.vectors)
        ]
    )


ROUTES = (Route("/embedding", {"POST": embedding}),)
