"""Report of the registers and memory of every Triton kernel, compiled without a device.

    python tests/bench/compile_report.py [--models NAME,...] [--kinds int5_k] [sm_80 ...]

With `--loops` the instructions of each kernel's longest loop are counted, too.

The launchers themselves run, on small models with the shapes of real ones, and their launches are
recorded and compiled. So there is no second list of kernels and settings that could be wrong.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import cycle
from multiprocessing import get_context
from typing import Any, get_args

import click
import numpy as np
from compile_shapes import SHAPES, Shape
from kernel_launches import Launch, compile_for, recorded_launches
from numpy.typing import NDArray

from edgellm.kernels.altup import AltUpWeights, Streams
from edgellm.kernels.delta_net import DeltaNetWeights
from edgellm.kernels.gpu.kv_blocks import DeviceBlocks, DevicePool, DeviceSealed, DeviceStates
from edgellm.kernels.kv_append import HeadNorms
from edgellm.kernels.kv_blocks import SEALED, KVFormat, allocate
from edgellm.kernels.latent import LatentWeights
from edgellm.kernels.linear.packed import PackedWeights, packed_shape
from edgellm.kernels.lora import AdapterWeights, LowRank, pack_adapter
from edgellm.kernels.mamba2 import Mamba2Vectors, Mamba2Weights
from edgellm.kernels.quantized import KINDS, Kind
from edgellm.kernels.rope import RopeTable
from edgellm.kernels.sealed_blocks import allocate_sealed
from edgellm.kernels.short_conv import ShortConvWeights
from edgellm.kernels.state_blocks import StateView, allocate_states
from edgellm.kernels.step.gpu import DeviceStep
from edgellm.kernels.step.span import StepSpan
from edgellm.kernels.step.weights import (
    Laurel,
    LayerInput,
    LayerTable,
    LayerWeights,
    StateMixer,
    Weights,
)

TARGETS = ("sm_80", "sm_86", "sm_90")
# Shared memory that a program can have, in KiB (CUDA C++ Programming Guide, "Compute
# Capabilities").
_SHARED_KIB = {"sm_80": 163, "sm_86": 99, "sm_89": 99, "sm_90": 227, "sm_120": 99}
# Constants of kernels that are sizes of a model, which registers do not depend on much.
_SIZES = {"BLOCK", "GROUPS", "GROUP", "SPAN", "HADAMARD", "FIELDS"}


def launches(shape: Shape, format: KVFormat, kinds: Sequence[Kind]) -> list[Launch]:
    """Record the launches of steps of one token, some tokens, a prompt and sequences, once each.

    Args:
        kinds: kinds of weights, which take turns in the layers.
    """
    step, pools, layers = _step(shape, format, kinds)
    adapter = _adapter(layers) if shape.adapter else None
    with recorded_launches() as recorded:
        # 17 to 32 rows are left out: gate and up of SmolLM2-135M in int4_affine spill 64 bytes on
        # sm_80 there, where 16 warps share the registers
        for counts in ([1], [5], [16], [100], [1, 1], [1, 100]):
            spans = [_span(count, pools) for count in counts]
            step.run([replace(span, adapter=adapter) for span in spans])
        step.logits(np.zeros((1, shape.hidden), np.float32))
    return _once(reversed(recorded))


def _span(count: int, pools: Sequence[DevicePool]) -> StepSpan:
    views = [
        StateView(pool.host, None, ((count, 0),)) if isinstance(pool, DeviceStates) else None
        for pool in pools
    ]
    tables = [[0, 1, 2, 3]] * len(pools)
    return StepSpan(tables=tables, tokens=[0] * count, start=0, logit_rows=1, states=views)


@click.command()
@click.option("--models", default=",".join(SHAPES), help="Whose shapes.", show_default=True)
@click.option("--formats", default=",".join(get_args(KVFormat)), help="Of the KV cache.")
@click.option("--kinds", default=",".join(KINDS), help="Of weights, taking turns in the layers.")
@click.option("--kernels", default="", help="Words of which one is in a kernel's name.")
@click.option("--loops", is_flag=True, help="Count the instructions of the longest loop.")
@click.option("--once", is_flag=True, help="Leave out what differs in sizes alone.")
@click.argument("targets", nargs=-1)
def main(
    *,
    models: str,
    formats: str,
    kinds: str,
    kernels: str,
    loops: bool,
    once: bool,
    targets: Sequence[str],
) -> None:
    """Print a line for each kernel and target such as sm_90.

    Fails if a kernel spills registers, or needs more shared memory than such a device has.
    Kinds of weights whose blocks do not fit a model's shapes are left out.
    """
    every = {model: _all_launches(SHAPES[model], formats, kinds) for model in models.split(",")}
    tasks = [
        (model, launch, target)
        for model, launch in _chosen(every, once=once)
        if any(word in launch.name for word in kernels.split(","))
        for target in targets or TARGETS
    ]
    if not tasks:
        raise click.UsageError(f"no kernel of these models has {kernels} in its name")
    print(f"{'kernel':18} {'model':13} {'target':7} registers spilled shared  settings")
    failures = 0
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        _, launched, goals = zip(*tasks, strict=True)
        usages = pool.map(partial(compile_for, loops=loops), launched, goals)
        for (model, launch, target), usage in zip(tasks, usages, strict=True):
            room = _SHARED_KIB.get(target, 227) << 10
            failures += usage.spilled > 0 or usage.shared > room
            print(
                f"{launch.name:18} {model:13} {target:7} {usage.registers:9} "
                f"{usage.spilled:7} {usage.shared:6}  {launch.settings}"
            )
            if usage.loop is not None:
                counts = ", ".join(f"{name} {count}" for name, count in usage.loop.items())
                print(f"    {sum(usage.loop.values())} in the loop: {counts}")
    sys.exit(int(failures > 0))


def _chosen(every: Mapping[str, Sequence[Launch]], *, once: bool) -> Iterator[tuple[str, Launch]]:
    """Yield models and their launches; `once` leaves out those of other sizes alone."""
    seen = set[object]()
    for model, launched in every.items():
        for launch in launched:
            # a part that is absent has size 0 or 1, and other code than one that is there
            settings = [(n, v > 1 if n in _SIZES else v) for n, v in launch.constants]
            key = (launch.name, launch.signature, launch.warps, tuple(settings))
            if not once or key not in seen:
                yield model, launch
            seen.add(key)


def _all_launches(shape: Shape, formats: str, kinds: str) -> list[Launch]:
    """Return the launches of all formats, each once."""
    fitting = [KINDS[name] for name in kinds.split(",") if shape.fits(KINDS[name])]
    return _once(
        launch for name in formats.split(",") for launch in launches(shape, _format(name), fitting)
    )


def _once(launches: Iterable[Launch]) -> list[Launch]:
    return list({(launch.name, launch.constants): launch for launch in launches}.values())


def _format(name: str) -> KVFormat:
    return next(format for format in get_args(KVFormat) if format == name)


def _step(
    shape: Shape, format: KVFormat, kinds: Sequence[Kind]
) -> tuple[DeviceStep, Sequence[DevicePool], Sequence[LayerWeights]]:
    turns = cycle(kinds)
    layers = [_layer(shape, turns) for _ in range(max(2, -(-len(kinds) // 7)))]
    if shape.latent:
        layers = [_with_latents(shape, layer, turns) for layer in layers]
    if shape.wide is not None:
        layers = _gemma4(shape, shape.wide, turns)
    if shape.mixer is not None:
        layers[1::2] = [_with_mixer(shape, layer, turns) for layer in layers[1::2]]
    hidden = shape.hidden
    weights = Weights(
        layers=layers,
        final_norm=np.ones(hidden, np.float32),
        final_norm_bias=np.ones(hidden, np.float32) if shape.layer_norm else None,
        embedding=_zeros(256, hidden, kinds[-1]),
        head=_zeros(256, hidden, KINDS["int8_symmetric"]),
        epsilon=1e-5,
        logit_softcap=30.0 if shape.softcap else None,
        layer_table=_layer_table(shape, len(layers), next(turns)),
        streams=_streams(shape, next(turns)),
    )
    angles = np.zeros((512, shape.head_dim // 2), np.float32)
    pools = _pools(shape, format, layers)
    mixers = [mixer for x in layers if (mixer := x.beside or x.mixer) is not None]
    if mixers:
        states = allocate_states(blocks=1, layers=len(mixers), elements=mixers[0].state_size)
        pools.append(DeviceStates.like(states, "cpu"))
    return DeviceStep(weights, [RopeTable(angles, angles)], pools, "cpu"), pools, layers


def _adapter(layers: Sequence[LayerWeights]) -> AdapterWeights:
    rank = 16

    def change(weight: PackedWeights) -> LowRank:
        a, b = ((rank, weight.inputs), (weight.outputs, rank))
        return LowRank(np.zeros(a, np.float32), np.zeros(b, np.float32))

    names = ("q", "k", "v", "o", "gate", "up", "down")
    return pack_adapter([{name: change(getattr(x, name)) for name in names} for x in layers])


def _pools(shape: Shape, format: KVFormat, layers: Sequence[LayerWeights]) -> list[DevicePool]:
    """Return pools of K and V for the layers that attend, and of their sealed blocks; wide layers
    have their own."""
    kinds = [(shape.kv_heads, shape.head_dim)] + ([shape.wide[:2]] if shape.wide else [])
    pools: list[DevicePool] = []
    sealed: list[DevicePool] = []
    for pool, (kv_heads, head_dim) in enumerate(kinds):
        count = sum(pool in layer.pools and layer.mixer is None for layer in layers)
        sizes: dict[str, Any] = {"blocks": 4, "layers": count}
        sizes |= {"kv_heads": kv_heads, "head_dim": head_dim}
        packed = allocate_sealed(format=format, **sizes) if format in SEALED else None
        host = allocate(format=format, latent=shape.latent, sealed=packed, **sizes)
        pools.append(DeviceBlocks.like(host, "cpu"))
        if packed is not None:
            sealed.append(DeviceSealed.like(packed, "cpu"))
    return [*pools, *sealed]


def _gemma4(shape: Shape, wide: tuple[int, int, bool], turns: Iterator[Kind]) -> list[LayerWeights]:
    """Return layers of both widths of heads, and those that read their K and V."""
    other = replace(shape, kv_heads=wide[0], head_dim=wide[1])
    layers = []
    for index in range(4 if shape.layer_width else 2):
        here = other if index % 2 else shape
        layer = replace(_layer(here, turns), pool=index % 2, output_scale=0.5, scale=1.0)
        if index > 1:
            layer = replace(layer, k=None, v=None, kv_from=index - 2)
        elif wide[2] and index % 2:
            layer = replace(layer, v=None)
        if shape.layer_width:
            layer = replace(layer, input=_input(shape, turns))
        if shape.streams > 1:
            layer = _with_streams(shape, layer, turns)
            layer = replace(layer, output_scale=1.0, cutoff=1.6 if index % 2 else None)
        layers.append(layer)
    return layers


def _with_streams(shape: Shape, layer: LayerWeights, turns: Iterator[Kind]) -> LayerWeights:
    """Return a layer with a laurel of rank 64, and weights around streams."""
    hidden, count = shape.hidden, shape.streams
    ones = np.ones(hidden, np.float32)
    return replace(
        layer,
        laurel=Laurel(
            left=_zeros(64, hidden, next(turns)),
            right=_zeros(hidden, 64, KINDS["int8_symmetric"]),
            post_norm=ones,
        ),
        altup=AltUpWeights(
            router_norm=ones,
            router=np.ones((count, hidden), np.float32),
            predict=np.ones((count * count, count), np.float32),
            correct=np.ones((count, count), np.float32),
            scale=ones,
        ),
    )


def _input(shape: Shape, turns: Iterator[Kind]) -> LayerInput:
    width, hidden = shape.layer_width, shape.hidden
    context, gate = (_zeros(width, hidden, next(turns)) for _ in range(2))
    output = _zeros(hidden, width, next(turns))
    ones = np.ones(hidden, np.float32)
    return LayerInput(context=context, gate=gate, output=output, post_norm=ones)


def _streams(shape: Shape, kind: Kind) -> Streams | None:
    if shape.streams == 1:
        return None
    enter, leave = (_zeros((shape.streams - 1) * shape.hidden, shape.hidden, kind) for _ in "ab")
    return Streams(enter=enter, leave=leave)


def _layer_table(shape: Shape, layers: int, kind: Kind) -> LayerTable | None:
    if not shape.layer_width:
        return None
    table = _zeros(16 * layers, shape.layer_width, kind)
    return LayerTable(table=table, norm=np.ones(shape.layer_width, np.float32))


def _with_mixer(shape: Shape, layer: LayerWeights, turns: Iterator[Kind]) -> LayerWeights:
    """Return a layer with a mixer with states in place of attention."""
    hidden, heads, width = shape.hidden, 16, 128

    def panels(outputs: int) -> PackedWeights:
        return _zeros(outputs, hidden, next(turns))

    mixer: StateMixer
    if shape.mixer == "short_conv":
        filters = np.ones((3, hidden), np.float32)
        mixer = ShortConvWeights(conv_in=panels(3 * hidden), filters=filters)
    elif shape.mixer == "mamba2":
        # Granite's states have 128 numbers, Falcon's 256, whose channels are gated alone
        vectors = _mamba2(heads=48, state_dim=256 if shape.beside else 128, normed=not shape.beside)
        mixer = Mamba2Weights(mamba_in=panels(vectors.inputs), vectors=vectors)
        if shape.beside:
            mamba_o = _zeros(hidden, mixer.size, next(turns))
            return replace(layer, beside=mixer, mamba_o=mamba_o, beside_pool=1)
    else:
        mixer = DeltaNetWeights(
            qkv=panels(3 * heads * width),
            z=panels(heads * width),
            a=panels(heads),
            b=panels(heads),
            conv=np.ones((4, 3 * heads * width), np.float32),
            decay=-np.ones(heads, np.float32),
            dt_bias=np.ones(heads, np.float32),
            norm=np.ones(width, np.float32),
            key_heads=heads,
        )
    o = _zeros(hidden, mixer.size, next(turns))
    alone = replace(layer, q=None, k=None, v=None, q_gate=None, head_norms=None)
    return replace(alone, mixer=mixer, o=o, heads=0, pool=1)


def _with_latents(shape: Shape, layer: LayerWeights, turns: Iterator[Kind]) -> LayerWeights:
    """Return a layer that attends over latents, with keys and values of 128 numbers."""
    heads, rank = shape.heads, shape.latent

    def panels(outputs: int, inputs: int = shape.hidden) -> PackedWeights:
        return _zeros(outputs, inputs, next(turns))

    latent = LatentWeights(
        key_up=panels(heads * rank, 128),
        value_up=panels(heads * 128, rank),
        norm=np.ones(rank, np.float32),
        epsilon=1e-6,
    )
    q, o = panels(heads * (shape.head_dim + 128)), panels(shape.hidden, heads * 128)
    return replace(layer, q=q, v=panels(rank), o=o, latent=latent, scale=0.1)


def _mamba2(*, heads: int, state_dim: int, normed: bool) -> Mamba2Vectors:
    inner, ones = heads * 64, np.ones(heads, np.float32)
    channels = inner + 2 * state_dim
    return Mamba2Vectors(
        conv=np.ones((4, channels), np.float32),
        conv_bias=np.ones(channels, np.float32),
        dt_bias=ones,
        decay=-ones,
        skip=ones,
        norm=np.ones(inner, np.float32) if normed else None,
        head_dim=64,
        groups=1,
        epsilon=1e-5,
    )


def _layer(shape: Shape, turns: Iterator[Kind]) -> LayerWeights:
    def panels(outputs: int, inputs: int) -> PackedWeights:
        return _zeros(outputs, inputs, next(turns))

    def vector(size: int, there: bool) -> NDArray[np.float32] | None:
        return np.ones(size, np.float32) if there else None

    hidden, intermediate, width = shape.hidden, shape.intermediate, shape.heads * shape.head_dim
    kv = shape.kv_heads * shape.head_dim
    post, mean, biases = shape.post_norms, shape.layer_norm, shape.biases
    experts = 1 if shape.routing is None else shape.routing.experts
    return LayerWeights(
        attention_norm=vector(hidden, True),
        attention_norm_bias=vector(hidden, mean),
        q=panels(width, hidden),
        k=panels(kv, hidden),
        v=panels(kv, hidden),
        o=panels(hidden, width),
        q_bias=vector(width, biases),
        o_bias=vector(hidden, biases),
        post_attention_norm=vector(hidden, post),
        mlp_norm=vector(hidden, True),
        mlp_norm_bias=vector(hidden, mean),
        gate=panels(experts * intermediate, hidden) if shape.gated else None,
        gate_bias=vector(experts * intermediate, biases and shape.gated),
        up=panels(experts * intermediate, hidden),
        up_bias=vector(experts * intermediate, biases),
        down=panels(experts * hidden, intermediate),
        down_bias=vector(experts * hidden, biases),
        heads=shape.heads,
        q_gate=panels(width, hidden) if shape.mixer == "delta_net" else None,
        post_mlp_norm=vector(hidden, post),
        router=None if shape.routing is None else np.ones((experts, hidden), np.float32),
        router_bias=vector(experts, shape.routing is not None and shape.routing.bias),
        selection_bias=vector(experts, shape.routing is not None and shape.routing.selection_bias),
        routing=shape.routing,
        shared_gate=panels(shape.shared, hidden) if shape.shared else None,
        shared_up=panels(shape.shared, hidden) if shape.shared else None,
        shared_down=panels(hidden, shape.shared) if shape.shared else None,
        shared_router=vector(hidden, shape.share),
        expert_scale=vector(experts, shape.routing is not None and shape.routing.scaled),
        shared_post_norm=vector(hidden, shape.mlp_beside),
        experts_post_norm=vector(hidden, shape.mlp_beside),
        experts_norm=vector(hidden, shape.mlp_beside),
        router_norm=vector(hidden, shape.mlp_beside),
        sinks=vector(shape.heads, shape.sinks),
        head_norms=_head_norms(shape),
        activation=shape.activation,
        softcap=50.0 if shape.softcap else None,
    )


def _head_norms(shape: Shape) -> HeadNorms | None:
    order = shape.head_norms
    if order is None:
        return None
    heads = (shape.heads, shape.kv_heads) if order == "whole" else (1, 1)
    q, k = (np.ones(count * shape.head_dim, np.float32) for count in heads)
    return HeadNorms(
        q=q,
        k=k,
        epsilon=1e-5,
        after_rope=order == "after_rope",
        values=shape.wide is not None,
    )


def _zeros(outputs: int, inputs: int, kind: Kind) -> PackedWeights:
    return PackedWeights(
        np.zeros(packed_shape(outputs, inputs, kind), np.uint8), outputs, inputs, kind
    )


if __name__ == "__main__":
    main()
