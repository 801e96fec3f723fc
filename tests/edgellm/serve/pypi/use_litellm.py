"""litellm, through the four dialects that it has for servers like this one."""

import asyncio
import json
import sys

import litellm

url, model = sys.argv[1:]
OPENAI = {"model": f"openai/{model}", "api_base": f"{url}/v1", "api_key": "none"}
HOSTED = {"model": f"hosted_vllm/{model}", "api_base": f"{url}/v1"}
OLLAMA = {"model": f"ollama_chat/{model}", "api_base": url}
ANTHROPIC = {"model": f"anthropic/{model}", "api_base": url, "api_key": "none"}
MESSAGES = [{"role": "user", "content": "hello there"}]
PARAMETERS = {
    "type": "object",
    "properties": {"on": {"type": "boolean"}},
    "required": ["on"],
    "additionalProperties": False,
}
TURN = {"type": "function", "function": {"name": "turn", "parameters": PARAMETERS}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "turn", "schema": PARAMETERS}}


def told(name: str, value: object) -> None:
    print(json.dumps({"name": name, "value": value}), flush=True)


for name, where in (
    ("openai", OPENAI),
    ("hosted_vllm", HOSTED),
    ("ollama", OLLAMA),
    ("anthropic", ANTHROPIC),
):
    asked = {**where, "messages": MESSAGES, "max_tokens": 12, "temperature": 0, "num_retries": 0}
    reply = litellm.completion(**asked)
    chunks = list(litellm.completion(**asked, stream=True))
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    told(
        name,
        {
            "text": reply.choices[0].message.content,
            "reason": reply.choices[0].finish_reason,
            "tokens": reply.usage.completion_tokens,
            "streamed": "".join(texts),
        },
    )

calling = {**OPENAI, "tools": [TURN], "max_tokens": 100, "seed": 1}
message = litellm.completion(
    **calling, messages=MESSAGES, tool_choice="required", parallel_tool_calls=False
)
message = message.choices[0].message
(call,) = message.tool_calls
result = {"role": "tool", "tool_call_id": call.id, "content": "it is on"}
history = [*MESSAGES, message.model_dump(), result]
after = litellm.completion(**{**calling, "max_tokens": 5}, messages=history, tool_choice="none")
told("call", {"name": call.function.name, "arguments": json.loads(call.function.arguments)})
told("after the call", after.usage.completion_tokens)

held = litellm.completion(
    **OPENAI, messages=MESSAGES, response_format=SCHEMA, max_tokens=100, seed=1
)
told("schema", json.loads(held.choices[0].message.content))

vectors = litellm.embedding(**OPENAI, input=["a", "b"], encoding_format="float")
told("embeddings", [len(each["embedding"]) for each in vectors.data])

gap = {"prompt": "once upon", "max_tokens": 5, "temperature": 0, "num_retries": 0}
text = litellm.text_completion(**{**gap, **OPENAI, "model": f"text-completion-openai/{model}"})
told("text", text.choices[0].text)


async def asynchronous() -> str:
    reply = await litellm.acompletion(
        **OPENAI, messages=MESSAGES, max_tokens=12, temperature=0, stream=True
    )
    return "".join([chunk.choices[0].delta.content or "" async for chunk in reply])


told("asyncio", asyncio.run(asynchronous()))

for name, wrong in (
    ("unknown model", {"model": "openai/gpt-5"}),
    ("wrong field", {"temperature": -1}),
    ("too long", {"messages": [{"role": "user", "content": "many words " * 9000}]}),
):
    try:
        litellm.completion(**{**OPENAI, "messages": MESSAGES, "num_retries": 0, **wrong})
    except Exception as error:  # what it makes of the server's
        told(name, {"class": type(error).__name__, "status": getattr(error, "status_code", None)})
