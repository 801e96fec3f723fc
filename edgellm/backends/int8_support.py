"""Whether this CPU multiplies int8 without saturating.

On x86 before AVX-512 VNNI and AVX-VNNI, ONNX Runtime multiplies uint8 by int8 with VPMADDUBSW,
which clips the sum of two products to 16 bits (see "U8S8 saturation" in its quantization guide).
The w8a8 precision uses all 8 bits and would lose its accuracy there.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import onnx_ir as ir

from edgellm.backends.thread_pool import onnx_runtime, session_options
from edgellm.graphs.builder import GraphBuilder
from edgellm.graphs.contract import ROWS_DIM

_WIDTH = 64


@cache
def int8_products_are_exact() -> bool:
    """Whether a product of the largest uint8 and int8 values comes out exact on this CPU."""
    ort = onnx_runtime()

    graph = GraphBuilder("int8_support")
    x = graph.input("x", (ROWS_DIM, _WIDTH))
    codes = graph.op(
        "QuantizeLinear",
        x,
        graph.constant(1.0, np.float32),
        graph.constant(0, np.uint8),
    )
    weight = np.full((_WIDTH, _WIDTH), 127, np.int8)
    product = graph.op("MatMulInteger", codes, graph.weight(ir.tensor(weight, name="weight")))
    total = graph.op("Cast", product, to=ir.DataType.FLOAT)
    model = graph.build({"y": (total, (ROWS_DIM, _WIDTH))})
    session = ort.InferenceSession(
        ir.to_proto(model).SerializeToString(),
        session_options(),
        providers=["CPUExecutionProvider"],
    )
    product = session.run(None, {"x": np.full((_WIDTH, _WIDTH), 255, np.float32)})[0]
    return bool((product == 255 * 127 * _WIDTH).all())
