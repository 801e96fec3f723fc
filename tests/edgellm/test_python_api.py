"""What a newcomer types first: completion of names, texts of objects, tokens, forms of answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import BaseModel

import edgellm
from edgellm import LLM, GenerationOptions, Grammar, OptionError, load

SCHEMA = {
    "type": "object",
    "properties": {"n": {"enum": [3]}},
    "required": ["n"],
    "additionalProperties": False,
}


class Number(BaseModel, extra="forbid"):
    n: bool


@pytest.fixture(scope="module")
def tiny(tiny_model: Path) -> LLM:
    return load(str(tiny_model))


def test_names_are_completed() -> None:
    assert {"load", "LLM", "Chat", "Tool", "Grammar"} <= set(dir(edgellm))
    assert all(hasattr(edgellm, name) for name in dir(edgellm))


def test_objects_say_what_they_are(tiny: LLM) -> None:
    assert repr(tiny).startswith(f"<edgellm.LLM {tiny.name}: prefill ")
    chat = tiny.chat(system="brief", max_tokens=2)
    chat.send("hello")
    assert f"with {tiny.name}: 3 messages, " in repr(chat)
    session = tiny.session()
    session.append("abc")
    assert repr(session) == f"<edgellm.Session with {tiny.name}: 3 tokens, 0 of them cached>"


def test_tokens(tiny: LLM) -> None:
    text = "hello <|user|> there"
    assert tiny.detokenize(tiny.tokenize(text)) == text
    assert tiny.count_tokens(text) == len(tiny.tokenize(text))
    special = tiny.tokenize(text, parse_special=True)
    assert len(special) < len(tiny.tokenize(text))
    assert tiny.detokenize(special, skip_special=False) == text
    with pytest.raises(OptionError, match="tokens"):
        tiny.detokenize([1 << 30])
    with pytest.raises(OptionError, match="text"):
        tiny.tokenize(b"bytes")  # type: ignore[arg-type]


def test_embeddings(tiny: LLM) -> None:
    one, many = tiny.embed("hello"), tiny.embed(["hello", "world", "hello"])
    assert one.shape == many[0].shape
    assert one.dtype == np.float32
    assert (many[0] == one).all()
    assert (many[2] == one).all()
    assert np.linalg.norm(many, axis=1) == pytest.approx(np.ones(3), abs=1e-5)
    assert not np.array_equal(tiny.embed("hello", pooling="last"), one)
    for wrong in ("", ["a", ""], 5):
        with pytest.raises(OptionError):
            tiny.embed(wrong)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="mean, last"):
        tiny.embed("a", pooling="first")  # type: ignore[arg-type]


@pytest.mark.parametrize("schema", [SCHEMA, json.dumps(SCHEMA)], ids=["dict", "text"])
def test_json_of_a_schema(tiny: LLM, schema: Any) -> None:
    whole = tiny.generate("a", json_schema=schema, max_tokens=100, seed=1)
    assert json.loads(whole.text)["n"] == 3
    assert json.loads(tiny.chat(max_tokens=100).send("go", json_schema=schema).text)["n"] == 3
    (answer,) = tiny.batch(["a"], json_schema=schema, max_tokens=100)
    assert answer.completion is not None
    assert json.loads(answer.completion.text)["n"] == 3


def test_json_of_a_class(tiny: LLM) -> None:
    answer = tiny.generate("a", json_schema=Number, max_tokens=100, seed=1)
    assert Number.model_validate_json(answer.text).n in (True, False)


@pytest.mark.parametrize("grammar", ['root ::= "yes" | "no"', Grammar("regex", "yes|no")])
def test_grammars(tiny: LLM, grammar: Any) -> None:
    assert tiny.generate("a", grammar=grammar).text in ("yes", "no")
    session = tiny.session()
    session.append("a")
    assert session.generate(grammar=grammar).text in ("yes", "no")
    assert "".join(p.text for p in tiny.stream("a", grammar=grammar)) in ("yes", "no")


@pytest.mark.parametrize(
    ("form", "named"),
    [
        ({"json_schema": 5}, "json_schema"),
        ({"json_schema": {"enum": [object()]}}, "no JSON"),
        ({"json_schema": "{"}, "schema"),
        ({"json_schema": {"type": "nothing"}}, "schema"),
        ({"grammar": 5}, "grammar"),
        ({"grammar": "root ::= (("}, "grammar"),
        ({"grammar": "a", "json_schema": {}}, "`json_schema` and `grammar`"),
        ({"logit_filter": lambda *_: None, "json_schema": {}}, "`logit_filter` and `json_schema`"),
    ],
)
def test_wrong_forms(tiny: LLM, form: Any, named: str) -> None:
    with pytest.raises(OptionError, match=named):
        tiny.generate("a", max_tokens=1, **form)


def test_one_text_that_ends_an_answer() -> None:
    assert GenerationOptions(stop="x").stop == ("x",)
    with pytest.raises(OptionError):
        GenerationOptions(stop=5)  # type: ignore[arg-type]


def test_a_conversation_goes_on_from_messages(tiny: LLM) -> None:
    options: Any = {"temperature": 0, "max_tokens": 5}
    first = tiny.chat(system="Be brief.", **options)
    first.send("hello")
    second = tiny.chat(messages=first.messages, **options)
    assert second.messages == first.messages
    assert second.send("and now").text == first.send("and now").text
    told = LLM(tiny.engine, system="Of load.")
    assert told.chat(messages=first.messages).messages == first.messages
    assert [each.content for each in told.chat(messages=first.messages[1:2]).messages] == [
        "Of load.",
        "hello",
    ]
