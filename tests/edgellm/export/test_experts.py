"""Export of models with experts, and what refuses to compute them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from random_checkpoint import CONFIGS
from tiny_gguf import FILES, VOCABULARY, convert, with_vocabulary
from tiny_models import make, save_tokenizer

from edgellm import load
from edgellm.backends import selection
from edgellm.backends.packed_weights import open_packed_weights
from edgellm.backends.selection import precisions_of, select
from edgellm.engine.auto_backend import auto_choice
from edgellm.errors import BundleError, OptionError, UnsupportedModelError
from edgellm.export import export
from edgellm.graphs.checkpoint import open_checkpoint
from edgellm.graphs.config import ModelConfig
from edgellm.kernels.experts import Routing
from edgellm.kernels.linear import packed_shape, unpack_weight
from edgellm.kernels.quantized import KINDS, dequantize
from edgellm.measure.roofline import work_of
from edgellm.options import EngineOptions
from edgellm.store import precision_support
from edgellm.store.bundle import Bundle
from edgellm.store.bundle_check import check_manifest
from edgellm.store.manifest import imported
from edgellm.store.precision_support import why_not

ROUTING = Routing(experts=5, used=3)


CONFIG = CONFIGS["experts"]


@dataclass(frozen=True)
class Exported:
    folder: Path
    bundle: Bundle


@pytest.fixture(scope="module", params=["folder", "Q8_0"])
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """A tiny Qwen3-MoE, from its folder or from a file made of it."""
    folder = tmp_path_factory.mktemp("experts")
    make("qwen3_moe", folder, vocab_size=VOCABULARY)
    save_tokenizer(folder)
    path = folder
    if request.param != "folder":
        arch, keys, _ = FILES["qwen3_moe"]
        kind = gguf.GGMLQuantizationType[request.param]
        path = convert(folder, folder / "model.gguf", arch, with_vocabulary(keys), kind=kind)
    bundle = export(path, folder / "bundle", name="tiny", source=str(path))
    return Exported(path, bundle)


def test_the_packed_precision_alone_is_exported(exported: Exported) -> None:
    assert set(exported.bundle.manifest.precisions) == {"packed"}
    assert exported.bundle.manifest.reference == {}


def test_weights_are_those_of_the_checkpoint(exported: Exported) -> None:
    checkpoint, weights = open_checkpoint(exported.folder), open_packed_weights(exported.bundle)
    for index, layer in enumerate(weights.layers):
        assert layer.routing == Routing(experts=5, used=3, normalized=True)
        router = checkpoint.tensor(f"layers.{index}.router").float32()
        assert layer.router is not None
        np.testing.assert_array_equal(layer.router, router)
        for name, packed in (("gate", layer.gate), ("up", layer.up), ("down", layer.down)):
            exact = checkpoint.tensor(f"layers.{index}.{name}").float32()
            assert packed is not None
            assert (packed.outputs, packed.inputs) == exact.shape
            found = dequantize(unpack_weight(packed))
            assert np.abs(found - exact).max() < 0.01 * np.abs(exact).max()


def test_a_step_reads_its_own_experts(exported: Exported) -> None:
    """And so does the roofline of `edgellm plan` and `edgellm bench`."""
    kind = KINDS["int8_symmetric"]

    def packed(outputs: int, inputs: int) -> int:
        return int(np.prod(packed_shape(outputs, inputs, kind)))

    attention = 2 * packed(128, 64) + 2 * packed(64, 64) - packed(128, 64) + packed(64, 128)
    experts = 3 * (2 * packed(32, 64) + packed(64, 32))
    expected = 4 * (attention + experts + 5 * 64 * 4) + packed(VOCABULARY, 64)
    assert imported(exported.bundle.manifest, "packed").decode_bytes == expected
    work = work_of(exported.bundle, 0, precision="packed", kv_format="int8")
    assert work.decode_bytes == expected
    attention_weights = 2 * 128 * 64 + 2 * 64 * 64
    assert work.prefill_flops == 2 * 4 * (attention_weights + 3 * 3 * 32 * 64 + 5 * 64)


def test_a_manifest_of_other_experts_is_refused(exported: Exported) -> None:
    manifest = exported.bundle.manifest
    changed = with_layers(manifest.config, replace(ROUTING, experts=6))
    with pytest.raises(BundleError, match=r"layers\.0\.\w+ is .*the config needs"):
        check_manifest(replace(manifest, config=changed), origin="manifest.json")
    dense = with_layers(manifest.config, None)
    with pytest.raises(BundleError, match=r"packed: .*(router|the config needs)"):
        check_manifest(replace(manifest, config=dense), origin="manifest.json")


def with_layers(config: ModelConfig, experts: Routing | None) -> ModelConfig:
    return replace(config, layers=tuple(replace(x, experts=experts) for x in config.layers))


@pytest.mark.parametrize("precision", ["int4", "w8a16-qdq", "w8a8-qdq"])
def test_some_precisions_have_no_experts_beside_them(
    exported: Exported, tmp_path: Path, precision: str
) -> None:
    assert why_not(precision, CONFIG) is not None
    words = rf"precision {precision} cannot compute qwen3_moe: it has experts.*Take .*f32.*native"
    with pytest.raises(UnsupportedModelError, match=words):
        export(
            exported.folder,
            tmp_path / "out",
            name="x",
            source="x",
            precisions=("packed", precision),
        )
    assert not (tmp_path / "out").exists()
    with pytest.raises(UnsupportedModelError, match=words):
        export(
            exported.folder,
            exported.bundle.path,
            name="tiny",
            source=str(exported.folder),
            precisions=(precision,),
        )


def test_chunk_sizes_are_refused(exported: Exported, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="packed is exported without chunks"):
        export(exported.folder, tmp_path / "out", name="x", source="x", chunk_sizes=(8,))


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "library", lambda: object())


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize(
    "options",
    [
        {"decode": "portable"},
        {"decode": "reference"},
        {"decode": "triton", "prefill": "cpu"},
        {"decode": "chunked", "prefill": "cpu"},
        {"prefill": "cuda", "decode": "chunked"},
        {"prefill": "cuda"},
        {"precision": "w8a8", "decode": "triton"},
        {"prefill": "cpu", "precision": "f32", "decode": "reference"},
    ],
    ids=str,
)
def test_other_back_ends_are_refused(exported: Exported, options: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModelError, match=r"is '\w+'.* compute random: .*Take .*native"):
        select(EngineOptions(**options), CONFIG)


def test_a_back_end_that_is_not_installed_is_refused_for_the_experts(
    exported: Exported, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not with advice to install it."""

    def require(_: str) -> None:
        raise OptionError("install it")

    monkeypatch.setattr(selection, "require_backend", require)
    for path in (exported.folder, exported.bundle.path):
        with pytest.raises(UnsupportedModelError, match="has experts"):
            load(str(path), decode="reference")
    with pytest.raises(OptionError, match="install it"):
        load("hf:org/repo", decode="triton")


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize(
    ("usual", "reason"),
    [("native", "no accelerator was measured here with this model"), ("triton", "as decode")],
)
def test_auto_is_what_decodes_other_models(
    monkeypatch: pytest.MonkeyPatch, exported: Exported, usual: str, reason: str
) -> None:
    monkeypatch.setattr(selection, "_usual_decode", lambda: usual)
    monkeypatch.setattr(selection, "require_backend", lambda _: None)
    chosen = select(EngineOptions(), CONFIG)
    assert (chosen.prefill, chosen.decode) == (usual, usual)
    assert chosen.precisions(CONFIG) == {"packed"}
    assert precisions_of(EngineOptions())(CONFIG) == {"packed"}
    choice = auto_choice(exported.bundle, EngineOptions())
    assert (choice.prefill, choice.reason) == (usual, reason)


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("precision", ["f32", "f16", "w4a16", "w8a8"])
def test_graphs_leave_them_to_the_host(
    monkeypatch: pytest.MonkeyPatch, exported: Exported, precision: str
) -> None:
    monkeypatch.setattr(selection, "require_backend", lambda _: None)
    monkeypatch.setattr(selection, "_usual_decode", lambda: "triton")
    for options in ({"prefill": "cpu"}, {"prefill": "cpu", "decode": "native"}, {}):
        chosen = select(EngineOptions(precision=precision, **options), exported.bundle.config)
        assert (chosen.prefill, chosen.decode) == ("cpu", "native")
        assert chosen.precisions(exported.bundle.config) == {"packed", precision}


@pytest.mark.usefixtures("compiled")
def test_a_gpu_may_have_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "require_backend", lambda _: None)
    for prefill, decode in (("native", "triton"), ("triton", "native")):
        chosen = select(EngineOptions(prefill=prefill, decode=decode), CONFIG)
        assert (chosen.prefill, chosen.decode) == (prefill, decode)
        assert chosen.precisions(CONFIG) == {"packed"}


def test_a_gpu_needs_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "library", lambda: None)
    monkeypatch.setattr(selection, "require_backend", lambda _: None)
    chosen = select(EngineOptions(decode="triton"), CONFIG)
    assert (chosen.prefill, chosen.decode) == ("triton", "triton")
    with pytest.raises(UnsupportedModelError, match="not built"):
        select(EngineOptions(decode="triton", prefill="native"), CONFIG)


def test_a_part_that_a_gpu_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    assert why_not("triton", CONFIG) is None
    unknown = precision_support.Part("an unknown part", lambda _: True, ("triton",))
    monkeypatch.setattr(precision_support, "PARTS", (*precision_support.PARTS, unknown))
    words = "it has an unknown part, which triton does not compute"
    assert why_not("triton", CONFIG) == words
    for option in ({"decode": "triton"}, {"prefill": "triton"}):
        with pytest.raises(UnsupportedModelError, match=rf"is 'triton'.*random: {words}. Take"):
            select(EngineOptions(**option), CONFIG)
