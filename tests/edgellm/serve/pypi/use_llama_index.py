"""llama-index, with its class for servers that speak OpenAI's language."""

import asyncio
import json
import sys

from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel

url, name = sys.argv[1:]
COMMON = {"model": name, "api_base": f"{url}/v1", "api_key": "none", "max_retries": 0}
COMMON["temperature"] = 0
chat = OpenAILike(**COMMON, is_chat_model=True, is_function_calling_model=True, max_tokens=12)
texts = OpenAILike(**COMMON, is_chat_model=False, max_tokens=5)
messages = [ChatMessage(role="user", content="hello there")]


class Turn(BaseModel):
    """Turn the light."""

    on: bool


def turn(on: bool) -> str:
    """Turn the light."""
    return "it is on"


def told(name: str, value: object) -> None:
    print(json.dumps({"name": name, "value": value}), flush=True)


told("chat", chat.chat(messages).message.content)
told("stream", "".join(part.delta or "" for part in chat.stream_chat(messages)))
told("text", texts.complete("once upon").text)


async def asynchronous() -> str:
    return "".join([part.delta or "" async for part in await chat.astream_chat(messages)])


told("asyncio", asyncio.run(asynchronous()))

caller = OpenAILike(**COMMON, is_chat_model=True, is_function_calling_model=True, max_tokens=200)
tool = FunctionTool.from_defaults(turn)
reply = caller.chat_with_tools([tool], user_msg="go", tool_required=True)
(call,) = caller.get_tool_calls_from_response(reply)
told("call", {"name": call.tool_name, "arguments": call.tool_kwargs})
history = [
    ChatMessage(role="user", content="go"),
    reply.message,
    ChatMessage(role="tool", content="on", additional_kwargs={"tool_call_id": call.tool_id}),
]
told("after the call", chat.chat(history).message.content)

structured = OpenAILike(
    **COMMON, is_chat_model=True, max_tokens=200, should_use_structured_outputs=True
)
program = structured.as_structured_llm(Turn)
told("schema", json.loads(program.chat(messages).message.content))
