"""Named texts: computed once, found again under their names."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from edgellm import ContextOverflowError, OptionError, TemplateError
from edgellm.kernels.native import library
from edgellm.llm import LLM, load
from edgellm.named_prefix import forget_prefix, kept_prefixes
from edgellm.text.template import ChatTemplate

DOCUMENT = "The lighthouse of Orle was built in 1843 by Maria Tende. " * 12
SYSTEM = "You answer in one short sentence. " * 10
Cli = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def bundle(tiny_model: Path) -> str:
    return str(load(str(tiny_model)).engine.bundle.path)


@pytest.fixture
def llm(bundle: str, edgellm_home: Path) -> LLM:
    return load(bundle, ctx_size=1024)


def test_a_document_is_there_after_a_restart(llm: LLM, bundle: str) -> None:
    question = "Who built the lighthouse?"
    sampling = llm.generation_options(temperature=0, max_tokens=8)
    with llm.prefix("orle", DOCUMENT) as document:
        tokens = document.tokens
        document.append(question)
        expected = document.generate(options=sampling).text
    other = load(bundle, ctx_size=1024)
    with other.prefix("orle") as document, document.fork() as asked:
        assert document.tokens == tokens
        assert document.cached == len(tokens)
        asked.append(question)
        answer = asked.generate(options=sampling)
        assert answer.text == expected
        assert answer.stats.cached_tokens == len(tokens)
    assert [(p.name, p.kind, p.tokens) for p, _ in kept_prefixes()] == [
        ("orle", "text", len(tokens))
    ]


def test_a_system_prompt_is_found_by_chats(llm: LLM, bundle: str) -> None:
    with llm.prefix("short", SYSTEM, system=True) as prefix:
        count = len(prefix.tokens)
    other = load(bundle, ctx_size=1024)
    with other.prefix("short", SYSTEM, system=True):
        answer = other.chat(system=SYSTEM, temperature=0, max_tokens=4).send("What is a list?")
    assert answer.stats.cached_tokens == count
    plain = load(bundle, ctx_size=1024)
    assert (
        plain.chat(system=SYSTEM, temperature=0, max_tokens=4).send("What is a list?").text
        == answer.text
    )


@pytest.mark.skipif(library() is None, reason="installed without a compiler")
@pytest.mark.parametrize("system", [False, True])
def test_a_condensed_text_is_condensed_after_a_restart(llm: LLM, bundle: str, system: bool) -> None:
    """A chat and a session go on from it; what is damaged is condensed again."""
    text = DOCUMENT
    with llm.prefix("orle", text, system=system, keep=0.5) as document:
        count = len(document.tokens)
        assert document.cached == count >= 512
    expected = answered(llm, text, system)
    again = load(bundle, ctx_size=1024)
    assert answered(again, text, system) == expected
    ((about, folder),) = kept_prefixes()
    assert about.keep == 0.5
    (folder / "session").write_bytes(b"damaged")
    assert answered(load(bundle, ctx_size=1024), text, system) == expected
    again.prefix("orle", text, system=system).close()  # all of it takes the place
    assert answered(load(bundle, ctx_size=1024), text, system) != expected


def answered(llm: LLM, text: str, system: bool) -> tuple[object, ...]:
    """An answer behind a kept text, all of which is found."""
    options = llm.generation_options(temperature=0, max_tokens=8, logprobs=1)
    with llm.prefix("orle") as session:
        count = len(session.tokens)
        if system:
            answer = llm.chat(system=text, session=session, options=options).send("Who built it?")
        else:
            session.append("Who built it? It was")
            answer = session.generate(options=options)
        assert answer.stats.cached_tokens == count
        return answer.text, answer.logprobs


def test_another_text_takes_the_place(llm: LLM) -> None:
    llm.prefix("orle", DOCUMENT).close()
    with llm.prefix("orle", "Another text.") as prefix:
        assert llm.engine.tokenizer.decode(prefix.tokens, skip_special=True) == "Another text."
    ((prefix, folder),) = kept_prefixes()
    assert prefix.text == "Another text."
    shutil.copytree(folder, folder.with_name(".partial-killed"))
    assert kept_prefixes() == [(prefix, folder)]


def test_a_damaged_file_is_computed_again(
    llm: LLM, bundle: str, caplog: pytest.LogCaptureFixture
) -> None:
    with llm.prefix("orle", DOCUMENT) as document:
        tokens = document.tokens
    ((_, folder),) = kept_prefixes()
    data = bytearray((folder / "session").read_bytes())
    data[-5] ^= 1
    (folder / "session").write_bytes(data)
    other = load(bundle, ctx_size=1024)
    with other.prefix("orle") as document:
        assert (document.tokens, document.cached) == (tokens, len(tokens))
    assert "computed again" in caplog.text
    caplog.clear()
    other.prefix("orle").close()
    assert not caplog.text


def test_names_belong_to_a_model_and_kv_format(llm: LLM, bundle: str) -> None:
    llm.prefix("orle", DOCUMENT).close()
    other = load(bundle, ctx_size=1024, kv_format="f16")
    with pytest.raises(OptionError, match=r"no prefix 'orle' .* in f16; kept .*: orle"):
        other.prefix("orle")
    other.prefix("orle", DOCUMENT).close()
    assert len(kept_prefixes()) == 2
    assert forget_prefix("orle") == 2
    assert kept_prefixes() == []


def test_bad_input(llm: LLM) -> None:
    with pytest.raises(OptionError, match="none"):
        llm.prefix("orle")
    with pytest.raises(OptionError, match="empty"):
        llm.prefix(" ", DOCUMENT)
    with pytest.raises(OptionError, match="empty"):
        llm.prefix("orle", "")
    with pytest.raises(ContextOverflowError):
        llm.prefix("orle", DOCUMENT * 10)
    assert kept_prefixes() == []


def test_commands(bundle: str, edgellm_home: Path, cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "orle.txt").write_text(DOCUMENT)
    assert cli("cache", "ls").stdout == ""
    added = cli("cache", "add", "orle", bundle, "-f", str(tmp_path / "orle.txt"), "--raw")
    assert "orle: " in added.stderr
    assert cli("cache", "add", "short", bundle, "-p", SYSTEM).returncode == 0
    listed = cli("cache", "ls").stdout.splitlines()
    assert [line.split()[0] for line in listed] == ["orle", "short"]
    greedy = ("--temp", "0", "-n", "8", "--stats")
    plain = cli("run", bundle, "--raw", "-p", DOCUMENT + "Who built it?", *greedy)
    cached = cli("run", bundle, "--cache", "orle", "-p", "Who built it?", *greedy)
    assert plain.returncode == cached.returncode == 0
    exact = library() is not None  # else other pieces of a prompt give other last bits
    assert cached.stdout == plain.stdout or not exact
    assert "(0 cached" in plain.stderr
    assert "(0 cached" not in cached.stderr
    chatted = cli("run", bundle, "--cache", "short", "-p", "What is a list?", *greedy)
    whole = cli("run", bundle, "-sys", SYSTEM, "What is a list?", *greedy)
    assert chatted.returncode == whole.returncode == 0
    assert chatted.stdout == whole.stdout or not exact
    for wrong in (
        ("run", bundle, "--cache", "none", "-p", "Hello"),
        ("run", bundle, "--cache", "short", "--raw", "-p", "Hello"),
        ("run", bundle, "--cache", "short", "--prefix", "a"),
        ("run", bundle, "--cache", "short", "-sys", "You", "-p", "Hello"),
        ("cache", "add", "orle", bundle),
        ("cache", "rm", "none"),
    ):
        assert cli(*wrong).returncode == 2
    assert cli("cache", "rm", "orle", "short").returncode == 0
    assert cli("cache", "ls").stdout == ""


def test_a_template_that_ignores_the_question(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm.engine, "template", ChatTemplate("{{ messages[0].content }}"))
    with pytest.raises(TemplateError, match="ignores what the user says"):
        llm.prefix("pirate", SYSTEM, system=True)
