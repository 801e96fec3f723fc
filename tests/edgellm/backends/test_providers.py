from __future__ import annotations

import subprocess
import sys
import types
from dataclasses import replace
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from random_checkpoint import CONFIGS

from edgellm import OptionError, ProviderError, UnsupportedModelError
from edgellm.backends import thread_pool
from edgellm.backends.int8_support import int8_products_are_exact
from edgellm.backends.providers import PROVIDERS, require, statuses
from edgellm.backends.selection import select
from edgellm.llm import load
from edgellm.options import EngineOptions


def test_every_provider_is_usable_or_says_why() -> None:
    found = {status.name: status for status in statuses()}
    assert set(found) == set(PROVIDERS)
    assert found["cpu"].usable
    assert found["cpu"].device
    assert all(status.usable or status.reason for status in found.values())


def test_choice() -> None:
    require("cpu")
    with pytest.raises(OptionError, match="edgellm devices"):
        require("gpu")


def test_plugin_that_is_not_installed_or_does_not_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime_ep_webgpu", None)
    with pytest.raises(ProviderError, match="pip install 'onnxruntime-ep-webgpu'"):
        require("webgpu")
    broken = types.ModuleType("onnxruntime_ep_webgpu")
    broken.get_library_path = lambda: "/nowhere/libnothing.so"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "onnxruntime_ep_webgpu", broken)
    with pytest.raises(ProviderError, match="does not load"):
        require("webgpu")


@pytest.mark.parametrize(
    ("prefill", "precision", "words"),
    [
        ("qnn", "w8a8", "w8a16-qdq"),
        ("cpu", "packed", "w8a8, f32"),
        ("auto", "f64", "w8a8, f32"),
        ("native", "f32", "none"),
    ],
)
def test_precision_that_a_provider_does_not_take(prefill: str, precision: str, words: str) -> None:
    with pytest.raises(OptionError, match=words):
        EngineOptions(prefill=prefill, precision=precision)


def test_options_for_a_provider_without_any(tiny_model: Path) -> None:
    with pytest.raises(OptionError, match="provider options: cpu"):
        load(str(tiny_model), prefill="cpu", provider_options={"soc_model": "60"})


def test_one_pool_for_the_process(tiny_model: Path) -> None:
    threads = load(str(tiny_model), prefill="cpu", decode="portable").engine.threads
    assert thread_pool.start(None) == threads
    with pytest.raises(OptionError, match="share one pool"):
        thread_pool.start(threads + 1)


def started_in_a_new_process(code: str) -> str:
    imports = "from edgellm import OptionError\nfrom edgellm.backends import thread_pool\n"
    script = f"import threading\n{imports}{dedent(code)}"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    return found.stdout


def test_a_pool_of_all_cores_leaves_nothing_to_spare() -> None:
    """Beside it, one thread more would wait for a core that the pool has."""
    code = """
        cores = thread_pool.usable_cores()
        assert thread_pool.start(None) == cores
        assert thread_pool.start(None, spare=1) == cores
        """
    started_in_a_new_process(code)


def test_threads_to_spare_count_where_there_are_cores_for_them() -> None:
    code = """
        thread_pool.usable_cores = lambda: 4
        assert thread_pool.start(None, spare=1) == 4
        assert thread_pool.start(4, spare=1) == 4
        assert thread_pool.start(None, spare=1) == 4
        assert thread_pool.start(None) == 3
        """
    started_in_a_new_process(code)


def test_two_threads_that_start_the_pool_at_once() -> None:
    """One of them makes it, and the other is told that its size is another one."""
    code = """
        together, refused = threading.Barrier(2), []

        def start(threads):
            together.wait()
            try:
                thread_pool.start(threads)
            except OptionError as error:
                refused.append(str(error))

        workers = [threading.Thread(target=start, args=(n,)) for n in (1, 2)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        print(*refused)
        """
    assert started_in_a_new_process(code).count("share one pool") == 1


def test_saturating_products_turn_int8_off(monkeypatch: pytest.MonkeyPatch) -> None:
    import onnxruntime as ort

    from edgellm.backends import int8_support

    run = ort.InferenceSession.run

    def saturated(self: Any, *arguments: Any) -> Any:
        return [output.clip(-32768 * 64, 32767 * 32) for output in run(self, *arguments)]

    monkeypatch.setattr(ort.InferenceSession, "run", saturated)
    assert not int8_products_are_exact.__wrapped__()
    monkeypatch.setattr(int8_support, "int8_products_are_exact", lambda: False)
    config = CONFIGS["llama"]
    assert select(EngineOptions(prefill="cpu")).prefill_precision(config) == "f32"
    assert select(EngineOptions(precision="w8a8")).prefill_precision(config) == "w8a8"


def test_auto_takes_what_can_compute_the_model() -> None:
    config = CONFIGS["gemma3"]
    options = EngineOptions(prefill="cpu", decode="portable")
    assert select(options).precisions(config) == {"f32", "int4"}
    with pytest.raises(UnsupportedModelError, match=r"precision w8a8 .*Take f32 or f16 or w4a16"):
        select(replace(options, precision="w8a8")).prefill_precision(config)
