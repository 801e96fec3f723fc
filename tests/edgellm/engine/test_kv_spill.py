"""Sealed blocks in a file: the same answers, when every block has to be read back as well."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from inspection import is_resting
from loop_checks import forked
from spill import needs_spill, on_disk, resident, take_back
from waiting import until

from edgellm import OptionError
from edgellm.backends.selection import select
from edgellm.engine.memory import draft_options, estimate
from edgellm.kernels.kv_blocks import SEALED, SealedBlocks
from edgellm.kernels.native import library
from edgellm.llm import LLM, load
from edgellm.options import EngineOptions
from edgellm.store.bundle import open_bundle

pytestmark = [
    needs_spill,
    pytest.mark.skipif(library() is None, reason="installed without a compiler"),
]

TOKENS = [7, *((7 * i + i // 11) % 250 for i in range(780))]
ANSWER: dict[str, Any] = {"temperature": 0, "max_tokens": 20, "ignore_eos": True, "logprobs": 1}


def sealed_pool(llm: LLM) -> SealedBlocks:
    (pool,) = (g.blocks for g in llm.engine.cache.groups if isinstance(g.blocks, SealedBlocks))
    return pool


@pytest.mark.parametrize("format", SEALED)
def test_answers_are_the_same_after_all_blocks_left_memory(
    format: str, folder: str, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"kv_format": format, "ctx_size": 1024}
    llm, plain = load(folder, kv_spill=on_disk(tmp_path), **options), load(folder, **options)
    sessions = llm.session(), plain.session()
    for part in (TOKENS[:600], TOKENS[600:700], TOKENS[700:]):
        for session in sessions:
            session.append(part)
        found, expected = (session.generate(**ANSWER) for session in sessions)
        assert found.tokens == expected.tokens
        assert found.logprobs == expected.logprobs
        take_back(sealed_pool(llm))
    assert llm.generate(TOKENS[:600], **ANSWER).stats.cached_tokens > 384
    assert resident(sealed_pool(llm)) > 0
    assert list(tmp_path.iterdir()) == []


def test_blocks_in_a_file_are_not_counted_as_memory(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = open_bundle(Path(folder))
    config = replace(bundle.config, context_length=1 << 20)
    bundle = replace(bundle, manifest=replace(bundle.manifest, config=config))
    memory = type("Memory", (), {"total": 1 << 29, "available": 1 << 29})
    monkeypatch.setattr(psutil, "virtual_memory", memory)
    options = EngineOptions(kv_format="k4v4")
    spilled = replace(options, kv_spill=tmp_path)
    here, there = (estimate(bundle, each, select(each)) for each in (options, spilled))
    assert here.ctx_size < there.ctx_size == 1 << 20
    assert here.spilled == 0
    whole = estimate(bundle, replace(options, ctx_size=1 << 20), select(options))
    assert there.kv_cache + there.spilled == whole.kv_cache
    assert there.kv_cache < whole.kv_cache // 2
    assert draft_options(bundle, spilled, ctx_size=1024).kv_spill == tmp_path


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_process_refuses(folder: str, tmp_path: Path) -> None:
    """It would write into the blocks of its parent."""
    llm = load(folder, kv_format="k4v4", ctx_size=1024, kv_spill=on_disk(tmp_path))
    expected = llm.generate(TOKENS, **ANSWER).tokens

    def in_child() -> str:
        try:
            return str(llm.generate(TOKENS[1:], **ANSWER).tokens)
        except OptionError as error:
            return str(error)

    until(lambda: is_resting(llm))
    assert "load the model in the new process" in forked(in_child)
    assert llm.generate(TOKENS, **ANSWER).tokens == expected


@pytest.mark.parametrize("format", ["int8", "f32"])
def test_formats_without_packed_blocks_are_refused(format: str, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="take one of k8v4, k4v4, k4v2, or leave out"):
        EngineOptions(kv_format=format, kv_spill=tmp_path)  # type: ignore[arg-type]


def test_a_folder_that_is_missing_ends_the_load(folder: str, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"`kv_spill` .*: No such file or directory"):
        load(folder, kv_format="k4v4", kv_spill=tmp_path / "none")
    assert os.listdir(tmp_path) == []
