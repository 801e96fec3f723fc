from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import onnx_ir as ir
import pytest

from edgellm import ProviderError
from edgellm.backends.providers import open_session
from edgellm.graphs.builder import GraphBuilder
from edgellm.llm import load


def test_placement_counts_every_node(export_static: Callable[..., Path], tmp_path: Path) -> None:
    bundle = export_static(tmp_path / "bundle", precisions=("f32",))
    llm = load(str(bundle), prefill="cpu", precision="f32", decode="reference")
    placement = llm.engine.prefill.placement
    assert placement.complete
    assert placement.nodes.keys() == {"CPUExecutionProvider"}
    assert placement.nodes["CPUExecutionProvider"] > 3 * 5


def test_graph_that_does_not_load(tmp_path: Path) -> None:
    path = tmp_path / "broken.onnx"
    path.write_bytes(b"not a graph")
    with pytest.raises(ProviderError, match=r"broken\.onnx"):
        open_session(path, provider="cpu")


def test_unknown_operator_is_not_run_elsewhere(tmp_path: Path) -> None:
    graph = GraphBuilder("strange")
    value = graph.op("NoSuchOperator", graph.input("x", (1,)), domain="com.microsoft")
    ir.save(graph.build({"y": (value, (1,))}), tmp_path / "strange.onnx")
    with pytest.raises(ProviderError, match="cpu does not load"):
        open_session(tmp_path / "strange.onnx", provider="cpu")
