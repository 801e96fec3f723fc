from __future__ import annotations

import json
from pathlib import Path

import pytest

from edgellm.bundle import COSTS
from edgellm.export import export
from edgellm.kernels.native import library
from edgellm.llm import LLM, load

PROMPT = "The quick brown fox jumps over the lazy dog. " * 30


@pytest.fixture
def folder(tiny_model: Path, tmp_path: Path) -> Path:
    """A bundle in which costs of the CPU provider have been measured."""
    if library() is None:
        pytest.skip("installed without a compiler")
    out = tmp_path / "bundle"
    export(tiny_model, out, name="tiny", source=str(tiny_model))
    load(str(out), prefill="cpu")
    return out


def rewrite(folder: Path, *, chunk: float, token: float) -> None:
    """Pretend that 32 rows of a chunk, and a token in the native step, took so long."""
    known = json.loads((folder / COSTS).read_text())
    ((key, values),) = known.items()
    chunks = {size: chunk * int(size) / 32 for size in values["chunks"]}
    values = {"chunks": chunks, "call": 0.0, "token": token}
    (folder / COSTS).write_text(json.dumps({key: values}))


def places(llm: LLM, tokens: int) -> dict[str, int]:
    with llm.session() as session:
        session.append([(i + tokens) % 50 for i in range(tokens)])
        return session.generate(llm.sampling(max_tokens=1, temperature=0)).stats.prefill


def test_a_faster_provider_takes_long_prompts(folder: Path) -> None:
    rewrite(folder, chunk=0.010, token=0.001)
    llm = load(str(folder))
    assert llm.engine.options.prefill == "cpu"
    assert places(llm, 8) == {"native": 8}
    assert places(llm, 256) == {"cpu": 256}


def test_a_whole_chunk_stays_native_where_that_is_cheaper(folder: Path) -> None:
    rewrite(folder, chunk=0.050, token=0.001)
    assert places(load(str(folder)), 40) == {"native": 40}
    assert places(load(str(folder), prefill="cpu"), 40) == {"cpu": 32, "native": 8}


def test_a_slower_provider_is_left_alone(folder: Path) -> None:
    rewrite(folder, chunk=1.0, token=0.001)
    assert places(load(str(folder)), 256) == {"native": 256}


def test_costs_of_other_threads_or_another_version_do_not_count(folder: Path) -> None:
    rewrite(folder, chunk=0.010, token=0.001)
    assert places(load(str(folder), threads=1), 256) == {"native": 256}
    known = json.loads((folder / COSTS).read_text())
    (folder / COSTS).write_text(json.dumps({f"{key} old": v for key, v in known.items()}))
    assert places(load(str(folder)), 256) == {"native": 256}


@pytest.mark.parametrize("provider", ["qnn", "cuda", "nothing"])
def test_a_provider_that_is_gone_is_not_chosen(folder: Path, provider: str) -> None:
    rewrite(folder, chunk=0.010, token=0.001)
    known = json.loads((folder / COSTS).read_text())
    ((key, values),) = known.items()
    (folder / COSTS).write_text(json.dumps({key.replace("cpu", provider, 1): values}))
    assert places(load(str(folder)), 256) == {"native": 256}
