"""Attention over latents on the C++ kernels: all that the cache does with a sequence."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from matrix import usable
from tiny_models import make, save_tokenizer

from edgellm.cache.groups import CacheGroup, cache_bytes, cache_groups
from edgellm.cli.main import edgellm
from edgellm.errors import UnsupportedModelError
from edgellm.export import export
from edgellm.kernels.kv_blocks import BLOCK
from edgellm.llm import LLM, load

pytestmark = pytest.mark.skipif(not usable("C++"), reason="latents need the C++ kernels")

TOKENS = np.random.default_rng(3).integers(3, 256, 600).tolist()
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}
Start = Callable[..., LLM]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("latents")
    make("glm4_moe_lite", folder, max_position_embeddings=1024, vocab_size=320)
    save_tokenizer(folder)
    return export(folder, folder / "bundle", name="tiny", source=str(folder)).path


@pytest.fixture
def start(bundle: Path) -> Iterator[Start]:
    opened: list[LLM] = []

    def begin(**options: Any) -> LLM:
        opened.append(load(str(bundle), ctx_size=1024, **options))
        return opened[-1]

    yield begin
    for llm in opened:
        llm.close()


def test_the_cache_holds_each_latent_once(start: Start) -> None:
    config = start().engine.bundle.config
    (group,) = cache_groups(config)
    assert isinstance(group, CacheGroup)
    assert (group.kv_heads, group.head_dim, group.latent) == (1, 16, 64)
    two, one = (cache_bytes(config, format="f16", ctx_size=1024, blocks=n) for n in (17, 16))
    assert two - one == BLOCK * 3 * (16 + 64) * 2


@pytest.mark.parametrize("kv_format", ["int8", "f16"])
def test_rewound_forked_and_continued_is_as_new(start: Start, kv_format: str) -> None:
    llm = start(kv_format=kv_format)
    with llm.session() as session:
        session.append(TOKENS[:400])
        session.generate(**GREEDY)
        fork = session.fork()
        session.rewind(150)
        session.append(TOKENS[500:])
        continued = session.generate(**GREEDY).tokens
        assert fork.generate(**GREEDY).stats.cached_tokens >= 400
    fresh = start(kv_format=kv_format).generate([*TOKENS[:150], *TOKENS[500:]], **GREEDY)
    assert continued == fresh.tokens


def test_a_prefix_is_found_again_and_outlives_its_process(start: Start, tmp_path: Path) -> None:
    llm = start()
    first = llm.generate(TOKENS[:400], **GREEDY).tokens
    with llm.session() as session:
        session.append([*TOKENS[:400], *first, 5])
        again = session.generate(**GREEDY)
        session.save(tmp_path / "saved")
        expected = session.generate(**GREEDY).tokens
    assert again.stats.cached_tokens >= 400
    assert again.tokens == start().generate([*TOKENS[:400], *first, 5], **GREEDY).tokens
    with start().load_session(tmp_path / "saved") as session:
        assert session.generate(**GREEDY).tokens == expected


def test_a_full_context_goes_on(start: Start) -> None:
    """Keys are turned to other positions, and latents stay."""
    with start().session() as session:
        session.append([*TOKENS, *TOKENS[:400]])
        options = {**GREEDY, "max_tokens": 40, "context_policy": "shift", "keep": 4}
        answered = session.generate(**options)
    assert len(answered.tokens) == 40
    assert answered.stats.dropped_tokens > 0


def test_the_self_test_says_what_it_lacks(bundle: Path) -> None:
    result = CliRunner().invoke(edgellm, ["doctor", str(bundle)])
    assert "models with latents in place of K and V (glm4_moe_lite) yet" in result.output
    assert isinstance(result.exception, SystemExit | None)


def test_graphs_are_refused(start: Start) -> None:
    with pytest.raises(UnsupportedModelError, match=r"it has .*attention over latents \(MLA\)"):
        start(decode="portable")
