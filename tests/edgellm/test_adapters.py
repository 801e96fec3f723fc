"""Adapters at run time: judged by transformers, many on one model, and each with its own cache."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from breadth import one_in
from inspection import commands, context
from requirements import unavailable
from tiny_adapters import ALPHA, Pairs, merged, pairs_of, write_gguf_adapter, write_peft
from tiny_gguf import FILES, VOCABULARY, convert, with_vocabulary
from tiny_models import make, save_tokenizer
from waiting import until

from edgellm.backends.batch import Span
from edgellm.engine.adapters import adapter_bytes, for_adapters
from edgellm.errors import (
    EdgeLLMError,
    MemoryEstimateError,
    ModelFormatError,
    OptionError,
    SessionFileError,
    UnsupportedModelError,
)
from edgellm.generation import BatchRequest
from edgellm.generation_options import GenerationOptions
from edgellm.kernels.kv_blocks import BLOCK
from edgellm.kernels.native import library
from edgellm.llm import LLM, LoadArguments, load
from edgellm.options import EngineOptions
from edgellm.results import Completion
from edgellm.serve.served import served_model
from edgellm.session import Session

pytestmark = pytest.mark.usefixtures("edgellm_home")
PROMPT = [(7 * i) % 50 + 3 for i in range(BLOCK + 20)]
TOKENS = np.random.default_rng(5).integers(3, 256, 40).tolist()
# Models in which a rounded row has other experts too often, which the rows behind it see.
ALL_EXPERTS = {"qwen2_moe": {"num_experts_per_tok": 5}, "gemma4_experts": {"top_k_experts": 6}}
SIZES: dict[str, Any] = {"ctx_size": 4 * BLOCK, "cache_size": 16 * BLOCK}


@pytest.fixture(autouse=True)
def native() -> None:
    if library() is None:
        unavailable("native", "installed without a compiler")


@pytest.fixture(scope="module")
def adapters(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Three adapters of the tiny model, of several ranks and parts."""
    root = tmp_path_factory.mktemp("adapters")
    kinds: dict[str, dict[str, Any]] = {
        "one": {"rank": 4, "seed": 1},
        "two": {"rank": 16, "seed": 2, "only": lambda n: "q_proj" in n or "v_proj" in n},
        "three": {"rank": 7, "seed": 3, "only": lambda n: "mlp" in n},
    }
    return {
        name: write_peft(root / name, pairs_of(tiny_model, size=1.0, **kind))
        for name, kind in kinds.items()
    }


@pytest.fixture
def llm(tiny_model: Path, adapters: dict[str, Path]) -> Iterator[LLM]:
    with load(str(tiny_model), adapters=adapters, **SIZES) as llm:
        yield llm


def ask(llm: LLM, adapter: str | None = None, prompt: list[int] = PROMPT) -> Completion:
    return llm.generate(
        prompt, adapter=adapter, max_tokens=12, temperature=0, ignore_eos=True, logprobs=2
    )


def rows_of(llm: LLM, adapter: str | None, tokens: list[int] = TOKENS) -> np.ndarray:
    """Logits of all tokens of a text."""
    chosen = llm.engine.adapters.get(adapter)
    weights = None if chosen is None else chosen.weights
    sequence = llm.engine.cache.sequence(root=llm.engine.cache.index.salted_root("another"))
    span = Span(sequence, tokens, logit_rows=len(tokens), adapter=weights)
    (rows,) = llm.engine.prefill.run([span])
    sequence.truncate(0)
    return np.stack([logits.scores for logits in rows.logits])


def distance(found: np.ndarray, expected: np.ndarray) -> float:
    """Of most rows: a few have other experts, where two are nearly as good."""
    return float(np.median(np.abs(found - expected).mean(axis=1)) / np.abs(expected).mean())


def judged_by_hooks(folder: Path, pairs: Pairs, tokens: list[int], scale: float) -> np.ndarray:
    """Logits of transformers with `scale B (A x)` added to the outputs of each module."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for name, matrices in pairs.items():
        a, b = map(torch.from_numpy, matrices)

        def add(_: Any, inputs: Any, output: Any, a: Any = a, b: Any = b) -> Any:
            return output + scale * (inputs[0] @ a.T @ b.T)

        model.get_submodule(name).register_forward_hook(add)
    with torch.no_grad():
        result: np.ndarray = model(torch.tensor([tokens])).logits[0].numpy()
    return result


JUDGED = (
    "llama qwen2 phi3 gemma2 glm4 gemma3n_text lfm2 falcon_h1 granitemoehybrid_mamba deepseek_v2 "
    "glm4_moe_lite qwen2_moe qwen3_5_text qwen3_next gemma4_experts gpt_oss"
)


@pytest.mark.parametrize("name", one_in(3, JUDGED.split()))
def test_computes_what_transformers_computes(tmp_path: Path, name: str) -> None:
    """With `scale B A` added to the weights, and with hooks beside weights that stay."""
    import torch
    from transformers import AutoModelForCausalLM

    base, scale = tmp_path / "model", ALPHA / 8
    make(name, base, vocab_size=320, **ALL_EXPERTS.get(name, {}))
    save_tokenizer(base)
    others = (".experts.", "expert_gate", ".per_layer_", ".altup", ".laurel.")
    pairs = pairs_of(base, rank=8, size=0.7, only=lambda m: not any(part in m for part in others))
    whole = AutoModelForCausalLM.from_pretrained(
        merged(base, tmp_path / "merged", pairs, scale=scale), dtype=torch.float32
    ).eval()
    with torch.no_grad():
        expected = whole(torch.tensor([TOKENS])).logits[0].numpy()
    np.testing.assert_allclose(
        judged_by_hooks(base, pairs, TOKENS, scale), expected, atol=2e-3 * np.abs(expected).max()
    )
    adapter = write_peft(tmp_path / "adapter", pairs)
    with load(str(base), adapters={"it": adapter}, **{**SIZES, "ctx_size": 128}) as llm:
        # rounding alone is 0.11 of the delta nets of Qwen3.5
        assert distance(rows_of(llm, "it"), expected) < (0.12 if "qwen3_5" in name else 0.07)
        assert distance(rows_of(llm, None), expected) > 0.3


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_gguf_files_too(tmp_path: Path, name: str) -> None:
    """A GGUF file with an adapter in GGUF, and with the same as a folder of PEFT."""
    arch, keys, changes = FILES[name]
    base, scale = tmp_path / "model", ALPHA / 4
    make(name, base, vocab_size=VOCABULARY, **changes)
    pairs = pairs_of(base)
    file = convert(base, tmp_path / "model.gguf", arch, with_vocabulary(keys))
    sources = {
        "gguf": write_gguf_adapter(tmp_path / "adapter.gguf", base, pairs, arch),
        "peft": write_peft(tmp_path / "adapter", pairs),
    }
    expected = judged_by_hooks(base, pairs, TOKENS, scale)
    with load(str(file), adapters=sources, **{**SIZES, "ctx_size": 128}) as llm:
        assert llm.adapters == ["gguf", "peft"]
        assert distance(rows_of(llm, "gguf"), expected) < 0.07
        np.testing.assert_array_equal(rows_of(llm, "gguf"), rows_of(llm, "peft"))
        assert distance(rows_of(llm, None), expected) > 0.3


def test_a_scale_is_a_factor_of_the_change(tiny_model: Path, adapters: dict[str, Path]) -> None:
    sources = {"whole": adapters["one"], "none": (adapters["one"], 0.0)}
    with load(str(tiny_model), adapters=sources, **SIZES) as llm:
        base, none, whole = (rows_of(llm, name) for name in (None, "none", "whole"))
        np.testing.assert_allclose(none, base, atol=1e-6)
        llm.load_adapter("half", adapters["one"], scale=0.5)
        assert 0.1 < distance(rows_of(llm, "half"), base) < distance(whole, base)


def test_requests_of_a_batch_have_the_adapter_of_their_session(llm: LLM) -> None:
    """Whatever the batch names; options of the request alone go over it."""
    chosen = GenerationOptions(max_tokens=12, temperature=0, ignore_eos=True, adapter="two")
    requests, expected = list[BatchRequest](), list[str | None]()
    for own, named in (("one", None), (None, None), ("one", chosen)):
        session = llm.session(adapter=own)
        session.append(PROMPT)
        session.generate(max_tokens=0)
        requests.append(BatchRequest(prompt=[*PROMPT, 9], session=session, options=named))
        expected.append(own if named is None else named.adapter)
    answers = sorted(llm.batch(requests, options=chosen), key=lambda answer: answer.index)
    alone = [ask(llm, name, [*PROMPT, 9]) for name in expected]
    assert [answer.result().tokens for answer in answers] == [each.tokens for each in alone]
    kept = [answer.result().stats.cached_tokens for answer in answers]
    assert kept == [len(PROMPT), len(PROMPT), 0]


def test_three_adapters_and_none_together_are_as_alone(llm: LLM) -> None:
    """The same tokens and probabilities, to the last bit, as each by itself."""
    names = ("one", None, "two", "three", "one", None)
    prompts = [[*PROMPT, 10 + i] for i in range(len(names))]
    alone = [ask(llm, name, prompt) for name, prompt in zip(names, prompts, strict=True)]
    together = llm.batch(
        BatchRequest(
            prompt=prompt,
            options=GenerationOptions(
                adapter=name, max_tokens=12, temperature=0, ignore_eos=True, logprobs=2
            ),
        )
        for name, prompt in zip(names, prompts, strict=True)
    )
    found = {answer.index: answer.result() for answer in together}
    for index, expected in enumerate(alone):
        assert found[index].tokens == expected.tokens
        assert found[index].logprobs == expected.logprobs
    assert len({answer.tokens for answer in alone[:4]}) == 4


def test_without_adapters_nothing_changes(llm: LLM, tiny_model: Path) -> None:
    with load(str(tiny_model), **SIZES) as plain:
        assert ask(plain).logprobs == ask(llm).logprobs
        np.testing.assert_array_equal(rows_of(plain, None), rows_of(llm, None))


def test_each_adapter_finds_its_own_blocks_alone(llm: LLM, adapters: dict[str, Path]) -> None:
    answers = []
    for adapter in ("one", None, "two", "one", None, "two"):
        answers.append(ask(llm, adapter))
    cached = [answer.stats.cached_tokens for answer in answers]
    assert cached[:3] == [0, 0, 0]
    assert min(cached[3:]) >= BLOCK
    for first, second in zip(answers[:3], answers[3:], strict=True):
        assert first.logprobs == second.logprobs
    # the same matrices under another name
    llm.load_adapter("again", adapters["one"])
    assert ask(llm, "again").stats.cached_tokens >= BLOCK
    # and others under the same name
    llm.unload_adapter("one")
    llm.load_adapter("one", adapters["one"], scale=0.5)
    assert ask(llm, "one").stats.cached_tokens == 0


def test_blocks_on_disk_are_of_one_adapter(
    tiny_model: Path, adapters: dict[str, Path], tmp_path: Path
) -> None:
    for expected in (0, BLOCK):
        with load(str(tiny_model), adapters=adapters, kv_cache_dir=tmp_path / "kv", **SIZES) as llm:
            cached = [ask(llm, name).stats.cached_tokens for name in ("one", "two")]
            assert [count // BLOCK * BLOCK for count in cached] == [expected, expected]
    with load(str(tiny_model), kv_cache_dir=tmp_path / "kv", **SIZES) as llm:
        assert ask(llm).stats.cached_tokens == 0


def test_sessions_have_an_adapter_and_answers_may_have_another(llm: LLM) -> None:
    options: dict[str, Any] = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
    expected = {name: ask(llm, name).tokens[:8] for name in ("one", "two", None)}
    with llm.session(adapter="one") as session:
        session.append(PROMPT)
        assert session.generate(**options).tokens == expected["one"]
        session.rewind(len(PROMPT))
        with session.fork() as other:
            assert other.generate(**options).tokens == expected["one"]
        assert session.generate(adapter="two", **options).tokens == expected["two"]
        session.rewind(len(PROMPT))
        assert session.generate(**options).tokens == expected["one"]
    with llm.session() as session:
        session.append(PROMPT)
        assert session.generate(adapter="one", **options).tokens == expected["one"]
        session.rewind(len(PROMPT))
        assert session.generate(**options).tokens == expected[None]


def test_an_adapter_changes_while_others_take_the_blocks(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """K and V of the new one are not under the name of those before."""
    with llm.session() as session:
        session.append(PROMPT)
        session.generate(max_tokens=2, temperature=0)
        held, one = context(session), llm.engine.adapters.get("one")
        adapting = threading.Thread(target=held.adapt, args=(one,))
        sequence = llm.engine.cache.sequence

        def between(**arguments: Any) -> Any:
            adapting.start()
            until(lambda: not adapting.is_alive() or commands(llm) > 0)
            return sequence(**arguments)

        with monkeypatch.context() as patch:
            patch.setattr(llm.engine.cache, "sequence", between)
            llm.engine.thread.call(held.give_back)
        adapting.join()
        with llm.session(adapter="one") as other:
            assert held.adapter is one
            assert held.sequence.root == context(other).sequence.root


def test_a_model_with_an_adapter_for_all_answers(
    tiny_model: Path, adapters: dict[str, Path], llm: LLM, edgellm_home: Path
) -> None:
    """What a session or an answer says, also that there is none, goes over it."""
    options: dict[str, Any] = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
    expected = {name: ask(llm, name).tokens[:8] for name in ("one", "two", None)}
    with load(str(tiny_model), adapters=adapters, defaults={"adapter": "one"}, **SIZES) as one:

        def answer(session: Session, **arguments: Any) -> tuple[int, ...]:
            with session:
                session.append(PROMPT)
                return session.generate(**options, **arguments).tokens

        assert one.generate(PROMPT, **options).tokens == expected["one"]
        assert one.generate(PROMPT, adapter=None, **options).tokens == expected[None]
        assert answer(one.session()) == expected["one"]
        assert answer(one.session(), adapter="two") == expected["two"]
        assert answer(one.session(), adapter=None) == expected[None]
        for name in ("two", None):
            assert answer(one.session(adapter=name)) == expected[name]
            assert answer(one.session(adapter=name).fork()) == expected[name]
        given = one.generation_options(**options)
        assert answer(one.session(adapter="two"), options=given) == expected["one"]
        with one.prefix("it", "a", adapter=None) as session:
            session.replace(PROMPT)
            assert session.generate(**options).tokens == expected[None]
        with pytest.raises(TypeError, match="no option `adaptor`"):
            one.session(adaptor="one")  # type: ignore[call-arg]


def test_chats_keep_their_adapter(llm: LLM) -> None:
    def answer(**options: Any) -> str:
        with llm.chat(max_tokens=8, temperature=0, **options) as chat:
            return chat.send("abc").text + chat.send("def").text

    assert answer(adapter="one") == answer(adapter="one") != answer()
    with llm.chat(max_tokens=8, temperature=0) as chat:
        first = chat.send("abc", adapter="one").text
        with llm.chat(max_tokens=8, temperature=0, adapter="one") as other:
            assert other.send("abc").text == first
        assert chat.send("abc").text != first


def test_saved_sessions_know_their_adapter(
    llm: LLM, adapters: dict[str, Path], tmp_path: Path
) -> None:
    options: dict[str, Any] = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
    with llm.session(adapter="one") as session:
        session.append(PROMPT)
        session.generate(max_tokens=0)
        session.save(tmp_path / "session")
        expected = session.generate(**options).logprobs
    for adapter, text in ((None, "opened with none"), ("two", "opened with another")):
        with pytest.raises(SessionFileError, match=f"saved with the adapter 'one', and {text}"):
            llm.load_session(tmp_path / "session", adapter=adapter)
    llm.load_adapter("renamed", adapters["one"])
    with llm.load_session(tmp_path / "session", adapter="renamed") as session:
        assert session.cached == len(PROMPT)
        assert session.generate(**options).logprobs == expected
    with llm.session() as session:
        session.append(PROMPT)
        session.generate(max_tokens=0)
        session.save(tmp_path / "plain")
    with pytest.raises(SessionFileError, match="saved with no adapter, and opened with another"):
        llm.load_session(tmp_path / "plain", adapter="one")


def test_named_prefixes_are_of_one_adapter(llm: LLM) -> None:
    text = "abcdefgh" * 20
    with llm.prefix("it", text, adapter="one") as session:
        expected = session.generate(max_tokens=6, temperature=0).tokens
    with pytest.raises(OptionError, match="no prefix 'it' is kept for"):
        llm.prefix("it")
    llm.prefix("it", text).close()
    with llm.prefix("it", adapter="one") as session:
        assert session.cached > 100
        assert session.generate(max_tokens=6, temperature=0).tokens == expected
    with llm.prefix("it", text, system=True, adapter="one") as session:
        chat = llm.chat(system=text, session=session, max_tokens=2)  # with its adapter
        assert chat.send("a").stats.cached_tokens == len(session.tokens)
    with llm.prefix("it") as session:
        assert session.generate(max_tokens=6, temperature=0).tokens != expected


def test_answers_on_their_way_outlive_their_adapter(llm: LLM) -> None:
    expected = ask(llm, "one")
    stream = llm.stream(PROMPT, adapter="one", max_tokens=12, temperature=0, ignore_eos=True)
    first = next(stream)
    llm.unload_adapter("one")
    assert llm.adapters == ["two", "three"]
    tokens = (first.token, *(piece.token for piece in stream if piece.token is not None))
    assert tokens == expected.tokens
    with pytest.raises(OptionError, match="`adapter` is 'one'; loaded are two, three"):
        ask(llm, "one")
    with pytest.raises(OptionError, match="`adapter` is 'one'"):
        llm.unload_adapter("one")


def test_drafts_leave_answers_as_they_are(llm: LLM) -> None:
    """Also of tokens that answers of the base, or of other adapters, had before."""
    repeating = [*PROMPT, *PROMPT[:40]]
    for adapter in (None, "one", "two"):
        options: dict[str, Any] = {"adapter": adapter, "max_tokens": 30, "temperature": 0}
        options["ignore_eos"] = True
        plain = llm.generate(repeating, speculate=False, **options)
        assert llm.generate(repeating, **options).tokens == plain.tokens


def test_a_draft_model_drafts_without_an_adapter(
    tiny_model: Path, adapters: dict[str, Path], write_model: Callable[..., Path], tmp_path: Path
) -> None:
    small = write_model(
        tmp_path / "small",
        num_hidden_layers=1,
        hidden_size=96,
    )
    with load(str(tiny_model), adapters=adapters, draft=str(small), **SIZES) as llm:
        drafted, plain = (
            llm.generate(
                PROMPT, adapter="one", speculate=s, max_tokens=20, temperature=0, ignore_eos=True
            )
            for s in (True, False)
        )
        assert drafted.tokens == plain.tokens


def test_layered_prompts_have_their_adapter(tiny_model: Path, adapters: dict[str, Path]) -> None:
    long = [*PROMPT, *PROMPT]
    with load(str(tiny_model), adapters=adapters, **SIZES) as llm:
        expected = ask(llm, "one", long).logprobs
    with load(str(tiny_model), adapters=adapters, scheduling="layered", **SIZES) as llm:
        others = threading.Thread(target=lambda: [ask(llm, "two") for _ in range(3)])
        others.start()
        found = ask(llm, "one", long).logprobs
        others.join()
    assert found == expected


def test_embeddings_and_ranks_have_their_adapter(llm: LLM) -> None:
    base, one = llm.embed("some text"), llm.embed("some text", adapter="one")
    assert float(base @ one) < 0.99
    np.testing.assert_array_equal(one, llm.embed("some text", adapter="one"))
    ranks = [
        [each.relevance for each in llm.rerank("a", ["bc", "de"], adapter=adapter)]
        for adapter in (None, "one")
    ]
    assert ranks[0] != ranks[1]


def test_adapters_stand_in_the_estimate_of_memory(
    llm: LLM, tiny_model: Path, adapters: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = [llm.engine.adapters.get(name) for name in adapters]
    size = sum(each.weights.nbytes for each in loaded if each is not None)
    assert llm.engine.memory.adapters == adapter_bytes(dict(adapters)) == size > 0
    with load(str(tiny_model), **SIZES) as plain:
        alone = plain.engine.memory
    assert llm.engine.memory.models - alone.models == size
    arguments: LoadArguments = {**SIZES}
    given: LoadArguments = {**SIZES, "adapters": adapters}
    models = [served_model(str(tiny_model), each) for each in (given, arguments)]
    assert models[0].needed_bytes() - models[1].needed_bytes() == size
    cards = [each.card() for each in models]
    assert cards[0] is not None
    assert cards[1] is not None
    assert cards[0].memory_bytes - cards[1].memory_bytes == size
    available = psutil.virtual_memory()._replace(available=alone.total)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: available)
    with pytest.raises(MemoryEstimateError, match="`adapters` "):
        load(str(tiny_model), adapters=adapters, **SIZES)


def test_adapters_need_the_native_kernels(tiny_model: Path, adapters: dict[str, Path]) -> None:
    options = {"decode": "portable", "prefill": "cpu", "precision": "f32", **SIZES}
    with load(str(tiny_model), **options) as llm:
        with pytest.raises(UnsupportedModelError, match=r"needs the native kernels.*--lora"):
            llm.load_adapter("one", adapters["one"])
        assert llm.adapters == []
        assert ask(llm).tokens


def test_what_does_not_fit_is_refused_before_anything_runs(
    llm: LLM, adapters: dict[str, Path], write_model: Callable[..., Path], tmp_path: Path
) -> None:
    other = write_model(tmp_path / "other", hidden_size=192)
    foreign = write_peft(tmp_path / "foreign", pairs_of(other))
    with pytest.raises(ModelFormatError, match="for another model"):
        llm.load_adapter("foreign", foreign)
    with pytest.raises(OptionError, match="'one' is loaded already"):
        llm.load_adapter("one", adapters["two"])
    for arguments in ({"name": ""}, {"name": 3}, {"path": 4}, {"scale": "much"}):
        with pytest.raises(EdgeLLMError):
            llm.load_adapter(**{"name": "new", "path": adapters["one"], **arguments})
    with pytest.raises(OptionError, match="loaded are one, two, three"):
        ask(llm, "foreign")
    with pytest.raises(OptionError, match="`adapter`"):
        llm.session(adapter="foreign")


def test_auto_is_what_takes_adapters() -> None:
    for options, expected in (
        ({}, "native"),
        ({"decode": "triton"}, "triton"),
        ({"prefill": "triton"}, "triton"),
    ):
        chosen = for_adapters(EngineOptions(**options))
        assert (chosen.prefill, chosen.decode) == (expected, expected)
