"""`/completion` and what belongs to it, as clients of llama.cpp's server use them."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from parsing import fields_of, refusal
from serving import Running, running, served
from waiting import Clock

from edgellm.llm import LLM
from edgellm.serve import ModelPool, ServeOptions
from edgellm.serve.http.fields import Fields
from edgellm.serve.llama_cpp.completion import apply_samplers
from edgellm.serve.llama_cpp.fields import generation_arguments, logit_bias
from edgellm.serve.openai.sampling import sampling_arguments

GREEDY: dict[str, Any] = {"prompt": "hello there", "n_predict": 12, "temperature": 0}


def chunks(reply: httpx.Response) -> list[dict[str, Any]]:
    assert reply.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in reply.text.split("\n") if line and not line.startswith(":")]
    assert all(line.startswith("data: {") for line in lines), "no names, no [DONE]"
    return [json.loads(line[6:]) for line in lines]


def error(reply: httpx.Response, status: int, kind: str = "invalid_request_error") -> str:
    assert reply.status_code == status, reply.text
    body = reply.json()["error"]
    assert (body["code"], body["type"]) == (status, kind)
    message: str = body["message"]
    assert message
    return message


@pytest.mark.parametrize("path", ["/completion", "/completions"])
def test_an_answer_is_the_librarys(server: Running, path: str) -> None:
    asked = {"prompt": "hello there", "n_predict": 15, "seed": 11, "top_k": 20, "top_p": 0.9}
    expected = server.llm.generate(
        "hello there", max_tokens=15, seed=11, top_k=20, top_p=0.9, temperature=0.8
    )
    body = server.post(path, {**asked, "temperature": 0.8, "return_tokens": True}).json()
    assert body["content"] == expected.text
    assert body["tokens"] == list(expected.tokens)
    assert body["tokens_predicted"] == len(expected.tokens)
    assert body["tokens_evaluated"] == expected.stats.prompt_tokens
    assert body["generation_settings"]["seed"] == 11
    assert body["stop"] is True
    assert body["prompt"] == "hello there"
    assert body["model"] == "tiny"
    assert body["truncated"] is False


def test_compact_json_as_editors_match_it(server: Running) -> None:
    assert server.post("/completion", GREEDY).text.startswith('{"index":0,"content":"')


def test_a_second_request_finds_the_first_ones_prompt(server: Running) -> None:
    prompt = "~ an own prompt of this test: " + "words " * 30
    first = server.post("/completion", {**GREEDY, "prompt": prompt}).json()
    again = server.post("/completion", {**GREEDY, "prompt": prompt}).json()
    longer = server.post("/completion", {**GREEDY, "prompt": prompt + " and more"}).json()
    total = len(prompt)
    assert (first["timings"]["cache_n"], first["timings"]["prompt_n"]) == (0, total)
    assert (again["timings"]["cache_n"], again["timings"]["prompt_n"]) == (total - 1, 1)
    assert again["content"] == first["content"]
    assert longer["timings"]["cache_n"] >= total - 1
    assert longer["timings"]["cache_n"] + longer["timings"]["prompt_n"] == total + 9
    assert again["tokens_cached"] == total + again["tokens_predicted"] - 1


def test_nothing_predicted_fills_the_cache(server: Running) -> None:
    prompt = "%warmed up" * 20
    warm = server.post("/completion", {"prompt": prompt, "n_predict": 0}).json()
    assert (warm["content"], warm["tokens_predicted"]) == ("", 0)
    assert warm["timings"]["prompt_n"] == len(prompt)
    answer = server.post("/completion", {**GREEDY, "prompt": prompt}).json()
    assert answer["timings"]["prompt_n"] == 1


def test_a_stream_has_the_same_text(server: Running) -> None:
    whole = server.post("/completion", GREEDY).json()
    parts = chunks(server.post("/completion", {**GREEDY, "stream": True}))
    assert "".join(part["content"] for part in parts) == whole["content"]
    assert [part["stop"] for part in parts] == [False] * (len(parts) - 1) + [True]
    assert {"index", "content", "tokens", "id_slot", "tokens_evaluated"} <= set(parts[0])
    assert parts[-1]["timings"]["predicted_n"] == whole["tokens_predicted"]
    assert parts[-1]["stop_type"] == whole["stop_type"]
    assert "timings" not in parts[0]


def test_progress_and_timings_of_a_stream(server: Running) -> None:
    asked = {**GREEDY, "prompt": "p" * 600, "stream": True}
    parts = chunks(
        server.post("/completion", {**asked, "return_progress": True, "timings_per_token": True})
    )
    progress = [part["prompt_progress"] for part in parts if "prompt_progress" in part]
    assert progress[-1]["processed"] == progress[-1]["total"] == 600
    assert all(each["cache"] <= each["processed"] <= 600 for each in progress)
    timed = [part for part in parts if part["content"] and not part["stop"]]
    assert all(part["timings"]["predicted_n"] == part["tokens_predicted"] for part in timed)
    cached = chunks(server.post("/completion", {**asked, "return_progress": True}))
    assert cached[0]["prompt_progress"]["cache"] == 599


def test_response_fields_have_their_paths_as_keys(server: Running) -> None:
    paths = ["content", "timings/prompt_n", "generation_settings/n_predict", "nothing/here", ""]
    body = server.post("/completion", {**GREEDY, "response_fields": paths}).json()
    assert set(body) == {"content", "timings/prompt_n", "generation_settings/n_predict"}
    assert body["generation_settings/n_predict"] == 12
    only = {**GREEDY, "n_predict": 0, "response_fields": [""]}  # as editors warm the cache up
    assert server.post("/completion", only).text == "{}"
    last = chunks(server.post("/completion", {**GREEDY, "response_fields": [""], "stream": True}))
    assert last[-1] == {}
    assert "content" in last[0]
    all_of_it = server.post("/completion", {**GREEDY, "response_fields": []}).json()
    assert all_of_it.keys() == server.post("/completion", GREEDY).json().keys()


def test_why_an_answer_ended(server: Running, tiny: LLM) -> None:
    long = {**GREEDY, "n_predict": 30, "ignore_eos": True}
    whole = server.post("/completion", long).json()
    assert (whole["stop_type"], whole["stopping_word"]) == ("limit", "")
    assert len(whole["content"]) > 5
    word = whole["content"][4]
    stopped = server.post("/completion", {**long, "stop": ["", word]}).json()
    assert (stopped["stop_type"], stopped["stopping_word"]) == ("word", word)
    assert stopped["content"] == whole["content"][: whole["content"].index(word)]
    # an end token, by raising it beyond all others
    end = min(tiny.engine.tokenizer.eos_ids)
    ended = server.post("/completion", {**GREEDY, "logit_bias": [[end, 1000]]}).json()
    assert (ended["stop_type"], ended["content"], ended["tokens_predicted"]) == ("eos", "", 1)
    full = {"prompt": "f" * 1000, "temperature": 0, "ignore_eos": True}
    full = server.post("/completion", full).json()
    assert (full["stop_type"], full["truncated"]) == ("limit", True)


@pytest.mark.parametrize("stop", [[], [""], ["", ""], ""])
def test_nothing_stops_an_answer_where_no_text_is_given(server: Running, stop: Any) -> None:
    """llama-server means to leave empty texts out as well; in 2026 they end an answer at once."""
    whole = server.post("/completion", {**GREEDY, "ignore_eos": True}).json()
    assert whole["generation_settings"]["stop"] == []
    asked = {**GREEDY, "ignore_eos": True, "stop": stop}
    body = server.post("/completion", asked).json()
    for key in ("content", "tokens_predicted", "stop_type", "stopping_word"):
        assert body[key] == whole[key], key
    assert body["generation_settings"]["stop"] == []
    assert (body["tokens_predicted"], body["stop_type"]) == (12, "limit")


def test_lines(server: Running, tiny: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgellm.engine.answer.time", Clock(per_call=0.001))
    (newline,) = tiny.engine.tokenizer.encode("\n", add_bos=False)
    always = {**GREEDY, "logit_bias": {str(newline): 1000}}
    limited = server.post("/completion", {**always, "t_max_predict_ms": 1}).json()
    assert limited["stop_type"] == "limit"
    assert limited["tokens_predicted"] == 2
    assert limited["has_new_line"] is True
    unlimited = server.post("/completion", {**always, "t_max_predict_ms": -1}).json()
    assert unlimited["content"] == "\n" * 12
    # text without an end of a line is not cut
    free = {**GREEDY, "logit_bias": [["\n", False]], "t_max_predict_ms": 1}
    assert server.post("/completion", free).json()["tokens_predicted"] == 12


def test_an_indentation_that_ends_it(server: Running) -> None:
    bias = [["\n", 500], ["x", 500.5]]
    penal = {"frequency_penalty": 2, "repeat_last_n": -1}
    asked = {**GREEDY, **penal, "logit_bias": bias, "n_predict": 8}
    both = server.post("/completion", asked).json()
    assert "\nx" in both["content"]
    cut = server.post("/completion", {**asked, "n_indent": 2}).json()
    assert cut["stop_type"] == "limit"
    assert cut["content"] == both["content"][: both["content"].index("\nx")]


def test_several_answers_and_several_prompts(server: Running) -> None:
    fields = {"response_fields": ["index", "content"], "seed": 4, "n_predict": 6}
    alone = [
        server.post("/completion", {**fields, "prompt": "one", "seed": 4 + i}).json()["content"]
        for i in range(3)
    ]
    several = server.post("/completion", {**fields, "prompt": "one", "n_cmpl": 3}).json()
    assert [each["content"] for each in several] == alone
    assert [each["index"] for each in several] == [0, 1, 2]
    prompts = server.post("/completion", {**fields, "prompt": ["one", [111, "ne"]]}).json()
    assert [each["index"] for each in prompts] == [0, 1]
    assert prompts[0]["content"] == alone[0]
    streamed = chunks(
        server.post("/completion", {**fields, "prompt": ["one", "two"], "n": 2, "stream": True})
    )
    assert sorted({part["index"] for part in streamed}) == [0, 1, 2, 3]


def test_the_same_prompt_as_text_and_as_tokens(server: Running) -> None:
    tokens = server.post("/tokenize", {"content": "hello there"}).json()["tokens"]
    mixed = [*tokens[:5], " there"]
    texts = {
        json.dumps(prompt): server.post("/completion", {**GREEDY, "prompt": prompt}).json()
        for prompt in ("hello there", tokens, mixed, [tokens], ["hello there"])
    }
    assert len({body["content"] for body in texts.values()}) == 1
    assert {body["tokens_evaluated"] for body in texts.values()} == {len(tokens)}


def test_probabilities(server: Running) -> None:
    for name in ("n_probs", "logprobs"):
        body = server.post("/completion", {**GREEDY, "n_predict": 3, name: 4}).json()
        steps = body["completion_probabilities"]
        assert len(steps) == 3
        for step in steps:
            assert len(step["top_logprobs"]) == 4
            assert step["top_logprobs"][0]["id"] == step["id"]  # greedy
            assert step["logprob"] == step["top_logprobs"][0]["logprob"] < 0
            assert isinstance(step["bytes"], list)
    parts = chunks(server.post("/completion", {**GREEDY, "n_probs": 1, "stream": True}))
    assert sum(len(p.get("completion_probabilities", [])) for p in parts) == 12


def test_null_and_unknown_fields_are_as_if_absent(server: Running) -> None:
    plain = server.post("/completion", {**GREEDY, "response_fields": ["content"]}).json()
    names = ("stop", "seed", "top_k", "n_cmpl", "grammar", "json_schema", "lora", "samplers")
    odd = {**dict.fromkeys(names), "t_max_prompt_ms": 500, "whatever": {"deep": [1]}, "id_slot": 99}
    more = {"cache_prompt": True, "n_keep": -1, "n_discard": 5, "dry_multiplier": 0, "mirostat": 0}
    asked = {**GREEDY, **odd, **more, "lora": [{"id": 0, "scale": 0}], "model": "made up"}
    reply = server.post("/completion", {**asked, "response_fields": ["content"]})
    assert reply.json() == plain


def test_soft_limits_move_values(server: Running) -> None:
    plain = server.post("/completion", GREEDY).json()["content"]
    for given in ({"temperature": -1}, {"top_p": 7, "min_p": -3, "top_k": -1}, {"n_probs": -2}):
        reply = server.post("/completion", {**GREEDY, **given})
        assert reply.status_code == 200, reply.text
        assert reply.json()["content"] == plain


def test_seeds_that_mean_any(server: Running) -> None:
    for seed in (-1, 2**32 - 1, 2**64 - 1):  # Tabby sends the last one
        body = server.post("/completion", {"prompt": "a", "n_predict": 1, "seed": seed}).json()
        assert body["generation_settings"]["seed"] not in (-1, seed)


@pytest.mark.parametrize(
    ("samplers", "as_if"),
    [
        ([], {"top_k": 0, "top_p": 1, "min_p": 0, "temperature": 1}),
        (["top_k"], {"top_p": 1, "min_p": 0, "temperature": 1}),
        (["penalties", "dry", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"], {}),
        ("kpmt", {}),
        ("kt", {"top_p": 1, "min_p": 0}),
        (["xtc", "dry"], {"samplers": "x"}),
    ],
)
def test_samplers_that_are_not_listed_do_nothing(
    server: Running, samplers: Any, as_if: dict[str, Any]
) -> None:
    chosen = {"prompt": "abc", "n_predict": 10, "seed": 5, "top_k": 30, "top_p": 0.7, "min_p": 0.1}
    listed = server.post("/completion", {**chosen, "temperature": 0.6, "samplers": samplers}).json()
    plain = server.post("/completion", {**chosen, "temperature": 0.6, **as_if}).json()
    assert listed["content"] == plain["content"]


BAD: list[tuple[dict[str, Any], str]] = [
    ({"n_predict": -2}, "Field 'n_predict': Value must be between -1 <= value <= 2147483647"),
    ({"n_predict": 2**31}, "but got 2147483648"),
    ({"n_predict": "12"}, "n_predict"),
    ({"n_predict": True}, "n_predict"),
    ({"n_predict": None, "max_tokens": 1.5}, "max_tokens"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": [1]}, "top_p"),
    ({"seed": 2**64}, "seed"),
    ({"seed": "1"}, "seed"),
    ({"stop": 5}, "stop"),
    ({"stop": [5]}, "stop"),
    ({"stop": ["x"] * 1000}, "stop"),
    ({"stop": "x" * 2000}, "stop"),
    ({"id_slot": -5}, "id_slot"),
    ({"n_discard": -1}, "Field 'n_discard': Value must be between 0"),
    ({"n_keep": -2}, "n_keep"),
    ({"n_indent": -1}, "n_indent"),
    ({"repeat_last_n": -2}, "repeat_last_n"),
    ({"t_max_predict_ms": -2}, "t_max_predict_ms"),
    ({"logit_bias": [[-1, 1]]}, "logit_bias"),
    ({"logit_bias": [[1, True]]}, "logit_bias"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"logit_bias": "x"}, "logit_bias"),
    ({"samplers": ["best"]}, "best"),
    ({"samplers": "z"}, "samplers"),
    ({"samplers": 5}, "samplers"),
    ({"samplers": ["infill", "top_p"]}, "behind it"),
    ({"samplers": ["adaptive_p"]}, "adaptive_p"),
    ({"dry_penalty_last_n": -2}, "dry_penalty_last_n"),
    ({"dry_allowed_length": 0.5}, "dry_allowed_length"),
    ({"mirostat": 3}, "mirostat"),
    ({"min_keep": -1}, "min_keep"),
    ({"lora": 5}, "lora"),
]
# What is refused behind the parser, where the model is known, and one that is not.
OVER_HTTP: list[tuple[dict[str, Any], str]] = [
    ({"n_cache_reuse": -1}, "n_cache_reuse"),
    ({"grammar": 5}, "grammar"),
    ({"grammar": "root ::= " + "(" * 60_000}, "the grammar cannot be used"),
    ({"grammar": "root ::= " + "a" * (1 << 19)}, "the grammar has"),
    ({"grammar": 'root ::= "a"', "json_schema": {}}, "json_schema"),
    ({"logit_bias": [[token, 1] for token in range(1025)]}, "at most 1024"),
    ({"n_predict": 2**31}, "but got 2147483648"),
    ({"prompt": None}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": [[["a"]]]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [2**31]}, "prompt"),
    ({"prompt": [1.5]}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": [320]}, "320"),
    ({"prompt": ["a"] * 65}, "65"),
    ({"n_cmpl": 0}, "Field 'n_cmpl': Value must be between 1 <= value <= 16, but got 0"),
    ({"n_cmpl": 10**9}, "n_cmpl"),
    ({"n": 17}, "Field 'n'"),
    ({"response_fields": "content"}, "response_fields"),
    ({"response_fields": [1]}, "response_fields"),
    ({"stream": "yes"}, "stream"),
    ({"json_schema": []}, "json_schema"),
    ({"json_schema": {"type": "nothing"}}, ""),
    ({"json_schema": {"$ref": "http://example.com/schema"}}, ""),
]


def read(fields: Fields) -> None:
    """The fields that say how an answer is made."""
    apply_samplers(fields, generation_arguments(fields))
    logit_bias(fields)


@pytest.mark.parametrize(("fields", "named"), BAD, ids=lambda value: json.dumps(value)[:40])
def test_wrong_fields(fields: dict[str, Any], named: str) -> None:
    wrong = refusal(read, {"prompt": "hello", "n_predict": 3, **fields})
    assert wrong.status == 400
    assert named in wrong.message


@pytest.mark.parametrize(("fields", "named"), OVER_HTTP, ids=lambda value: json.dumps(value)[:40])
def test_wrong_fields_over_http(server: Running, fields: dict[str, Any], named: str) -> None:
    asked = {"prompt": "hello", "n_predict": 3, **fields}
    assert named in error(server.post("/completion", asked), 400)
    if fields.get("stream") is None:
        assert named in error(server.post("/completion", {**asked, "stream": True}), 400)


def test_a_prompt_that_is_missing(server: Running) -> None:
    assert "prompt" in error(server.post("/completion", {}), 400)


def test_an_answer_follows_a_grammar(server: Running) -> None:
    asked = {**GREEDY, "grammar": 'root ::= ("yes" | "no") "!"'}
    assert server.post("/completion", asked).json()["content"] in ("yes!", "no!")


@pytest.mark.parametrize(
    "fields",
    [
        {"mirostat": 1},
        {"adaptive_target": 0.5},
        {"lora": [{"id": 0, "scale": 0.5}]},
        {"echo": True},
        {"n_probs": 1, "post_sampling_probs": True},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_what_is_not_there_is_refused_by_name(server: Running, fields: dict[str, Any]) -> None:
    message = error(server.post("/completion", {**GREEDY, **fields}), 501, "not_supported_error")
    assert any(name in message for name in fields)


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"\xff{}", b'{"a":1,"a":2}', b'{"prompt":NaN}', b"[" * 10_000],
)
def test_bodies_that_are_none(server: Running, body: bytes) -> None:
    for path in ("/completion", "/infill", "/tokenize"):
        with server.client() as client:
            error(client.post(path, content=body), 400)


def test_a_prompt_beyond_the_context(server: Running) -> None:
    reply = server.post("/completion", {"prompt": "x" * 1500, "n_predict": 1})
    error(reply, 400, "exceed_context_size_error")
    body = reply.json()["error"]
    assert (body["n_prompt_tokens"], body["n_ctx"]) == (1500, 1024)


def test_a_schema(server: Running) -> None:
    pytest.importorskip("llguidance")
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}
    asked = {"prompt": "x", "temperature": 0, "n_predict": 60}
    body = server.post("/completion", {**asked, "json_schema": schema}).json()
    assert body["content"].strip().startswith("{")


def test_other_methods_and_paths(server: Running) -> None:
    reply = server.get("/completion")
    assert "GET" in error(reply, 405)
    assert "POST" in reply.headers["allow"]


def test_models_by_name_where_there_are_several(tiny: LLM) -> None:
    pool = ModelPool([served(tiny), served(tiny, "other")])
    with running(pool, tiny, ServeOptions(port=0, grace_s=1)) as server:
        error(server.post("/completion", {**GREEDY, "model": "made up"}), 404, "not_found_error")
        assert server.post("/completion", {**GREEDY, "model": "other"}).json()["model"] == "other"
        assert server.post("/completion", {**GREEDY, "model": ""}).json()["model"] == "tiny"
        assert server.get("/props", params={"model": "other"}).json()["model_alias"] == "other"


def test_a_request_may_limit_its_drafts() -> None:
    for most in (0, 5):
        asked = generation_arguments(Fields({"speculative.n_max": most}))
        assert asked == {"speculate_most": most}
    refused = refusal(generation_arguments, {"speculative.n_max": -1})
    assert refused.param == "speculative.n_max"
    assert sampling_arguments(fields_of({"speculate": False, "speculate_most": 2})) == {
        "speculate": False,
        "speculate_most": 2,
    }


def test_drafts_are_told_in_timings_and_placement(server: Running) -> None:
    asked = {"prompt": "one two three four " * 12, "n_predict": 60, "temperature": 0}
    body = server.post("/completion", {**asked, "ignore_eos": True}).json()
    drafts = body["placement"]["drafts"]
    assert body["placement"]["draft_failure"] == ""
    assert sum(each["drafted"] for each in drafts.values()) == body["timings"].get("draft_n", 0)
    off = server.post("/completion", {**asked, "speculative.n_max": 0}).json()
    assert off["placement"]["drafts"] == {}
    assert off["content"] == body["content"][: len(off["content"])]
