"""Gemma 4 and 3n: layers that read K and V of others, and embeddings for each layer; in Gemma 3n
several residual streams, too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from inspection import used_blocks
from matrix import usable
from rounded_weights import found, round_weights
from tiny_models import logits, make, save_tokenizer

from edgellm.backends.batch import Span
from edgellm.backends.native import NativeModel
from edgellm.cache.groups import cache_bytes, cache_groups, places
from edgellm.engine.one_sequence import compute_prompt, compute_tokens
from edgellm.errors import UnsupportedModelError
from edgellm.export import export
from edgellm.graphs.config import ModelConfig
from edgellm.kernels.step import FusedStep
from edgellm.llm import LLM, load
from edgellm.measure.doctor import float_reference
from edgellm.measure.quality import quality

pytestmark = pytest.mark.skipif(not usable("C++"), reason="both need the C++ kernels")

WINDOW = 100
SIZES = {"sliding_window": WINDOW, "max_position_embeddings": 1024, "vocab_size": 320}
TOKENS = np.random.default_rng(3).integers(3, 256, 1000).tolist()
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
Start = Callable[..., LLM]


@pytest.fixture(scope="module", params=["gemma4_text", "gemma3n_text"])
def model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Any, Path]:
    folder = tmp_path_factory.mktemp("shared")
    # tokens from 200 on have the embeddings of token 0 there
    fewer = {"vocab_size_per_layer_input": 200} if request.param == "gemma3n_text" else {}
    whole = make(request.param, folder, **SIZES, **fewer)
    round_weights(whole)
    whole.save_pretrained(folder)
    save_tokenizer(folder)
    bundle = export(folder, folder / "bundle", name="tiny", source=str(folder))
    return whole, bundle.path


@pytest.fixture
def start(model: tuple[Any, Path]) -> Iterator[Start]:
    opened: list[LLM] = []

    def begin(**options: Any) -> LLM:
        opened.append(load(str(model[1]), ctx_size=1024, **options))
        return opened[-1]

    yield begin
    for llm in opened:
        llm.close()


def config_of(llm: LLM) -> ModelConfig:
    return llm.engine.bundle.config


@pytest.mark.parametrize("length", [1, 33, 290])
def test_logits_are_those_of_transformers(
    model: tuple[Any, Path], start: Start, length: int
) -> None:
    """Before and behind the window; weights are numbers that 8 bits hold."""
    tokens = TOKENS[: length + 6]
    expected = logits(model[0], tokens)[length - 1 :]
    errors = np.abs(found(start(kv_format="f32"), tokens, length) - expected)
    assert errors.mean() < 0.035 * np.abs(expected).mean()
    assert errors.max() < 0.1 * np.abs(expected).max()


def test_shared_layers_take_no_memory(start: Start) -> None:
    config = config_of(start())
    groups = cache_groups(config)
    assert [(group.layers, group.window) for group in groups] == [((0, 1), WINDOW), ((2,), None)]
    assert places(groups) == [(0, 0), (0, 1), (1, 0), (0, 1), (0, 1), (1, 0)]
    # 128 tokens of K and V: one layer of one head of 64 numbers, or of two of 32, two of two of 32
    needed = cache_bytes(config, format="f32", ctx_size=128, blocks=1)
    full = config.layers[2].attention.kv_size
    assert full == (128 if config.streams is None else 64)
    assert needed == 2 * 4 * 128 * (full + 2 * 2 * 32)


def answer(llm: LLM, tokens: list[int]) -> tuple[int, ...]:
    with llm.session() as session:
        session.append(tokens)
        return session.generate(**GREEDY).tokens


@pytest.mark.parametrize("length", [690, 640, 90])
def test_rewound_forked_and_continued_is_as_new(start: Start, length: int) -> None:
    llm = start()
    with llm.session() as session:
        session.append(TOKENS[:700])
        session.generate(**GREEDY)
        fork = session.fork()
        session.rewind(length)
        session.append(TOKENS[900:])
        continued = session.generate(**GREEDY).tokens
        assert fork.generate(**GREEDY).stats.cached_tokens >= 700
    assert continued == answer(start(), [*TOKENS[:length], *TOKENS[900:]])


def test_a_prefix_is_found_again_and_outlives_its_process(start: Start, tmp_path: Path) -> None:
    llm = start()
    first = answer(llm, TOKENS[:700])
    with llm.session() as session:
        session.append([*TOKENS[:700], *first, 5, 6])
        again = session.generate(**GREEDY)
        session.save(tmp_path / "saved")
        expected = session.generate(**GREEDY).tokens
    assert again.stats.cached_tokens >= 700
    assert again.tokens == answer(start(), [*TOKENS[:700], *first, 5, 6])
    with start().load_session(tmp_path / "saved") as session:
        assert session.generate(**GREEDY).tokens == expected


@pytest.mark.parametrize("scheduling", ["stall_free", "layered"])
def test_answers_together_are_those_alone(start: Start, scheduling: Any) -> None:
    prompts = [TOKENS[i : i + length] for i, length in enumerate((3, 400, 41, 170))]
    alone = [start().generate(each, **GREEDY).tokens for each in prompts]
    llm = start(scheduling=scheduling)
    together = {each.index: each.result().tokens for each in llm.batch(prompts, **GREEDY)}
    assert [together[index] for index in range(len(prompts))] == alone
    assert used_blocks(llm) == 0


def test_drafts_change_nothing(start: Start) -> None:
    tokens = [*TOKENS[:200], *TOKENS[:200]]
    answers = []
    for speculate in (False, True):
        with start().session() as session:
            session.append(tokens)
            options = {**GREEDY, "max_tokens": 60, "speculate": speculate}
            answers.append(session.generate(**options).tokens)
    assert answers[0] == answers[1]


def test_a_full_context_goes_on(start: Start) -> None:
    with start().session() as session:
        session.append(TOKENS)
        options = {**GREEDY, "max_tokens": 60, "context_policy": "shift", "keep": 4}
        answered = session.generate(**options)
    assert len(answered.tokens) == 60
    assert answered.stats.dropped_tokens > 0


def test_a_prompts_rows_leave_where_the_shared_layers_begin(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All rows pass the first three layers, and those with logits alone the others."""
    rows: Counter[range] = Counter()
    run = FusedStep.run

    def count(self: FusedStep, spans: Any, **options: Any) -> Any:
        group = options["group"]
        layers = range(6) if group is None else group.layers
        rows[layers] += sum(len(span.tokens) for span in spans)
        return run(self, spans, **options)

    monkeypatch.setattr(FusedStep, "run", count)
    llm = start()
    llm.generate(TOKENS[:200], temperature=0, max_tokens=2, ignore_eos=True)
    assert rows == {range(3): 200, range(3, 6): 1, range(6): 1}


def test_rows_that_leave_early_change_nothing(start: Start) -> None:
    llm = start()
    backend = llm.engine.decoder
    assert isinstance(backend, NativeModel)
    lengths = [(150, 1), (1, 1), (40, 0), (7, 3)]

    def compute(all_states: bool) -> list[Any]:
        sequences = [llm.engine.cache.sequence() for _ in lengths]
        spans = [
            Span(sequence, TOKENS[:length], logit_rows=logit_rows, all_states=all_states)
            for sequence, (length, logit_rows) in zip(sequences, lengths, strict=True)
        ]
        found = backend.run(spans)
        for sequence in sequences:
            sequence.truncate(0)
            sequence.close()
        return found

    whole, short = (llm.engine.thread.call(lambda a=a: compute(a)) for a in (True, False))
    for ours, theirs, (length, logit_rows) in zip(short, whole, lengths, strict=True):
        assert ours.hidden.shape == theirs.hidden.shape
        begin = length - logit_rows
        np.testing.assert_array_equal(ours.hidden[begin:], theirs.hidden[begin:])
        assert not ours.hidden[:begin].any()
        for a, b in zip(ours.logits, theirs.logits, strict=True):
            np.testing.assert_array_equal(a.scores, b.scores)


@pytest.mark.triton
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_triton_goes_on_and_back_from_what_the_host_computed(
    model: tuple[Any, Path], start: Start, triton_device: str
) -> None:
    """Over the end of a block, in two sequences at once, and behind a rewind on the device."""
    options: dict[str, Any] = {"prefill": "native", "decode": "triton", "kv_format": "f32"}
    llm = start(**options)
    expected = logits(model[0], TOKENS[:131])
    cache, decoder = llm.engine.cache, llm.engine.decoder
    sequence = cache.sequence()
    found = [compute_prompt(llm.engine.prefill, TOKENS[:127], sequence)[None]]
    found.append(compute_tokens(decoder, TOKENS[127:130], sequence))
    fork = sequence.fork()
    both = decoder.run([Span(each, TOKENS[130:131], logit_rows=1) for each in (sequence, fork)])
    once, again = (each.logits[0].scores for each in both)
    np.testing.assert_array_equal(again, once)
    fork.truncate(126)
    np.testing.assert_allclose(
        compute_tokens(decoder, TOKENS[126:131], fork)[-1], once, atol=0.02 * np.abs(once).max()
    )
    rows = np.concatenate([*found, once[None]])
    errors = np.abs(rows - expected[[126, 127, 128, 129, 130]])
    assert errors.max() < 0.1 * np.abs(expected).max()
    for each in (sequence, fork):
        each.close()


def test_quality_has_a_reference(start: Start) -> None:
    text = "".join(chr(token % 26 + 65) for token in TOKENS)
    judged = quality(start(kv_format="f32").engine, text, window=64, max_windows=2)
    assert judged.kl_mean < 0.02


def test_there_is_no_self_test_yet(start: Start) -> None:
    words = "no self-test of models with layers that share K and V"
    bundle = start().engine.bundle
    with pytest.raises(UnsupportedModelError, match=words), float_reference(bundle):
        raise AssertionError("a reference")


def test_states_of_all_rows_where_they_are_asked_for(model: tuple[Any, Path], start: Start) -> None:
    """Embeddings and scores of a prompt need rows that would leave early."""
    import torch

    llm, text = start(kv_format="f32"), "What is asked for is all that is there, and no row leaves."
    tokens = llm.tokenize(text)
    with torch.no_grad():
        judged = model[0].model(torch.tensor([tokens])).last_hidden_state[0].double().numpy()
    mean = judged.mean(axis=0)
    assert llm.embed(text) @ mean > 0.998 * np.linalg.norm(mean)
    scores = llm.generate(tokens, max_tokens=0, prompt_logprobs=1).prompt_logprobs
    rows = logits(model[0], tokens)
    exact = rows - np.logaddexp.reduce(rows, axis=1, keepdims=True)
    pairs = zip(scores[1:], exact, tokens[1:], strict=False)
    errors = [abs(score.logprob - row[token]) for score, row, token in pairs]
    assert np.mean(errors) < 0.25
    assert len(scores) == len(tokens)
