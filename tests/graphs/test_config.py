from __future__ import annotations

import json
from dataclasses import replace

import pytest

from edgellm.errors import ModelFormatError, UnsupportedModelError
from edgellm.graphs.config import Fields, ModelConfig

CONFIG = ModelConfig(
    model_type="llama",
    vocab_size=320,
    hidden_size=96,
    intermediate_size=160,
    layers=2,
    heads=6,
    kv_heads=2,
    head_dim=16,
    rms_norm_eps=1e-5,
    context_length=1024,
    inv_freq=(1.0, 0.1),
    sliding_window=None,
    tied_embedding=True,
)


def test_survives_json() -> None:
    assert ModelConfig.from_json(json.loads(json.dumps(CONFIG.to_json()))) == CONFIG


def test_sizes() -> None:
    assert CONFIG.attention_size == 96
    assert CONFIG.qkv_size == 96 + 2 * 32
    per_layer = 96 * 160 + 96 * 96 + 3 * 96 * 160
    assert CONFIG.parameters == 2 * per_layer + 320 * 96 + 5 * 96


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"layers": 0}, ModelFormatError, "layers is 0"),
        ({"heads": 5}, ModelFormatError, "multiple of"),
        ({"inv_freq": (1.0,) * 9}, ModelFormatError, "18 dimensions"),
        ({"inv_freq": ()}, ModelFormatError, "0 dimensions"),
        ({"inv_freq": (1.0,)}, ModelFormatError, "2 dimensions"),
        ({"inv_freq": (1.0, float("nan"))}, ModelFormatError, "inv_freq"),
        ({"hidden_size": 100}, UnsupportedModelError, "multiple of 32"),
        ({"head_dim": 10}, UnsupportedModelError, "head_dim is 10; it must be a multiple of 4"),
        (
            {"heads": 7, "kv_heads": 1, "head_dim": 12},
            UnsupportedModelError,
            r"kv_heads \* head_dim is 12; it must be a multiple of 8",
        ),
        ({"layers": 4097}, ModelFormatError, "layers is 4097; 1 to 4096 is allowed"),
        ({"hidden_size": 10**30}, ModelFormatError, "hidden_size is 10+; 1 to"),
        ({"hidden_size": 1 << 10**5}, ModelFormatError, "a number of 100001 bits"),
        ({"rms_norm_eps": float("nan")}, ModelFormatError, "rms_norm_eps is nan"),
        ({"rms_norm_eps": 0.0}, ModelFormatError, "rms_norm_eps"),
    ],
)
def test_impossible_shapes_are_refused(changes: dict, error: type, words: str) -> None:
    with pytest.raises(error, match=words):
        replace(CONFIG, **changes)


def test_unknown_field_in_json_is_refused() -> None:
    with pytest.raises(ModelFormatError, match="speed"):
        ModelConfig.from_json({**CONFIG.to_json(), "speed": 3})


@pytest.mark.parametrize(
    ("value", "kind", "words"),
    [
        (None, int, "missing"),
        ("3", int, "expected int"),
        (True, int, "expected int"),
        (1.5, int, "expected int"),
        (float("nan"), float, "expected a number"),
        ([1], str, "expected str"),
        (10**400, float, "a number of 1329 bits"),
        (1 << 63, int, "below 2\\^63"),
    ],
)
def test_typed_reads(value: object, kind: type, words: str) -> None:
    with pytest.raises(ModelFormatError, match=words):
        Fields({"key": value}, origin="config.json").read(kind, "key")


def test_integers_are_numbers() -> None:
    assert Fields({"theta": 10000}, origin="").read(float, "theta") == 10000.0


def test_require_names_the_feature() -> None:
    with pytest.raises(UnsupportedModelError, match=r"hidden_act = 'gelu'.*'silu'"):
        Fields({"hidden_act": "gelu"}, origin="config.json").require("hidden_act", "silu")
