"""Going on in a full context."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from inspection import cached_prefix, context, used_blocks

from edgellm import ContextOverflowError, OptionError
from edgellm.generation_options import Shift
from edgellm.kernels.kv_blocks import BLOCK
from edgellm.kernels.native import library
from edgellm.llm import LLM, load
from edgellm.session import Session
from edgellm.store.bundle import Bundle
from edgellm.text.prompt import Message

CTX = 256
TEXT = "In the year 1969 three men flew to the moon. " * 40


@pytest.fixture(scope="module")
def llm(smollm2: Bundle) -> LLM:
    return load(str(smollm2.path), ctx_size=CTX)


def first_layer(session: Session) -> tuple[np.ndarray, np.ndarray]:
    """K and V of the first layer, `[Hkv, tokens, D]`: they depend on token and position alone."""
    sequence = context(session).sequence
    view, slot = sequence.view(0)
    k, v = view.blocks.read(view.table, slot, slice(None), len(sequence))
    ids = list(view.table)
    scales = view.blocks.k_scale, view.blocks.v_scale
    found = []
    for codes, scale in zip((k, v), scales, strict=True):
        assert scale is not None
        by_token = scale[ids, slot].transpose(1, 0, 2).reshape(codes.shape[0], -1)
        found.append(codes * by_token[:, : len(sequence), None])
    return found[0], found[1]


@pytest.mark.slow
def test_an_answer_goes_on_behind_the_end_of_the_context(llm: LLM) -> None:
    with llm.session() as session:
        session.append(TEXT[:700])
        prompt = len(session.tokens)
        sampling = llm.generation_options(
            temperature=0, max_tokens=160, ignore_eos=True, context_policy="shift", keep=8
        )
        answer = session.generate(options=sampling)
        assert answer.finish_reason == "length"
        assert len(answer.tokens) == 160
        kept = prompt + 160 - answer.stats.dropped_tokens
        assert len(session.tokens) == kept <= CTX + 1
        assert answer.stats.dropped_tokens > CTX / 2  # more than once
        # nothing was computed twice
        assert sum(answer.stats.prefill.values()) == prompt
        assert session.tokens[8:] == answer.tokens[-(kept - 8) :]


def test_shifted_keys_are_those_of_the_new_positions(llm: LLM) -> None:
    with llm.session() as session, llm.session() as fresh:
        session.append(TEXT[:700])
        session.generate(temperature=0, max_tokens=1)
        session.rewind(session.cached)
        assert llm.engine.thread.call(lambda: context(session).make_room(Shift(), 4)) > 0
        assert session.cached == len(session.tokens)
        fresh.replace(session.tokens)
        fresh.generate(temperature=0, max_tokens=0)
        for moved, computed in zip(first_layer(session), first_layer(fresh), strict=True):
            # keys are rounded twice, after a transform that spreads the error over the row
            error, size = (np.linalg.norm(rows, axis=-1) for rows in (moved - computed, computed))
            assert (error <= 0.02 * size).all()


def test_another_text_takes_nothing_from_behind_a_gap(llm: LLM) -> None:
    with llm.session() as session:
        session.append(TEXT[:700])
        session.generate(temperature=0, max_tokens=1)
        llm.engine.thread.call(lambda: context(session).make_room(Shift(), 4))
        session.replace([*session.tokens, 5])
        assert session.cached == 4


def test_a_prompt_that_is_too_long(llm: LLM) -> None:
    with pytest.raises(ContextOverflowError, match="`context_policy` shift"):
        llm.generate(TEXT, max_tokens=4)
    answer = llm.generate(TEXT, max_tokens=4, context_policy="shift", temperature=0)
    assert len(answer.tokens) == 4
    tokens = llm.engine.tokenizer.encode(TEXT)
    seen = answer.stats.prompt_tokens - answer.stats.dropped_tokens
    assert answer.stats.prompt_tokens == len(tokens)
    assert seen == 4 + (CTX - 4) // 2
    with llm.session() as session:
        session.replace(tokens[:4] + tokens[-(seen - 4) :])
        assert session.generate(max_tokens=4, temperature=0).text == answer.text


def test_what_was_there_is_used_when_a_session_grows_too_long(llm: LLM) -> None:
    with llm.session() as session:
        tokens = llm.engine.tokenizer.encode(TEXT)
        session.append(tokens[:250])
        sampling = llm.generation_options(temperature=0, max_tokens=0, context_policy="shift")
        session.generate(options=sampling)
        session.append(tokens[250:300])
        answer = session.generate(options=sampling)
        assert answer.stats.dropped_tokens == 300 - 4 - 126
        assert answer.stats.cached_tokens == 250 - answer.stats.dropped_tokens
        assert sum(answer.stats.prefill.values()) == 50


@pytest.mark.slow
def test_a_stream_takes_the_memory_of_one_context(llm: LLM) -> None:
    tokens = llm.engine.tokenizer.encode(TEXT)[::-1]  # no other text begins so
    sampling = llm.generation_options(temperature=0, max_tokens=0, context_policy="shift")
    with llm.session() as session:
        before, held, dropped = used_blocks(llm), [], 0
        for start in range(0, len(tokens), 60):
            part = tokens[start : start + 60]
            session.append(part)
            stats = session.generate(options=sampling).stats
            held.append(used_blocks(llm) - before)
            dropped += stats.dropped_tokens
            assert sum(stats.prefill.values()) == len(part)  # nothing was computed twice
        assert max(held) == max(held[: CTX // 60]) == CTX // BLOCK
        assert session.tokens == (*tokens[:4], *tokens[4 + dropped :])


def test_saved_and_restored(llm: LLM, tmp_path: Path) -> None:
    sampling = llm.generation_options(
        temperature=0, max_tokens=60, ignore_eos=True, context_policy="shift"
    )
    with llm.session() as session:
        session.append(TEXT[:700])
        session.generate(options=sampling)
        session.save(tmp_path / "session")
        tokens = session.tokens
        expected = session.generate(options=sampling).tokens
    with llm.load_session(tmp_path / "session") as restored:
        assert restored.tokens == tokens
        assert restored.generate(options=sampling).tokens == expected
    # what was shifted is nobody else's
    assert cached_prefix(llm, tokens) < BLOCK


@pytest.mark.parametrize("keep", [CTX - 1, CTX, 10_000])
def test_no_room_behind_what_is_kept(llm: LLM, keep: int) -> None:
    with pytest.raises(OptionError, match=r"`keep` is .* 0 to 254 is allowed"):
        llm.generate(TEXT, max_tokens=4, context_policy="shift", keep=keep)


def test_a_policy_that_there_is_not(llm: LLM) -> None:
    with pytest.raises(OptionError, match="error, shift"):
        llm.generation_options(context_policy="forget")  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_chat_forgets_whole_turns(llm: LLM) -> None:
    chat = llm.chat(
        system="You are a pirate.", temperature=0, max_tokens=16, context_policy="shift"
    )
    dropped = 0
    for i in range(8):
        answer = chat.send(f"Tell me something about the number {i}.")
        assert answer.stats.prompt_tokens + 16 <= CTX
        dropped += answer.stats.dropped_tokens
    assert dropped > 0
    assert len(chat.messages) == 17
    seen = llm.engine.tokenizer.decode(chat.tokens)
    assert "You are a pirate." in seen
    assert "the number 7." in seen
    assert "the number 0." not in seen
    assert seen.count("system") == 1
    # another conversation, which begins with a question too, is seen whole
    chat.messages[1:] = [Message("user", "Hello"), Message("assistant", "Hi")]
    assert chat.send("Who are you?").stats.dropped_tokens == 0
    assert "Hello" in llm.engine.tokenizer.decode(chat.tokens)
    del chat.messages[1:]
    assert chat.send("Who are you?").stats.dropped_tokens == 0
    chat.close()


def test_a_chat_that_fits_forgets_nothing(llm: LLM, smollm2: Bundle) -> None:
    texts = []
    for policy in ("error", "shift"):
        if library() is None:  # what is cached has other bits
            llm = load(str(smollm2.path), ctx_size=CTX)
        chat = llm.chat(temperature=0, max_tokens=8, context_policy=policy)
        texts.append([chat.send(text).text for text in ("Hello", "What is a list?")])
        chat.close()
    assert texts[0] == texts[1]
