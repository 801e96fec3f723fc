"""Chunks that stay on the device: ONNX Runtime bound to torch's memory, attention in Triton."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from random_checkpoint import CONFIGS

from edgellm.backends import opening
from edgellm.backends.batch import Backend, Span
from edgellm.backends.chunked_backend import ChunkedBackend
from edgellm.backends.forward import Model
from edgellm.backends.host_attention import HostAttention, head_norms, rope_tables
from edgellm.backends.planner import Costs
from edgellm.backends.providers import CPU, PROVIDERS
from edgellm.backends.segments import Head, Segments
from edgellm.backends.selection import Parts, Selection, select
from edgellm.engine.one_sequence import Hooks, compute_prompt, compute_tokens
from edgellm.errors import CancelledError, MemoryEstimateError, OptionError, ProviderError
from edgellm.export import export
from edgellm.kernels.gpu import device
from edgellm.llm import LLM, load
from edgellm.options import EngineOptions
from edgellm.store.key_basis import open_head_norms

if TYPE_CHECKING:
    from edgellm.backends.device_model import DeviceModel

# the interpreter computes in numpy, which warns of the NaN in memory that was never written
pytestmark = [pytest.mark.triton, pytest.mark.filterwarnings("ignore::RuntimeWarning")]

TOKENS = [7 * i % 50 + 3 for i in range(40)]
PRECISIONS = ("f32", "f16", "w4a16")


@pytest.fixture(params=["llama"])
def llm(request: pytest.FixtureRequest, make_model: Callable[..., Path], tmp_path: Path) -> LLM:
    pytest.importorskip("triton")
    if device.why_not() is None and not device.interpreted():
        pytest.skip("the CPU in the device's place needs Triton's interpreter, not a GPU")
    out = tmp_path / "bundle"
    export(
        make_model(model_type=request.param),
        out,
        name="tiny",
        source="tiny",
        precisions=PRECISIONS,
        chunk_sizes=(16, 32),
    )
    return load(str(out), precision="f32", prefill="cpu", decode="reference", kv_format="f32")


def on_device(llm: LLM, precision: str) -> Backend:
    """Prefill of a precision through device memory; the CPU stands in for the device."""
    model = opened(llm, precision)
    costs = Costs(dict.fromkeys(model.segments.chunk_sizes, (1.0,)))
    return ChunkedBackend(model, llm.engine.decoder, costs)


def opened(llm: LLM, precision: str) -> DeviceModel:
    engine = llm.engine
    parts = Parts(
        bundle=engine.bundle,
        options=engine.options,
        selection=Selection(prefill="cuda", decode="reference", policy="serial"),
        cache=engine.cache,
        ropes=rope_tables(engine.config, engine.ctx_size),
        threads=1,
        progress=None,
    )
    head, attention = head_and_attention(llm, precision)
    return opening.open_on_device(parts, precision, head=head, attention=attention)


def on_host(llm: LLM, precision: str) -> Backend:
    """Prefill of a precision by ONNX Runtime's CPU provider and the C++ kernels."""
    engine = llm.engine
    segments = Segments(engine.bundle, precision, provider=CPU, threads=1)
    model = Model(segments, *head_and_attention(llm, precision), threads=1)
    return ChunkedBackend(model, engine.decoder, Costs(dict.fromkeys(segments.chunk_sizes, (1.0,))))


def head_and_attention(llm: LLM, precision: str) -> tuple[Head, HostAttention]:
    bundle, config = llm.engine.bundle, llm.engine.config
    head = Head(bundle, bundle.precision(precision).head or "")
    norms = open_head_norms(bundle.path, bundle.manifest.keys)
    ropes = rope_tables(config, llm.engine.ctx_size)
    return head, HostAttention(config, ropes, head_norms(config, norms.__getitem__))


def states(prefill: Backend, llm: LLM, tokens: Sequence[int]) -> np.ndarray:
    """Hidden states of a sequence of its own, prefilled in two parts."""
    found: list[np.ndarray] = []
    hooks = Hooks(on_hidden=lambda rows: found.append(rows.copy()))
    sequence = llm.engine.cache.sequence()
    compute_prompt(prefill, tokens[:20], sequence, hooks)
    compute_prompt(prefill, tokens[20:], sequence, hooks)
    # the host takes over what the device computed
    compute_tokens(llm.engine.decoder, [5], sequence)
    sequence.close()
    return np.concatenate(found)


@pytest.mark.parametrize(
    ("llm", "precision"),
    [
        ("llama", "f32"),
        ("llama", "f16"),
        ("llama", "w4a16"),
        ("qwen3", "f32"),
        ("gemma2", "f32"),
    ],
    indirect=["llm"],
)
def test_like_the_host(llm: LLM, precision: str) -> None:
    prefills = (on_host(llm, precision), on_device(llm, precision))
    expected, ours = (states(prefill, llm, TOKENS) for prefill in prefills)
    np.testing.assert_allclose(ours, expected, atol=1e-4 if precision == "f32" else 1e-2)


def test_decode_goes_on_where_the_device_stopped(llm: LLM) -> None:
    logits = []
    for prefill in (llm.engine.prefill, on_device(llm, "f32")):
        sequence = llm.engine.cache.sequence()
        compute_prompt(prefill, TOKENS, sequence, Hooks())
        logits.append(compute_tokens(llm.engine.decoder, [5], sequence)[0])
    np.testing.assert_allclose(logits[1], logits[0], atol=1e-4)


@pytest.mark.parametrize("llm", ["gemma2"], indirect=True)
def test_many_sequences_in_a_chunk_like_the_host(llm: LLM) -> None:
    """Spans of three sequences, two of which go on, over two chunks."""
    lengths, counts = (0, 5, 12), (9, 1, 8)
    found = []
    for prefill in (on_host(llm, "f32"), on_device(llm, "f32")):
        spans = []
        for length, count in zip(lengths, counts, strict=True):
            sequence = llm.engine.cache.sequence()
            if length:
                prefill.run([Span(sequence, TOKENS[:length])])
            spans.append(Span(sequence, TOKENS[length : length + count], 1))
        results = prefill.run(spans)
        found.append([(rows.hidden, rows.logits[0].scores) for rows in results])
        for span, length, count in zip(spans, lengths, counts, strict=True):
            assert span.sequence.tokens == TOKENS[: length + count]
            span.sequence.truncate(0)
    for theirs, ours in zip(*found, strict=True):
        np.testing.assert_allclose(ours[0], theirs[0], atol=1e-4)
        np.testing.assert_allclose(ours[1], theirs[1], atol=1e-3)


def test_cancelled_prefill_keeps_whole_chunks(llm: LLM) -> None:
    cancel = threading.Event()
    sequence = llm.engine.cache.sequence()
    hooks = Hooks(cancel=cancel, on_hidden=lambda _: cancel.set())
    with pytest.raises(CancelledError):
        compute_prompt(on_device(llm, "f32"), [3, 1] * 40, sequence, hooks)
    assert 0 < len(sequence) < 80


def test_profile_waits_for_each_step(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    model, waited = opened(llm, "f32"), list[None]()
    monkeypatch.setattr(model, "wait", lambda: waited.append(None))
    sequence = llm.engine.cache.sequence()
    seconds = model.profile(TOKENS[:16], sequence, size=16, start=0)
    assert len(waited) == len(seconds) - 1 > 0  # nothing is launched by `commit`


def test_weights_of_each_chunk_size_must_fit(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    files, cache = llm.engine.bundle.manifest.files, llm.engine.cache.nbytes
    needed = 2 * files["f32/weights.bin"].bytes + cache
    monkeypatch.setattr("edgellm.kernels.gpu.device.free_bytes", lambda _: needed - 1)
    with pytest.raises(MemoryEstimateError, match="for weights of f32 in 2 chunk sizes"):
        opened(llm, "f32")
    monkeypatch.setattr("edgellm.kernels.gpu.device.free_bytes", lambda _: needed)
    opened(llm, "f32")


def test_wrong_provider_is_noticed_when_it_is_opened(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Segments.run

    def broken(self: Segments, index: int, chunk: int, inputs: Mapping[str, Any]) -> list[Any]:
        return [-out if chunk == 32 else out for out in run(self, index, chunk, inputs)]

    monkeypatch.setattr(Segments, "run", broken)
    with pytest.raises(ProviderError, match="segment 0 in chunks of 32 is wrong"):
        opened(llm, "f32")


@pytest.mark.smoke
def test_cuda_is_not_in_this_build(monkeypatch: pytest.MonkeyPatch) -> None:
    import onnxruntime

    if PROVIDERS["cuda"].ort_name in onnxruntime.get_available_providers():
        pytest.skip("it is")
    with pytest.raises(ProviderError, match="onnxruntime-gpu"):
        select(EngineOptions(prefill="cuda"))


@pytest.mark.smoke
def test_cuda_takes_chunks_one_by_one() -> None:
    with pytest.raises(OptionError, match="the host has no part"):
        EngineOptions(prefill="cuda", schedule="out-of-order")
    options = EngineOptions(prefill=CPU, precision="w4a16")
    assert select(options).prefill_precision(CONFIGS["llama"]) == "w4a16"
