from __future__ import annotations

import math
import threading
from typing import Any

import numpy as np
import pytest

from edgellm import (
    CancelledError,
    ContextOverflowError,
    GenerationOptions,
    NumericError,
    OptionError,
    Progress,
)
from edgellm.backends.batch import Rows, StepBackend
from edgellm.backends.registry import TRITON
from edgellm.cache.groups import STEP_ROWS
from edgellm.engine.one_sequence import Hooks, compute_prompt
from edgellm.kernels.native import library
from edgellm.kernels.sampling import Logits
from edgellm.llm import LLM, load

GREEDY = GenerationOptions(temperature=0.0, max_tokens=24)
TEXT = "In the year 1969 three men flew to the moon. " * 8


@pytest.fixture(params=["chosen", pytest.param("portable", marks=pytest.mark.slow)])
def llm(request: pytest.FixtureRequest) -> LLM:
    """The default model as a user gets it, and without the fused step."""
    found: LLM = request.getfixturevalue(f"{request.param}_llm")
    return found


def backend(llm: LLM) -> str:
    return llm.engine.prefill.placement.provider


def have_cached(llm: LLM, *prompts: str) -> None:
    """Compute prompts where those that are cached get other bits: without the native kernels."""
    if library() is None:
        for text in prompts:
            llm.generate(text, temperature=0, max_tokens=1)


def test_question_is_answered(chosen_llm: LLM) -> None:
    # (without the second sentence the first token is a near-tie, in float32 too: "The" and "L'")
    question = "Name the capital of France. Answer in English."
    answer = chosen_llm.chat(temperature=0).send(question)
    assert "Paris" in answer.text
    assert answer.finish_reason == "stop"
    assert answer.stats.prompt_tokens == 40
    assert answer.stats.generation_tokens == len(answer.tokens) == len(answer.logprobs)
    assert answer.stats.prefill == {backend(chosen_llm): 40 - answer.stats.cached_tokens}


def test_pieces_make_up_the_text(llm: LLM) -> None:
    pieces = list(llm.stream(TEXT, temperature=0, max_tokens=12, logprobs=3))
    whole = llm.generate(TEXT, temperature=0, max_tokens=12)
    assert "".join(p.text for p in pieces) == whole.text
    assert [p.finish_reason for p in pieces[:-1]] == [None] * (len(pieces) - 1)
    assert pieces[-1].finish_reason == "length"
    assert [p.stats is None for p in pieces] == [True] * (len(pieces) - 1) + [False]
    for piece in pieces[:-1]:
        assert piece.top_logprobs is not None
        assert len(piece.top_logprobs) == 3
        # greedy takes the first of them
        assert piece.logprob == max(piece.top_logprobs.values())
        assert piece.token == next(iter(piece.top_logprobs))


def test_same_seed_same_text(llm: LLM) -> None:
    texts = {llm.generate("Once", max_tokens=20, temperature=1.2, seed=s).text for s in (3, 3, 3)}
    assert len(texts) == 1
    assert llm.generate("Once", max_tokens=20, temperature=1.2, seed=4).text not in texts


def test_stop_text_is_cut_off(llm: LLM) -> None:
    whole = llm.generate(TEXT, temperature=0, max_tokens=24).text
    stop = whole[10:14]
    found = llm.generate(TEXT, temperature=0, max_tokens=24, stop=[stop])
    assert found.text == whole[: whole.index(stop)]
    assert found.finish_reason == "stop"


def test_max_tokens_zero_only_fills_the_cache(llm: LLM) -> None:
    with llm.session() as session:
        session.append("Some words to remember")
        found = session.generate(max_tokens=0)
        assert found.tokens == ()
        assert found.finish_reason == "length"
        assert session.cached == len(session.tokens)


@pytest.mark.parametrize("at", [1, 50, 127, 128, 129])
@pytest.mark.parametrize(
    "kind", ["chosen_llm", pytest.param("reference_llm", marks=pytest.mark.slow)]
)
def test_cached_prefix_changes_nothing(kind: str, at: int, request: pytest.FixtureRequest) -> None:
    llm: LLM = request.getfixturevalue(kind)
    if llm.engine.prefill.precision != llm.engine.decoder.precision:
        pytest.skip("prefill and decode round differently without the native kernels")
    tokens = llm.engine.tokenizer.encode(TEXT * 2)[:180]
    with llm.session() as cold:
        cold.append([7, *tokens])
        cold.rewind(0)
        cold.append(tokens)
        expected = cold.generate(options=GREEDY)
    with llm.session() as warm:
        warm.append([*tokens[:at], 5, 6, 7])
        warm.generate(max_tokens=0)
        warm.replace(tokens)
        found = warm.generate(options=GREEDY)
    assert found.stats.cached_tokens >= at
    assert found.tokens == expected.tokens


def test_second_turn_computes_only_what_is_new(llm: LLM) -> None:
    chat = llm.chat(temperature=0, max_tokens=16)
    first = chat.send("Name a planet.")
    second = chat.send("Name another one.")
    assert second.stats.cached_tokens >= first.stats.prompt_tokens + len(first.tokens) - 2
    assert sum(second.stats.prefill.values()) < 25


def test_fork_and_rewind(llm: LLM) -> None:
    with llm.session() as trunk:
        trunk.append(TEXT)
        length = len(trunk.tokens)
        first = trunk.generate(options=GREEDY)
        with trunk.fork() as branch:
            assert branch.tokens == trunk.tokens
            branch.rewind(length)
            assert branch.generate(options=GREEDY).tokens == first.tokens
            branch.rewind(length - 3)
            branch.append(" Suddenly")
            branch.generate(options=GREEDY)
        assert trunk.tokens[length:] == first.tokens
        with pytest.raises(OptionError, match="length"):
            trunk.rewind(10**6)


@pytest.mark.slow
def test_cancel_in_prefill_keeps_the_session(llm: LLM) -> None:
    cancel = threading.Event()
    seen: list[Progress] = []

    def progress(news: Progress) -> None:
        seen.append(news)
        cancel.set()

    with llm.session() as session:
        session.append([11, *llm.engine.tokenizer.encode(TEXT * 6)])
        found = session.generate(options=GREEDY, cancel=cancel, progress=progress)
        assert found.finish_reason == "cancelled"
        assert found.tokens == ()
        (news,) = seen
        chunk = news.done
        assert news == Progress("prefill", chunk, len(session.tokens), "tokens")
        # a native step is as long as one who comes meanwhile may wait
        assert 128 <= chunk <= (STEP_ROWS if isinstance(llm.engine.prefill, StepBackend) else 128)
        assert session.cached == found.stats.cached_tokens + chunk == chunk
        assert found.stats.prefill == {backend(llm): chunk}
        resumed = session.generate(options=GREEDY)
        assert resumed.stats.cached_tokens == chunk
        expected = session.tokens[: resumed.stats.prompt_tokens]
    with llm.session() as other:
        other.append(expected)
        assert other.generate(options=GREEDY).tokens == resumed.tokens


def test_cancel_between_layers_leaves_the_sequence_as_it_was(llm: LLM) -> None:
    class Later(threading.Event):
        """Set when it is asked for the fourth time."""

        asked = 0

        def is_set(self) -> bool:
            self.asked += 1
            return self.asked > 3

    sequence = llm.engine.cache.sequence()
    if library() is None:  # numpy adds up one row in another order
        compute_prompt(llm.engine.prefill, [1, 2], sequence)
    before = compute_prompt(llm.engine.prefill, [1, 2, 3][len(sequence) :], sequence)
    sequence.truncate(2)
    cancel = Later()
    with pytest.raises(CancelledError, match="between two layers"):
        compute_prompt(llm.engine.prefill, [4, 5, 6], sequence, Hooks(cancel=cancel))
    assert cancel.asked == 4
    assert sequence.tokens == [1, 2]
    # on a GPU a single row has a kernel of its own, which adds up in another order
    allowed = 0.1 if backend(llm) == TRITON else 0.0
    np.testing.assert_allclose(
        compute_prompt(llm.engine.prefill, [3], sequence), before, atol=allowed, rtol=0
    )
    sequence.truncate(0)


def test_cancel_while_answering(llm: LLM) -> None:
    cancel = threading.Event()
    chat = llm.chat(temperature=0)
    pieces = []
    for piece in chat.stream("Count to one hundred.", cancel=cancel):
        pieces.append(piece)
        if len(pieces) == 5:
            cancel.set()
    assert pieces[-1].finish_reason == "cancelled"
    assert chat.messages[-1].role == "assistant"
    assert chat.send("Go on.").text


def test_abandoned_stream_keeps_the_session_valid(llm: LLM) -> None:
    with llm.session() as session:
        session.append(TEXT)
        stream = session.stream(options=GREEDY)
        first = next(stream)
        stream.close()
        assert session.tokens[-1] == first.token
        assert session.stats is not None
        assert session.generate(options=GREEDY).tokens


def test_context_that_is_too_small(smollm2: Any) -> None:
    llm = load(str(smollm2.path), ctx_size=64)
    with pytest.raises(ContextOverflowError, match=r"has \d+ tokens.*holds 64"):
        llm.generate(TEXT)
    full = llm.generate("Count: 1 2 3", temperature=0, ignore_eos=True)
    assert full.finish_reason == "length"
    assert full.stats.prompt_tokens + len(full.tokens) == 65
    exact = llm.engine.tokenizer.encode(TEXT)[:64]
    with llm.session() as session:
        session.append(exact)
        assert len(session.generate(options=GREEDY).tokens) == 1


def test_all_blocks_held(smollm2: Any) -> None:
    llm = load(str(smollm2.path), ctx_size=128, cache_size=128)
    sessions = [llm.session() for _ in range(3)]
    for i, session in enumerate(sessions):
        session.append([i, 100, 200])
    assert all(session.generate(options=GREEDY).tokens for session in sessions)
    assert [session.cached > 0 for session in sessions] == [False, True, True]


def test_empty_prompt(llm: LLM) -> None:
    with pytest.raises(OptionError, match="empty"):
        llm.generate("")
    with pytest.raises(OptionError, match="empty"):
        llm.chat().send("  ")


def test_failed_turn_leaves_the_conversation(smollm2: Any) -> None:
    llm = load(str(smollm2.path), ctx_size=128)
    chat = llm.chat(temperature=0, max_tokens=4)
    chat.send("Hi")
    before = list(chat.messages)
    with pytest.raises(ContextOverflowError):
        chat.send(TEXT * 3)
    assert chat.messages == before
    assert chat.send("Hello").text


def test_regenerate_replaces_the_answer(llm: LLM) -> None:
    chat = llm.chat(temperature=0, max_tokens=8)
    first = chat.send("Hi")
    list(chat.regenerate())
    assert [m.role for m in chat.messages] == ["user", "assistant"]
    assert chat.messages[-1].content == first.text


def test_two_sessions_in_two_threads(llm: LLM) -> None:
    prompts = ["The sun is", "My favourite food is"]
    have_cached(llm, *prompts)
    expected = [llm.generate(p, temperature=0, max_tokens=24).tokens for p in prompts]
    found: list[Any] = [None, None]

    def work(i: int) -> None:
        found[i] = llm.generate(prompts[i], temperature=0, max_tokens=24).tokens

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == expected


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"precision": "w2"}, "w8a8, f32, f16, w4a16, w8a16-qdq"),
        ({"decode": "fast"}, "native, triton, portable, reference"),
        ({"prefill": "tpu"}, "auto, native, triton, cpu, cuda"),
        ({"kv_format": "int4"}, "int8, f16, f32"),
        ({"ctx_size": -1}, "`ctx_size` is -1"),
        ({"ctx_size": 10**9}, "allowed with this model are 8192 at most"),
        ({"ctx_size": 64, "cache_size": 5}, "`cache_size` is 5"),
        ({"threads": 0}, "1 to 1024"),
        ({"scheduling": "fair"}, "stall_free, layered, serial, two_devices"),
        ({"decode_slowdown": 1}, "`decode_slowdown` is 1; allowed is a number, 1.01 to 100"),
        ({"time_target_ms": 0}, "`time_target_ms` is 0; allowed is a number, 1 to 60000"),
        ({"time_target_ms": "fast"}, "`time_target_ms` is 'fast'"),
    ],
    ids=str,
)
def test_load_options_are_checked(smollm2: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        load(str(smollm2.path), **options)


def test_unusable_provider_says_why(smollm2: Any) -> None:
    import edgellm

    with pytest.raises(edgellm.ProviderError, match="onnxruntime-gpu"):
        load(str(smollm2.path), prefill="cuda")


def test_too_little_memory(smollm2: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import psutil

    import edgellm

    class Little:
        total = available = 100 << 20

    monkeypatch.setattr(psutil, "virtual_memory", Little)
    with pytest.raises(edgellm.MemoryEstimateError, match="100 MiB are available"):
        load(str(smollm2.path))


def test_broken_weights_are_noticed(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = np.full(llm.engine.config.vocab_size, np.nan, np.float32)
    rows = Rows(broken[None], [Logits(broken, math.nan)])
    monkeypatch.setattr(llm.engine.prefill, "run", lambda *_, **__: [rows])
    with pytest.raises(NumericError, match="not finite"):
        llm.generate("Hello")


def test_answers_that_end_before_they_begin(chosen_llm: LLM) -> None:
    chat = chosen_llm.chat(temperature=0, max_tokens=0)
    assert (chat.send("Hello").text, chat.send("Hello").finish_reason) == ("", "length")
    chat.options = chosen_llm.generation_options(time_limit_ms=1)
    assert chat.send("Hello " * 500).finish_reason == "time"
    cancelled = threading.Event()
    cancelled.set()
    assert chat.send("Hello", cancel=cancelled).finish_reason == "cancelled"
    assert chat.messages == []


def test_log_probabilities_are_those_before_the_filter(chosen_llm: LLM) -> None:
    prompt = "The capital of France is"
    have_cached(chosen_llm, prompt)
    free = next(chosen_llm.stream(prompt, temperature=0, max_tokens=1, logprobs=3))
    assert free.token is not None
    assert free.top_logprobs is not None

    def without_the_best(logits: np.ndarray, tokens: Any) -> None:
        logits[free.token] = -np.inf

    filtered = next(
        chosen_llm.stream(
            prompt, temperature=0, max_tokens=1, logprobs=3, logit_filter=without_the_best
        )
    )
    assert filtered.top_logprobs == free.top_logprobs
    assert filtered.token == list(free.top_logprobs)[1]
    assert filtered.logprob == free.top_logprobs[filtered.token]
