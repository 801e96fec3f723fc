"""Pools of sealed blocks in a file: the arrays of one in memory, and folders that are refused."""

from __future__ import annotations

import errno
import gc
import os
import shutil
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from spill import needs_spill, on_disk

from edgellm import OptionError
from edgellm.cache.spilled_pool import spilled_pool
from edgellm.kernels.kv_blocks import SEALED, KVFormat, SealedBlocks
from edgellm.kernels.sealed_blocks import allocate_sealed

pytestmark = needs_spill


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    return on_disk(tmp_path)


def in_memory(blocks: int, format: KVFormat = "k4v2") -> SealedBlocks:
    return allocate_sealed(format=format, blocks=blocks, layers=3, kv_heads=2, head_dim=24)


@pytest.mark.parametrize("format", SEALED)
def test_blocks_are_written_copied_and_cleared_as_in_memory(format: KVFormat, disk: Path) -> None:
    pools = in_memory(5, format), spilled_pool(in_memory(1, format), blocks=5, folder=disk)
    assert list(disk.iterdir()) == []
    rng = np.random.default_rng(1)
    for each, other in zip(*(pool.arrays for pool in pools), strict=True):
        assert (each.shape, each.dtype, each.strides) == (other.shape, other.dtype, other.strides)
        assert other.flags.c_contiguous
        assert other.flags.aligned
        each[:] = other[:] = rng.integers(0, 200, each.shape)
    for pool in pools:
        pool.clear([3])
        pool.copy_rows(1, 4, 128)
        pool.copy_rows(0, 1, 128)
    for block in range(5):
        for each, other in zip(*(pool.first_rows(block, 128) for pool in pools), strict=True):
            np.testing.assert_array_equal(each, other)
    assert pools[0].nbytes == pools[1].nbytes


def test_the_file_has_all_its_blocks_and_goes_with_the_pool(disk: Path) -> None:
    pool = spilled_pool(in_memory(1), blocks=40, folder=disk)
    (file,) = nameless(disk)
    assert file.st_size == pool.nbytes == 40 * in_memory(1).nbytes
    assert 512 * file.st_blocks >= file.st_size
    del pool
    gc.collect()
    assert nameless(disk) == []


def nameless(folder: Path) -> list[os.stat_result]:
    """Open files of a folder that it does not list."""
    numbers = (int(name) for name in os.listdir("/proc/self/fd"))
    return [os.fstat(number) for number in numbers if at(number).startswith(f"{folder}/")]


def at(number: int) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{number}")
    except OSError:
        return ""  # of the listing itself


def refused(folder: Path, *, blocks: int = 3) -> str:
    with pytest.raises(OptionError, match="`kv_spill`") as error:
        spilled_pool(in_memory(1), blocks=blocks, folder=folder)
    return str(error.value)


def test_folders_that_cannot_be_written(disk: Path) -> None:
    (disk / "file").touch()
    size = 3 * in_memory(1).nbytes
    for name, reason in (("file", "Not a directory"), ("none", "No such file or directory")):
        text = refused(disk / name)
        assert f"{disk / name}: {reason}; name a folder that can be written" in text
        assert f"{size} bytes free" in text
    assert [path.name for path in disk.iterdir()] == ["file"]


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="needs a file system in memory")
def test_a_folder_in_memory(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to("/dev/shm")
    for folder in (Path("/dev/shm"), link):
        assert f"`kv_spill` {folder} is in memory itself" in refused(folder)


class Usage(NamedTuple):
    free: int


def test_a_disk_without_room(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not begun where the disk says so before; given back where it fills up meanwhile."""
    size = 3 * in_memory(1).nbytes
    usage = shutil.disk_usage
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(size - 1))
    text = refused(disk)
    assert f"{size} bytes are needed, and {size - 1} are free" in text
    assert "choose a smaller `ctx_size`" in text
    monkeypatch.setattr(shutil, "disk_usage", usage)

    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    assert "No space left on device" in refused(disk)
    assert nameless(disk) == list(disk.iterdir()) == []


def test_a_system_that_reserves_no_room(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "posix_fallocate")
    assert "Python reserves no room for files" in refused(disk)
    assert list(disk.iterdir()) == []
