"""Models with experts on the C++ kernels: what they compute and answer is what transformers does.

Their weights are numbers that 8 bits hold, so that what is left is the rounding of activations. It
sends a token whose experts are hardly better than the next ones to others, and its logits with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from click.testing import CliRunner
from matrix import MEDIAN, usable
from rounded_weights import found, round_weights
from tiny_gguf import FILES, VOCABULARY, convert, with_vocabulary
from tiny_models import logits, make, save_tokenizer

from edgellm.cli.main import edgellm
from edgellm.export import export
from edgellm.llm import LLM, load
from edgellm.measure.quality import quality
from edgellm.models import describe
from edgellm.store.manifest import imported
from edgellm.store.precision_support import why_not

pytestmark = pytest.mark.skipif(not usable("C++"), reason="experts need the C++ kernels")

NAMES = (
    *("qwen3_moe", "qwen3_moe_mixed", "olmoe", "mixtral", "granitemoe"),
    *("qwen2_moe", "glm4_moe", "gpt_oss"),
)
CASES = [(name, form) for name in NAMES for form in ("folder", "Q8_0")]
CASES.remove(("qwen3_moe_mixed", "Q8_0"))
CASES.append(("gemma4_experts", "Q8_0"))
# The others are tried with the slow tests: they take two minutes of two cores.
QUICK = (
    *(("qwen3_moe_mixed", "folder"), ("olmoe", "Q8_0"), ("glm4_moe", "Q8_0")),
    *(("gpt_oss", "folder"), ("gemma4_experts", "Q8_0")),
)
PARAMS = [
    pytest.param(case, marks=() if case in QUICK else pytest.mark.slow, id=str(case))
    for case in CASES
]
TOKENS = np.random.default_rng(0).integers(3, VOCABULARY, 300).tolist()
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 16, "ignore_eos": True}


@dataclass(frozen=True)
class Judged:
    llm: LLM
    judge: Any
    source: str


@pytest.fixture(scope="module", params=PARAMS)
def judged(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Judged]:
    name, form = request.param
    folder = tmp_path_factory.mktemp(name)
    arch, keys, changes = FILES.get(name, (None, None, {}))
    sizes = {"vocab_size": VOCABULARY, "max_position_embeddings": 512}
    model = make(name, folder, **sizes, **(changes if form != "folder" else {}))
    round_weights(model)
    model.save_pretrained(folder)
    save_tokenizer(folder)
    path = folder
    if form != "folder":
        kind = gguf.GGMLQuantizationType[form]
        path = convert(folder, folder / "m.gguf", arch, with_vocabulary(keys), kind=kind)
    bundle = export(path, folder / "bundle", name="tiny", source=str(path))
    assert imported(bundle.manifest, "packed").requantized_tensors == 0
    with load(str(bundle.path), kv_format="f32") as llm:
        yield Judged(llm, model, str(path))


@pytest.mark.parametrize("length", [1, 2, 15, 33, 290])
def test_logits_are_near(judged: Judged, length: int) -> None:
    tokens = TOKENS[: length + 10]
    check(judged, judged.llm, tokens, length)


def check(judged: Judged, llm: LLM, tokens: list[int], length: int) -> None:
    judge(errors_of(judged, llm, tokens, length))


def errors_of(judged: Judged, llm: LLM, tokens: list[int], length: int) -> np.ndarray:
    """The error of each row of logits behind a prompt, over the largest logit."""
    expected = logits(judged.judge, tokens)[length - 1 :]
    errors: np.ndarray = np.abs(found(llm, tokens, length) - expected).max(axis=1)
    return errors / np.abs(expected).max()


def judge(errors: np.ndarray) -> None:
    assert np.median(errors) < MEDIAN
    assert (errors > 2 * MEDIAN).mean() < 0.3


def test_greedy_tokens(judged: Judged) -> None:
    """Behind those before it, hardly any is less likely than another one by more than the error."""
    less: list[float] = []
    for first in (0, 50, 100):
        prompt = TOKENS[first : first + 40]
        tokens = judged.llm.generate(prompt, **GREEDY).tokens
        rows = logits(judged.judge, [*prompt, *tokens])[len(prompt) - 1 : -1]
        chosen = np.take_along_axis(rows, np.array(tokens)[:, None], axis=1)[:, 0]
        less += ((rows.max(axis=1) - chosen) / np.abs(rows).max(axis=1)).tolist()
    assert (np.array(less) > MEDIAN).mean() < 0.1


@pytest.mark.parametrize("scheduling", ["stall_free", "layered"])
def test_answers_together_are_those_alone(judged: Judged, scheduling: Any) -> None:
    prompts = [TOKENS[i : i + length] for i, length in enumerate((3, 200, 41, 17, 90))]
    alone = [judged.llm.generate(each, **GREEDY).tokens for each in prompts]
    path = str(judged.llm.engine.bundle.path)
    with load(path, kv_format="f32", scheduling=scheduling) as llm:
        together = {each.index: each.result().tokens for each in llm.batch(prompts, **GREEDY)}
    assert [together[index] for index in range(len(prompts))] == alone


def test_prompts_in_pieces_and_found_again(judged: Judged) -> None:
    with load(str(judged.llm.engine.bundle.path), kv_format="f32") as llm:
        whole = llm.generate(TOKENS[:200], **GREEDY)
        again = llm.generate(TOKENS[:200], **GREEDY)
    assert whole.stats.cached_tokens == 0
    assert (again.tokens, again.stats.cached_tokens) == (whole.tokens, 199)
    with load(str(judged.llm.engine.bundle.path), kv_format="f32") as llm, llm.session() as session:
        for first in range(0, 200, 37):
            session.append(TOKENS[first : min(first + 37, 200)])
            session.generate(temperature=0, max_tokens=0)
        assert session.generate(**GREEDY).tokens == whole.tokens


def test_what_a_token_uses_is_shown(judged: Judged) -> None:
    path = str(judged.llm.engine.bundle.path)
    shown = describe(path)
    assert shown.used_parameters < shown.parameters
    printed = CliRunner().invoke(edgellm, ["show", path])
    assert f"M, of which a token uses {shown.used_parameters / 1e6:.1f} M" in printed.output


def test_quality_has_a_reference(judged: Judged) -> None:
    text = "".join(chr(token % 26 + 65) for token in TOKENS)
    found = quality(judged.llm.engine, text, window=64, max_windows=2)
    assert found.kl_mean < 0.1
    assert abs(found.perplexity_change) < 0.2


def test_the_self_test_passes(judged: Judged) -> None:
    result = CliRunner().invoke(edgellm, ["doctor", "-v", str(judged.llm.engine.bundle.path)])
    if judged.llm.engine.config.attention.v_norm:
        assert "no self-test of models with V made of K (gemma4_text) yet" in result.output
        return
    assert result.exit_code == 0, result.output
    assert "checks passed" in result.output


def test_a_cache_of_eight_bits(judged: Judged) -> None:
    with load(str(judged.llm.engine.bundle.path)) as llm:
        check(judged, llm, TOKENS[:60], 30)


@pytest.mark.parametrize("precision", ["f32", "w8a8"])
def test_chunks_of_graphs_leave_them_to_the_host(judged: Judged, precision: str) -> None:
    """Between two graphs; prompts of less than a chunk, of one, and of some and a part."""
    reason = why_not(precision, judged.llm.engine.config)
    if reason is not None:
        pytest.skip(reason)
    if precision == "w8a8" and not usable("w8a8"):
        pytest.skip("ONNX Runtime's int8 products saturate on this processor")
    path = judged.llm.engine.bundle.path
    export(
        Path(judged.source),
        path,
        name="tiny",
        source=judged.source,
        precisions=(precision,),
        chunk_sizes=(8,),
    )
    with load(str(path), kv_format="f32", prefill="cpu", precision=precision) as llm:
        assert llm.engine.decoder.name == "native"
        # of several texts together: a row with other experts moves all rows behind it
        cases = enumerate((3, 8, 21, 11, 16))
        parts = [errors_of(judged, llm, TOKENS[40 * i :][: n + 10], n) for i, n in cases]
        judge(np.concatenate(parts))
