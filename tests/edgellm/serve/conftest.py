"""Servers of the tiny model."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import inspection
import openai
import pytest
from browser import CHROMIUM, Browser, browser
from loads import Loads
from requirements import unavailable
from serving import Running, running, served
from tokenizers import Tokenizer
from waiting import until

from edgellm.kernels.kv_blocks import BLOCK
from edgellm.llm import LLM, load
from edgellm.serve import ModelPool, ServeOptions

MARKERS = ("prefix", "suffix", "middle", "pad")
FIM_TOKENS = [f"<|fim_{name}|>" for name in MARKERS] + ["<|repo_name|>", "<|file_sep|>"]


def loaded(folder: Path) -> LLM:
    llm = load(str(folder), ctx_size=8 * BLOCK, cache_size=64 * BLOCK)
    if not llm.engine.decoder.exact_rows:
        unavailable("native", "needs the native kernels")
    return llm


@pytest.fixture(scope="session")
def tiny(tiny_model: Path) -> LLM:
    return loaded(tiny_model)


@pytest.fixture(scope="session")
def tiny_fim(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """The tiny model with the infill tokens of Qwen2.5-Coder, which it does not understand."""
    folder = tmp_path_factory.mktemp("fim") / "model"
    shutil.copytree(tiny_model, folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(FIM_TOKENS)
    tokenizer.save(str(folder / "tokenizer.json"))
    return loaded(folder)


@pytest.fixture(scope="module")
def fim_server(tiny_fim: LLM) -> Iterator[Running]:
    """A server of that model, under the names that editors call theirs."""
    pool = ModelPool([served(tiny_fim, id) for id in ("fim", "m", "qwen2.5-coder")])
    with running(pool, tiny_fim, ServeOptions(port=0, grace_s=1)) as one:
        yield one


@pytest.fixture
def loads(tiny: LLM) -> Loads:
    return Loads(tiny)


@pytest.fixture
def serving(tiny: LLM) -> Iterator[Callable[..., Running]]:
    """Starts servers of the tiny model: `serving(api_keys=("a",))`."""
    with ExitStack() as stack:

        def start(**options: Any) -> Running:
            chosen = ServeOptions(**{"port": 0, "grace_s": 1, **options})
            return stack.enter_context(running(ModelPool([served(tiny)]), tiny, chosen))

        yield start


@pytest.fixture(scope="module")
def server(tiny: LLM) -> Iterator[Running]:
    """A server of the tiny model, for all tests of a file."""
    options = ServeOptions(port=0, grace_s=1)
    with running(ModelPool([served(tiny)]), tiny, options) as one:
        yield one


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(autouse=True)
def nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """No test leaves an answer that is on its way, or a block that is held."""
    yield
    if "tiny" not in request.fixturenames and "server" not in request.fixturenames:
        return
    llm: LLM = request.getfixturevalue("tiny")

    def idle() -> bool:
        on_their_way = inspection.live(llm) or inspection.submitted(llm)
        return not on_their_way and inspection.used_blocks(llm) == 0

    until(idle)


@pytest.fixture(scope="session")
def chromium() -> None:
    if CHROMIUM is None:
        unavailable("chromium", "no chromium (apt-get install chromium)")


@pytest.fixture
def tab(server: Running, chromium: None, tmp_path: Path) -> Iterator[Browser]:
    with browser(tmp_path / "profile") as tab:
        tab.open(server.url)
        tab.until("$('model').value")
        yield tab
