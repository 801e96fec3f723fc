"""KV blocks that outlive a process, and everything that can happen to their files."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from inspection import until_kept
from waiting import until

from edgellm.cache.block_store import packed_size
from edgellm.cache.disk_cache import DiskCache
from edgellm.errors import OptionError
from edgellm.llm import LLM, load
from edgellm.results import Completion

PROMPT = [(7 * i) % 50 + 3 for i in range(300)]
FULL_BLOCKS = 256


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "kv"


@pytest.fixture
def start(tiny_model: Path, folder: Path) -> Callable[..., LLM]:
    """Load the model anew, as another process would."""

    def run(**options: Any) -> LLM:
        return load(str(tiny_model), kv_cache_dir=folder, **options)

    return run


def ask(llm: LLM, tokens: list[int] = PROMPT) -> Completion:
    with llm.session() as session:
        session.append(tokens)
        answer = session.generate(max_tokens=8, temperature=0, ignore_eos=True)
    until_kept(llm)
    return answer


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.kv"))


def test_a_prefix_is_found_after_a_restart(start: Callable[..., LLM], folder: Path) -> None:
    cold = ask(start())
    assert cold.stats.cached_tokens == 0
    assert len(files(folder)) == 2
    warm = ask(start())
    assert warm.stats.cached_tokens == FULL_BLOCKS
    assert warm.tokens == cold.tokens
    longer = ask(start(), PROMPT[:200])
    assert longer.stats.cached_tokens == 128


def test_memory_comes_before_the_disk(start: Callable[..., LLM]) -> None:
    ask(start())
    llm = start()
    ask(llm)
    assert ask(llm).stats.cached_tokens == len(PROMPT) - 1


def test_another_format_or_back_end_has_blocks_of_its_own(start: Callable[..., LLM]) -> None:
    ask(start())
    assert ask(start(kv_format="f16")).stats.cached_tokens == 0
    other = start(prefill="cpu", precision="f32", decode="reference")
    assert ask(other).stats.cached_tokens == 0


def test_blocks_of_another_layout_are_not_read(
    start: Callable[..., LLM], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr("edgellm.engine.loaded_model.LAYOUT_VERSION", 1)
        ask(start())
    assert ask(start()).stats.cached_tokens == 0
    assert len(files(folder)) == 4


def cut(path: Path, _: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flip(path: Path, _: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def empty(path: Path, _: Path) -> None:
    path.write_bytes(b"")


def other_block(path: Path, other: Path) -> None:
    shutil.copy(other, path)


def another_version(path: Path, _: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"edgellm kv 1", b"edgellm kv 2", 1))


@pytest.mark.parametrize("damage", [cut, flip, empty, other_block, another_version])
def test_damaged_files_are_not_read(
    start: Callable[..., LLM], folder: Path, damage: Callable[[Path, Path], None]
) -> None:
    ask(start(), PROMPT[::-1])
    (*others,) = files(folder)
    cold = ask(start())
    for path in set(files(folder)) - set(others):
        damage(path, others[0])
    again = ask(start())
    assert again.tokens == cold.tokens
    assert again.stats.cached_tokens == 0
    # the first one was written anew; only now is the second one read, deleted and written anew
    assert ask(start()).stats.cached_tokens == 128
    assert ask(start()).stats.cached_tokens == FULL_BLOCKS


def test_a_folder_of_another_model(
    start: Callable[..., LLM], make_model: Callable[..., Path], folder: Path, edgellm_home: Path
) -> None:
    ask(load(str(make_model(initializer_range=0.2)), kv_cache_dir=folder))
    assert ask(start()).stats.cached_tokens == 0
    assert len(files(folder)) == 4


@pytest.mark.slow
def test_the_budget_holds_and_the_last_used_stay(start: Callable[..., LLM], folder: Path) -> None:
    ask(start())
    size = files(folder)[0].stat().st_size
    budget = max(1 << 20, 6 * size)
    llm = start(kv_cache_bytes=budget)
    for prompt in range(budget // size + 10):
        ask(llm, [prompt % 300 + 3, prompt // 300 + 3, *PROMPT[:130]])
        assert sum(file.stat().st_size for file in files(folder)) <= budget
    assert ask(start(), [prompt % 300 + 3, prompt // 300 + 3, *PROMPT[:130]]).stats.cached_tokens
    assert not ask(start()).stats.cached_tokens


def test_the_folder_is_not_looked_through_for_each_block(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But again when other processes may have filled it meanwhile."""
    looks: list[str] = []
    glob = Path.glob

    def counted(path: Path, pattern: str) -> Iterator[Path]:
        looks.append(pattern)
        return glob(path, pattern)

    disk, other = (DiskCache(folder, budget=160_000) for _ in range(2))
    names = [bytes([i]) * 32 for i in range(60)]
    for name in names[:9]:
        disk.write(name, bytes(900))
    monkeypatch.setattr(Path, "glob", counted)
    for name in names:
        other.write(name, bytes(900))
    assert len(looks) == 1 + 60 * 980 // 10_000
    for name in range(200):
        disk.write(bytes([name, 1]) * 16, bytes(900))
        assert sum(file.stat().st_size for file in folder.iterdir()) <= 170_000


def test_a_full_disk_is_no_error(
    start: Callable[..., LLM], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_half(path: Path, data: bytes) -> int:
        with path.open("wb") as file:
            file.write(data[: len(data) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", write_half)
        cold = ask(start())
    assert list(folder.iterdir()) == []
    assert ask(start()).tokens == cold.tokens


def test_a_folder_that_cannot_be_made(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OptionError, match="kv_cache_dir"):
        load(str(tiny_model), kv_cache_dir=tmp_path / "file" / "kv")


_ENDLESS = """
import sys
from edgellm.llm import load
llm = load(sys.argv[1], kv_cache_dir=sys.argv[2], cache_size=1024)
print("go", flush=True)
for i in range(100000):
    with llm.session() as session:
        session.append([i % 300 + 3, i // 300 + 3, *([5, 6, 7] * 90)])
        session.generate(max_tokens=1)
"""


@pytest.mark.slow
def test_killed_while_writing(start: Callable[..., LLM], tiny_model: Path, folder: Path) -> None:
    """Two processes write into one folder and are killed; every file that there is, is whole."""
    start()
    command = [sys.executable, "-c", _ENDLESS, str(tiny_model), str(folder)]
    for count in (1, 6):
        writers = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(2)]
        for writer in writers:
            assert writer.stdout is not None
            writer.stdout.readline()
        until(lambda count=count: len(files(folder)) >= count)
        for writer in writers:
            writer.send_signal(signal.SIGKILL)
            writer.wait()
            assert writer.stdout is not None
            writer.stdout.close()
    found = files(folder)
    assert found
    llm = start()
    disk, cache = llm.engine.cache.disk, llm.engine.cache
    assert disk is not None
    size = packed_size(cache.groups[0].blocks)
    assert all(disk.read(bytes.fromhex(path.stem), size=size) is not None for path in found)
    assert cache.used_blocks == 0
    # what a killed process left unfinished goes when it is old
    left = folder / ".partial-left"
    left.write_bytes(b"")
    os.utime(left, (0, 0))
    start()
    assert not left.exists()


def test_what_is_pinned_is_not_deleted(folder: Path) -> None:
    disk = DiskCache(folder, budget=5000)
    names = [bytes([i]) * 32 for i in range(9)]
    with disk.pin(names[:2]):
        for name in names:
            assert disk.write(name, bytes(1000))
        assert len(files(folder)) == 9
        with disk.pin(names[2:3]):
            pass
        assert [disk.has(name) for name in names] == [True] * 2 + [False] * 5 + [True] * 2
    assert [disk.has(name) for name in names] == [True] * 2 + [False] * 5 + [True] * 2
    disk.write(b"x" * 32, bytes(1000))
    assert sum(file.stat().st_size for file in files(folder)) <= 5000
    assert not disk.has(names[0])
