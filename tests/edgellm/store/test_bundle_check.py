"""Manifests that lie: every sum fits, and what they say does not."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edgellm import BundleError, TokenizerError, load
from edgellm.export import export
from edgellm.kernels.native import library
from edgellm.store.bundle import open_bundle
from edgellm.store.home import sha256_of
from edgellm.store.manifest import MANIFEST, TOKENIZER

Change = tuple[str, Any]
PANEL = "precisions/packed/arrays/"
K = PANEL + "layers.0.k/"
KINDS = "precisions/packed/kinds/layers.0."
LAYERS = "config/layers"
ROPES = "config/ropes"


def every(part: str | None = None, **changes: Any) -> Callable[[list[Any]], list[Any]]:
    """Changes each layer or RoPE of a config, or a part of each."""

    def change(entries: list[Any]) -> list[Any]:
        for entry in entries:
            (entry if part is None else entry[part]).update(changes)
        return entries

    change.__name__ = ",".join(f"{name}={value}" for name, value in changes.items())
    return change


def attention(**changes: Any) -> Change:
    return LAYERS, every("attention", **changes)


def mlp(**changes: Any) -> Change:
    return LAYERS, every("mlp", **changes)


@pytest.fixture(scope="module")
def exported(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model for the native kernels, for ONNX Runtime, and with both kinds of heads."""
    out = tmp_path_factory.mktemp("exported") / "bundle"
    export(tiny_model, out, name="t", source="t", precisions=("packed", "f32", "int4"))
    return out


@pytest.fixture
def changed(exported: Path, tmp_path: Path) -> Callable[..., Path]:
    """A copy of the bundle with some values of its manifest changed: `changed(("a/b", 1))`."""

    def change(*changes: Change) -> Path:
        path = tmp_path / "bundle"
        shutil.copytree(exported, path)
        manifest = json.loads((path / MANIFEST).read_text())
        for place, value in changes:
            *parents, key = place.split("/")
            holder = manifest
            for parent in parents:
                holder = holder[parent]
            if value is KeyError:
                del holder[key]
            else:
                holder[key] = value(holder[key]) if callable(value) else value
        (path / MANIFEST).write_text(json.dumps(manifest))
        return path

    return change


def test_the_bundle_as_it_was_exported_is_fine(changed: Callable[..., Path]) -> None:
    assert open_bundle(changed(), verify=True).config.vocab_size == 320


def _id(place: str, value: Any) -> str:
    return f"{place}={value.__name__ if callable(value) else value}"[:60]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        # sizes of the config that the arrays do not have
        (attention(heads=12), r"layers\.0\.q is uint8 \[6, 3, 544\].*needs uint8 \[12, 3, 544\]"),
        (attention(kv_heads=6), r"layers\.0\.k is uint8 \[2, 3, 544\].*needs uint8 \[6, 3"),
        (attention(kv_heads=1), r"layers\.0\.k"),
        (attention(head_dim=32), "quarter of them|the config needs"),
        (("config/hidden_size", 64), "the config needs"),
        (("config/hidden_size", 1152), "the config needs"),
        (mlp(intermediate=320), r"layers\.0\.gate"),
        (("config/vocab_size", 10), "embedding is uint8"),
        (("config/vocab_size", 50000), r"embedding is uint8 \[20, 3, 544\].*\[3125, 3, 544\]"),
        (("config/vocab_size", 10**9), "vocab_size is 1000000000; 1 to 16777216 is allowed"),
        ((LAYERS, lambda layers: layers[:1]), r"the kind of layers\.1\..* is of no weight"),
        (
            (LAYERS, lambda layers: layers + layers[:1]),
            r"the kind of layers\.2\..* is missing|errors of 000, 001, 002, 003",
        ),
        (("config/tied_embedding", True), "the kind of head is of no weight"),
        (attention(qkv_bias=True), r"layers\.0\.q_bias is missing"),
        (attention(output_bias=True), r"layers\.0\.o_bias is missing"),
        (attention(qk_norm="head"), r"keys: array layers\.0\.q_norm is missing"),
        (mlp(bias=True), r"layers\.0\.gate_bias is missing"),
        (mlp(gated=False), r"the kind of layers\.0\.gate is of no weight"),
        ((LAYERS, every(norms="sandwich")), r"layers\.0\.post_attention_norm is missing"),
        (("config/norm", "layer"), r"layers\.0\.attention_norm_bias is missing"),
        # numbers that no model has
        ((LAYERS, []), "layer_count is 0; 1 to"),
        ((LAYERS, -1), "expected a list"),
        ((LAYERS, lambda layers: layers * 3000), "layer_count is 6000; 1 to 4096"),
        (("config/hidden_size", 10**30), "hidden_size"),
        (attention(head_dim=18), "multiple of 4"),
        (("config/context_length", 1 << 31), "context_length"),
        (attention(window=0), "window is 0"),
        (attention(softcap=-1.0), r"softcap is -1\.0; it must be positive"),
        (attention(scale=0), "scale is 0"),
        (attention(rope=1), "names RoPE 1 of 1"),
        (attention(qk_norm="both"), "qk_norm is 'both'; expected 'none' or"),
        (mlp(activation="relu"), "activation is 'relu'"),
        (("config/norm_eps", float("nan")), "norm_eps"),
        (("config/norm_eps", 0), "norm_eps"),
        (("config/embedding_scale", 0), "embedding_scale is 0"),
        (("config/logit_softcap", float("inf")), "logit_softcap"),
        ((ROPES, []), "names RoPE 0 of 0"),
        ((ROPES, every(inv_freq=[])), "rotates 0 dimensions"),
        ((ROPES, every(inv_freq=[1.0])), "rotates 2 dimensions"),
        ((ROPES, every(inv_freq=[float("inf")] * 8)), "finite number"),
        ((ROPES, every(inv_freq=[1e38] * 8)), r"numbers from 0 to 6\.28"),
        ((ROPES, every(inv_freq=[-1.0] * 8)), r"numbers from 0 to 6\.28"),
        ((ROPES, every(magnitude=0)), "magnitude of RoPE is 0"),
        # arrays
        ((KINDS + "q", "int3"), "q is of the unknown kind 'int3'; known are int4_symmetric, int4"),
        ((KINDS + "q", "int6_k"), "q has 96 inputs; int6_k needs a multiple of 256"),
        ((KINDS + "q", "int5_symmetric"), r"q is uint8 .*needs uint8 \[6, 3, 352\]"),
        ((KINDS + "q", KeyError), r"the kind of layers\.0\.q is missing"),
        ((KINDS + "x", "int4_k"), r"the kind of layers\.0\.x is of no weight"),
        ((K + "shape", [10, 3, 100]), "the config needs uint8"),
        ((K + "shape", [3, 10, 320]), "the config needs uint8"),
        ((K + "shape", []), "the config needs uint8"),
        ((K + "dtype", "float32"), r"layers\.0\.k is float32 .*needs uint8"),
        ((K + "dtype", "nothing"), "k is nothing"),
        ((K + "offset", -64), "lies at bytes -64"),
        ((K + "offset", 1), "multiple of 64"),
        ((K + "offset", 1 << 40), "lies at bytes 1099511627776"),
        ((K + "file", "packed/other.bin"), r"packed/other\.bin is needed and not listed"),
        ((K + "file", "../manifest.json"), "not listed"),
        ((PANEL + "embedding/shape", [20, 3, 320]), r"needs uint8 \[20, 3, 544\]"),
        ((PANEL + "final_norm/shape", [95]), r"needs float32 \[96\]"),
        ((PANEL + "final_norm", KeyError), "final_norm is missing"),
        (("heads/f32/embedding/values/shape", [320, 95]), r"needs float32 \[320, 96\]"),
        (("heads/f32/embedding", {}), "values is missing"),
        (("heads/int8/embedding/codes/shape", [320, 3, 31]), r"needs uint8 \[320, 3, 32\]"),
        (("heads/int8/embedding/scale/dtype", "float16"), "needs float32"),
        (("heads/int8/embedding/scale/offset", 10**6), "lies at bytes 1000000"),
        (("reference/tokens/shape", [0]), "not a list of tokens"),
        (("keys", {}), "keys: array exponents is missing"),
        (("keys/exponents/shape", [2, 2, 7]), r"needs int8 \[2, 2, 8\]"),
        (("reference/logits/shape", [1, 319]), r"needs float32 \[1, 320\]"),
        (("reference", {}), "tokens is missing"),
        # files and precisions
        (("files", {}), r"tokenizer\.json is needed and not listed"),
        (("files/packed\\weights.bin", KeyError), r"packed/weights\.bin is needed"),
        (("files/f32\\001.onnx", KeyError), r"f32/001\.onnx is needed"),
        (("files/head-f32\\head.onnx", KeyError), r"head\.onnx is needed"),
        (("precisions/f32/head", "f64"), "head f64 is not in the bundle"),
        (("precisions/f32/chunk_sizes", [0]), "chunk sizes"),
        (("precisions/f32/chunk_sizes", []), "chunk sizes"),
        (("precisions/f32/chunk_sizes", [7]), r"c7\.onnx is needed"),
        (("precisions/f32/host_tokens", 2), "host_tokens is 2"),
        (("precisions/packed/host_tokens", 10**9), "packed: host_tokens is 1000000000; 0 to 1"),
        (("precisions/packed/host_tokens", -1), "packed: host_tokens is -1; 0 to 1"),
        (("precisions/f32/errors", {}), "errors of 000"),
        (
            ("precisions/f32/shadows", {"x": {"scale": 1, "bits": 8, "importance": 1}}),
            "shadow x is of no layer",
        ),
        (
            ("precisions/f32/shadows", {"layers.0.down": {"scale": 1, "bits": 8, "importance": 1}}),
            r"layers\.0\.down is missing",
        ),
        (
            ("precisions/f32/shadows", {"layers.0.down": {"scale": 1, "bits": 3, "importance": 1}}),
            "3 bits",
        ),
        (("generation", {"speed": 1}), "unknown key 'speed'"),
        (("generation", {"top_k": "4"}), "generation: `top_k` is '4'; allowed is a whole number"),
        (("generation", {"temperature": -5}), "generation: `temperature` is -5; allowed is a num"),
    ],
    ids=lambda value: _id(*value) if isinstance(value, tuple) else "",
)
def test_what_does_not_fit_the_config_is_refused(
    changed: Callable[..., Path], change: Change, words: str
) -> None:
    place, value = change
    path = changed((place, value)) if "\\" not in place else _without_file(changed(), place)
    with pytest.raises(BundleError, match=words) as caught:
        open_bundle(path)
    assert str(path) in str(caught.value)


def _without_file(path: Path, place: str) -> Path:
    manifest = json.loads((path / MANIFEST).read_text())
    del manifest["files"][place.removeprefix("files/").replace("\\", "/")]
    (path / MANIFEST).write_text(json.dumps(manifest))
    return path


def paths_of(value: Any, prefix: str = "") -> list[str]:
    """Every place in a manifest, the first entry alone of what there is many of."""
    found = [prefix] if prefix else []
    if isinstance(value, dict):
        many = prefix.endswith(("arrays", "files", "reference", "errors", "versions"))
        for key in list(value)[:1] if many else value:
            if "/" not in key:
                found += paths_of(value[key], f"{prefix}/{key}".lstrip("/"))
    return found


@pytest.mark.parametrize(
    "wrong",
    [
        *(None, "text", -3, [[1]]),
        *(pytest.param(x, marks=pytest.mark.slow) for x in (True, 1.5, 10**30, [], {}, {"a": 1})),
    ],
)
def test_any_value_of_another_type_is_a_bundle_error(exported: Path, wrong: object) -> None:
    """At every place in turn; what may stand there opens, and nothing raises anything else."""
    original = json.loads((exported / MANIFEST).read_text())
    scratch = exported.parent / "scratch"
    shutil.copytree(exported, scratch, dirs_exist_ok=True)
    refused = 0
    for place in paths_of(original):
        manifest = copy.deepcopy(original)
        *parents, key = place.split("/")
        holder = manifest
        for parent in parents:
            holder = holder[parent]
        holder[key] = wrong
        (scratch / MANIFEST).write_text(json.dumps(manifest))
        try:
            open_bundle(scratch)
        except BundleError:
            refused += 1
    assert refused > 40


@pytest.mark.parametrize("id", [320, 10**6, 1 << 31])
def test_a_token_without_a_row_is_refused_when_a_text_has_it(
    changed: Callable[..., Path], id: int
) -> None:
    path = changed()
    file = path / TOKENIZER
    tokenizer = json.loads(file.read_text())
    tokenizer["model"]["vocab"]["A"] = id
    file.write_text(json.dumps(tokenizer))
    manifest = json.loads((path / MANIFEST).read_text())
    manifest["files"][TOKENIZER] = {"bytes": file.stat().st_size, "sha256": sha256_of(file)}
    (path / MANIFEST).write_text(json.dumps(manifest))
    options: dict[str, Any] = (
        {} if library() is not None else {"prefill": "cpu", "precision": "f32"}
    )
    llm = load(str(path), **options)
    assert llm.generate("B", max_tokens=1, ignore_eos=True).stats.generation_tokens == 1
    with pytest.raises(TokenizerError, match=rf"token 'A' has the id {id}.*320 rows"):
        llm.generate("BAB")
