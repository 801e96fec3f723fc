"""`/infill`, beside what editors send (`test_editors.py`)."""

from __future__ import annotations

from typing import Any

import pytest
from inspection import used_blocks
from serving import Running

PLAIN: dict[str, Any] = {"input_prefix": "a = ", "input_suffix": "\n", "n_predict": 4}


def prompt(server: Running, **fields: Any) -> str:
    reply = server.post("/infill", {**PLAIN, "temperature": 0, **fields})
    assert reply.status_code == 200, reply.text
    text: str = reply.json()["prompt"]
    return text


def test_the_prompt(fim_server: Running) -> None:
    """`prompt` is the end of the prefix, and texts of special tokens are plain text."""
    assert prompt(fim_server) == "<|fim_prefix|>a = <|fim_suffix|>\n<|fim_middle|>"
    assert prompt(fim_server, prompt="b + ").startswith("<|fim_prefix|>a = b + <|fim_suffix|>")
    chunks = [{"filename": "x.py", "text": "x = 1\n"}, {"text": "y = 2\n"}]
    assert prompt(fim_server, input_extra=chunks) == (
        "<|repo_name|>myproject\n<|file_sep|>x.py\nx = 1\n<|file_sep|>tmp\ny = 2\n"
        "<|file_sep|>filename\n<|fim_prefix|>a = <|fim_suffix|>\n<|fim_middle|>"
    )
    marked = fim_server.post("/infill", {**PLAIN, "input_prefix": "<|fim_middle|>"}).json()
    assert marked["tokens_evaluated"] == 3 + len("<|fim_middle|>") + 1


def test_an_answer_is_the_librarys(fim_server: Running) -> None:
    expected = fim_server.llm.infill("def f(", "):\n", max_tokens=9)
    asked = {"input_prefix": "def f(", "input_suffix": "):\n", "n_predict": 9, "temperature": 0}
    assert fim_server.post("/infill", asked).json()["content"] == expected.text


def test_other_files_stay_in_the_cache(fim_server: Running) -> None:
    chunks = [{"filename": "a.h", "text": "int add(int a, int b);\n" * 8}]
    warm = {"input_prefix": "", "input_suffix": "", "input_extra": chunks, "n_predict": 0}
    first = fim_server.post("/infill", {**warm, "samplers": [], "prompt": ""}).json()
    assert first["timings"]["prompt_n"] > 150
    second = fim_server.post("/infill", {**PLAIN, "input_extra": chunks}).json()
    assert second["timings"]["cache_n"] >= first["tokens_evaluated"] - 3
    assert second["timings"]["prompt_n"] < 12


def test_long_texts_are_cut(fim_server: Running) -> None:
    """Three parts of the prefix, its end, to one of the suffix, its beginning."""
    long = {"input_prefix": "p" * 5_000_000 + "q", "input_suffix": "s" + "t" * 50_000}
    tail = "the line"
    reply = fim_server.post("/infill", {**long, "prompt": tail, "n_predict": 4, "temperature": 0})
    assert reply.status_code == 200, reply.text
    text = reply.json()["prompt"]
    before, behind = text.removeprefix("<|fim_prefix|>").split("<|fim_suffix|>")
    assert before.endswith("pq" + tail)
    assert behind.startswith("stt")
    kept_before = len(before) - len(tail)
    kept_behind = len(behind) - len("<|fim_middle|>") + len(tail)
    assert kept_before == 3 * kept_behind
    assert 400 < reply.json()["tokens_evaluated"] < 600
    extra = [{"text": "e" * 3000}]
    files = fim_server.post("/infill", {**PLAIN, "input_extra": extra}).json()
    assert files["tokens_evaluated"] < 1024


def test_the_infill_sampler(fim_server: Running) -> None:
    """The same seed gives the same, and answers that could end do."""
    asked = {**PLAIN, "samplers": ["top_k", "top_p", "infill"], "n_predict": 20, "seed": 3}
    first = fim_server.post("/infill", asked).json()
    assert fim_server.post("/infill", asked).json()["content"] == first["content"]
    assert (
        fim_server.post("/infill", {**asked, "n_cmpl": 3}).json()[0]["content"]
        == (first["content"])
    )


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"input_prefix": None}, "input_prefix"),
        ({"input_suffix": None}, "input_suffix"),
        ({"input_prefix": 5}, "input_prefix"),
        ({"input_suffix": ["a"]}, "input_suffix"),
        ({"prompt": ["a"]}, "prompt"),
        ({"input_extra": "text"}, "input_extra"),
        ({"input_extra": [5]}, "input_extra"),
        ({"input_extra": [{}]}, "input_extra[0].text"),
        ({"input_extra": [{"filename": "ok"}]}, "input_extra[0].text"),
        ({"input_extra": [{"filename": 123}]}, "input_extra[0].filename"),
        ({"input_extra": [{"filename": 123, "text": "abc"}]}, "input_extra[0].filename"),
        ({"input_extra": [{"filename": "ok", "text": 456}]}, "input_extra[0].text"),
        ({"input_extra": [{"text": "a"}] * 1025}, "1024"),
        ({"n_predict": -2}, "n_predict"),
    ],
)
def test_wrong_fields(fim_server: Running, change: dict[str, Any], named: str) -> None:
    reply = fim_server.post("/infill", {**PLAIN, **change})
    assert reply.status_code == 400, reply.text
    assert named in reply.json()["error"]["message"]
    assert reply.json()["error"]["type"] == "invalid_request_error"


def test_a_line_too_long_for_the_context(fim_server: Running) -> None:
    reply = fim_server.post("/infill", {**PLAIN, "prompt": "x" * 2000})
    assert reply.status_code == 400
    assert reply.json()["error"]["type"] == "exceed_context_size_error"
    assert reply.json()["error"]["n_ctx"] == 1024


@pytest.mark.parametrize("stream", [False, True])
def test_a_model_without_the_tokens(server: Running, stream: bool) -> None:
    reply = server.post("/infill", {**PLAIN, "stream": stream})
    assert reply.status_code == 501
    error = reply.json()["error"]
    assert (error["code"], error["type"]) == (501, "not_supported_error")
    assert "tiny" in error["message"]
    assert "/" not in error["message"], "no path"


def test_a_suffix_is_copied_behind_what_has_changed(fim_server: Running) -> None:
    """As llama.cpp's `--cache-reuse` and `n_cache_reuse`, for `/completion` too."""
    suffix = "\n    return total + value\n" * 12

    def sent(prefix: str, **fields: Any) -> tuple[int, int]:
        body = {"input_prefix": prefix, "input_suffix": suffix, "n_predict": 2, **fields}
        timings = fim_server.post("/infill", body).json()["timings"]
        return timings["cache_n"], timings["prompt_n"]

    cached, whole = sent("def first(value):", n_cache_reuse=64)
    assert cached < 20 < whole
    for prefix in ("def first(value, more):", "def first(value, more, most):", "def f(value):"):
        cached, computed = sent(prefix, n_cache_reuse=64)
        assert computed < 40
        assert cached > whole - 40
    cached, _ = sent("def first(value, more):", n_cache_reuse=100_000)
    assert cached < 40
    cached, _ = sent("def second(value):")
    assert cached < 20
    exact = fim_server.llm.infill("def second(value):", suffix, max_tokens=2)
    assert exact.stats.cached_tokens > whole - 20  # what was computed last, and no copies
    assert used_blocks(fim_server.llm) == 0
    # less of the end is left than has to be computed
    longer = "".join(f"def number_{n}(value): pass\n" for n in range(40))
    cached, _ = sent(longer, n_cache_reuse=64)
    assert cached < 20
