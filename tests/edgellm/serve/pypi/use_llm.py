"""llm, with models that a file of its own describes."""

import json
import os
import sys
from pathlib import Path

url, name = sys.argv[1:]
user = Path.home() / "llm"
user.mkdir(exist_ok=True)
os.environ["LLM_USER_PATH"] = str(user)
common = {"model_name": name, "api_base": f"{url}/v1", "api_key_name": "edgellm"}
models = [
    {"model_id": "chat", **common, "supports_schema": True, "supports_tools": True},
    {"model_id": "text", **common, "completion": True},
    {"model_id": "items", **common, "responses": True},
]
(user / "extra-openai-models.yaml").write_text(json.dumps(models))  # which is YAML
(user / "keys.json").write_text(json.dumps({"edgellm": "none"}))

import llm  # noqa: E402  (it reads the path when it is imported)


def turn(on: bool) -> str:
    """Turn the light."""
    return f"it is {on}"


def told(name: str, value: object) -> None:
    print(json.dumps({"name": name, "value": value}), flush=True)


chat = llm.get_model("chat")
asked = {"max_tokens": 12, "temperature": 0}
told("chat", chat.prompt("hello there", stream=False, **asked).text())
conversation = chat.conversation()
streamed = conversation.prompt("hello there", **asked)
told("stream", "".join(streamed))
told("next turn", conversation.prompt("again", **asked).text())
told("usage", streamed.usage().output)
schema = {**llm.schema_dsl("on bool"), "additionalProperties": False}
told("schema", json.loads(chat.prompt("go", schema=schema, temperature=0).text()))
told("tools", chat.chain("Turn on the light.", tools=[turn]).text())
told("text", llm.get_model("text").prompt("once upon", **asked).text())
told("responses", llm.get_model("items").prompt("hello there").text())
