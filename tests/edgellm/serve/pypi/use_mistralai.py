"""Mistral's own client: gaps, whole and as a stream, chats, and what models can do."""

import json
import sys

from mistralai.client import Mistral
from mistralai.client.errors import SDKError

url, name = sys.argv[1:]
client = Mistral(api_key="none", server_url=url)
gap = {"model": name, "prompt": "def f(", "suffix": "):\n", "max_tokens": 9, "min_tokens": 2}


def told(name: str, value: object) -> None:
    print(json.dumps({"name": name, "value": value}), flush=True)


reply = client.fim.complete(**gap)
told("whole", {"text": reply.choices[0].message.content, "tokens": reply.usage.completion_tokens})
chunks = [event.data for event in client.fim.stream(**gap)]
text = "".join(chunk.choices[0].delta.content for chunk in chunks)
told("stream", {"text": text, "tokens": chunks[-1].usage.completion_tokens})
messages = [{"role": "user", "content": "hello there"}]
chat = client.chat.complete(model=name, messages=messages, max_tokens=9, temperature=0)
told("chat", chat.choices[0].message.content)
models = client.models.list().data
told("models", [[type(model).__name__, model.id] for model in models])
retrieved = client.models.retrieve(model_id=name)
told("model", retrieved.model_dump(include={"id", "capabilities", "max_context_length"}))
try:
    client.fim.complete(model="none", prompt="a")
except SDKError as error:
    told("unknown model", error.status_code)
