"""A model whose layers see 100 positions, or all: what is computed, kept, found and moved."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from inspection import cached_prefix, until_kept, used_blocks
from matrix import ALLOWED, BACKENDS, CHUNK, usable
from tiny_models import logits, make, save_tokenizer

from edgellm.cache.group_table import GroupTable
from edgellm.engine.one_sequence import Hooks, compute_prompt, compute_tokens
from edgellm.export import export
from edgellm.llm import LLM, load

WINDOW, LENGTH, DECODED = 100, 700, 4
SIZES = {"sliding_window": WINDOW, "max_position_embeddings": 1024, "vocab_size": 320}
TOKENS = np.random.default_rng(3).integers(3, 256, LENGTH + 300).tolist()
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
Start = Callable[..., LLM]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    folder = tmp_path_factory.mktemp("windows")
    whole = make("gemma3_text", folder, **SIZES)
    save_tokenizer(folder)
    for precisions in (("f32", "int4"), ("packed",)):
        export(
            folder,
            folder / "bundle",
            name="tiny",
            source=str(folder),
            precisions=precisions,
            chunk_sizes=None if (folder / "bundle").exists() else (CHUNK, 64),
        )
    return whole, folder / "bundle"


@pytest.fixture
def start(model: tuple[Any, Path]) -> Start:
    return lambda **options: load(str(model[1]), ctx_size=1024, **options)


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that a window has passed hold NaN, or codes with a scale of NaN."""
    passed = GroupTable.pass_window

    def pass_and_poison(table: GroupTable, length: int) -> None:
        before, store = table.first, table.store
        passed(table, length)
        for block in table.ids[before : table.first]:
            if store.pool.references(block) == 0:
                for array in store.blocks.block(block):
                    array[...] = 77 if array.dtype == np.int8 else np.nan

    monkeypatch.setattr(GroupTable, "pass_window", pass_and_poison)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(
    ("backend", "schedule"),
    [
        ("f32", "out-of-order"),
        ("int4", "serial"),
        *([("C++", "serial")] if usable("C++") else []),
    ],
)
def test_long_prompts_are_what_transformers_computes(
    model: tuple[Any, Path], start: Start, backend: str, schedule: str
) -> None:
    tokens = TOKENS[: LENGTH + DECODED]
    expected = logits(model[0], tokens)[LENGTH - 1 :]
    chosen = {} if backend == "C++" else {"schedule": schedule}
    with start(**BACKENDS[backend][1], **chosen) as llm:
        sequence = llm.engine.cache.sequence()
        rows = [compute_prompt(llm.engine.prefill, tokens[:LENGTH], sequence, Hooks())]
        rows += [
            compute_tokens(llm.engine.decoder, [token], sequence)[0] for token in tokens[LENGTH:]
        ]
        used = {group.group.window: group.pool.used for group in llm.engine.cache.groups}
    assert used == {WINDOW: 2, None: 6}
    assert np.abs(np.stack(rows) - expected).max() < ALLOWED[backend] * np.abs(expected).max()


def answer(llm: LLM, tokens: list[int]) -> tuple[int, ...]:
    with llm.session() as session:
        session.append(tokens)
        return session.generate(**GREEDY).tokens


@pytest.mark.usefixtures("poisoned")
@pytest.mark.skipif(not usable("C++"), reason="decode is native: needs a compiler")
def test_prompts_on_another_device_while_others_decode(start: Start) -> None:
    prompts = [TOKENS[i : i + length] for i, length in enumerate((700, 30, 410, 150))]
    options = {"prefill": "cpu", "precision": "f32", "decode": "native", "schedule": "in-order"}
    alone = start(scheduling="serial", **options)
    expected = [alone.generate(each, **GREEDY).tokens for each in prompts]
    with start(scheduling="two_devices", cache_size=8192, **options) as llm:
        assert llm.engine.scheduling == "two_devices"
        found = {each.index: each.result().tokens for each in llm.batch(prompts, **GREEDY)}
        assert [found[index] for index in range(4)] == expected
        assert used_blocks(llm) == 0


@pytest.mark.parametrize("length", [690, 640, 300, 90])
def test_rewound_and_continued_is_as_if_it_had_been_new(start: Start, length: int) -> None:
    llm = start()
    with llm.session() as session:
        session.append(TOKENS[:LENGTH])
        session.generate(**GREEDY)
        fork = session.fork()
        session.rewind(length)
        session.append(TOKENS[900:])
        found = session.generate(**GREEDY).tokens
        assert fork.generate(**GREEDY).stats.cached_tokens >= LENGTH
    assert found == answer(start(), [*TOKENS[:length], *TOKENS[900:]])


def test_a_prefix_is_found_again(start: Start) -> None:
    llm = start()
    first = answer(llm, TOKENS[:LENGTH])
    with llm.session() as session:
        session.append([*TOKENS[:LENGTH], *first, 5, 6])
        again = session.generate(**GREEDY)
    assert again.stats.cached_tokens >= LENGTH
    assert again.tokens == answer(start(), [*TOKENS[:LENGTH], *first, 5, 6])


def test_sessions_are_saved_without_what_windows_have_passed(start: Start, tmp_path: Path) -> None:
    llm = start()
    with llm.session() as session:
        session.append(TOKENS[:LENGTH])
        session.generate(temperature=0, max_tokens=0)
        session.save(tmp_path / "saved")
        expected = session.generate(**GREEDY).tokens
    other = start()
    with other.load_session(tmp_path / "saved") as session:
        assert session.cached == LENGTH
        answered = session.generate(**GREEDY)
    assert answered.tokens == expected
    assert answered.stats.cached_tokens == LENGTH - 1
    whole, windowed = (
        sum(array[0].nbytes for array in group.blocks.arrays)
        for group in sorted(other.engine.cache.groups, key=lambda g: g.group.window or 0)
    )
    assert (tmp_path / "saved").stat().st_size < 6 * whole + 3 * windowed + 8000


def test_blocks_on_disk_outlive_the_process(start: Start, tmp_path: Path) -> None:
    before = start(kv_cache_dir=tmp_path)
    expected = answer(before, TOKENS[:LENGTH])
    until_kept(before)
    llm = start(kv_cache_dir=tmp_path)
    with llm.session() as session:
        session.append(TOKENS[:LENGTH])
        assert cached_prefix(llm, TOKENS[:LENGTH]) == 640
        answered = session.generate(**GREEDY)
    assert answered.tokens == expected
    assert answered.stats.cached_tokens == 640


@pytest.mark.parametrize("keep", [4, 700])
def test_a_full_context_goes_on(start: Start, keep: int) -> None:
    """Past its window nothing is lost: those who keep little have what their windows see."""
    llm = start()
    with llm.session() as session:
        session.append(TOKENS[:1000])
        answered = session.generate(
            temperature=0, max_tokens=80, ignore_eos=True, context_policy="shift", keep=keep
        )
        assert len(answered.tokens) == 80
        assert answered.stats.dropped_tokens > 0
        assert session.cached >= len(session.tokens) - 1
        again = session.generate(**GREEDY)
    assert len(again.tokens) == 12


def test_drafts_change_nothing(start: Start) -> None:
    tokens = [*TOKENS[:300], *TOKENS[:300]]
    answers = []
    for speculate in (False, True):
        llm = start()
        with llm.session() as session:
            session.append(tokens)
            answered = session.generate(
                temperature=0, max_tokens=100, ignore_eos=True, speculate=speculate
            )
            answers.append(answered.tokens)
    assert answers[0] == answers[1]
