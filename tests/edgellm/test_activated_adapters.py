"""Adapters that begin at tokens of the prompt (activated LoRA, arXiv:2504.12397)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from requirements import unavailable
from tiny_adapters import ALPHA, Pairs, pairs_of, write_gguf_adapter, write_peft

from edgellm.cache.prefix_index import Root
from edgellm.engine.adapters import NEVER
from edgellm.errors import ModelFormatError, UnsupportedModelError
from edgellm.export.source_checkpoint import MergedCheckpoint
from edgellm.generation import BatchRequest
from edgellm.generation_options import GenerationOptions
from edgellm.graphs.checkpoint import open_checkpoint
from edgellm.graphs.lora import open_adapter
from edgellm.kernels.kv_blocks import BLOCK
from edgellm.kernels.native import library
from edgellm.llm import LLM, load
from edgellm.results import Completion

pytestmark = pytest.mark.usefixtures("edgellm_home")
TEXT = [(7 * i) % 50 + 3 for i in range(BLOCK + 50)]
INVOCATION = [60, 61]
# it begins at the last of two places, within a block
PROMPT = [*TEXT[:20], *INVOCATION, *TEXT, *INVOCATION, 9, 10, 11]
START = 20 + 2 + len(TEXT)
SIZES: dict[str, Any] = {"ctx_size": 4 * BLOCK, "cache_size": 32 * BLOCK}
OPTIONS: dict[str, Any] = {"max_tokens": 8, "temperature": 0, "ignore_eos": True, "logprobs": 2}


@pytest.fixture(autouse=True)
def native() -> None:
    if library() is None:
        unavailable("native", "installed without a compiler")


@pytest.fixture(scope="module")
def pairs(tiny_model: Path) -> Pairs:
    return pairs_of(tiny_model, size=1.0, seed=1)


@pytest.fixture(scope="module")
def adapters(
    tiny_model: Path, pairs: Pairs, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    root, changes = tmp_path_factory.mktemp("adapters"), {"alora_invocation_tokens": INVOCATION}
    return {
        "one": write_peft(root / "one", pairs, **changes),
        "two": write_peft(root / "two", pairs_of(tiny_model, size=1.0, seed=2), **changes),
        "always": write_peft(root / "always", pairs),
    }


@pytest.fixture
def llm(tiny_model: Path, adapters: dict[str, Path]) -> Iterator[LLM]:
    with load(str(tiny_model), adapters=adapters, **SIZES) as llm:
        yield llm


def ask(llm: LLM, adapter: str | None, prompt: list[int] = PROMPT) -> Completion:
    return llm.generate(prompt, adapter=adapter, **OPTIONS)


def cold(model: Path, adapters: dict[str, Path], adapter: str | None, prompt: list[int]) -> Any:
    """Log probabilities of an answer, with nothing in the KV cache before."""
    with load(str(model), adapters=adapters, **SIZES) as llm:
        return ask(llm, adapter, prompt).logprobs


def judged(folder: Path, pairs: Pairs, tokens: list[int], start: int) -> np.ndarray:
    """Log probabilities of each token but the first, as PEFT's `ALoraLinearVariant` has them."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for name, matrices in pairs.items():
        a, b = map(torch.from_numpy, matrices)

        def add(_: Any, inputs: Any, output: Any, a: Any = a, b: Any = b) -> Any:
            output[:, start:] += ALPHA / 4 * (inputs[0][:, start:] @ a.T @ b.T)
            return output

        model.get_submodule(name).register_forward_hook(add)
    with torch.no_grad():
        scores = torch.log_softmax(model(torch.tensor([tokens])).logits[0], dim=-1)
    result: np.ndarray = scores[range(len(tokens) - 1), tokens[1:]].numpy()
    return result


def test_begins_at_the_last_invocation(llm: LLM, tiny_model: Path, pairs: Pairs) -> None:
    def scores(adapter: str | None) -> np.ndarray:
        answer = llm.generate(PROMPT, adapter=adapter, prompt_logprobs=0, max_tokens=1)
        return np.array([each.logprob for each in answer.prompt_logprobs[1:]])

    found, base, always = scores("one"), scores(None), scores("always")
    expected = judged(tiny_model, pairs, PROMPT, START)
    assert np.abs(found - expected).mean() < 0.1
    np.testing.assert_array_equal(found[: START - 1], base[: START - 1])
    assert np.abs(found[START:] - base[START:]).mean() > 0.2
    assert np.abs(always - expected).mean() > 0.2


def test_without_an_invocation_the_model_answers_as_it_is(llm: LLM) -> None:
    assert ask(llm, "one", TEXT).logprobs == ask(llm, None, TEXT).logprobs


def test_tokens_before_it_are_found_by_all_and_those_behind_by_itself(
    llm: LLM, tiny_model: Path, adapters: dict[str, Path]
) -> None:
    expected = {name: cold(tiny_model, adapters, name, PROMPT) for name in ("one", "two", None)}
    ask(llm, None, PROMPT[:START])
    for name, cached in (("one", START), ("two", START), (None, START), ("always", 0)):
        answer = ask(llm, name)
        # the prompt of the base ends where an adapter begins, or a token before
        assert cached - 1 <= answer.stats.cached_tokens <= cached, name
        if name in expected:
            assert answer.logprobs == expected[name]
    for name in ("one", "two", None):
        again = ask(llm, name)
        assert again.stats.cached_tokens == len(PROMPT) - 1
        assert again.logprobs == expected[name]


def test_blocks_on_disk_too(tiny_model: Path, adapters: dict[str, Path], tmp_path: Path) -> None:
    prompt = [*PROMPT, *TEXT]
    found = []
    for names in ((None, "one"), ("two", "one", None)):
        with load(str(tiny_model), adapters=adapters, kv_cache_dir=tmp_path / "kv", **SIZES) as llm:
            answers = [ask(llm, name, prompt) for name in names]
            found.append(
                {name: answer.logprobs for name, answer in zip(names, answers, strict=True)}
            )
    assert answers[0].stats.cached_tokens == BLOCK
    assert answers[1].stats.cached_tokens >= 2 * BLOCK
    assert answers[2].stats.cached_tokens >= 2 * BLOCK
    assert found[0] == {name: found[1][name] for name in found[0]}


def test_together_they_answer_as_alone(
    llm: LLM, tiny_model: Path, adapters: dict[str, Path]
) -> None:
    names = ["one", None, "two", "always", "one"]
    prompts = [PROMPT, PROMPT, PROMPT, PROMPT, [*TEXT, *INVOCATION]]
    expected = [cold(tiny_model, adapters, *each) for each in zip(names, prompts, strict=True)]
    asked = [
        BatchRequest(prompt=prompt, options=GenerationOptions(adapter=name, **OPTIONS))
        for name, prompt in zip(names, prompts, strict=True)
    ]
    for answer in llm.batch(asked):
        assert answer.result().logprobs == expected[answer.index]


def test_layered_prompts(tiny_model: Path, adapters: dict[str, Path]) -> None:
    expected = cold(tiny_model, adapters, "one", PROMPT)
    with load(str(tiny_model), adapters=adapters, scheduling="layered", **SIZES) as llm:
        assert ask(llm, "one").logprobs == expected


def test_a_session_changes_between_the_model_and_adapters(
    llm: LLM, tiny_model: Path, adapters: dict[str, Path], tmp_path: Path
) -> None:
    """What was computed before the earlier of two places stays, and no more."""
    with llm.session() as session:
        session.append(TEXT)
        known = 0
        for name in ("one", None, "two", "one", "one"):
            session.append([*INVOCATION, *TEXT[:9]])
            tokens = session.tokens
            answer = session.generate(adapter=name, **OPTIONS)
            assert answer.logprobs == cold(tiny_model, adapters, name, tokens)
            assert answer.stats.cached_tokens >= known
            known = len(TEXT)
        session.save(tmp_path / "session")
        rest = session.generate(adapter="one", **OPTIONS)
    with llm.load_session(tmp_path / "session", adapter="one") as session:
        assert session.cached > len(TEXT)
        assert session.generate(**OPTIONS).logprobs == rest.logprobs


def test_a_full_context_forgets_what_is_before_it(llm: LLM) -> None:
    roots = [Root(b"", start, 1).shifted(keep=4, discard=10) for start in (3, 20, 9, NEVER)]
    assert [root.start for root in roots] == [3, 10, 4, NEVER]
    options: dict[str, Any] = {**OPTIONS, "max_tokens": 300, "context_policy": "shift"}
    answer = llm.generate([*PROMPT, *TEXT], adapter="one", **options)
    assert len(answer.tokens) == 300
    assert answer.stats.dropped_tokens > 0


def test_files_of_peft_and_gguf_name_their_tokens(
    llm: LLM, tiny_model: Path, pairs: Pairs, adapters: dict[str, Path], tmp_path: Path
) -> None:
    assert open_adapter(adapters["one"]).invocation == tuple(INVOCATION)
    assert open_adapter(adapters["always"]).invocation == ()
    file = write_gguf_adapter(
        tmp_path / "one.gguf", tiny_model, pairs, gguf.MODEL_ARCH.LLAMA, invocation=INVOCATION
    )
    llm.load_adapter("file", file)
    assert ask(llm, "file").logprobs == ask(llm, "one").logprobs
    loaded = llm.engine.adapters.loaded["file"]
    assert [loaded.start(each) for each in (PROMPT, TEXT, [])] == [START, NEVER, NEVER]


def test_what_cannot_be_is_refused(
    llm: LLM, tiny_model: Path, pairs: Pairs, adapters: dict[str, Path], tmp_path: Path
) -> None:
    beyond = write_peft(tmp_path / "beyond", pairs, alora_invocation_tokens=[1 << 20])
    with pytest.raises(ModelFormatError, match="begins at the token 1048576; the model has"):
        llm.load_adapter("beyond", beyond)
    with pytest.raises(UnsupportedModelError, match="cannot be merged"):
        MergedCheckpoint(open_checkpoint(tiny_model), [(adapters["one"], 1.0)])
