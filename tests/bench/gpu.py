"""Triton kernels on a GPU: bandwidth, each kernel's share of it, tokens/s of whole models.

    python tests/bench/gpu.py [--models SmolLM2-135M,Qwen3-30B-A3B] [--kind int4_k]
        [--depths 128,4096,32768] [--peer]

Weights are random in the shapes of real models; speed does not depend on their values. Copy
bandwidth is measured first, and everything is told as a share of it. `--peer` decodes the same
shapes with Hugging Face transformers, in bfloat16 with a static cache and torch.compile.

Without a GPU, this shows that it runs; its times mean nothing then:

    TRITON_INTERPRET=1 python tests/bench/gpu.py --models tiny,tiny-experts --depths 8
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
import triton

from edgellm.backends.providers import CUDA, status
from edgellm.backends.registry import TRITON
from edgellm.cache.sequence import Sequence
from edgellm.engine.one_sequence import compute_prompt
from edgellm.errors import EdgeLLMError
from edgellm.kernels import rope
from edgellm.kernels.attention.gpu import Partials, attend
from edgellm.kernels.attention.gpu_tiles import Tiling
from edgellm.kernels.experts import Routing
from edgellm.kernels.experts.gpu import DeviceRouter, ExpertBuffers, ExpertSizes, add_up, route
from edgellm.kernels.gpu.device import device_name, interpreted, require
from edgellm.kernels.gpu.kv_blocks import DeviceBlocks
from edgellm.kernels.kv_blocks import BLOCK, KVFormat, allocate
from edgellm.kernels.linear.gpu import FEW_ROWS, DevicePackedWeights, Next, Rows, linear
from edgellm.kernels.linear.packed import PackedWeights, packed_shape
from edgellm.kernels.quantized import KINDS, Kind
from edgellm.kernels.step import StepSpan
from edgellm.kernels.step.gpu import DECODE_ROWS, MAX_ROWS, DeviceStep
from edgellm.kernels.step.gpu_inputs import SpanInputs
from edgellm.kernels.step.weights import LayerWeights, Weights
from edgellm.llm import LLM, load

COPY_BYTES = 2 << 30
PROMPT = 2048
PEER_CALLS = 40


@dataclass(frozen=True)
class Shape:
    """Of a model, with its vocabulary."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    routing: Routing | None = None

    @property
    def experts(self) -> int:
        return 1 if self.routing is None else self.routing.experts

    @property
    def kv_size(self) -> int:
        return self.kv_heads * self.head_dim


SHAPES = {
    "tiny": Shape(1, 256, 256, 8, 1, 32, 64),
    "SmolLM2-135M": Shape(30, 576, 1536, 9, 3, 64, 49152),
    "Llama-3.2-1B": Shape(16, 2048, 8192, 32, 8, 64, 128256),
    "Llama-3-8B": Shape(32, 4096, 14336, 32, 8, 128, 128256),
    "Qwen2.5-7B": Shape(28, 3584, 18944, 28, 4, 128, 152064),
    "tiny-experts": Shape(1, 256, 64, 8, 1, 32, 64, Routing(experts=8, used=2)),
    "Qwen3-30B-A3B": Shape(48, 2048, 768, 32, 4, 128, 151936, Routing(experts=128, used=8)),
}


def seconds(run: Callable[[], object]) -> float:
    """The median time of launches on the device, whose caches are cold."""
    if interpreted():
        return waited(run, calls=1)
    return float(triton.testing.do_bench(run, return_mode="median")) / 1e3


def waited(run: Callable[[], object], *, calls: int = 30) -> float:
    """The median time of a call that waits for its results, on the host's clock."""
    times = []
    for _ in range(calls + (0 if interpreted() else 3)):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return float(np.median(times[-calls:]))


def random_panels(rng: np.random.Generator, outputs: int, inputs: int, kind: Kind) -> PackedWeights:
    """Random weights, about 1 / sqrt(inputs) each."""
    data = rng.integers(0, 256, packed_shape(outputs, inputs, kind), dtype=np.uint8)
    size = 1.6 / 2 ** (kind.bits - 1) / np.sqrt(inputs)
    if kind.blocked:
        data[..., : kind.block_bytes] = _bytes(size / 64, kind.block_bytes)
    else:
        data[..., 64 * kind.bits :] = _bytes(size, kind.group_bytes - 64 * kind.bits)
    return PackedWeights(data, outputs, inputs, kind)


def _bytes(value: float, count: int) -> np.ndarray:
    """A number as halves."""
    return np.full(count // 2, value, np.float16).view(np.uint8)


def random_weights(shape: Shape, kind: Kind) -> Weights:
    """Every layer has the same weights here, and its own copy on the device."""
    rng = np.random.default_rng(0)
    width, norm = shape.heads * shape.head_dim, np.ones(shape.hidden, np.float32)
    router = rng.standard_normal((shape.experts, shape.hidden), np.float32)
    layer = LayerWeights(
        attention_norm=norm,
        mlp_norm=norm,
        q=random_panels(rng, width, shape.hidden, kind),
        k=random_panels(rng, shape.kv_size, shape.hidden, kind),
        v=random_panels(rng, shape.kv_size, shape.hidden, kind),
        o=random_panels(rng, shape.hidden, width, kind),
        gate=random_panels(rng, shape.experts * shape.intermediate, shape.hidden, kind),
        up=random_panels(rng, shape.experts * shape.intermediate, shape.hidden, kind),
        down=random_panels(rng, shape.experts * shape.hidden, shape.intermediate, kind),
        heads=shape.heads,
        router=router if shape.routing else None,
        routing=shape.routing,
    )
    table = random_panels(rng, shape.vocabulary, shape.hidden, KINDS["int8_symmetric"])
    return Weights(
        layers=[layer] * shape.layers,
        final_norm=norm,
        embedding=table,
        head=table,
        epsilon=1e-5,
    )


def pool(shape: Shape, tokens: int, format: KVFormat, device: str, *, layers: int) -> DeviceBlocks:
    """Blocks for `tokens` tokens, filled with ones."""
    host = allocate(
        format=format,
        blocks=-(-tokens // BLOCK),
        layers=layers,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
    )
    blocks = DeviceBlocks.like(host, device)
    for part in (blocks.k, blocks.v, blocks.k_scale, blocks.v_scale):
        part.fill_(1)
    return blocks


def copy_bandwidth(device: str) -> float:
    """Bytes read and written a second."""
    size = 1 << 20 if interpreted() else COPY_BYTES
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / seconds(lambda: target.copy_(source))


def show_linear(shape: Shape, kind: Kind, device: str, bandwidth: float) -> None:
    """The vector products of one layer and the head."""
    weights = random_weights(shape, kind)
    layer = weights.layers[0]
    alone = ("o",) if shape.routing else ("o", "gate", "down")
    parts = {name: [getattr(layer, name)] for name in alone}
    qkv = list(layer.qkv)
    for name, stacked in {"qkv": qkv, **parts, "head": [weights.head]}.items():
        weight = DevicePackedWeights.stacked(stacked, device)
        for count in (1, 8, 32, 512):
            x = torch.randn((count, weight.inputs), device=device)
            y = torch.empty((count, weight.outputs), device=device)
            rows = Rows.empty(count, weight.inputs, device)
            run = _bound(linear, x, weight, y, rows)
            show_kernel(f"linear {name} x{count}", seconds(run), weight.data.nbytes, bandwidth)


def show_experts(shape: Shape, kind: Kind, device: str, bandwidth: float) -> None:
    """The experts of one layer, from the router to the sum; each by itself and all together."""
    layer = random_weights(shape, kind).layers[0]
    routing, gate, router = layer.routing, layer.gate, layer.router
    if routing is None or gate is None or router is None:
        return
    sizes = ExpertSizes(routing, shape.hidden, shape.intermediate)
    on_gpu = DeviceRouter(torch.from_numpy(router).to(device), sizes)
    packed = (gate, layer.up, layer.down)
    first, second, down = (DevicePackedWeights.of(panels, device) for panels in packed)
    for count in (1, 8, 32, 512):
        room = ExpertBuffers.empty([sizes], rows=count, device=device)
        rows = Rows.empty(count, shape.hidden, device)
        x = torch.randn((count, shape.hidden), device=device)
        inner, out = room.slots(sizes, count)
        choose = _bound(route, x, on_gpu, room, norm=None, epsilon=0.0)
        tiles = route(x, on_gpu, room, norm=None, epsilon=0.0)
        slots = replace(tiles, source=None)
        few = count <= FEW_ROWS
        then, coded = Next(room.inner) if few else None, room.inner if few else None
        options = {"activation": "silu", "up": second, "then": then, "tiles": tiles}
        steps = {
            "router": (choose, router.nbytes),
            "gate and up": (_bound(linear, x, first, inner, rows, **options), 2),
            "down": (_bound(linear, inner, down, out, room.rows, coded=coded, tiles=slots), 1),
            "sum": (_bound(add_up, room, on_gpu, x, add=True, then=None), out.nbytes),
        }
        held = len({int(entry[0]) for entry in tiles.table.cpu() if entry[2]})
        for name, (run, size) in steps.items():
            if size <= 2:
                size *= held * down.data.nbytes // routing.experts
            show_kernel(f"{name} x{count}, {held} experts", seconds(run), size, bandwidth)


def show_attention(shape: Shape, depth: int, device: str, bandwidth: float) -> None:
    for format in ("int8", "f16"):
        blocks = pool(shape, depth + 1, format, device, layers=1)
        q = torch.randn((1, shape.heads, shape.head_dim), device=device)
        kinds = [(shape.heads, shape.kv_heads, shape.head_dim)]
        partials = Partials.empty(tokens=1, kinds=kinds, device=device)
        tiling = Tiling.of(blocks, shape.heads)
        inputs = SpanInputs(
            [blocks], tilings=[tiling], rows=1, positions=depth + 1, vocabulary=2, device=device
        )
        inputs.set([_span(range(len(blocks.k)), 1, depth)])
        tables, work = inputs.places[0].tables, inputs.work([1])[tiling]
        run = _bound(attend, blocks, tables, 0, q, work, torch.empty_like(q), partials)
        size = blocks.host.nbytes * depth // (len(blocks.k) * BLOCK)
        show_kernel(f"attention {format} @{depth}", seconds(run), size, bandwidth)


def show_kernel(name: str, taken: float, size: int, bandwidth: float) -> None:
    rate = size / taken
    print(f"  {name:26} {taken * 1e6:9.1f} us  {rate / 1e9:7.0f} GB/s  {rate / bandwidth:4.0%}")


def show_model(
    shape: Shape, kind: Kind, depths: SequenceOf[int], device: str, bandwidth: float
) -> None:
    """Decode at each depth and of several sequences, and a prompt."""
    weights = random_weights(shape, kind)
    longest = max(*depths, PROMPT if not interpreted() else 0) + BLOCK
    frequencies = (10000.0 ** (-np.arange(shape.head_dim // 2) / (shape.head_dim // 2))).tolist()
    rope_table = rope.table(frequencies, longest)
    for format in ("int8", "f16"):
        blocks = pool(shape, longest, format, device, layers=shape.layers)
        step = DeviceStep(weights, [rope_table], [blocks], device)
        table = list(range(len(blocks.k)))
        for depth in depths:
            taken = waited(_bound(step.best, [_span(table, 1, depth)]))
            size = _read(weights) + blocks.host.nbytes * depth // (len(blocks.k) * BLOCK)
            print(
                f"  decode {format} @{depth:<6} {1 / taken:8.0f} tokens/s  "
                f"{size / taken / bandwidth:4.0%} of the bandwidth"
            )
        for rows in (8, DECODE_ROWS):
            each = len(table) // rows
            if each == 0:
                continue
            tables = [table[first * each : (first + 1) * each] for first in range(rows)]
            depth = each * BLOCK - 1
            spans = [_span(blocks_of_one, 1, depth) for blocks_of_one in tables]
            taken = waited(_bound(step.best, spans))
            print(f"  decode {format} {rows} @{depth:<6} {rows / taken:8.0f} tokens/s")
        count = 16 if interpreted() else PROMPT
        taken = waited(partial(_prompt, step, table, count), calls=1 if interpreted() else 5)
        print(f"  prefill {format} pp{count:<6} {count / taken:8.0f} tokens/s")
        del step, blocks


def show_peer(shape: Shape, depth: int, bandwidth: float) -> None:
    """The same shape in transformers: bfloat16 weights, static cache, compiled decode."""
    from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=depth + PEER_CALLS,
        tie_word_embeddings=True,
    )
    with torch.device("cuda"), torch.inference_mode():
        model = LlamaForCausalLM(config).to(torch.bfloat16)
        # the cache counts its tokens itself: a prompt first, then one token a call
        cache = StaticCache(config=config, max_cache_len=depth + PEER_CALLS)
        model(torch.ones((1, depth), dtype=torch.int64), past_key_values=cache)
        model.forward = torch.compile(model.forward, mode="reduce-overhead", fullgraph=True)
        token = torch.ones((1, 1), dtype=torch.int64)

        def decode() -> None:
            model(token, past_key_values=cache)
            torch.cuda.synchronize()

        taken = waited(decode, calls=PEER_CALLS - 8)
        size = 2 * sum(p.numel() for p in model.parameters())
    print(
        f"  transformers bf16 @{depth:<6} {1 / taken:8.0f} tokens/s  "
        f"{size / taken / bandwidth:4.0%} of the bandwidth (weights alone)"
    )


def show_provider() -> None:
    """The default model's prompt through ONNX Runtime's CUDA provider, beside Triton's."""
    reason = status(CUDA).reason
    choices = [(TRITON, None), (CUDA, "f16"), (CUDA, "w4a16")]
    if reason:
        print(f"CUDA provider: left out, {reason}")
        choices = choices[:1]
    for prefill, precision in choices:
        try:
            llm = load(prefill=prefill, precision=precision, decode=TRITON, ctx_size=2 * PROMPT)
        except EdgeLLMError as error:
            print(f"  {prefill}: left out, {error}")
            continue
        sequence = llm.engine.cache.sequence()

        def run(llm: LLM = llm, sequence: Sequence = sequence) -> None:
            compute_prompt(llm.engine.prefill, [1] * PROMPT, sequence)
            sequence.truncate(0)

        print(
            f"  prefill {prefill} {precision or ''} pp{PROMPT} "
            f"{PROMPT / waited(run, calls=5):8.0f} tokens/s"
        )


def _read(weights: Weights) -> int:
    """Bytes of the weights that a token reads."""
    unread = 0
    for layer in weights.layers:
        if layer.routing is not None and layer.gate is not None:
            stacked = sum(part.data.nbytes for part in (layer.gate, layer.up, layer.down))
            unread += (
                stacked * (layer.routing.experts - layer.routing.used) // layer.routing.experts
            )
    return weights.nbytes - unread


def _prompt(step: DeviceStep, table: SequenceOf[int], count: int) -> None:
    for start in range(0, count, MAX_ROWS):
        size = min(MAX_ROWS, count - start)
        step.run([_span(table, size, start, logit_rows=int(start + size == count))])


def _span(table: SequenceOf[int], count: int, start: int, *, logit_rows: int = 1) -> StepSpan:
    return StepSpan(tables=[table], tokens=[1] * count, start=start, logit_rows=logit_rows)


def _bound(call: Callable[..., object], *args: object, **options: object) -> Callable[[], object]:
    return lambda: call(*args, **options)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(name for name in SHAPES if "tiny" not in name))
    parser.add_argument("--depths", default="128,4096,32768")
    parser.add_argument("--kind", choices=KINDS, default="int4_symmetric", help="of the layers")
    parser.add_argument("--peer", action="store_true")
    arguments = parser.parse_args()
    device = require()
    kind = KINDS[arguments.kind]
    depths = [int(depth) for depth in arguments.depths.split(",")]
    bandwidth = copy_bandwidth(device)
    print(
        f"{device_name()}, torch {torch.__version__}, triton {triton.__version__}: "
        f"copy {bandwidth / 1e9:.0f} GB/s"
    )
    for name in arguments.models.split(","):
        print(name)
        show_linear(SHAPES[name], kind, device, bandwidth)
        show_experts(SHAPES[name], kind, device, bandwidth)
        for depth in depths:
            show_attention(SHAPES[name], depth, device, bandwidth)
        show_model(SHAPES[name], kind, depths, device, bandwidth)
        if arguments.peer and SHAPES[name].routing is None:
            show_peer(SHAPES[name], depths[0], bandwidth)
    show_provider()


if __name__ == "__main__":
    main()
