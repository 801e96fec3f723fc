"""Documents by their relevance: a reranker's yes and no, and cosines of embeddings."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from edgellm import LLM, OptionError, UnsupportedModelError, load
from edgellm.engine.embedding import yes_no_prompts
from edgellm.engine.one_sequence import compute_prompt

DOCUMENTS = ["a cat sat on the mat", "the dog", "cats and dogs " * 20, "x"]
QUERY = "cats"


@pytest.fixture(scope="module")
def tiny(tiny_model: Any) -> LLM:
    return load(str(tiny_model))


def test_embeddings_rank_by_their_cosines(tiny: LLM) -> None:
    query, vectors = tiny.embed(QUERY), tiny.embed(DOCUMENTS)
    found = tiny.rerank(QUERY, DOCUMENTS)
    cosines = vectors @ query
    assert [each.index for each in found] == np.argsort(-cosines, kind="stable").tolist()
    for each in found:
        assert each.relevance == pytest.approx(float(cosines[each.index]), abs=1e-6)
    assert tiny.rerank(QUERY, DOCUMENTS, top_n=2) == found[:2]
    assert tiny.rerank(QUERY, DOCUMENTS, pooling="last") != found


@pytest.fixture
def judge(smollm2: Any) -> LLM:
    return load(str(smollm2.path), ctx_size=1024)


def test_yes_beside_no(judge: LLM) -> None:
    """The relevance is what the logits after the prompt say, computed alone."""
    found = judge.rerank(QUERY, DOCUMENTS, method="yes_no", instruction="Find texts on cats")
    prompts = yes_no_prompts(judge.engine, QUERY, DOCUMENTS, instruction="Find texts on cats")
    vocabulary = judge.engine.tokenizer.vocabulary
    tokens = [vocabulary["yes"], vocabulary["no"]]

    def logits(prompt: list[int]) -> np.ndarray:
        sequence = judge.engine.cache.sequence()
        scores = compute_prompt(judge.engine.prefill, prompt, sequence)
        sequence.close()
        return scores[tokens].astype(np.float64)

    for each in found:
        yes, no = judge.engine.thread.call(lambda each=each: logits(prompts[each.index]))
        assert each.relevance == pytest.approx(1 / (1 + np.exp(no - yes)), abs=1e-5)
    assert sorted(each.index for each in found) == [0, 1, 2, 3]
    assert [e.relevance for e in found] == sorted((e.relevance for e in found), reverse=True)


def test_the_prompt_is_that_of_rerankers(judge: LLM) -> None:
    (prompt,) = yes_no_prompts(judge.engine, "why", ["because"], instruction="Find reasons")
    text = judge.detokenize(prompt, skip_special=False)
    assert text == (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query "
        'and the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
        "<|im_start|>user\n<Instruct>: Find reasons\n<Query>: why\n<Document>: because<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_a_model_without_the_tokens(tiny: LLM) -> None:
    with pytest.raises(UnsupportedModelError, match="has no token 'yes'"):
        tiny.rerank(QUERY, DOCUMENTS, method="yes_no")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"query": ""}, "query"),
        ({"documents": ["a", ""]}, "documents"),
        ({"documents": "a"}, "documents"),
        ({"top_n": 0}, "top_n"),
        ({"method": "best"}, "method"),
        ({"pooling": "first"}, "pooling"),
    ],
    ids=str,
)
def test_bad_values_are_refused_by_name(tiny: LLM, arguments: Any, named: str) -> None:
    with pytest.raises(OptionError, match=named):
        tiny.rerank(**{"query": QUERY, "documents": DOCUMENTS, **arguments})
