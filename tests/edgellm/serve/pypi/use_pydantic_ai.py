"""pydantic-ai: an agent with a tool and an output of a type."""

import asyncio
import json
import sys
from typing import Literal

from pydantic import BaseModel
from pydantic_ai import Agent, ModelHTTPError, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

url, name = sys.argv[1:]
provider = OpenAIProvider(base_url=f"{url}/v1", api_key="none")
model = OpenAIChatModel(name, provider=provider)
settings = {"max_tokens": 200, "seed": 1, "temperature": 0.0}


class Size(BaseModel):
    """How large something is."""

    unit: Literal["cm", "m"]
    tall: bool


def told(name: str, value: object) -> None:
    print(json.dumps({"name": name, "value": value}), flush=True)


def counts(run: object) -> dict[str, int]:
    return {"requests": run.usage.requests, "output_tokens": run.usage.output_tokens}


plain = Agent(model, model_settings={**settings, "max_tokens": 12})
run = plain.run_sync("hello there")
told("chat", {"text": run.output, **counts(run)})


async def streamed() -> str:
    async with plain.run_stream("hello there") as run:
        return "".join([text async for text in run.stream_text(delta=True)])


told("stream", asyncio.run(streamed()))

native = Agent(model, output_type=NativeOutput(Size), model_settings=settings)
told("schema", native.run_sync("A tower of 50 metres.").output.model_dump())

agent = Agent(model, output_type=Size, model_settings=settings, retries=0)
calls = []


@agent.tool_plain
def turn(on: bool) -> str:
    """Turn the light."""
    calls.append(on)
    return "it is on"


run = agent.run_sync("Turn it on and measure.")
told("tools", {"output": run.output.model_dump(), "calls": calls, **counts(run)})

greedy = {"max_tokens": 12, "temperature": 0.0}
responses = Agent(OpenAIResponsesModel(name, provider=provider), model_settings=greedy)
run = responses.run_sync("hello there")
told("responses", {"text": run.output, **counts(run)})

try:
    Agent(OpenAIChatModel("gpt-5", provider=provider)).run_sync("hello")
except ModelHTTPError as error:
    told("unknown model", error.status_code)
