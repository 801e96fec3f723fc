"""Prefill and decode in Triton kernels beside those of the CPU, on one KV cache."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from tiny_adapters import pairs_of, write_peft

from edgellm.backends.batch import Rows, Span
from edgellm.backends.selection import select
from edgellm.cache.replica import Replica
from edgellm.cache.sequence import Sequence as CachedSequence
from edgellm.engine.one_sequence import Hooks, compute_prompt, compute_tokens
from edgellm.errors import CancelledError, MemoryEstimateError, OptionError, ProviderError
from edgellm.kernels.gpu import device
from edgellm.kernels.kv_blocks import SEALED, KVFormat, allocate
from edgellm.kernels.native import library
from edgellm.llm import LLM, load
from edgellm.measure.explain import resident
from edgellm.options import EngineOptions
from edgellm.results import Completion
from edgellm.store.bundle import Bundle
from edgellm.store.prepare import prepare

# the interpreter computes in numpy, which warns of the NaN in memory that was never written
pytestmark = [pytest.mark.triton, pytest.mark.filterwarnings("ignore::RuntimeWarning")]

TOKENS = [7 * i % 50 + 3 for i in range(300)]
CPU = "native" if library() is not None else "cpu"
CPU_DECODE = "native" if library() is not None else "portable"


@pytest.fixture(scope="module")
def bundle(tiny_model: Path) -> Bundle:
    pytest.importorskip("triton")
    return prepare(str(tiny_model), precisions=("packed", "f32", "int4", "w8a8"))


@pytest.fixture(scope="module")
def on_gpu(bundle: Bundle) -> LLM:
    return load(str(bundle.path), prefill="triton", decode="triton")


def logits_after(llm: LLM, tokens: Sequence[int], *, sequence: CachedSequence) -> np.ndarray:
    return compute_prompt(llm.engine.prefill, tokens, sequence, Hooks())


def close(ours: np.ndarray, theirs: np.ndarray) -> bool:
    """As far as int8 activations, which the CPU rounds and the GPU does not, leave them equal."""
    return float(np.abs(ours - theirs).mean() / np.abs(theirs).mean()) < 0.05


@pytest.mark.parametrize("format", ["int8", "f32"])
def test_like_the_cpu(bundle: Bundle, format: str) -> None:
    """A prompt in Triton, one on the CPU that ends before a block does, and tokens across that."""
    found = []
    for decode in ("triton", CPU_DECODE):
        prompt = decode if decode == "triton" else CPU
        short = load(str(bundle.path), kv_format=format, prefill=prompt, decode=decode)
        logits = [logits_after(short, TOKENS[:20], sequence=short.engine.cache.sequence())]
        llm = load(str(bundle.path), kv_format=format, prefill=CPU, decode=decode)
        sequence = llm.engine.cache.sequence()
        logits.append(logits_after(llm, TOKENS[:126], sequence=sequence))
        logits += [
            compute_tokens(llm.engine.decoder, [token], sequence)[0] for token in TOKENS[126:129]
        ]
        found.append(np.stack(logits))
    assert close(*found)


def test_whole_chunks_and_a_rest(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgellm.kernels.step.gpu.MAX_ROWS", 8)
    tokens = TOKENS[:19]
    found = []
    for prefill in ("triton", CPU):
        llm = load(str(bundle.path), prefill=prefill, decode=CPU_DECODE)
        sequence = llm.engine.cache.sequence()
        cancel = threading.Event()
        cancel.set()
        with pytest.raises(CancelledError):
            compute_prompt(llm.engine.prefill, tokens, sequence, Hooks(cancel=cancel))
        assert len(sequence) == 0
        found.append(logits_after(llm, tokens, sequence=sequence))
    assert close(*found)


@pytest.mark.parametrize(
    ("prefill", "decode"), [(CPU, "triton"), ("triton", CPU_DECODE), ("cpu", "triton")]
)
def test_host_and_device_hand_over(bundle: Bundle, prefill: str, decode: str) -> None:
    """Prefill on one side, decode on the other, prefill again: each needs what the other wrote."""
    options = {"precision": "f32"} if prefill == "cpu" else {}
    mixed = load(str(bundle.path), prefill=prefill, decode=decode, **options)
    host = "cpu" if prefill == "cpu" else CPU
    on_cpu = load(str(bundle.path), prefill=host, decode=CPU_DECODE, **options)
    found = []
    for llm in (mixed, on_cpu):
        sequence = llm.engine.cache.sequence()
        decoder = llm.engine.decoder
        compute_tokens(decoder, TOKENS[:3], sequence)
        logits = [logits_after(llm, TOKENS[3:20], sequence=sequence)]
        logits += [compute_tokens(decoder, [token], sequence)[0] for token in TOKENS[20:23]]
        logits.append(logits_after(llm, TOKENS[23:30], sequence=sequence))
        fork = sequence.fork()
        logits.append(compute_tokens(decoder, [5], sequence)[0])
        logits.append(compute_tokens(decoder, [6], fork)[0])
        logits.append(logits_after(llm, TOKENS[30:33], sequence=fork))
        found.append(np.stack(logits))
        sequence.close()
        fork.close()
    assert close(*found)


def test_a_cached_prefix_serves_the_other_side(bundle: Bundle) -> None:
    prompt = TOKENS[1:141]  # whose next tokens are clear: the sides round in their own ways
    llm = load(str(bundle.path), prefill=CPU, decode="triton")
    with llm.session() as session:
        session.append(prompt)
        first = session.generate(max_tokens=4, temperature=0)
    with llm.session() as session:
        session.append([*prompt, *first.tokens[:2]])
        again = session.generate(max_tokens=2, temperature=0)
    assert again.stats.cached_tokens == 141
    assert again.tokens == first.tokens[2:]
    assert again.stats.prefill == {CPU: 1}
    assert again.stats.decode == "triton packed"


@pytest.mark.skipif(sys.platform != "linux", reason="reads what Linux tells of mapped files")
def test_the_file_that_weights_are_copied_from_leaves_memory(bundle: Bundle) -> None:
    before = resident(bundle).mapped.get("packed", 0)  # models that other tests have open
    llm = load(str(bundle.path), prefill="triton", decode="triton")
    assert resident(bundle).mapped.get("packed", 0) <= before
    assert [copy.place for copy in llm.engine.memory.copies] == ["triton", "triton"]
    assert llm.engine.memory.weights == 0


@pytest.mark.skipif(CPU == "cpu", reason="chunks of graphs read blocks as they go")
def test_blocks_are_copied_once(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = load(str(bundle.path), prefill=CPU, decode="triton")
    replica = llm.engine.cache.groups[0].replica
    assert isinstance(replica, Replica)
    fetched: list[int] = []
    fetch = replica.device.fetch
    monkeypatch.setattr(
        type(replica.device), "fetch", lambda _, ids: (fetched.extend(ids), fetch(ids))[1]
    )
    sequence = llm.engine.cache.sequence()
    logits_after(llm, TOKENS[:260], sequence=sequence)
    for token in TOKENS[:3]:
        compute_tokens(llm.engine.decoder, [token], sequence)[0]
    assert sorted(fetched) == sorted(sequence.tables[0].held)


def test_a_shifted_context_goes_on(bundle: Bundle) -> None:
    found = []
    for backend in ("triton", CPU_DECODE):
        llm = load(str(bundle.path), kv_format="f32", prefill=CPU, decode=backend)
        sequence = llm.engine.cache.sequence()
        logits_after(llm, TOKENS[:138], sequence=sequence)
        for token in TOKENS[138:140]:  # so that both sides have written what is turned
            compute_tokens(llm.engine.decoder, [token], sequence)
        sequence.shift(keep=4, discard=30)
        steps = [
            compute_tokens(llm.engine.decoder, [token], sequence)[0] for token in TOKENS[140:143]
        ]
        assert len(sequence) == 113
        found.append(np.concatenate(steps))
    assert close(*found)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0, "logprobs": 3},
        {"temperature": 1.0, "repeat_penalty": 1.2, "repeat_last_n": 20, "seed": 5},
    ],
)
def test_the_best_logits_lead_to_the_same_answer_as_all(
    on_gpu: LLM, monkeypatch: pytest.MonkeyPatch, options: dict[str, float]
) -> None:
    def answer() -> Completion:
        with on_gpu.session() as session:
            session.append(TOKENS[:9])
            return session.generate(max_tokens=2, ignore_eos=True, **options)

    answer()  # from here on, all but the prompt's last token is cached
    model = on_gpu.engine.decoder
    asked: list[int] = []
    best = model._candidates

    def watched(spans: Sequence[Span]) -> list[Rows] | None:
        results: list[Rows] | None = best(spans)
        if results is not None:
            asked.append(spans[0].tokens[0])
        return results

    monkeypatch.setattr(model, "_candidates", watched)
    first = answer()
    assert asked == [TOKENS[8], *first.tokens[:-1]]
    monkeypatch.setattr(model, "_candidates", lambda _: None)
    again = answer()
    assert again.tokens == first.tokens
    assert again.logprobs == pytest.approx(first.logprobs, abs=1e-4)


def test_cancelled_prefill_leaves_the_sequence(on_gpu: LLM) -> None:
    cancel = threading.Event()
    cancel.set()
    sequence = on_gpu.engine.cache.sequence()
    with pytest.raises(CancelledError):
        compute_prompt(on_gpu.engine.prefill, TOKENS, sequence, Hooks(cancel=cancel))
    assert len(sequence) == 0


@pytest.mark.gpu
@pytest.mark.slow
def test_smollm2_takes_the_same_greedy_tokens(smollm2: Bundle) -> None:
    """A prompt and eight tokens that the CPU takes, given to Triton in one step, lead to the same
    ones there."""
    pytest.importorskip("triton")
    cpu, triton = (
        load(str(smollm2.path), ctx_size=256, prefill=CPU, decode=decode)
        for decode in (CPU_DECODE, "triton")
    )
    with cpu.session() as session:
        session.append("The capital of France is")
        prompt = session.tokens
        tokens = session.generate(max_tokens=9, temperature=0).tokens
    sequence = triton.engine.cache.sequence()
    logits = compute_tokens(triton.engine.decoder, [*prompt, *tokens[:8]], sequence)
    assert logits.argmax(-1).tolist()[-9:] == list(tokens)


@pytest.mark.smoke
def test_no_device_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    if device.why_not() is None:
        pytest.skip("there is a GPU")
    for options in ({"decode": "triton"}, {"prefill": "triton"}):
        with pytest.raises(ProviderError, match="triton: "):
            select(EngineOptions(**options))
    assert select(EngineOptions()).decode != "triton"


@pytest.mark.smoke
def test_panels_have_no_other_precision() -> None:
    pytest.importorskip("triton")
    with pytest.raises(OptionError, match="none, the kernels have their own"):
        EngineOptions(prefill="triton", precision="f32")


@pytest.mark.smoke
def test_too_little_device_memory(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "free_bytes", lambda _: 1 << 10)
    with pytest.raises(MemoryEstimateError, match=r"0 MiB free; for weights .* smaller `ctx_size`"):
        load(str(bundle.path), decode="triton")


@pytest.mark.smoke
def test_auto_takes_the_cpu_where_the_device_has_too_little_memory(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("edgellm.backends.selection._usual_decode", lambda: "triton")
    monkeypatch.setattr(device, "free_bytes", lambda _: 1 << 10)
    with caplog.at_level(logging.WARNING):
        llm = load(str(bundle.path))
    assert llm.decode.split()[0] == CPU_DECODE
    (note,) = [note for note in llm.notes if "triton" in note]
    assert note.startswith(f"decode {CPU_DECODE}, not triton: the device has 0 MiB free; ")
    assert [record.getMessage() for record in caplog.records] == [f"{llm.name}: {note}"]
    assert len(llm.generate(TOKENS[:5], max_tokens=2).tokens) == 2


@pytest.mark.smoke
def test_auto_takes_the_cpu_where_torch_finds_no_device(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgellm.backends.selection._usual_decode", lambda: "triton")
    monkeypatch.setattr(device, "why_not", lambda: "torch finds no device")
    llm = load(str(bundle.path))
    assert f"decode {CPU_DECODE}, not triton: torch finds no device" in llm.notes


@pytest.mark.smoke
@pytest.mark.parametrize("format", ["int8", "f16"])
def test_blocks_change_sides(format: KVFormat, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order of their ids or not, in one copy of an array or several."""
    pytest.importorskip("triton")
    from edgellm.kernels.gpu import kv_blocks

    shape = {"blocks": 7, "layers": 2, "kv_heads": 2, "head_dim": 16}
    host, other = (allocate(format=format, **shape) for _ in range(2))
    arrays = [(host.k, other.k), (host.v, other.v)]
    if host.k_scale is not None and other.k_scale is not None:
        arrays.append((host.k_scale, other.k_scale))
    for mine, _ in arrays:
        mine[:] = np.arange(mine.size).reshape(mine.shape) % 113
    ids = [5, 0, 3, 6]
    for at_once in (kv_blocks._AT_ONCE, 2 * host.k[0].nbytes, 1):
        monkeypatch.setattr(kv_blocks, "_AT_ONCE", at_once)
        blocks = kv_blocks.DeviceBlocks.like(host, device.require())
        blocks.fetch(ids)
        for _, theirs in arrays:
            theirs[:] = 1
        replace(blocks, host=other).give(ids[1:])
        for mine, theirs in arrays:
            for block in range(7):
                expected = mine[block] if block in ids[1:] else np.ones_like(mine[block])
                np.testing.assert_array_equal(theirs[block], expected)


def test_adapters_come_and_go_while_the_model_answers(
    bundle: Bundle, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that begins late too, whose rows are cut among calls; as on the CPU."""
    paths = [
        write_peft(tmp_path / str(seed), pairs_of(tiny_model, rank=rank, seed=seed, size=1.0))
        for seed, rank in enumerate((4, 7))
    ]
    tokens, found = TOKENS[:27], []
    monkeypatch.setattr("edgellm.kernels.step.gpu.MAX_ROWS", 16)
    for backend in ("triton", CPU):
        with load(str(bundle.path), prefill=backend, decode=backend) as llm:
            rows = []
            for number, (path, start) in enumerate([(None, 0), (paths[0], 0), (paths[1], 19)]):
                weights = None
                if path is not None:
                    llm.load_adapter("it", path)
                    weights = llm.engine.adapters.loaded["it"].weights
                    llm.unload_adapter("it")
                root = llm.engine.cache.index.salted_root(str(number))
                span = Span(llm.engine.cache.sequence(root=root), tokens, logit_rows=len(tokens))
                span = replace(span, adapter=weights, adapter_start=start)
                rows.append(
                    llm.engine.thread.call(partial(llm.engine.prefill.run, [span]))[0].hidden
                )
            found.append(rows)
    for ours, theirs in zip(*found, strict=True):
        assert close(ours, theirs)
    plain, whole, late = found[0]
    assert not close(plain, whole)
    assert np.array_equal(plain[:16], late[:16])
    assert not close(plain[19:], late[19:])


@pytest.mark.smoke
def test_an_adapter_beyond_the_device_is_refused(
    bundle: Bundle, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_peft(tmp_path / "it", pairs_of(tiny_model, rank=2))
    with load(str(bundle.path), prefill="triton", decode="triton") as llm:
        monkeypatch.setattr(device, "free_bytes", lambda _: 1000)
        with pytest.raises(MemoryEstimateError, match="for the adapter 0 MiB are needed"):
            llm.load_adapter("it", path)
        assert llm.adapters == []


@pytest.mark.skipif(CPU == "cpu", reason="computes the first tokens in C++")
@pytest.mark.parametrize("format", SEALED)
def test_both_sides_seal_blocks(bundle: Bundle, format: KVFormat) -> None:
    """Tokens in Triton seal a block, a prompt in C++ the next one, and each side reads both."""
    tokens, found = [7, *((7 * i + i // 11) % 250 for i in range(530))], []
    for decode in ("triton", "native"):
        llm = load(str(bundle.path), kv_format=format, prefill="native", decode=decode)
        sequence, logits = llm.engine.cache.sequence(), []
        for start, end in ((0, 383), (386, 514)):
            logits.append(logits_after(llm, tokens[start:end], sequence=sequence))
            for token in tokens[end : end + 3]:
                logits.append(compute_tokens(llm.engine.decoder, [token], sequence)[0])
        found.append(np.stack(logits))
        sequence.close()
    assert close(*found)


@pytest.mark.parametrize("format", ["k8v4", pytest.param("k4v4", marks=pytest.mark.smoke)])
def test_formats_that_seal_blocks_are_taken_where_both_sides_have_them(
    bundle: Bundle, format: KVFormat
) -> None:
    options = EngineOptions(kv_format=format, prefill="triton", decode="triton")
    selection = select(options)
    assert (selection.prefill, selection.decode) == ("triton", "triton")
    with pytest.raises(OptionError, match="the C\\+\\+ and Triton kernels alone seal blocks"):
        select(replace(options, prefill="cpu"))
    for name, value in (("kv_read", 512), ("kv_budget", 1024), ("prefill_mass", 0.9)):
        plain = replace(options, kv_format="k4v4" if name == "kv_read" else "int8")
        with pytest.raises(OptionError, match=f"`{name}` is {value}.*take native for both"):
            select(replace(plain, **{name: value}))
