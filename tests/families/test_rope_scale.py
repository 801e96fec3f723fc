"""Contexts longer than a model was trained for, judged by transformers with YaRN in its config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matrix import ALLOWED, BACKENDS, usable
from tiny_models import logits, make, save_tokenizer

from edgellm.engine.one_sequence import compute_prompt, compute_tokens
from edgellm.errors import OptionError, UnsupportedModelError
from edgellm.export import export
from edgellm.llm import load
from edgellm.measure.doctor import examine

TRAINED, SCALE, LENGTH, DECODED = 64, 4.0, 190, 3
TOKENS = np.random.default_rng(5).integers(3, 128, LENGTH + DECODED).tolist()
YARN = {
    "rope_type": "yarn",
    "rope_theta": 5000.0,  # as `make` gives it to Llama
    "factor": SCALE,
    "original_max_position_embeddings": TRAINED,
}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("plain")
    make("llama", folder, vocab_size=320, max_position_embeddings=TRAINED)
    save_tokenizer(folder)
    precisions = ("f32", "int4", "packed")
    export(folder, folder / "bundle", name="tiny", source=str(folder), precisions=precisions)
    return str(folder / "bundle")


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """The same weights, and the folder that asks for YaRN itself."""
    folder = tmp_path_factory.mktemp("yarn")
    sizes = {"vocab_size": 320, "max_position_embeddings": int(TRAINED * SCALE)}
    model = make("llama", folder, rope_parameters=YARN, **sizes)
    save_tokenizer(folder)
    return model, folder


@pytest.mark.parametrize(
    "backend",
    [
        "f32",
        "int4",
        pytest.param("C++", marks=pytest.mark.skipif(not usable("C++"), reason="needs a compiler")),
    ],
)
def test_as_if_its_files_asked_for_it(bundle: str, judge: tuple[Any, Path], backend: str) -> None:
    expected = logits(judge[0], TOKENS)[LENGTH - 1 :]
    with load(bundle, rope_scale=SCALE, **BACKENDS[backend][1]) as llm:
        assert llm.ctx_size == TRAINED * SCALE
        sequence = llm.engine.cache.sequence()
        rows = [compute_prompt(llm.engine.prefill, TOKENS[:LENGTH], sequence)]
        rows += [
            compute_tokens(llm.engine.decoder, [token], sequence)[0] for token in TOKENS[LENGTH:]
        ]
    assert np.abs(np.stack(rows) - expected).max() < ALLOWED[backend] * np.abs(expected).max()


def test_what_is_kept_fits_the_same_scale_alone(bundle: str) -> None:
    fingerprints = set()
    for scale in (None, 2.0, 4.0):
        with load(bundle, rope_scale=scale, ctx_size=TRAINED) as llm:
            fingerprints.add(llm.engine.fingerprint)
            if scale is not None:
                with pytest.raises(OptionError, match="the model as it is"):
                    list(examine(llm.engine))
    assert len(fingerprints) == 3


def test_refused(bundle: str, judge: tuple[Any, Path], tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="allowed with this model are 128 at most, or more with"):
        load(bundle, rope_scale=2, ctx_size=129)
    for scale in (0.5, 65, "4", True):
        with pytest.raises(OptionError, match=r"`rope_scale` is .* 1 to 64"):
            load(bundle, rope_scale=scale)
    export(judge[1], tmp_path / "bundle", name="tiny", source="", precisions=("f32",))
    with pytest.raises(UnsupportedModelError, match="files scale RoPE already"):
        load(str(tmp_path / "bundle"), rope_scale=2, precision="f32", decode="reference")
