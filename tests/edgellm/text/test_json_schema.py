from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest

from edgellm import OptionError
from edgellm.kernels.native import library
from edgellm.llm import LLM
from edgellm.text.json_schema import GrammarFilter, Grammars, JsonFilter
from edgellm.text.tokenizer import Tokenizer

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


@pytest.fixture(scope="module")
def tokenizer(chosen_llm: LLM) -> Tokenizer:
    return chosen_llm.engine.tokenizer


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer)


def allowed_after(schema_filter: JsonFilter, tokenizer: Tokenizer, text: str) -> set[str]:
    """The texts of the tokens that may follow."""
    logits = np.zeros(tokenizer.vocab_size, np.float32)
    schema_filter(logits, tokenizer.encode(text, add_bos=False))
    return {tokenizer.text_of(int(token)) for token in np.flatnonzero(logits == 0)}


@pytest.mark.parametrize(
    "schema",
    [
        "{",
        "[]",
        '{"type": "nothing"}',
        '{"$ref": "#/missing"}',
        '{"enum": []}',
        '{"type": "string", "minLength": 5, "maxLength": 2}',
    ],
)
def test_bad_schemas(grammars: Grammars, schema: str) -> None:
    with pytest.raises(OptionError, match="schema"):
        grammars.filter(schema)


@pytest.mark.parametrize("depth", [200, 500, 3000, 100_000])
@pytest.mark.parametrize("opening", ['{"properties":{"a":', '{"allOf":[', "["])
def test_deep_schemas(grammars: Grammars, depth: int, opening: str) -> None:
    closing = "".join({"{": "}", "[": "]"}[c] for c in reversed(opening) if c in "{[")
    with pytest.raises(OptionError, match="the JSON schema cannot be used"):
        grammars.filter(opening * depth + "{}" + closing * depth)


def test_a_vocabulary_serves_many_filters(tokenizer: Tokenizer, grammars: Grammars) -> None:
    """Of one after the other and of two at once, and the same as with one of its own."""
    truth, number = grammars.filter('{"type": "boolean"}'), grammars.filter('{"type": "integer"}')
    assert "true" in allowed_after(truth, tokenizer, "")
    assert "1" in allowed_after(number, tokenizer, "")
    assert "2" in allowed_after(number, tokenizer, "1")
    alone = JsonFilter(tokenizer, '{"type": "boolean"}')
    assert allowed_after(alone, tokenizer, "t") == allowed_after(truth, tokenizer, "t")


def test_a_second_answer_begins_anew(tokenizer: Tokenizer, grammars: Grammars) -> None:
    schema_filter = grammars.filter('{"type": "boolean"}')
    first = allowed_after(schema_filter, tokenizer, "")
    allowed_after(schema_filter, tokenizer, "true")
    assert allowed_after(schema_filter, tokenizer, "") == first
    assert "true" not in allowed_after(schema_filter, tokenizer, "fal")
    assert "true" in allowed_after(schema_filter, tokenizer, "")


def test_answers_that_take_turns_read_each_token_once(
    llm: LLM, grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And have what they have alone."""
    schema_filter, read = grammars.filter(json.dumps(SCHEMA)), []
    options = {"temperature": 1.2, "max_tokens": 40, "logit_filter": schema_filter}
    if library() is None:  # a prompt that is cached gets other bits
        llm.generate("A story:", max_tokens=1)
    expected = [llm.generate("A story:", seed=seed, **options).tokens for seed in range(4)]
    for_answer = schema_filter.for_answer

    def counted() -> object:
        document = for_answer()
        consume = document._matcher.consume_tokens

        class Matcher:
            def __getattr__(self, name: str) -> object:
                return getattr(inner, name)

            def consume_tokens(self, tokens: list[int]) -> object:
                read.extend(tokens)
                return consume(tokens)

        inner, document._matcher = document._matcher, Matcher()
        return document

    monkeypatch.setattr(schema_filter, "for_answer", counted)
    answers = llm.generate("A story:", n=4, seed=0, **options)
    assert [answer.tokens for answer in answers] == expected
    assert len(read) <= sum(len(tokens) for tokens in expected)


def test_a_dead_end_is_an_error(tokenizer: Tokenizer, grammars: Grammars) -> None:
    """A value that must contain itself, and an answer that is not of the schema."""
    with pytest.raises(OptionError, match=r"allows nothing after the 0 tokens"):
        allowed_after(grammars.filter('{"$ref": "#"}'), tokenizer, "")
    schema_filter = grammars.filter('{"type": "boolean"}')
    with pytest.raises(OptionError, match=r"allows nothing .*maybe"):
        allowed_after(schema_filter, tokenizer, "maybe")
    assert "true" in allowed_after(schema_filter, tokenizer, "")
    # logits of fewer tokens than the vocabulary has
    with pytest.raises(OptionError, match="allows nothing"):
        schema_filter(np.zeros(3, np.float32)[1:2], [])


@pytest.mark.usefixtures("smollm2")
@pytest.mark.parametrize("missing", ["transformers", "llguidance"])
def test_what_is_not_installed(missing: str) -> None:
    """transformers is not needed; without llguidance, the reason is said."""
    code = f"""
import sys
sys.modules["{missing}"] = None
from edgellm import OptionError
from edgellm.text.json_schema import Grammars
from edgellm.llm import load
try:
    Grammars(load().engine.tokenizer).filter("{{}}")
except OptionError as error:
    print(error)
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    if missing == "transformers":
        assert found.stdout == ""
    else:
        assert "import of llguidance halted" in found.stdout
        assert "pip install llguidance" in found.stdout


@pytest.mark.parametrize("name", ["PanicException", "KeyboardInterrupt"])
def test_a_panic_of_the_library_is_an_error_of_its_answer(name: str) -> None:
    """A panic is no Exception, so `except Exception` does not see it."""
    kind = type(name, (BaseException,), {})

    class Matcher:
        def deep_copy(self) -> Matcher:
            return self

        def consume_tokens(self, tokens: list[int]) -> None:
            raise kind("index out of bounds")

    expected = OptionError if name == "PanicException" else kind
    with pytest.raises(expected, match="index out of bounds"):
        GrammarFilter(Matcher(), "the grammar")(np.zeros(9, np.float32), [])
