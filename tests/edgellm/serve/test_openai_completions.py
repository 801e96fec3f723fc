"""`/v1/completions`, as OpenAI's own client sees it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import openai
import pytest
from parsing import refusal
from serving import Running

from edgellm.serve.openai.completions import read_completion

ASKED: Any = {"model": "tiny", "max_tokens": 11, "temperature": 0.9, "seed": 4}


def test_an_answer_is_the_librarys(server: Running, client: openai.OpenAI) -> None:
    reply = client.completions.create(prompt="once upon", **ASKED)
    expected = server.llm.generate("once upon", max_tokens=11, temperature=0.9, seed=4)
    assert reply.choices[0].text == expected.text
    assert reply.object == "text_completion"
    assert reply.usage is not None
    assert reply.usage.completion_tokens == len(expected.tokens)


def test_lists_of_prompts(server: Running, client: openai.OpenAI) -> None:
    prompts = ["once upon", "a time", "there"]
    reply = client.completions.create(prompt=prompts, n=2, **ASKED)
    alone = [client.completions.create(prompt=prompt, n=2, **ASKED) for prompt in prompts]
    assert [c.text for c in reply.choices] == [c.text for one in alone for c in one.choices]
    assert [c.index for c in reply.choices] == list(range(6))
    counts = [one.usage.prompt_tokens for one in alone if one.usage is not None]
    assert reply.usage is not None
    assert reply.usage.prompt_tokens == sum(counts)

    texts = [""] * 6
    for chunk in client.completions.create(prompt=prompts, n=2, stream=True, **ASKED):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in reply.choices]


@pytest.mark.parametrize("path", ["/v1/completions", "/completion"])
def test_more_prompts_than_may_wait(serving: Callable[..., Running], path: str) -> None:
    """They are begun one after the other, and none is refused."""
    server = serving(max_waiting=2)
    body = {"prompt": [f"{number} and" for number in range(9)], "max_tokens": 2, "seed": 1}
    reply = server.post(path, body)
    assert reply.status_code == 200, reply.text
    answers = reply.json()
    assert len(answers["choices"] if path == "/v1/completions" else answers) == 9
    assert server.answering.metrics.rejected["requests"] == 0


def test_token_ids(server: Running, client: openai.OpenAI) -> None:
    ids = server.llm.engine.tokenizer.encode("once upon")
    texts = [
        client.completions.create(prompt=prompt, **ASKED).choices[0].text
        for prompt in ("once upon", ids, [ids])
    ]
    assert len(set(texts)) == 1


def test_log_probabilities_in_the_old_shape(server: Running, client: openai.OpenAI) -> None:
    reply = client.completions.create(prompt="once upon", logprobs=3, **ASKED)
    expected = server.llm.generate("once upon", max_tokens=11, temperature=0.9, seed=4)
    logprobs = reply.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs == pytest.approx(expected.logprobs)
    assert logprobs.tokens is not None
    assert len(logprobs.tokens) == len(expected.tokens)
    assert logprobs.top_logprobs is not None
    assert all(len(top) <= 3 for top in logprobs.top_logprobs)
    assert all(math.isfinite(lp) for top in logprobs.top_logprobs for lp in top.values())


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"prompt": None},
        {"prompt": 3},
        {"prompt": []},
        {"prompt": [[]]},
        {"prompt": [["a"]]},
        {"prompt": [1.5]},
        {"prompt": [-1]},
        {"prompt": [2**31]},
        {"prompt": {"a": 1}},
        {"prompt": "a", "best_of": 3},
        {"prompt": "a", "logprobs": 99},
        {"prompt": [1, 2], "suffix": "b"},
        {"prompt": "a", "suffix": 4},
    ],
)
def test_wrong_fields(wrong: dict[str, Any]) -> None:
    error = refusal(lambda fields: read_completion(fields, max_n=16), {"max_tokens": 1, **wrong})
    assert error.status == 400
    assert error.message


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"prompt": [319, 400]},
        {"prompt": "a", "suffix": "b"},  # no model for infill
    ],
)
def test_wrong_fields_over_http(server: Running, wrong: dict[str, Any]) -> None:
    reply = server.post("/v1/completions", {"max_tokens": 1, **wrong})
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["message"]


@pytest.mark.parametrize(
    "field",
    [
        {"functions": [{"name": "f"}]},
        {"lora": [{"id": 0, "scale": 1.0}]},
    ],
)
@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
def test_what_would_change_the_answer_and_is_not_there(
    server: Running, route: str, field: dict[str, Any]
) -> None:
    body = {"prompt": "a", "messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
    reply = server.post(route, {**body, **field})
    (name,) = field
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == name
    off = {name: type(field[name])()}
    assert server.post(route, {**body, **off}).status_code == 200


def test_names_of_others_for_what_is_there(server: Running) -> None:
    """vLLM's penalty, llama.cpp's schema."""
    body = {"prompt": "a a a a", "max_tokens": 8, "temperature": 0}

    def text(**fields: Any) -> str:
        reply = server.post("/v1/completions", {**body, **fields})
        return str(reply.json()["choices"][0]["text"])

    assert text(repetition_penalty=3.0) == text(repeat_penalty=3.0) != text(repeat_penalty=1.0)
    schema = {"type": "array", "items": {"type": "integer"}, "maxItems": 1}
    wanted = {"type": "json_schema", "json_schema": {"schema": schema}}
    assert text(json_schema=schema) == text(response_format=wanted) != text()


_YES = {"type": "string", "enum": ["yes", "no"]}


@pytest.mark.parametrize(
    ("form", "allowed"),
    [
        ({"grammar": 'root ::= "yes" | "no"'}, ("yes", "no")),
        ({"grammar": 'start: "yes" | "no"'}, ("yes", "no")),
        ({"guided_grammar": 'root ::= "yes" | "no"'}, ("yes", "no")),
        ({"guided_json": _YES}, ('"yes"', '"no"')),
        ({"guided_json": json.dumps(_YES)}, ('"yes"', '"no"')),
        ({"guided_regex": "yes|no"}, ("yes", "no")),
        ({"guided_choice": ["yes", 'n"o\n']}, ("yes", 'n"o\n')),
        ({"structured_outputs": {"json": _YES}}, ('"yes"', '"no"')),
        ({"structured_outputs": {"regex": "yes|no"}}, ("yes", "no")),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, ("yes", "no")),
        ({"structured_outputs": {"grammar": 'root ::= "yes" | "no"'}}, ("yes", "no")),
    ],
)
@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
def test_forms_of_answers(
    server: Running, route: str, form: dict[str, Any], allowed: tuple[str, ...]
) -> None:
    body = {"prompt": "a", "messages": [{"role": "user", "content": "a"}], "max_tokens": 20}
    reply = server.post(route, {**body, **form})
    assert reply.status_code == 200, reply.text
    (choice,) = reply.json()["choices"]
    assert (choice["message"]["content"] if "message" in choice else choice["text"]) in allowed
    assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("form", "named"),
    [
        ({"grammar": "root ::= (("}, "the grammar cannot be used"),
        ({"grammar": "root ::= other"}, "other"),
        ({"grammar": 5}, "`grammar`"),
        ({"guided_regex": "(?=a)b"}, "look-around"),
        ({"guided_regex": "("}, "the regular expression"),
        ({"guided_choice": [5]}, "`guided_choice`"),
        ({"guided_json": "{"}, "the JSON schema"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structural_tag"),
        ({"structured_outputs": {"regex": 5}}, "`structured_outputs.regex`"),
        ({"grammar": 'root ::= "a"', "guided_regex": "a"}, "`guided_regex`"),
        ({"response_format": {"type": "json_object"}, "grammar": 'root ::= "a"'}, "`grammar`"),
    ],
)
def test_wrong_forms(server: Running, form: dict[str, Any], named: str) -> None:
    reply = server.post("/v1/completions", {"prompt": "a", "max_tokens": 1, **form})
    assert reply.status_code == 400, reply.text
    assert named in reply.json()["error"]["message"]


def test_null_is_absent(server: Running) -> None:
    body = {"prompt": "a", "max_tokens": 1, "suffix": None, "logprobs": None, "seed": None}
    assert server.post("/v1/completions", {**body, "stop": None, "x": 1}).status_code == 200


def test_a_suffix_has_its_gap_filled(fim_server: Running) -> None:
    """With a model that has infill tokens; also as a stream, and several times."""
    expected = fim_server.llm.infill("def f(", "):", max_tokens=9)
    asked: Any = {"model": "fim", "prompt": "def f(", "suffix": "):", "max_tokens": 9}
    with openai.OpenAI(base_url=f"{fim_server.url}/v1", api_key="x", max_retries=0) as client:
        reply = client.completions.create(**asked, n=2)
        assert [choice.text for choice in reply.choices] == [expected.text] * 2
        assert reply.usage is not None
        assert reply.usage.prompt_tokens == expected.stats.prompt_tokens
        chunks = client.completions.create(**asked, stream=True)
        text = "".join(choice.text for chunk in chunks for choice in chunk.choices)
        assert text == expected.text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_without_tokens_only_the_prompt_is_computed(
    server: Running, path: str, stream: bool
) -> None:
    text = f"{path} {stream} warmed up " * 9
    asked = {"prompt": text, "messages": [{"role": "user", "content": text}]}
    reply = server.post(path, {**asked, "max_tokens": 0, "stream": stream})
    if stream:
        lines = [line[6:] for line in reply.text.splitlines() if line.startswith("data: {")]
        choices = [choice for line in lines for choice in json.loads(line)["choices"]]
    else:
        choices = reply.json()["choices"]
        assert reply.json()["usage"]["completion_tokens"] == 0
    told = [choice.get("text") or choice.get("message", choice.get("delta")) for choice in choices]
    assert not any(each.get("content") if isinstance(each, dict) else each for each in told)
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["length"]
    counts = server.post(path, {**asked, "max_tokens": 1}).json()["usage"]
    assert counts["prompt_tokens_details"]["cached_tokens"] == counts["prompt_tokens"] - 1


def test_echo_has_the_prompt_and_its_scores(server: Running, client: openai.OpenAI) -> None:
    """As lm-eval asks: scores of all tokens but the last, which is the answer's."""
    tokens = server.llm.engine.tokenizer.encode("once upon a time")
    whole = client.completions.create(
        model="tiny",
        prompt=[tokens, tokens[:1]],
        max_tokens=1,
        temperature=0,
        logprobs=2,
        echo=True,
    )
    expected = server.llm.generate(tokens, max_tokens=1, temperature=0, prompt_logprobs=2)
    first, second = whole.choices
    assert first.text == "once upon a time" + expected.text
    scores = first.logprobs
    assert scores is not None
    assert scores.token_logprobs is not None
    assert scores.tokens is not None
    assert len(scores.tokens) == len(tokens) + 1
    assert scores.token_logprobs[:-1] == [each.logprob for each in expected.prompt_logprobs]
    assert scores.top_logprobs is not None
    assert scores.top_logprobs[0] is None
    for value, top in zip(scores.token_logprobs[1:], scores.top_logprobs[1:], strict=True):
        assert value <= max(top.values())
    assert second.logprobs is not None
    assert second.logprobs.token_logprobs is not None
    assert second.logprobs.token_logprobs[0] is None

    text, streamed, offsets = "", [], []
    for chunk in client.completions.create(
        model="tiny", prompt=tokens, max_tokens=1, temperature=0, logprobs=2, echo=True, stream=True
    ):
        for choice in chunk.choices:
            text += choice.text
            if choice.logprobs is not None:
                streamed += choice.logprobs.token_logprobs or []
                offsets += choice.logprobs.text_offset or []
    assert (text, streamed) == (first.text, scores.token_logprobs)
    assert offsets == scores.text_offset


@pytest.mark.parametrize("stream", [False, True])
def test_echo_without_scores(server: Running, stream: bool) -> None:
    asked = {"prompt": ["once upon", "a"], "max_tokens": 3, "temperature": 0, "n": 2, "seed": 1}
    plain = server.post("/v1/completions", asked).json()["choices"]
    texts = [""] * 4
    if stream:
        reply = server.post("/v1/completions", {**asked, "echo": True, "stream": True})
        for line in reply.text.splitlines():
            if line.startswith("data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    texts[choice["index"]] += choice["text"]
    else:
        reply = server.post("/v1/completions", {**asked, "echo": True})
        texts = [choice["text"] for choice in reply.json()["choices"]]
    prompts = ["once upon", "once upon", "a", "a"]
    assert texts == [p + c["text"] for p, c in zip(prompts, plain, strict=True)]


def test_scores_of_a_prompt_in_vllms_form(server: Running) -> None:
    asked = {"prompt": "once upon", "max_tokens": 1, "temperature": 0, "prompt_logprobs": 1}
    (choice,) = server.post("/v1/completions", asked).json()["choices"]
    expected = server.llm.generate("once upon", max_tokens=1, temperature=0, prompt_logprobs=1)
    first, *others = choice["prompt_logprobs"]
    assert first is None
    for scored, each in zip(others, expected.prompt_logprobs[1:], strict=True):
        own = scored[str(each.token)]
        assert (own["logprob"], own["rank"]) == (each.logprob, each.rank)
        assert min(entry["rank"] for entry in scored.values()) == 1
    wrong = server.post("/v1/completions", {**asked, "stream": True})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "prompt_logprobs")
    wrong = server.post("/v1/completions", {"prompt": "a", "suffix": "b", "echo": True})
    assert wrong.json()["error"]["param"] == "echo"


def test_a_tokenizer_over_http(server: Running) -> None:
    """vLLM's routes, as lm-eval's `remote` tokenizer uses them."""
    tokenizer = server.llm.engine.tokenizer
    info = server.get("/tokenizer_info").json()
    assert info["bos_token"] == tokenizer.bos
    assert info["eos_token"] in tokenizer.vocabulary
    asked = {"prompt": "once upon", "add_special_tokens": False}
    tokens = server.post("/tokenize", asked).json()["tokens"]
    assert tokens == tokenizer.encode("once upon", add_bos=False)
    assert server.post("/detokenize", {"tokens": tokens}).json()["prompt"] == "once upon"
