"""Models with states on the C++ kernels: whatever became of a sequence, it goes on as from scratch.

Weights are numbers that 8 bits hold, so that what is left is the rounding of activations.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from breadth import one_in
from click.testing import CliRunner
from inspection import draft_as, draft_with, drafts_of, used_blocks
from matrix import unsteady, usable
from rounded_weights import found, round_weights
from tiny_gguf import FILES, VOCABULARY, convert, with_vocabulary
from tiny_models import logits, make, save_tokenizer

from edgellm.cli.main import edgellm
from edgellm.errors import UnsupportedModelError
from edgellm.export import export
from edgellm.generation_options import Shift
from edgellm.kernels.kv_blocks import BLOCK
from edgellm.llm import LLM, load
from edgellm.measure.doctor import float_reference
from edgellm.measure.quality import quality
from edgellm.measure.roofline import work_of
from edgellm.results import Completion, Stats
from edgellm.store.bundle import open_bundle
from edgellm.store.manifest import imported

pytestmark = pytest.mark.skipif(not usable("C++"), reason="states need the C++ kernels")

CASES = [
    *(("lfm2", "folder"), ("lfm2", "Q8_0"), ("lfm2_narrow", "folder")),
    *(("granitemoehybrid_mamba", "Q8_0"), ("qwen3_5_text", "folder")),
    *(("qwen3_5_text_even", "Q8_0"), ("falcon_h1", "folder")),
]
# The others are tried with the slow tests: they take a minute of two cores.
QUICK = (("lfm2", "folder"), ("granitemoehybrid_mamba", "Q8_0"), ("qwen3_5_text", "folder"))
PARAMS = [
    pytest.param(case, marks=() if case in QUICK else pytest.mark.slow, id="-".join(case))
    for case in CASES
]
TOKENS = np.random.default_rng(0).integers(3, VOCABULARY, 500).tolist()
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}
# The largest error of a logit, over the largest logit: without a tap it is 0.2 or more.
NEAR = 0.1


@dataclass(frozen=True)
class Judged:
    path: str
    judge: Any
    known: dict[str, Completion] = field(default_factory=dict)

    @contextmanager
    def load(self, **options: Any) -> Iterator[LLM]:
        with load(self.path, **options) as llm:
            yield llm

    def scratch(self, prompt: Sequence[int], **changes: Any) -> Completion:
        """The answer to a prompt that nothing was computed of; of each one there is one."""
        asked = repr((list(prompt), changes))
        if asked not in self.known:
            with self.load() as llm:
                self.known[asked] = llm.generate(list(prompt), **(GREEDY | changes))
        return self.known[asked]


@pytest.fixture(scope="module", params=PARAMS)
def judged(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Judged:
    name, form = request.param
    folder = tmp_path_factory.mktemp(name)
    sizes = {"vocab_size": VOCABULARY, "max_position_embeddings": 512}
    model = make(name, folder, **sizes)
    round_weights(model)
    model.save_pretrained(folder)
    save_tokenizer(folder)
    use_template(folder)
    path = folder
    if form != "folder":
        arch, keys, _ = FILES[name]
        kind = gguf.GGMLQuantizationType[form]
        path = convert(folder, folder / "m.gguf", arch, with_vocabulary(keys), kind=kind)
    bundle = export(path, folder / "bundle", name="tiny", source=str(path))
    return Judged(str(bundle.path), model)


def use_template(folder: Path) -> None:
    """A chat template under which an answer is a part of the next prompt."""
    path = folder / "tokenizer_config.json"
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}<|user|>{{ m.content }}</s>"
        "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    values = json.loads(path.read_text())
    path.write_text(json.dumps({**values, "chat_template": template}))


def computed(stats: Stats) -> int:
    """Tokens of a prompt that were computed."""
    return sum(stats.prefill.values())


def same(answer: Completion, expected: Completion) -> None:
    assert answer.tokens == expected.tokens
    assert answer.logprobs == expected.logprobs


@pytest.mark.parametrize("length", one_in(2, [1, 2, 3, 15, 129, 290]))
def test_logits_are_near(judged: Judged, length: int) -> None:
    tokens = TOKENS[: length + 40]
    expected = logits(judged.judge, tokens)[length - 1 :]
    with judged.load(kv_format="f32") as llm:
        errors = np.abs(found(llm, tokens, length) - expected).max(axis=1) / np.abs(expected).max()
        statistic = np.median if unsteady(open_bundle(Path(judged.path)).config) else np.max
    assert statistic(errors) < NEAR


def test_a_prompt_goes_on_from_where_another_was_cut(judged: Judged) -> None:
    """From the end of a full block, or where the earlier text ended."""
    with judged.load() as llm:
        for prompt, cached in (
            (TOKENS[:300], 0),
            (TOKENS[:300], 2 * BLOCK),
            (TOKENS[:200] + TOKENS[300:340], BLOCK),
            (TOKENS[:100], 0),
        ):
            answer = llm.generate(
                prompt, **GREEDY, speculate=False
            )  # a draft computes the last token
            assert answer.stats.cached_tokens == cached
            assert computed(answer.stats) == len(prompt) - cached
            same(answer, judged.scratch(prompt))
        going_on = [*prompt, *answer.tokens, 7]
        assert llm.generate(going_on, **GREEDY).stats.cached_tokens == len(going_on) - 2


def test_a_session_goes_back_and_on(judged: Judged) -> None:
    """By a few tokens it goes to the end of a full block, and computes from there."""
    with judged.load() as llm, llm.session() as session:
        session.append(TOKENS[:200])
        session.generate(**GREEDY)
        for length, block in ((203, BLOCK), (140, BLOCK), (BLOCK, BLOCK), (100, 0)):
            session.rewind(length)
            prompt = [*session.tokens, *TOKENS[400:410]]
            session.append(TOKENS[400:410])
            answer = session.generate(**GREEDY)
            # the logits of the last token are wanted: of all of a prompt something is computed
            assert answer.stats.cached_tokens == block
            assert computed(answer.stats) == len(prompt) - block
            same(answer, judged.scratch(prompt))


@pytest.mark.parametrize("judged", CASES[:1], ids="-".join, indirect=True)
def test_a_session_goes_back_to_the_end_of_a_turn(judged: Judged) -> None:
    with judged.load() as llm, llm.session() as session:
        for begin in (0, 150, 300):
            session.append(TOKENS[begin : begin + 20])
            session.generate(**GREEDY)
        session.rewind(28 - 1)  # the last token of an answer is not computed
        session.append(TOKENS[400:410])
        prompt = list(session.tokens)
        answer = session.generate(**GREEDY)
        assert answer.stats.cached_tokens == 27
        same(answer, judged.scratch(prompt))


@pytest.mark.parametrize("judged", [CASES[0], CASES[4]], ids="-".join, indirect=True)
@pytest.mark.parametrize("scheduling", ["stall_free", "layered"])
def test_large_states_are_kept_at_few_places(
    judged: Judged, scheduling: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After each second block, at the end of a prompt's last one, and of the answer."""
    monkeypatch.setattr("edgellm.cache.groups.snapshot_interval", lambda _: 2)
    with judged.load(scheduling=scheduling, time_target_ms=1.0) as llm:
        first = llm.generate(TOKENS[:430], **GREEDY)
        for prompt, cached in (
            (TOKENS[:430], 3 * BLOCK),
            (TOKENS[:300], 2 * BLOCK),
            (TOKENS[:250], 0),
            ([*TOKENS[:430], *first.tokens, 7], 437),
        ):
            answer = llm.generate(prompt, **GREEDY)
            assert answer.stats.cached_tokens == cached
            same(answer, judged.scratch(prompt))


def test_forks_and_saved_sessions(judged: Judged, tmp_path: Path) -> None:
    with judged.load() as llm, llm.session() as session:
        session.append(TOKENS[:150])
        session.generate(**GREEDY)
        fork = session.fork()
        prompts = []
        for each, tokens in ((session, TOKENS[200:220]), (fork, TOKENS[300:305])):
            each.append(tokens)
            prompts.append(list(each.tokens))
        fork.save(tmp_path / "saved")
        for each, prompt in zip((session, fork), prompts, strict=True):
            answer = each.generate(**GREEDY)
            same(answer, judged.scratch(prompt))
            assert computed(answer.stats) <= 20 + 1
        fork.close()
    with judged.load() as llm, llm.load_session(tmp_path / "saved") as saved:
        assert list(saved.tokens) == prompts[1]
        answer = saved.generate(**GREEDY)
        same(answer, judged.scratch(prompts[1]))
        assert computed(answer.stats) <= 5 + 1


def test_sealed_blocks_beside_states(judged: Judged) -> None:
    """Blocks are sealed from the fourth one on: found again, forked and behind a rewind."""
    options = {**GREEDY, "logprobs": 1}
    with judged.load(kv_format="k4v4") as llm:
        expected = llm.generate(TOKENS[:490], **options)
    with judged.load(kv_format="k4v4") as llm:
        llm.generate(TOKENS[:400], **options)
        again = llm.generate(TOKENS[:490], **options)
        assert again.stats.cached_tokens >= 2 * BLOCK
        same(again, expected)
        session = llm.session()
        session.append(TOKENS)
        session.generate(temperature=0, max_tokens=1)
        branch = session.fork()
        for each in (session, branch):
            each.rewind(490)
            same(each.generate(**options), expected)


def test_blocks_on_disk(judged: Judged, tmp_path: Path) -> None:
    with judged.load(kv_cache_dir=tmp_path) as llm:
        llm.generate(TOKENS[:300], **GREEDY)
    with judged.load(kv_cache_dir=tmp_path) as llm:
        answer = llm.generate(TOKENS[:300], **GREEDY)
    assert answer.stats.cached_tokens == 2 * BLOCK
    same(answer, judged.scratch(TOKENS[:300]))


@pytest.mark.parametrize("scheduling", ["stall_free", "layered", "serial"])
def test_answers_together_are_those_alone(judged: Judged, scheduling: Any) -> None:
    """In a cache that holds not all of them at once: some wait, or are computed again."""
    prompts = [TOKENS[i : i + length] for i, length in enumerate((3, 300, 127, 41, 200))]
    long = {"max_tokens": 40}
    # layered: a time that few layers take, so that prompts go through a few at a time
    sizes = {"ctx_size": 512, "cache_size": 640, "time_target_ms": 1.0}
    with judged.load(scheduling=scheduling, **sizes) as llm:
        together = {a.index: a.result() for a in llm.batch(prompts, **(GREEDY | long))}
        assert used_blocks(llm) == 0
    for index, prompt in enumerate(prompts):
        same(together[index], judged.scratch(prompt, **long))


@pytest.mark.parametrize("judged", CASES[:1], ids="-".join, indirect=True)
def test_a_chat_computes_what_is_new(judged: Judged) -> None:
    """Ten turns, none of which computes what an earlier one has, but for one token."""
    with judged.load() as llm, llm.chat() as chat:
        # bytes that are no text have other tokens in the next prompt than in the answer
        letters = dict.fromkeys(llm.tokenize("abcdefgh"), 100.0)
        options = GREEDY | {"max_tokens": 16, "logit_bias": letters}
        before = 0
        for turn in range(10):
            answer = chat.send(f"Turn {turn}", **options)
            prompt = answer.stats.prompt_tokens
            # a draft may have computed the last token
            assert prompt - before <= computed(answer.stats) <= prompt - max(before - 1, 0)
            before = len(chat.tokens)
        same(answer, judged.scratch(chat.tokens[:prompt], **options))


def test_a_stateless_chat_computes_what_is_new(judged: Judged) -> None:
    """As clients of a server send it: the whole conversation each time."""
    text = TOKENS[:40]
    with judged.load() as llm:
        for turn in range(10):
            answer = llm.generate(text, **GREEDY)
            assert computed(answer.stats) in ((10, 11) if turn else (40,))
            text = [*text, *answer.tokens, *TOKENS[100 + turn : 110 + turn]]


def test_a_full_context_forgets_and_computes_the_others_again(judged: Judged) -> None:
    shift = GREEDY | {"max_tokens": 60, "context_policy": "shift", "keep": 5}
    with judged.load(ctx_size=256) as llm, llm.session() as session:
        session.append(TOKENS[:230])
        answer = session.generate(**shift)
        end = session.tokens
    text = TOKENS[:230]
    for token in answer.tokens:
        if len(text) > 256:
            count = Shift().forgotten(len(text), ctx_size=256, keep=5)
            text = text[:5] + text[5 + count :]
        if token != answer.tokens[-1] and len(text) % 16:
            text.append(token)
            continue
        assert judged.scratch(text, max_tokens=1).tokens == (token,)
        text.append(token)
    assert answer.stats.dropped_tokens > 0
    assert list(end) == text


SAMPLED: dict[str, Any] = {"temperature": 0.9, "seed": 5, "ignore_eos": True, "top_k": 20}


@pytest.mark.parametrize(
    ("options", "right"),
    one_in(4, [(SAMPLED, [3, 0, 7, 1]), (GREEDY, [0]), (GREEDY, [7]), (GREEDY, [3, 0, 7, 1])]),
    ids=["sampled", "wrong", "right", "partly"],
)
def test_drafts_change_no_bit(
    judged: Judged, right: list[int], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them right, none, or some, over the ends of blocks, by itself and beside others."""
    prompts = [TOKENS[i : i + length] for i, length in enumerate((3, 100, 125))]
    chosen = {**options, "max_tokens": 40, "logprobs": 2}
    with judged.load() as llm:
        plain = [llm.generate(p, **chosen, speculate=False) for p in prompts]
        turns = itertools.cycle(right)

        def guess(tokens: Sequence[int]) -> list[int]:
            texts = ([*p, *a.tokens] for p, a in zip(prompts, plain, strict=True))
            text = next(text for text in texts if text[: len(tokens)] == list(tokens))
            known, rest = next(turns), text[len(tokens) :]
            return [*rest[:known], *((token + 1) % VOCABULARY for token in rest[known:])]

        draft_as(monkeypatch, guess)
        for prompt, expected in zip(prompts, plain, strict=True):
            answer = llm.generate(prompt, **chosen)
            same(answer, expected)
            assert (answer.stats.accepted_tokens > 0) == (right != [0])
            assert answer.stats.drafted_tokens >= 20
        together = {a.index: a.result() for a in llm.batch(prompts, **chosen)}
        for index, expected in enumerate(plain):
            same(together[index], expected)
        assert used_blocks(llm) == 0


def test_a_session_behind_a_draft(
    judged: Judged, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where wrong guesses were dropped, it is forked, saved, and goes back."""
    draft_as(monkeypatch, lambda tokens: [tokens[-1], 5, 6, 7])
    with judged.load() as llm, llm.session() as session:
        session.append(TOKENS[:125])
        assert session.generate(**GREEDY).stats.drafted_tokens > 0
        fork = session.fork()
        fork.save(tmp_path / "saved")
        session.rewind(130)
        prompts = [[*each.tokens, *TOKENS[300:310]] for each in (session, fork)]
        for each, prompt in zip((session, fork), prompts, strict=True):
            each.append(TOKENS[300:310])
            same(each.generate(**GREEDY), judged.scratch(prompt, speculate=False))
        fork.close()
    with judged.load() as llm, llm.load_session(tmp_path / "saved") as saved:
        saved.append(TOKENS[300:310])
        answer = saved.generate(**GREEDY)
        same(answer, judged.scratch(prompts[1], speculate=False))
        assert computed(answer.stats) in (10, 11)


@pytest.mark.parametrize("judged", CASES[:1], ids="-".join, indirect=True)
def test_what_is_copied_is_foreseen(judged: Judged) -> None:
    """Each token the likeliest behind the same ones before: what was asked again is drafted."""
    copied = {"max_tokens": 60, "logit_bias": dict.fromkeys([5], 100.0), "repetition_limit": 0}
    with judged.load() as llm, pytest.MonkeyPatch.context() as patch:
        draft_with(patch, "lookup")
        answer = llm.generate([5] * 130, **(GREEDY | copied))
    assert answer.stats.drafts["lookup"].drafted <= 7 * 10
    assert answer.stats.drafted_tokens - answer.stats.accepted_tokens in (0, 1)  # behind the end
    assert answer.stats.accepted_tokens > 40


@pytest.mark.parametrize("states", [True, False])
@pytest.mark.parametrize("judged", [CASES[0], CASES[4]], ids="-".join, indirect=True)
def test_a_draft_model(judged: Judged, states: bool, tmp_path: Path) -> None:
    """With states of its own, or none; its guesses are dropped there as well."""
    sizes = {"vocab_size": VOCABULARY, "num_hidden_layers": 2, "max_position_embeddings": 512}
    kind = {"layer_types": ["conv", "full_attention"]} if states else {"intermediate_size": 32}
    make("lfm2" if states else "llama", tmp_path, **(sizes | kind))
    save_tokenizer(tmp_path)
    small = export(tmp_path, tmp_path / "bundle", name="small", source="", precisions=("packed",))
    prompt = TOKENS[:110]
    expected = judged.scratch(prompt, max_tokens=40, speculate=False)
    with judged.load(draft=str(small.path), draft_p_min=0) as llm:
        with pytest.MonkeyPatch.context() as patch:
            draft_with(patch, "model")
            answer = llm.generate(prompt, **(GREEDY | {"max_tokens": 40}))
        drafts = answer.stats.drafts["model"]
        assert drafts.drafted > 60
        assert answer.stats.draft_failure == ""
        same(answer, expected)
        assert used_blocks(drafts_of(llm)) == used_blocks(llm) == 0


@pytest.mark.parametrize(
    "options",
    [
        {"decode": "portable"},
        {"prefill": "cuda"},
        {"prefill": "cpu", "decode": "chunked"},
    ],
    ids=str,
)
def test_other_back_ends_are_refused(judged: Judged, options: dict[str, Any]) -> None:
    words = r"has layers with states.*, which \w+ does not compute. Take .*native"
    with pytest.raises(UnsupportedModelError, match=words):
        load(judged.path, **options)


def test_what_is_shown_and_planned(judged: Judged) -> None:
    result = CliRunner().invoke(edgellm, ["show", judged.path])
    assert result.exit_code == 0, result.output
    bundle = open_bundle(Path(judged.path))
    mixers = (layer.state_mixer for layer in bundle.config.layers)
    states = [mixer.state_size for mixer in mixers if mixer is not None]
    works = [work_of(bundle, n, precision="packed", kv_format="f32") for n in (0, 100)]
    weights = imported(bundle.manifest, "packed").decode_bytes
    assert works[0].decode_bytes == weights + 2 * 4 * sum(states)  # read and written
    attended = 100 * 2 * 4 * sum(each.kv_size for each in bundle.config.attentions.values())
    assert works[1].decode_bytes == works[0].decode_bytes + attended
    words = "no self-test of models with layers with states"
    with pytest.raises(UnsupportedModelError, match=words), float_reference(bundle):
        pass


def test_quality_has_a_reference(judged: Judged) -> None:
    text = "".join(chr(token % 26 + 65) for token in TOKENS)
    with judged.load() as llm:
        compared = quality(llm.engine, text, window=64, max_windows=2)
    assert compared.kl_mean < 0.1
    assert abs(compared.perplexity_change) < 0.2
