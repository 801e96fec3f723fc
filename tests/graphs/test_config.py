from __future__ import annotations

import json
from dataclasses import replace

import pytest

from edgellm.errors import ModelFormatError, UnsupportedModelError
from edgellm.graphs.config import ModelConfig, repeated
from edgellm.graphs.fields import Fields
from edgellm.graphs.layer_config import Attention, LayerConfig, Mlp, Rope
from edgellm.graphs.state_mixers import ShortConv
from edgellm.graphs.tensors import multiplied_parameters, parameters

LAYER = LayerConfig(mixer=Attention(heads=6, kv_heads=2, head_dim=16), mlp=Mlp(intermediate=160))
CONFIG = ModelConfig(
    model_type="llama",
    vocab_size=320,
    hidden_size=96,
    layers=repeated(LAYER, 2),
    ropes=(Rope(inv_freq=(1.0, 0.1)),),
    norm_eps=1e-5,
    context_length=1024,
    tied_embedding=True,
)


def test_survives_json() -> None:
    assert ModelConfig.from_json(json.loads(json.dumps(CONFIG.to_json()))) == CONFIG


HYBRID = replace(
    CONFIG,
    layers=(LAYER, replace(LAYER, mixer=ShortConv(channels=96, taps=3))),
)


def test_layers_are_named_by_their_mixers_in_json() -> None:
    """Those that attend as before there were other mixers: saved sessions name models by it."""
    assert ModelConfig.from_json(json.loads(json.dumps(HYBRID.to_json()))) == HYBRID
    attending, conv = HYBRID.to_json()["layers"]
    assert list(attending) == ["attention", "mlp", "norms"]
    assert list(conv) == ["short_conv", "mlp", "norms"]
    for change, words in (
        ({**conv, **attending}, "attention and short_conv exclude each other"),
        (
            {"mlp": conv["mlp"]},
            "key 'attention' or 'short_conv' or 'mamba2' or 'delta_net' is missing",
        ),
        ({**conv, "mixer": {}}, "'mixer'; known are attention, short_conv, mamba2, delta_net, mlp"),
    ):
        with pytest.raises(ModelFormatError, match=words):
            ModelConfig.from_json({**HYBRID.to_json(), "layers": [attending, change]})


def test_layers_with_states() -> None:
    assert (CONFIG.has_states, HYBRID.has_states) == (False, True)
    assert list(HYBRID.attentions) == [0]
    conv = HYBRID.layers[1]
    assert (conv.mixer.size, conv.attends) == (96, False)
    with pytest.raises(TypeError, match="ShortConv does not attend"):
        _ = conv.attention
    with pytest.raises(UnsupportedModelError, match="no layer attends"):
        replace(HYBRID, layers=(conv,))
    wide = replace(LAYER, mixer=ShortConv(channels=100, taps=3))
    with pytest.raises(UnsupportedModelError, match="size is 100"):
        replace(HYBRID, layers=(LAYER, wide))


def test_sizes() -> None:
    assert CONFIG.attention.size == 96
    assert CONFIG.attention.qkv_size == 96 + 2 * 32
    per_layer = 96 * 160 + 96 * 96 + 3 * 96 * 160
    assert multiplied_parameters(CONFIG) == 2 * per_layer
    assert parameters(CONFIG) == 2 * per_layer + 320 * 96 + 5 * 96


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"hidden_size": 100}, UnsupportedModelError, "multiple of 32"),
        ({"hidden_size": 10**30}, ModelFormatError, "hidden_size is 10+; 1 to"),
        ({"hidden_size": 1 << 10**5}, ModelFormatError, "a number of 100001 bits"),
        ({"norm_eps": float("nan")}, ModelFormatError, "norm_eps is nan"),
        ({"norm_eps": 0.0}, ModelFormatError, "norm_eps"),
        ({"embedding_scale": 0.0}, ModelFormatError, "embedding_scale is 0"),
        ({"logit_softcap": -1.0}, ModelFormatError, "logit_softcap is -1"),
    ],
)
def test_impossible_models_are_refused(changes: dict, error: type, words: str) -> None:
    with pytest.raises(error, match=words):
        replace(CONFIG, **changes)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"heads": 5}, ModelFormatError, "multiple of"),
        ({"head_dim": 10}, UnsupportedModelError, "head_dim is 10; it must be a multiple of 4"),
        (
            {"heads": 7, "kv_heads": 1, "head_dim": 12},
            UnsupportedModelError,
            r"kv_heads \* head_dim is 12; it must be a multiple of 8",
        ),
        ({"window": 0}, ModelFormatError, "window is 0; 1 to"),
        ({"scale": 0.0}, ModelFormatError, "scale is 0"),
        ({"softcap": float("inf")}, ModelFormatError, "softcap is inf"),
    ],
)
def test_impossible_attention_is_refused(changes: dict, error: type, words: str) -> None:
    with pytest.raises(error, match=words):
        replace(LAYER.attention, **changes)


@pytest.mark.parametrize(
    ("inv_freq", "words"),
    [
        ((1.0,) * 9, "18 dimensions"),
        ((), "0 dimensions"),
        ((1.0,), "2 dimensions"),
        ((1.0, float("nan")), "inv_freq"),
        ((1.0, -1.0), "inv_freq"),
    ],
)
def test_impossible_ropes_are_refused(inv_freq: tuple[float, ...], words: str) -> None:
    with pytest.raises(ModelFormatError, match=words):
        replace(CONFIG, ropes=(Rope(inv_freq=inv_freq),))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"head_dim": 32}, "RoPE rotates 4 dimensions, but a head has 32"),
        ({"heads": 1, "kv_heads": 1}, "attention_size is 16"),
        ({"rope": 1}, "layer 1 names RoPE 1 of 1"),
    ],
)
def test_a_layer_that_does_not_fit_is_refused(changes: dict, words: str) -> None:
    other = replace(LAYER, mixer=replace(LAYER.attention, **changes))
    with pytest.raises((ModelFormatError, UnsupportedModelError), match=words):
        replace(CONFIG, layers=(LAYER, other))


@pytest.mark.parametrize("count", [0, 4097, 10**40])
def test_impossible_numbers_of_layers_are_refused(count: int) -> None:
    with pytest.raises(ModelFormatError, match=r"layers is .*; 1 to 4096 is allowed"):
        repeated(LAYER, count)


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


@pytest.mark.parametrize("value", [1, 1.5, True, "x", [0]])
def test_settings_that_nobody_has_read_are_refused_by_name(value: object) -> None:
    fields = Fields({"head_scale": value, "torch_dtype": "x", "head": 0}, origin="config.json")
    with pytest.raises(UnsupportedModelError, match=r"config\.json: head_scale = .*not understood"):
        fields.refuse_unread()
    fields.refuse_unread(harmless=("head_scale",))
    fields.ignore("head_scale")
    fields.refuse_unread()


def test_assumed_values_stand_for_absent_ones_only() -> None:
    fields = Fields({"m.window": None, "m.heads": 3}, origin="", prefix="m.")
    fields.assume({"window": 8, "heads": 4, "layers": 5})
    assert fields.optional(int, "window") is None
    assert fields.read(int, "heads") == 3
    assert fields.read(int, "layers") == 5


def test_lists_with_an_entry_for_each_layer() -> None:
    fields = Fields({"same": [3, 3], "other": [1, 2], "one": 4, "kinds": ["a", 2]}, origin="")
    assert fields.uniform("same") == 3
    assert fields.uniform("one") == 4
    assert fields.uniform("none", default=7) == 7
    with pytest.raises(UnsupportedModelError, match="same in all layers"):
        fields.uniform("other")
    with pytest.raises(ModelFormatError, match="missing"):
        fields.uniform("none")
    assert fields.entries(int, "other", 2) == [1, 2]
    with pytest.raises(ModelFormatError, match="2 entries, and the model has 3 layers"):
        fields.entries(int, "other", 3)
    with pytest.raises(ModelFormatError, match="holds 2; expected str"):
        fields.entries(str, "kinds", 2)
