"""Sessions that are saved, and restored elsewhere."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from inspection import cached_prefix, until_kept

from edgellm.cache.session_file import SavedSession, write_session
from edgellm.errors import OptionError, SessionFileError
from edgellm.llm import LLM, load
from edgellm.session import Session

TOKENS = [(7 * i) % 50 + 3 for i in range(200)]


@pytest.fixture
def tiny(tiny_model: Path) -> LLM:
    return load(str(tiny_model))


def greedy(llm: LLM, session: Session, count: int = 6) -> tuple[int, ...]:
    return session.generate(max_tokens=count, temperature=0, ignore_eos=True).tokens


def test_goes_on_in_another_process(tiny: LLM, tiny_model: Path, tmp_path: Path) -> None:
    session = tiny.session()
    session.append(TOKENS)
    greedy(tiny, session)
    session.save(tmp_path / "session")
    tokens = session.tokens
    expected = greedy(tiny, session)
    other = load(str(tiny_model))
    restored = other.load_session(tmp_path / "session")
    assert restored.tokens == tokens
    assert restored.cached == len(tokens) - 1
    assert greedy(other, restored) == expected
    assert restored.stats is not None
    assert restored.stats.prefill == {other.engine.prefill.placement.provider: 1}


@pytest.mark.parametrize("backends", [("cpu", "portable"), ("cpu", "reference")])
def test_goes_on_in_another_back_end(
    tiny: LLM, tiny_model: Path, tmp_path: Path, backends: tuple[str, str]
) -> None:
    session = tiny.session()
    session.append(TOKENS)
    greedy(tiny, session)
    session.save(tmp_path / "session")
    other = load(str(tiny_model), prefill=backends[0], decode=backends[1])
    restored = other.load_session(tmp_path / "session")
    assert restored.cached == len(TOKENS) + 5
    greedy(other, restored)
    assert restored.tokens[: len(session.tokens)] == session.tokens
    restored.close()
    # they are not its own bits, but where it is what a user gets
    own = other.engine.selection == tiny.engine.selection
    assert cached_prefix(other, session.tokens) == own * len(session.tokens)


def test_the_same_back_end_finds_what_was_restored(
    tiny: LLM, tiny_model: Path, tmp_path: Path
) -> None:
    session = tiny.session()
    session.append(TOKENS)
    greedy(tiny, session)
    session.save(tmp_path / "session")
    other = load(str(tiny_model))
    other.load_session(tmp_path / "session").close()
    assert cached_prefix(other, session.tokens) == len(TOKENS) + 5


def test_an_empty_session(tiny: LLM, tmp_path: Path) -> None:
    tiny.session().save(tmp_path / "session")
    restored = tiny.load_session(tmp_path / "session")
    assert restored.tokens == ()
    restored.append(TOKENS[:3])
    assert len(greedy(tiny, restored)) == 6


def saved(llm: LLM, path: Path) -> Path:
    with llm.session() as session:
        session.append(TOKENS)
        greedy(llm, session, 1)
        session.save(path)
    return path


def test_damaged_files(tiny: LLM, tmp_path: Path) -> None:
    path = saved(tiny, tmp_path / "session")
    data = path.read_bytes()
    for damaged in (b"", data[:100], data[:-1], data[:500] + b"\0" + data[501:], b"x" * 999):
        if damaged == data:
            continue
        path.write_bytes(damaged)
        with pytest.raises(SessionFileError, match=r"damaged|not a session"):
            tiny.load_session(path)
    with pytest.raises(SessionFileError, match="No such file"):
        tiny.load_session(tmp_path / "nothing")


def test_what_does_not_fit_is_refused(
    tiny: LLM,
    tiny_model: Path,
    make_model: Callable[..., Path],
    tmp_path: Path,
    edgellm_home: Path,
) -> None:
    path = saved(tiny, tmp_path / "session")
    with pytest.raises(SessionFileError, match="`kv_format` int8"):
        load(str(tiny_model), kv_format="f16").load_session(path)
    with pytest.raises(SessionFileError, match="this is another model"):
        load(str(make_model(initializer_range=0.2))).load_session(path)
    write_session(path, SavedSession("model", "", "int4", [1], 0), b"")
    with pytest.raises(SessionFileError, match=r"is int4, .* allowed are int8, f16"):
        tiny.load_session(path)


def test_a_session_of_another_layout_is_refused(
    tiny: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved(tiny, tmp_path / "session")
    monkeypatch.setattr("edgellm.engine.loaded_model.LAYOUT_VERSION", 1)
    with pytest.raises(SessionFileError, match="this is another model"):
        tiny.load_session(path)
    monkeypatch.undo()
    path.write_bytes(path.read_bytes().replace(b"edgellm session 3", b"edgellm session 2", 1))
    with pytest.raises(SessionFileError, match="not a session that this edgellm saved"):
        tiny.load_session(path)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="may write everywhere")
def test_a_place_that_cannot_be_written(tiny: LLM, tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(OptionError, match="session"):
        tiny.session().save(tmp_path / "session")


def test_what_a_killed_save_has_left_is_deleted(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path\n"
        "from edgellm.store.home import replacing_file\n"
        "with replacing_file(Path(sys.argv[1])): os.kill(os.getpid(), signal.SIGKILL)"
    )
    for name in ("mine", "other"):
        subprocess.run([sys.executable, "-c", code, str(tmp_path / name)])
    for path in tmp_path.iterdir():
        os.utime(path, (0, 0))
    assert len(list(tmp_path.iterdir())) == 2
    write_session(tmp_path / "mine", SavedSession("model", "", "int8", [1], 0), b"")
    left = {path.name for path in tmp_path.iterdir()} - {"mine"}
    assert len(left) == 1  # of the other file


@pytest.mark.skipif(os.name != "posix", reason="permissions of POSIX")
def test_what_people_wrote_is_private(
    tiny: LLM, tiny_model: Path, tmp_path: Path, edgellm_home: Path
) -> None:
    path = saved(tiny, tmp_path / "session")
    tiny.prefix("docs", "some text")
    with_disk = load(str(tiny_model), kv_cache_dir=tmp_path / "kv")
    with_disk.generate(TOKENS, max_tokens=1)
    until_kept(with_disk)
    files = [path, *(edgellm_home / "prefixes").iterdir(), *(tmp_path / "kv").glob("*.kv")]
    assert len(files) == 3
    assert [file.stat().st_mode & 0o077 for file in files] == [0, 0, 0]
