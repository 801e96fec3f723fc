"""Computed prefixes on a disk that is taken away, and a server that is killed while it writes."""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving import Running, running, served, start, until

from edgellm.cache.disk_cache import DiskCache
from edgellm.kernels.kv_blocks import BLOCK
from edgellm.llm import load
from edgellm.serve import ModelPool, ServeOptions

PATH = "/v1/completions"


def words(seed: int, length: int) -> str:
    return "".join(random.Random(seed).choices("abcdefgh ", k=length))


def asked(seed: int) -> dict[str, Any]:
    return {"prompt": words(seed, 700), "max_tokens": 20, "seed": seed, "ignore_eos": True}


@pytest.fixture
def cached(tiny_model: Path, tmp_path: Path) -> Iterator[Running]:
    """A server with computed prefixes in a folder, and room for few of them in memory."""
    llm = load(
        str(tiny_model),
        ctx_size=8 * BLOCK,
        cache_size=8 * BLOCK,
        kv_cache_dir=tmp_path / "cache",
    )
    if not llm.engine.decoder.exact_rows:
        pytest.skip("needs the native kernels")
    pool = ModelPool([served(llm)])
    with running(pool, llm, ServeOptions(port=0, grace_s=1)) as server:
        yield server


def take_away(folder: Path) -> None:
    """At once: files may be on their way into it."""
    shutil.rmtree(folder.rename(folder.with_name("taken away")))


def answers(server: Running, seeds: range) -> list[str]:
    """Of each prompt, one after the other: none of them is in memory when it comes again."""
    replies = [server.post(PATH, asked(seed)) for seed in seeds]
    assert {reply.status_code for reply in replies} == {200}
    return [reply.json()["choices"][0]["text"] for reply in replies]


def until_kept(folder: Path, prompts: int) -> None:
    """They are written behind the reply."""
    until(lambda: len(list(folder.glob("*.kv"))) >= 5 * prompts)


def from_cache(server: Running) -> int:
    return server.answering.metrics.cached_tokens


def test_the_folder_is_taken_away(cached: Running, tmp_path: Path) -> None:
    """Its answers are computed again, and it is filled again."""
    folder = tmp_path / "cache"
    first = answers(cached, range(4))
    until_kept(folder, 4)
    before = from_cache(cached)
    assert answers(cached, range(4)) == first
    assert from_cache(cached) >= before + 3 * 5 * BLOCK
    take_away(folder)
    assert answers(cached, range(4)) == first
    until_kept(folder, 4)
    before = from_cache(cached)
    assert answers(cached, range(4)) == first
    assert from_cache(cached) >= before + 3 * 5 * BLOCK


def test_something_else_is_in_its_place(
    cached: Running, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = answers(cached, range(3))
    until_kept(tmp_path / "cache", 3)
    take_away(tmp_path / "cache")
    (tmp_path / "cache").write_text("not a folder")
    assert answers(cached, range(3)) == first
    until(lambda: "not all was kept" in caplog.text)
    assert (tmp_path / "cache").read_text() == "not a folder"


def test_files_vanish_between_two_looks(cached: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    first = answers(cached, range(3))
    read, chance = DiskCache.read, random.Random(0)

    def vanishing(self: DiskCache, name: bytes, *, size: int) -> memoryview | None:
        return read(self, name, size=size) if chance.random() < 0.7 else None

    monkeypatch.setattr(DiskCache, "read", vanishing)
    for _ in range(5):
        assert answers(cached, range(3)) == first


def test_a_disk_that_fails(
    cached: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Reading as well as writing; nobody is told of it but the log."""
    first = answers(cached, range(3))

    def fail(*_: object, **__: object) -> bytes:
        raise OSError(5, "Input/output error", "/home/user/secret")

    monkeypatch.setattr(Path, "read_bytes", fail)
    monkeypatch.setattr(Path, "write_bytes", fail)
    assert answers(cached, range(3)) == first
    new = cached.post(PATH, asked(99))
    assert new.status_code == 200
    until(lambda: "Input/output error" in caplog.text)


@pytest.mark.slow
def test_killed_while_it_writes_and_started_again(tiny_model: Path, tmp_path: Path) -> None:
    """Whatever the moment was, what is in the folder is whole, and answers are the same bits."""
    folder = tmp_path / "cache"
    options = ("--kv-cache-dir", str(folder), "--ctx-size", str(8 * BLOCK))
    expected: dict[int, str] = {}
    known = range(6)
    for life in range(4):
        with (
            start(tiny_model, *options) as (process, url),
            httpx.Client(base_url=url, timeout=60, trust_env=False) as client,
            ThreadPoolExecutor(8) as threads,
        ):

            def ask(seed: int, client: httpx.Client = client) -> dict[str, Any]:
                reply = client.post(PATH, json=asked(seed))
                assert reply.status_code == 200
                body: dict[str, Any] = reply.json()
                return body

            for seed, body in zip(known, threads.map(ask, known), strict=True):
                cached = body["usage"]["prompt_tokens_details"]["cached_tokens"]
                text = body["choices"][0]["text"]
                assert expected.setdefault(seed, text) == text
                assert cached >= 5 * BLOCK if life else cached < BLOCK
            until_kept(folder, len(known))
            others = [
                threads.submit(ask, seed) for seed in range(100 * life + 100, 100 * life + 140)
            ]
            time.sleep(0.1 + 0.15 * life)  # in the middle of them
            process.kill()
            assert process.wait(10) != 0
            for other in others:
                assert other.exception() is None or isinstance(other.exception(), httpx.HTTPError)
