from __future__ import annotations

import base64
import json
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_vocabulary import FIRST_TEXT, save_sentencepiece

from edgellm.errors import TokenizerError
from edgellm.store.bundle import Bundle
from edgellm.store.manifest import TokenizerEntry
from edgellm.text.tokenizer import TextStream, Tokenizer

TEXTS = [
    "",
    " ",
    "Hello",
    "  two  spaces ",
    "é日本語🙂👩‍👩‍👧‍👦",
    "a\r\nb\n\n\tc",
    "\u202eRTL\0NUL",
    "z" * 5000,
]


@pytest.fixture(scope="module")
def tokenizer(smollm2: Bundle) -> Tokenizer:
    return Tokenizer(smollm2.path, smollm2.manifest.tokenizer)


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return save_sentencepiece(tmp_path_factory.mktemp("spm"))


@pytest.mark.parametrize("text", TEXTS)
def test_round_trip(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


@settings(max_examples=200, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_streams_back(tokenizer: Tokenizer, text: str) -> None:
    stream = TextStream(tokenizer)
    shown = [stream.add(token) for token in tokenizer.encode(text, add_bos=False)]
    # (a byte that the vocabulary has no token for is lost in encoding)
    tokens = tokenizer.encode(text, add_bos=False)
    assert "".join(shown) + stream.finish() == tokenizer.decode(tokens)


def test_special_texts_are_plain_unless_asked(tokenizer: Tokenizer) -> None:
    text = "a<|im_end|>b"
    assert 2 not in tokenizer.encode(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert 2 in tokenizer.encode(text, parse_special=True)


def test_begin_token_is_never_doubled(sentencepiece: Tokenizer) -> None:
    assert sentencepiece.encode("Hi")[0] == sentencepiece.bos_id
    once = sentencepiece.encode("<s>Hi", parse_special=True)
    assert once.count(1) == 1
    assert sentencepiece.encode("Hi", add_bos=False)[0] != 1


def test_lone_surrogates_are_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(TokenizerError, match="Unicode"):
        tokenizer.encode("\ud800")


@pytest.mark.parametrize("kind", ["tokenizer", "sentencepiece"])
def test_stream_never_shows_half_a_character(kind: str, request: pytest.FixtureRequest) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(kind)
    text = "naïve 日本語 🙂 👩‍👩‍👧‍👦 𝒳 and done"
    tokens = tokenizer.encode(text, add_bos=False)
    stream = TextStream(tokenizer)
    shown = [stream.add(token) for token in tokens]
    assert "".join(shown) + stream.finish() == text
    assert not any("\ufffd" in piece for piece in shown)
    assert shown.count("") > 3


@pytest.mark.parametrize("kind", ["tokenizer", "sentencepiece"])
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_any_tokens_stream_to_their_text(
    kind: str, request: pytest.FixtureRequest, data: st.DataObject
) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(kind)
    # the decoder of byte tokens looks at whole runs of them, so random ones mean nothing there
    first = 0 if kind == "tokenizer" else FIRST_TEXT
    ids = st.integers(first, tokenizer.vocab_size - 1)
    tokens = data.draw(st.lists(ids, min_size=1, max_size=30))
    stream = TextStream(tokenizer)
    shown = "".join(stream.add(token) for token in tokens) + stream.finish()
    assert shown.replace("\ufffd", "") == tokenizer.decode(tokens).replace("\ufffd", "")


def test_runs_of_byte_tokens(sentencepiece: Tokenizer) -> None:
    text = "𒀀𒀁ⰀⰁⰂ𒀂"
    tokens = sentencepiece.encode(text, add_bos=False)
    assert len(tokens) > len(text) * 2
    stream = TextStream(sentencepiece, sentencepiece.encode("Ⰰ"))
    shown = [stream.add(token) for token in tokens[1:]]
    assert "".join(shown) == text
    assert set(shown) == {*text, ""}


def test_unfinished_bytes_show_at_the_end(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("🙂")
    assert len(tokens) > 1
    stream = TextStream(tokenizer)
    assert "".join(stream.add(token) for token in tokens[:-1]) == ""
    assert "\ufffd" in stream.finish()


def test_continued_text_keeps_its_space(sentencepiece: Tokenizer) -> None:
    tokens = sentencepiece.encode("The capital is Paris", add_bos=False)
    stream = TextStream(sentencepiece, tokens[:-1])
    assert stream.add(tokens[-1]) == " Paris"


def test_damaged_file(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"model": {"type": "Nothing"}}')
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        Tokenizer(tmp_path, TokenizerEntry(None, False, ()))


@pytest.mark.parametrize("parse_special", [False, True])
def test_long_texts_are_as_short_ones(tokenizer: Tokenizer, parse_special: bool) -> None:
    """They go other ways through `tokenizers`, that let other threads go on."""
    text = "The quick brown fox 日本語🙂 <|im_start|>\n" * 300
    plain = tokenizer._tokenizer
    ids = tokenizer.encode(text, add_bos=False, parse_special=parse_special)
    assert ids == plain.encode(text, add_special_tokens=False).ids
    assert (plain.token_to_id("<|im_start|>") in ids) == parse_special
    for skip in (False, True):
        expected = plain.decode(ids, skip_special_tokens=skip)
        assert tokenizer.decode(ids, skip_special=skip) == expected
    with pytest.raises(TokenizerError, match="not valid Unicode"):
        tokenizer.encode(text + "\ud800")


def test_other_threads_go_on_while_a_long_text_is_encoded(tokenizer: Tokenizer) -> None:
    """Python takes its lock away from no thread here; the other one goes on once it is let go."""
    text = "The quick brown fox jumps over the dog. " * 2_000
    begun, gone_on = threading.Event(), threading.Event()

    def other() -> None:
        begun.wait()
        gone_on.set()

    thread = threading.Thread(target=other)
    interval = sys.getswitchinterval()
    thread.start()
    try:
        sys.setswitchinterval(10_000)
        begun.set()
        turns = next(
            (i for i in range(200) if gone_on.is_set() or not tokenizer.encode(text)), None
        )
        assert turns is not None
    finally:
        sys.setswitchinterval(interval)
        thread.join()


CHARSMAPS = {
    "no bytes": b"",
    "three bytes": bytes(3),
    "no trie": bytes(8),
    "more than there is": bytes([255] * 4 + [0] * 4),
}


@pytest.mark.parametrize("escaped", [False, True])
@pytest.mark.parametrize("kind", CHARSMAPS)
def test_charsmaps_with_a_wrong_size(tmp_path: Path, kind: str, escaped: bool) -> None:
    """The library takes 8 GB for one, and panics at others, with a trace on stderr."""
    charsmap = base64.b64encode(CHARSMAPS[kind]).decode()
    text = json.dumps({"normalizer": {"type": "Precompiled", "precompiled_charsmap": charsmap}})
    if escaped:
        text = text.replace("Precompiled", "\\u0050recompiled")
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: precompiled_charsmap has \d bytes"):
        Tokenizer(tmp_path, TokenizerEntry(None, False, ()))


def test_a_pre_tokenizer_of_no_length(tmp_path: Path) -> None:
    description = {"pre_tokenizer": {"type": "FixedLength", "length": 0}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(description))
    with pytest.raises(TokenizerError, match="FixedLength"):
        Tokenizer(tmp_path, TokenizerEntry(None, False, ()))
