from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from edgellm import OptionError, Tool
from edgellm.kernels.native import library
from edgellm.llm import LLM
from edgellm.text.grammar import Grammar, Grammars, JsonFilter, MatcherFilter
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


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
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
        JsonFilter(grammars, schema)


@pytest.mark.parametrize("depth", [200, 500, 3000, 100_000])
@pytest.mark.parametrize("opening", ['{"properties":{"a":', '{"allOf":[', "["])
def test_deep_schemas(grammars: Grammars, depth: int, opening: str) -> None:
    closing = "".join({"{": "}", "[": "]"}[c] for c in reversed(opening) if c in "{[")
    with pytest.raises(OptionError, match="the JSON schema cannot be used"):
        JsonFilter(grammars, opening * depth + "{}" + closing * depth)


@pytest.mark.parametrize("kind", ["properties", "items", "$ref", "\\u0024ref"])
def test_chains_of_references(grammars: Grammars, kind: str) -> None:
    """llguidance would end the process."""
    names: dict[str, Any] = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(3000)}
    if kind == "properties":
        names = {key: {"properties": {"a": value}} for key, value in names.items()}
    elif kind == "items":
        names = {key: {"items": value} for key, value in names.items()}
    text = json.dumps({"$defs": {**names, "d3000": {}}, "$ref": "#/$defs/d0"})
    text = text.replace('"$ref"', f'"{kind}"') if "ref" in kind else text
    with pytest.raises(OptionError, match=r"3001 references in .* levels"):
        JsonFilter(grammars, text)
    schema = json.loads(text)
    with pytest.raises(OptionError, match=r"tool f: .* references"):
        Tool("f", "", {"$defs": schema["$defs"], "properties": {"a": {"$ref": schema["$ref"]}}})


def test_a_vocabulary_serves_many_filters(tokenizer: Tokenizer, grammars: Grammars) -> None:
    """Of one after the other and of two at once, and the same as with one of its own."""
    truth, number = (
        JsonFilter(grammars, '{"type": "boolean"}'),
        JsonFilter(grammars, '{"type": "integer"}'),
    )
    assert "true" in allowed_after(truth, tokenizer, "")
    assert "1" in allowed_after(number, tokenizer, "")
    assert "2" in allowed_after(number, tokenizer, "1")
    alone = JsonFilter(tokenizer, '{"type": "boolean"}')
    assert allowed_after(alone, tokenizer, "t") == allowed_after(truth, tokenizer, "t")


def test_a_second_answer_begins_anew(tokenizer: Tokenizer, grammars: Grammars) -> None:
    schema_filter = JsonFilter(grammars, '{"type": "boolean"}')
    first = allowed_after(schema_filter, tokenizer, "")
    allowed_after(schema_filter, tokenizer, "true")
    assert allowed_after(schema_filter, tokenizer, "") == first
    assert "true" not in allowed_after(schema_filter, tokenizer, "fal")
    assert "true" in allowed_after(schema_filter, tokenizer, "")


def test_answers_that_take_turns_read_each_token_once(
    llm: LLM, grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And have what they have alone."""
    schema_filter, read = JsonFilter(grammars, json.dumps(SCHEMA)), []
    options = {"temperature": 1.2, "max_tokens": 16, "logit_filter": schema_filter}
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
        allowed_after(JsonFilter(grammars, '{"$ref": "#"}'), tokenizer, "")
    schema_filter = JsonFilter(grammars, '{"type": "boolean"}')
    with pytest.raises(OptionError, match=r"allows nothing .*maybe"):
        allowed_after(schema_filter, tokenizer, "maybe")
    assert "true" in allowed_after(schema_filter, tokenizer, "")
    # logits of fewer tokens than the vocabulary has
    with pytest.raises(OptionError, match="allows nothing"):
        schema_filter(np.zeros(3, np.float32)[1:2], [])


@pytest.mark.slow
@pytest.mark.usefixtures("smollm2")
@pytest.mark.parametrize("missing", ["transformers", "llguidance"])
def test_what_is_not_installed(missing: str) -> None:
    """transformers is not needed; without llguidance, the reason is said."""
    code = f"""
import sys
sys.modules["{missing}"] = None
from edgellm import OptionError
from edgellm.llm import load
try:
    load().json_filter("{{}}")
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
        MatcherFilter(Matcher(), "the grammar")(np.zeros(9, np.float32), [])


ARITHMETIC = r"""
# llama.cpp's example, with its escapes
root  ::= (expr "=" ws term "\n")+
expr  ::= term ([-+*/] term)*
term  ::= ident | num | "(" ws expr ")" ws
ident ::= [a-z] [\u0061-\x7A0-9_]* ws
num   ::= [0-9]+ ws
ws    ::= [ \t\n]*
"""


@pytest.mark.parametrize(
    ("grammar", "right", "wrong"),
    [
        (Grammar.of(ARITHMETIC), ["a+1= 2\n", "(x1 *3)=y\n"], ["a+", "A=1\n", "1=2"]),
        (
            Grammar.of(r'root ::= "\U0001F600" | "\x22" | [^\x41-\x5A]'),
            ["\U0001f600", '"', "a"],
            ["B"],
        ),
        (Grammar.of(r'root ::= "\\x41"'), [r"\x41"], ["A"]),
        (Grammar.of('root ::= "a" | '), ["", "a"], ["b", "aa"]),
        (Grammar.of('root ::= root "a" | "b"'), ["b", "baaa"], ["a"]),
        (Grammar.of('start ::= "b"\nroot ::= "a" start'), ["ab"], ["b"]),
        (Grammar.of('start: "a" b\nb: "b"'), ["ab"], ["a"]),
        (Grammar.of('?start: "a"'), ["a"], ["b"]),
        (Grammar.of("root ::= .*"), ["ab\ncd", ""], []),
        (
            Grammar.of("root ::= [+--] | [~~] | [a-b&&c]"),
            ["+", ",", "-", "~", "&", "a"],
            ["d", "."],
        ),
        (Grammar.of('root ::= _d " 1"\n_d ::= [0-9 ]+'), ["5 1", "5 5 1"], ["5"]),
        (
            Grammar.of(
                'root ::= start start-rule Foo foo a-b a_b 1a # \\uD83D "\n'
                'start ::= "x"\nstart-rule ::= "y"\nFoo ::= "1"\nfoo ::= "2"\n'
                'a-b ::= "3"\na_b ::= "4"\n1a ::= "5"'
            ),
            ["xy12345"],
            ["yy12345"],
        ),
        (Grammar.of(r'root ::= "\[\]\"\\/" [\]\\/\-^\x7f]'), [r"""[]"\/]""", '[]"\\/\x7f'], ["a"]),
        (Grammar.one_of(["\x7f"]), ["\x7f"], ["a"]),
        (Grammar("regex", r"[a-z]{2}/\d+|\"x"), ["ab/12", '"x'], ["a/1", "ab/"]),
        (Grammar.one_of(["a", 'b"\\\n', "ü"]), ["a", 'b"\\\n', "ü"], ["b", ""]),
    ],
)
def test_texts_of_grammars(
    grammars: Grammars, tokenizer: Tokenizer, grammar: Grammar, right: list[str], wrong: list[str]
) -> None:
    def follows(text: str) -> bool:
        matcher, ids = grammars.matcher_of(grammar), tokenizer.encode(text, add_bos=False)
        return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())

    assert {text: follows(text) for text in [*right, *wrong]} == {
        **dict.fromkeys(right, True),
        **dict.fromkeys(wrong, False),
    }


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "root"),
        ('x ::= "y"', "root"),
        ("root ::= y", "y"),
        ("root ::= ((", "cannot be used"),
        ("root ::= " + "(" * 3000 + '"a"' + ")" * 3000, "nested too deep"),
        (r'root ::= "\UFFFFFFFF"', "no character"),
        (r'root ::= "\uD800"', "no character"),
        ("start: y", "cannot be used"),
        ("a" * (1 << 19), "at most 262144"),
        ("\n" * (1 << 18), "root"),
        ("root ::= " + "[" * 200_000, "cannot be used"),
        ("root ::= " + '"' * 200_001, "cannot be used"),
        pytest.param("root ::= " + "a" * 200_000, "cannot be used", marks=pytest.mark.slow),
        (
            "root ::= r1\n"
            + "".join(f"r{i} ::= r{i + 1}\n" for i in range(1, 3000))
            + 'r3000 ::= "a"',
            "at most 1000",
        ),
        pytest.param(
            "start: r1\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(1, 3000)),
            "at most 1000",
            marks=pytest.mark.slow,
        ),
        ("root ::= \ud800", "surrogate"),
    ],
)
def test_grammars_that_cannot_be_used(llm: LLM, text: str, why: str) -> None:
    with pytest.raises(OptionError, match=why) as raised:
        llm.grammar_filter(text)
    assert "grammar" in str(raised.value)
    assert len(str(raised.value)) < 400


def test_an_endless_grammar(llm: LLM) -> None:
    """It ends with the limit of tokens, or where nothing but one endless text is left."""
    held = llm.grammar_filter('root ::= ("a" | "b") root')
    answer = llm.generate("So:", max_tokens=12, logit_filter=held)
    assert answer.finish_reason == "length"
    assert set(answer.text) <= {"a", "b"}
    with pytest.raises(OptionError, match=r"the grammar allows nothing .*loosen it"):
        llm.generate("So:", logit_filter=llm.grammar_filter('root ::= "a" root'))


def test_kinds_of_grammars() -> None:
    with pytest.raises(OptionError, match="json_schema, gbnf, lark, regex"):
        Grammar("bnf", "a")  # type: ignore[arg-type]
    with pytest.raises(OptionError):
        Grammar("regex", 5)  # type: ignore[arg-type]
