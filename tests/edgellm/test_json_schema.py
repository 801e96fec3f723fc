from __future__ import annotations

import json

import pytest

from edgellm import OptionError
from edgellm.json_schema import JsonFilter
from edgellm.llm import LLM

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "maximum": 150},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_answers_fit_the_schema(llm: LLM, seed: int) -> None:
    chat = llm.chat(temperature=1.5, seed=seed, max_tokens=200)
    schema = JsonFilter(llm.engine.tokenizer, json.dumps(SCHEMA))
    answer = chat.send("Tell me a story.", logit_filter=schema)
    assert answer.finish_reason == "stop"
    found = json.loads(answer.text)
    assert set(found) == {"name", "age"}
    assert isinstance(found["age"], int)


@pytest.mark.parametrize("schema", ["{", '{"type": "nothing"}', '{"$ref": "#/missing"}'])
def test_bad_schemas(llm: LLM, schema: str) -> None:
    with pytest.raises(OptionError, match="schema"):
        JsonFilter(llm.engine.tokenizer, schema)
