"""Launches of Triton kernels, recorded instead of run, and compiled without a device."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from edgellm.kernels.gpu.early import OLDEST
from edgellm.kernels.quantized import Kind

_TYPES = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.int8: "*i8",
    torch.uint8: "*u8",
}
_WARPS = 4


@dataclass(frozen=True)
class Launch:
    """Kernel, and everything that its machine code depends on; another process can compile it."""

    module: str
    name: str
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]
    aligned: tuple[int, ...]
    warps: int
    fusion: bool

    @property
    def kernel(self) -> JITFunction[Any]:
        kernel: JITFunction[Any] = getattr(import_module(self.module), self.name)
        return kernel

    @property
    def settings(self) -> str:
        return " ".join(
            f"{name}={value.name if isinstance(value, Kind) else value}"
            for name, value in self.constants
        )


@dataclass(frozen=True)
class Usage:
    """Resources of a compiled kernel.

    Attributes:
        registers: registers of a thread.
        spilled: bytes of a thread that did not fit into registers.
        shared: bytes of shared memory of a program.
        loop: number of instructions of the longest loop, by their names; None: not counted.
    """

    registers: int
    spilled: int
    shared: int
    loop: Mapping[str, int] | None


def compile_for(launch: Launch, target: str, *, loops: bool) -> Usage:
    """Compile a launch for a target such as `sm_90`, and return its use of resources."""
    kernel, constants = launch.kernel, dict(launch.constants)
    number = int(target.removeprefix("sm_"))
    if "EARLY" in constants:
        constants["EARLY"] = (number // 10, number % 10) >= OLDEST
    types = dict(launch.signature)
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    attributes = {(index,): [["tt.divisibility", 16]] for index in launch.aligned}
    source = ASTSource(kernel, signature, constants, attributes)
    options = {"num_warps": launch.warps, "enable_fp_fusion": launch.fusion}
    compiled = triton.compile(source, target=GPUTarget("cuda", number, 32), options=options)
    return _usage(compiled.asm["cubin"], int(compiled.metadata.shared), loops=loops)


@contextmanager
def recorded_launches() -> Iterator[list[Launch]]:
    """Record launches in the yielded list instead of running them."""
    recorded: list[Launch] = []

    def record(kernel: JITFunction[Any], *args: Any, **options: Any) -> None:
        recorded.append(_launch(kernel, args, options))

    original = JITFunction.run
    JITFunction.run = record
    try:
        yield recorded
    finally:
        JITFunction.run = original


def _launch(kernel: JITFunction[Any], args: tuple[Any, ...], options: dict[str, Any]) -> Launch:
    signature, constants, aligned = [], [], []
    for index, (name, value) in enumerate(zip(kernel.arg_names, args, strict=False)):
        if isinstance(value, torch.Tensor):
            signature.append((name, _TYPES[value.dtype]))
            aligned.append(index)
        elif isinstance(value, int):
            specialized = not kernel.params[index].do_not_specialize
            if specialized and value == 1:
                constants.append((name, 1))  # as Triton does it
                continue
            signature.append((name, "i32"))
            if specialized and value % 16 == 0:
                aligned.append(index)
        else:
            signature.append((name, "fp32"))
    constants += [(name, value) for name, value in options.items() if name in kernel.arg_names]
    warps = int(options.get("num_warps", _WARPS))
    fusion = bool(options.get("enable_fp_fusion", True))
    name = (str(kernel.__module__), str(kernel.__name__))
    return Launch(*name, tuple(signature), tuple(constants), tuple(aligned), warps, fusion)


def _usage(cubin: bytes, shared: int, *, loops: bool) -> Usage:
    shown = _shown(cubin, "cuobjdump", "-res-usage")
    numbers = {name: int(n) for name, n in re.findall(r"(REG|STACK|LOCAL|SHARED):(\d+)", shown)}
    spilled = numbers["STACK"] + numbers["LOCAL"]
    loop = _longest_loop(_shown(cubin, "nvdisasm", "-c")) if loops else None
    return Usage(numbers["REG"], spilled, shared, loop)


def _shown(cubin: bytes, tool: str, option: str) -> str:
    """Return the output of one of NVIDIA's tools, which Triton brings along."""
    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / tool
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run(
            [path, option, file.name], capture_output=True, text=True, check=True
        ).stdout


def _longest_loop(assembly: str) -> Mapping[str, int]:
    """Count the instructions before the backward branch that goes farthest, the commonest first."""
    labels, names, longest = dict[str, int](), list[str](), list[str]()
    for line in assembly.splitlines():
        if label := re.match(r"(\.L\w+):", line):
            labels[label[1]] = len(names)
        if found := re.match(r"\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+ +)?(\w+)(.*);", line):
            names.append(found[1])
            target = re.search(r"\.L\w+", found[2]) if found[1] == "BRA" else None
            if target and len(names) - labels.get(target[0], len(names)) > len(longest):
                longest = names[labels[target[0]] :]
    return dict(Counter(longest).most_common())
