from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest

from edgellm import OptionError, ProviderError, thread_pool
from edgellm.graphs.builder import GraphBuilder
from edgellm.int8_support import int8_products_are_exact
from edgellm.llm import LLM
from edgellm.providers import PROVIDERS, choose, open_session, statuses


def test_every_provider_is_usable_or_says_why() -> None:
    found = {status.name: status for status in statuses()}
    assert set(found) == set(PROVIDERS)
    assert found["cpu"].usable
    assert found["cpu"].device
    assert all(status.usable or status.reason for status in found.values())


def test_choice() -> None:
    assert choose("auto") == "cpu"
    assert choose("cpu") == "cpu"
    with pytest.raises(OptionError, match="edgellm devices"):
        choose("gpu")


def test_placement_counts_every_node(portable_llm: LLM) -> None:
    placement = portable_llm.engine.prefill.placement
    assert placement.complete
    assert placement.nodes.keys() == {"CPUExecutionProvider"}
    assert placement.nodes["CPUExecutionProvider"] > 31 * 10


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


def test_one_pool_for_the_process(portable_llm: LLM) -> None:
    threads = portable_llm.engine.threads
    assert thread_pool.start(None) == threads
    with pytest.raises(OptionError, match="share one pool"):
        thread_pool.start(threads + 1)


def test_saturating_products_turn_int8_off(monkeypatch: pytest.MonkeyPatch) -> None:
    import onnxruntime as ort

    from edgellm import engine, int8_support

    run = ort.InferenceSession.run

    def saturated(self: Any, *arguments: Any) -> Any:
        return [output.clip(-32768 * 64, 32767 * 32) for output in run(self, *arguments)]

    monkeypatch.setattr(ort.InferenceSession, "run", saturated)
    assert not int8_products_are_exact.__wrapped__()
    monkeypatch.setattr(int8_support, "int8_products_are_exact", lambda: False)
    assert engine.EngineOptions(prefill="cpu").prefill_flavour == "f32"
    assert engine.EngineOptions(flavour="w8a8").prefill_flavour == "w8a8"
