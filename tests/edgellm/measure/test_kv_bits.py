"""Formats that layers get for a number of bits, and what they are chosen by."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import make, save_tokenizer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from edgellm import ModelFormatError, OptionError, SessionFileError, SourceError
from edgellm.graphs.checkpoint import open_checkpoint
from edgellm.kernels.attention import reference
from edgellm.kernels.kv_append.reference import round_trip
from edgellm.kernels.kv_blocks import BLOCK, SEALED, KVFormat
from edgellm.kernels.kv_seal.reference import with_sealed
from edgellm.kernels.native import library
from edgellm.llm import load
from edgellm.measure import explain, kv_bits
from edgellm.measure.kv_bits import choose, layer_losses
from edgellm.measure.roofline import Machine
from edgellm.serve.served import served_model
from edgellm.store.bundle import KV_LOSSES

pytestmark = pytest.mark.skipif(library() is None, reason="installed without a compiler")

TOKENS = [5, *((7 * i + i // 11) % 120 + 3 for i in range(391))]
BITS: dict[KVFormat, list[float]] = {"k8v4": [6.0] * 4, "k4v4": [4.0] * 4, "k4v2": [3.0] * 4}


@pytest.fixture(scope="module")
def bundle(deep_model: Path) -> Path:
    return load(str(deep_model)).engine.bundle.path


@pytest.fixture
def fresh(bundle: Path) -> Iterator[str]:
    """A bundle whose layers were not measured."""
    (bundle / KV_LOSSES).unlink(missing_ok=True)
    yield str(bundle)
    (bundle / KV_LOSSES).unlink(missing_ok=True)


@pytest.fixture
def measured(fresh: str, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Layers that lose less and less, in place of a measurement; an entry for each time."""
    times = list[int]()

    def layer_losses(*_: Any, **options: Any) -> Iterator[tuple[int, KVFormat, float]]:
        times.append(len(times))
        yield from ((x, name, rank / (1 + x)) for x in range(6) for rank, name in enumerate(SEALED))

    monkeypatch.setattr(kv_bits, "layer_losses", layer_losses)
    return times


def losses(*layers: tuple[float, float, float]) -> list[dict[KVFormat, float]]:
    return [dict(zip(SEALED, layer, strict=True)) for layer in layers]


def test_layers_that_lose_most_have_most_bits() -> None:
    measured = losses((0, 1, 2), (0, 1, 9), (0, 8, 9), (0, 0, 0))
    assert choose(losses(*[(2, 1, 1), (0, 0, 1)] * 2), BITS, 6.0) == ("k4v4", "k8v4") * 2
    for mean, expected in {
        3.0: ("k4v2", "k4v2", "k4v2", "k4v2"),
        3.24: ("k4v2", "k4v2", "k4v2", "k4v2"),
        3.25: ("k4v2", "k4v4", "k4v2", "k4v2"),
        4.0: ("k4v2", "k4v4", "k8v4", "k4v2"),
        4.25: ("k4v4", "k4v4", "k8v4", "k4v2"),
        6.0: ("k8v4", "k8v4", "k8v4", "k8v4"),
    }.items():
        assert choose(measured, BITS, mean) == expected, mean


def test_no_budget_is_exceeded_and_more_bits_lose_no_more() -> None:
    rng, before = np.random.default_rng(5), np.inf
    measured = losses(*np.sort(rng.exponential(size=(4, 3))))
    for mean in np.linspace(3, 6, 31):
        formats = choose(measured, BITS, mean)
        assert np.mean([BITS[name][0] for name in formats]) <= mean + 0.005
        loss = sum(measured[layer][name] for layer, name in enumerate(formats))
        assert loss <= before + 0.3
        before = min(loss, before)
    assert formats == ("k8v4",) * 4


class Captured:
    """Rotated queries, keys and values `[n, heads, D]` of each layer in transformers."""

    def __init__(self) -> None:
        self.layers: list[tuple[np.ndarray, ...]] = []

    def __call__(self, module: Any, q: Any, k: Any, v: Any, mask: Any, **options: Any) -> Any:
        self.layers.append(tuple(x[0].transpose(0, 1).double().numpy() for x in (q, k, v)))
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, q, k, v, mask, **options)


@pytest.mark.parametrize("name", ["llama", pytest.param("qwen2", marks=pytest.mark.slow)])
def test_losses_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    """With attention of the float64 reference on packed rows in one layer at a time."""
    capture = Captured()
    ALL_ATTENTION_FUNCTIONS.register("capture", capture)
    model = make(name, tmp_path, max_position_embeddings=512, num_hidden_layers=3)
    model.set_attn_implementation("capture")
    with torch.no_grad():
        states = model(torch.tensor([TOKENS]), output_hidden_states=True).hidden_states
    found = {(x, f): loss for x, f, loss in layer_losses(open_checkpoint(tmp_path), TOKENS)}
    assert len(found) == 9
    for index, (q, k, v) in enumerate(capture.layers):
        layer, last = model.model.layers[index], index == 2
        for format in SEALED:
            rows = [(x, round_trip(x, format, key=x is k), x is k) for x in (k, v)]
            attended = [packed(q[at], rows, format, at) for at in range(3 * BLOCK, len(TOKENS))]
            with torch.no_grad():
                ours = layer.self_attn.o_proj(torch.tensor(np.stack(attended)).float())
                ours = states[index][0, 3 * BLOCK :] + ours
                ours = ours + layer.mlp(layer.post_attention_layernorm(ours))
                ours = model.model.norm(ours) if last else ours
            exact = states[index + 1][0, 3 * BLOCK :]
            changes = (ours - exact).square().sum(1) / exact.square().sum(1)
            assert found[index, format] == pytest.approx(changes.mean().item(), rel=0.03)


def packed(
    q: np.ndarray, rows: list[tuple[np.ndarray, np.ndarray, bool]], format: KVFormat, at: int
) -> np.ndarray:
    """Attention of the row at a position, all heads of it in a row."""
    read = [with_sealed(each, held, format, at, key=key) for each, held, key in rows]
    return reference.attend(q[None], *read, at)[0].reshape(-1)


def test_texts_that_no_packed_block_is_read_of(tmp_path: Path) -> None:
    make("llama", tmp_path, max_position_embeddings=512)
    assert not any(x for *_, x in layer_losses(open_checkpoint(tmp_path), TOKENS[: 3 * BLOCK]))


def test_layers_with_windows_and_experts(tmp_path: Path) -> None:
    """Layers that see all alone are measured, with what no graph computes behind them."""
    for name, layers in (("gemma3_text", 1), ("qwen3_moe", 4)):
        make(name, tmp_path / name, max_position_embeddings=512)
        found = list(layer_losses(open_checkpoint(tmp_path / name), TOKENS))
        assert [(x, f) for x, f, _ in found] == [(x, f) for x in range(layers) for f in SEALED]
        assert all(0 < loss < 1 for *_, loss in found)


def test_measured_once_and_kept(fresh: str, monkeypatch: pytest.MonkeyPatch) -> None:
    told = list[tuple[int, int]]()
    llm = load(fresh, kv_bits=4.3, progress=lambda p: told.append((p.done, p.total)))
    assert told[-1] == (6, 6)
    formats = llm.options.kv_format
    assert isinstance(formats, tuple)
    assert len(formats) == 6
    assert set(formats) <= {*SEALED}
    answer = {"temperature": 0, "max_tokens": 20, "ignore_eos": True}
    expected = llm.generate(TOKENS, **answer).tokens
    assert load(fresh, kv_format=formats).generate(TOKENS, **answer).tokens == expected
    monkeypatch.setattr(kv_bits, "layer_losses", None)
    assert load(fresh, kv_bits=4.3).options.kv_format == formats
    chosen = load(fresh, kv_bits=4.5, kv_read=512).options.kv_format
    assert "k8v4" not in chosen


@pytest.mark.parametrize(
    "text", ["", "{}", '{"4": [{"k8v4": 0}]}', f'{{"4": [{{"k8v4": {10**400}}}]}}', "[[[", "\xff"]
)
def test_damaged_losses_are_measured_again(fresh: str, measured: list[int], text: str) -> None:
    (Path(fresh) / KV_LOSSES).write_bytes(text.encode("latin-1"))
    for _ in range(2):
        formats = load(fresh, kv_bits=4.3).options.kv_format
        assert formats == ("k4v4",) * 2 + ("k4v2",) * 4
        assert len(measured) == 1


def test_bad_input(fresh: str, tmp_path: Path) -> None:
    for options, message in (
        ({"kv_bits": 2.5}, r"`kv_bits` is 2.5; allowed with this model are \d.\d\d to \d.\d\d"),
        ({"kv_bits": 9}, "`kv_bits` is 9; allowed"),
        ({"kv_bits": "4.3"}, "`kv_bits`"),
        ({"kv_bits": 4.3, "kv_format": "k4v4"}, "bits choose the formats; leave out one"),
        ({"kv_bits": 4.3, "kv_budget": 1024}, "what is packed is not forgotten"),
        ({"kv_bits": 4.3, "prefill_mass": 0.99}, "without `kv_budget` and `kv_bits`"),
        ({"kv_bits": 4.3, "decode": "portable"}, "have a format for each layer"),
        ({"kv_format": ["k4v4"] * 5}, "has 5 formats; this model has 6 layers"),
        ({"kv_format": ("k4v4",) * 5 + ("int8",)}, "k8v4, k4v4, k4v2"),
        ({"kv_format": ("k8v4",) * 6, "kv_read": 512}, "blocks that matter"),
        ({"kv_format": ("k4v4",) * 6, "prefill": "cpu"}, "C\\+\\+ kernels alone have several"),
    ):
        with pytest.raises(OptionError, match=message):
            load(fresh, **options)
    make("deepseek_v2", tmp_path, vocab_size=320)
    save_tokenizer(tmp_path)
    with pytest.raises(OptionError, match=r"`kv_bits` is 4.3: blocks are packed of attention to"):
        load(str(tmp_path), kv_bits=4.3)


def test_sessions_of_other_bits(bundle: Path, tmp_path: Path) -> None:
    llm = load(str(bundle), kv_format=("k4v2", "k8v4") * 3)
    session = llm.session()
    session.append(TOKENS)
    session.generate(max_tokens=1)
    session.save(tmp_path / "saved")
    for other in (("k8v4", "k4v2") * 3, "int8"):
        with pytest.raises(SessionFileError, match="kv_bits"):
            load(str(bundle), kv_format=other).load_session(tmp_path / "saved")
    assert load(str(bundle), kv_format=llm.options.kv_format).load_session(tmp_path / "saved")


def test_without_the_file(deep_model: Path, tmp_path: Path) -> None:
    """Of a bundle whose checkpoint is gone."""
    folder = tmp_path / "model"
    shutil.copytree(deep_model, folder)
    path = load(str(folder)).engine.bundle.path
    shutil.rmtree(folder)
    with pytest.raises(SourceError):
        load(str(path), kv_bits=4.3)
    assert not (path / KV_LOSSES).exists()


def test_weights_that_are_not_numbers(fresh: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_bits, "layer_losses", lambda *_, **__: [(0, "k8v4", np.nan)])
    with pytest.raises(ModelFormatError, match="infinite or not a number"):
        load(fresh, kv_bits=4.3)
    assert not (Path(fresh) / KV_LOSSES).exists()


@pytest.mark.usefixtures("measured")
def test_a_draft_model_that_packs_nothing_keeps_int8(fresh: str, tmp_path: Path) -> None:
    sizes = {"sliding_window": 64, "vocab_size": 320, "max_position_embeddings": 512}
    make("phi3", tmp_path, **sizes)
    save_tokenizer(tmp_path)
    llm = load(fresh, kv_bits=4.3, draft=str(tmp_path))
    plain = load(fresh, kv_format=llm.options.kv_format)
    answer = {"temperature": 0, "max_tokens": 20, "ignore_eos": True}
    assert llm.generate(TOKENS, **answer).tokens == plain.generate(TOKENS, **answer).tokens


@pytest.mark.usefixtures("measured")
def test_a_server_knows_its_size_before_and_after(fresh: str) -> None:
    options: Any = {"kv_bits": 4.3, "ctx_size": 512}
    served = served_model(fresh, options)
    first, card = served.needed_bytes(), served.card()
    assert first == load(fresh, **options).engine.memory.models
    assert card is not None
    plain = served_model(fresh, {"ctx_size": 512}).needed_bytes()
    assert first != plain


@pytest.mark.usefixtures("measured")
def test_commands(
    fresh: str,
    tmp_path: Path,
    cli: Callable[..., subprocess.CompletedProcess[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(explain, "measure_cpu", lambda *_, **__: Machine(1e9, "a CPU", 1e9))
    file = tmp_path / "edgellm.toml"
    file.write_text(f"[models.small]\nsource = {json.dumps(fresh)}\nkv_bits = 4.3\n")
    by_file = ("plan", "600", "-m", "small", "--config", str(file))

    def cache(*arguments: str) -> str:
        (line,) = (
            line for line in cli(*arguments).stdout.splitlines() if line.startswith("KV cache: ")
        )
        return line

    assert " in " in cache("plan", "600", "-m", fresh, "--kv-bits", "4.3")
    assert " in " in cache(*by_file)
    assert ", int8;" in cache(*by_file, "--kv-format", "int8")
    both = cli("plan", "600", "-m", fresh, "--kv-bits", "4.3", "--kv-format", "int8")
    assert "leave out one" in both.stderr
