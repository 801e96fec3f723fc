"""Writes calls of the kernels for c_interface.cpp, with the rows that the numpy references give.

The structures are those that the package hands to the library: a stand-in for it takes down
the memory that they point at in place of running them.
"""

from __future__ import annotations

import ctypes
import struct
import sys
from contextlib import ExitStack
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from model_shapes import PARTS, Shape
from random_model import Model, span_of
from random_weights import random_weight

from edgellm.kernels import native, rope
from edgellm.kernels.attention import native as attention
from edgellm.kernels.attention import portable as portable_attention
from edgellm.kernels.kv_append import native as kv_append
from edgellm.kernels.kv_append import portable as portable_kv_append
from edgellm.kernels.kv_blocks import ROW_FORMATS, allocate
from edgellm.kernels.linear import native as linear
from edgellm.kernels.linear import pack_weight
from edgellm.kernels.linear import reference as reference_linear
from edgellm.kernels.quantized import KINDS, dequantize
from edgellm.kernels.sampling import native as sampling
from edgellm.kernels.sampling import reference as reference_sampling
from edgellm.kernels.step import native as step
from edgellm.kernels.step import native_spans

# In the order of `Type` in c_interface.cpp.
_TYPES = ("float32", "float64", "int8", "uint8", "uint16", "int64")


class _Scores(ctypes.Structure):
    """The same fields, in the same order, as `ScoresCall` in c_interface.cpp."""

    _fields_ = [
        ("scores", ctypes.c_void_p),
        ("count", ctypes.c_int64),
        ("k", ctypes.c_int64),
        ("ids", ctypes.c_void_p),
        ("sum", ctypes.c_void_p),
    ]


@dataclass
class Recorder:
    """Stands in for the library; `data` are the calls as c_interface.cpp reads them."""

    arrays: dict[int, np.ndarray] = field(default_factory=dict)  # by address
    lengths: dict[str, int] = field(default_factory=dict)  # of arrays of structures, by field
    data: bytes = b""
    _blocks: list[bytes] = field(default_factory=list)
    _pointers: list[tuple[int, int, int]] = field(default_factory=list)
    _block_at: dict[int, int] = field(default_factory=dict)
    _name: str = ""
    _call: Any = None

    def address(self, array: np.ndarray | None) -> int | None:
        """Takes the place of `native.address`, and remembers the array."""
        if array is None:
            return None
        self.arrays[array.ctypes.data] = array
        return int(array.ctypes.data)

    def edgellm_step_workspace(self, call: Any) -> int:
        return 0  # the program makes its own

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("edgellm_"):
            raise AttributeError(name)
        return lambda call: self.take(name.removeprefix("edgellm_"), call._obj)

    def edgellm_top_k(self, scores: int, count: int, k: int, ids: int) -> int:
        self.take("top_k", _Scores(scores, count, k, ids, None))
        return k

    def edgellm_log_sum_exp(self, scores: int, count: int) -> float:
        total = np.zeros(1)
        self.take("log_sum_exp", _Scores(scores, count, 0, None, self.address(total)))
        return 0.0

    def take(self, name: str, call: ctypes.Structure) -> int:
        """Take down a call's memory as it is before the call."""
        self._name, self._call = name, call
        self._blocks, self._pointers, self._block_at = [b""], [], {}
        self._blocks[0] = self._structure(call, 0, 0)
        return 1

    def _structure(self, value: ctypes.Structure, block: int, offset: int) -> bytes:
        for name, kind in ((each[0], each[1]) for each in value._fields_):
            at = offset + getattr(type(value), name).offset
            part = getattr(value, name)
            if issubclass(kind, ctypes.Structure):
                self._structure(part, block, at)
            elif kind is ctypes.c_void_p and part:
                self._point(block, at, self._array(part, pointers=name == "tables"))
            elif hasattr(kind, "contents"):
                self._point(block, at, self._structures(part, self.lengths[name]))
        return bytes(value)

    def _point(self, block: int, offset: int, target: int) -> None:
        self._pointers.append((block, offset, target))

    def _structures(self, first: Any, length: int) -> int:
        index = len(self._blocks)
        self._blocks.append(b"")
        size = ctypes.sizeof(first.contents)
        parts = [self._structure(first[i], index, i * size) for i in range(length)]
        self._blocks[index] = b"".join(parts)
        return index

    def _array(self, address: int, *, pointers: bool) -> int:
        if address not in self._block_at:
            self._block_at[address] = index = len(self._blocks)
            array = self.arrays[address]
            self._blocks.append(array.tobytes())
            if pointers:
                for i, target in enumerate(array.tolist()):
                    self._point(index, 8 * i, self._array(target, pointers=False))
        return self._block_at[address]

    def expect(self, tolerance: float, **fields: np.ndarray) -> None:
        """End a call: what the arrays that its fields name hold after it.

        Args:
            tolerance: of the mean difference, in means of what is expected.
        """
        self.data += _block(self._name.encode())
        self.data += _integers(len(self._blocks)) + b"".join(map(_block, self._blocks))
        self.data += _integers(len(self._pointers))
        self.data += b"".join(_integers(*each) for each in self._pointers)
        self.data += _integers(len(fields))
        for name, expected in fields.items():
            address = attrgetter(name.replace("__", "."))(self._call)
            values = np.zeros_like(self.arrays[address])
            values[tuple(map(slice, expected.shape))] = expected  # panels are padded
            stored = "uint16" if values.dtype == np.float16 else values.dtype.name
            self.data += _integers(self._block_at[address], _TYPES.index(stored))
            self.data += struct.pack("<d", tolerance) + _block(values.tobytes())


def _integers(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}q", *values)


def _block(data: bytes) -> bytes:
    stored = data.strip(b"\0") != b""
    return _integers(len(data), stored) + (data if stored else b"")


def _linears(recorder: Recorder) -> None:
    rng = np.random.default_rng(0)
    for kind, traits in KINDS.items():
        weight = random_weight(kind, 33, max(64, traits.inputs_multiple), rng)
        panels, matrix = pack_weight(weight), dequantize(weight).astype(np.float64)
        for rows in (1, 5, 24):
            x = rng.standard_normal((rows, panels.inputs)).astype(np.float32)
            linear.linear(recorder, x, panels, threads=2)
            recorder.expect(1e-6, y=reference_linear.linear(x, matrix))
            linear.linear(recorder, x, panels, fine=True)
            recorder.expect(1e-4, y=x @ matrix.T)


def _caches(recorder: Recorder) -> None:
    """Rows past the end of a block, appended, and then read by queries of the last ones."""
    rng = np.random.default_rng(1)
    heads, kv_heads, head_dim, tokens, table = 4, 2, 32, 140, [2, 0]
    turns = rope.table((10000.0 ** (-np.arange(16) / 16)).tolist(), 200)
    qkv = rng.standard_normal((tokens, heads + 2 * kv_heads, head_dim)).astype(np.float32)
    for format in ROW_FORMATS:
        sizes = {"blocks": 3, "layers": 2, "kv_heads": kv_heads, "head_dim": head_dim}
        ours, theirs = (allocate(format=format, **sizes) for _ in range(2))
        kv_append.append_rotated(recorder, ours, table, 1, 0, qkv, turns, threads=2)
        q = portable_kv_append.append_rotated(theirs, table, 1, 0, qkv, turns)
        scales = {"kv__k_scale": theirs.k_scale, "kv__v_scale": theirs.v_scale}
        scales = {name: scale for name, scale in scales.items() if scale is not None}
        recorder.expect(1e-4, q=q, kv__k=theirs.k, kv__v=theirs.v, **scales)
        for start, rules in ((0, {}), (130, {}), (100, {"window": 50, "softcap": 4.0})):
            rows = q[start:]
            attention.attend(recorder, theirs, table, 1, rows, start, threads=2, **rules)
            expected = portable_attention.attend(theirs, table, 1, rows, start, **rules)
            recorder.expect(1e-3, out=expected)


def _steps(recorder: Recorder) -> None:
    shapes = [Shape(2, 1, 32, hidden=32, intermediate=64), PARTS["everything"], PARTS["gemma3"]]
    for shape in shapes:
        model = Model(shape)
        views = model.views("f32")
        recorder.lengths = {"model": 1, "spans": 1, "layers": shape.layers}
        recorder.lengths |= {"pools": len(views), "ropes": len(model.ropes)}
        span = span_of(views, model.tokens[:9], 0, logit_rows=9)
        model.step(recorder, views).run([span], threads=2)
        states, logits = model.reference(9, "f32")
        recorder.expect(0.01, states=states, logits=logits)


def _scores(recorder: Recorder) -> None:
    scores = np.random.default_rng(2).standard_normal((3, 5000)).astype(np.float32)
    for row in scores:
        sampling.log_sum_exp(recorder, row)
        recorder.expect(1e-6, sum=np.array([reference_sampling.log_sum_exp(row)]))
        sampling.top_k(recorder, row, 40)
        recorder.expect(0, ids=np.array(reference_sampling.top_k(row, 40)))
    sampling.candidates(recorder, scores, [7, 7, 7], threads=2)
    sums, ids = zip(*reference_sampling.candidates(scores, [7, 7, 7]), strict=True)
    recorder.expect(1e-6, sums=np.array(sums), ids=np.array(ids), kept=np.full(3, 7))


def record(path: Path) -> None:
    """Write all calls to a file."""
    recorder = Recorder()
    with ExitStack() as patches:
        for module in (native, attention, kv_append, linear, native_spans, sampling, step):
            patches.enter_context(patch.object(module, "address", recorder.address))
        # what is written holds zeros before
        patches.enter_context(patch.object(np, "empty", np.zeros))
        for take_down in (_linears, _caches, _steps, _scores):
            take_down(recorder)
    path.write_bytes(recorder.data)


if __name__ == "__main__":
    record(Path(sys.argv[1]))
