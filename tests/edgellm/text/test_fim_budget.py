"""What of the surroundings of a gap goes into its prompt."""

from __future__ import annotations

import pytest

from edgellm.text.fim import FAMILIES, Budget, Gap, assemble, budget


@pytest.mark.parametrize("ctx_size", [1, 16, 128, 1024, 4096, 32768])
@pytest.mark.parametrize("max_tokens", [None, 0, 1, 128, 100_000])
def test_everything_fits(ctx_size: int, max_tokens: int | None) -> None:
    parts = budget(ctx_size, max_tokens=max_tokens)
    assert min(parts.prefix, parts.suffix, parts.extra) >= 0
    assert parts.prefix == 3 * parts.suffix
    assert parts.prefix + parts.suffix <= 2048
    if ctx_size >= 128:
        answer = min(max_tokens or 0, ctx_size // 2)
        assert parts.prefix + parts.suffix + parts.extra + answer < ctx_size


def test_much_context_is_for_other_files() -> None:
    assert budget(32768, max_tokens=128) == Budget(prefix=1536, suffix=512, extra=30576)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
@pytest.mark.parametrize("order", ["psm", "spm"])
def test_cut_texts(family, order) -> None:
    """The tail stays whole, at the cost of the suffix; of other files, the last ones stay."""
    texts = [*family.markers, *family.known_by, *family.stop_tokens]
    vocabulary = {text: 1000 + i for i, text in enumerate(dict.fromkeys(texts))}
    gap = Gap(
        prefix="p" * 500 + "q",
        suffix="s" + "t" * 500,
        tail="tail",
        extra=[("old", "o" * 400), ("new", "n" * 30)],
    )
    tokens = assemble(
        family,
        gap,
        encode=lambda text: [ord(c) for c in text],
        vocabulary=vocabulary,
        bos=None,
        order=order,
        budget=Budget(prefix=30, suffix=20, extra=60),
    )
    text = "".join(chr(token) if token < 1000 else "|" for token in tokens)
    assert "p" * 29 + "qtail|" in text or text.endswith("p" * 29 + "qtail")
    assert "|s" + "t" * 15 in text
    assert text.count("p") <= 29 + 1
    assert text.count("t") == 15 + 1
    assert "n" * 30 in text
    assert 5 < text.count("o") < 40
