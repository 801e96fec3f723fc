"""What an application on Ray Serve is told."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("pydantic", reason="pydantic comes with Ray")

from edgellm.ray import Arguments
from edgellm.serve.served import served_model


def test_texts_of_a_command_line() -> None:
    values: dict[str, Any] = {"model": "m", "threads": "4", "replicas": "2"}
    arguments = Arguments.model_validate(values)
    assert (arguments.threads, arguments.replicas, arguments.prefill_replicas) == (4, 2, 0)
    assert arguments.engine_arguments == {"threads": 4}
    assert not arguments.serve_options.metrics


def test_what_is_in_a_config_file() -> None:
    arguments = Arguments(
        threads=1,
        engine={"ctx_size": 2048, "kv_format": "k4v4"},
        server={"host": "0.0.0.0", "api_keys": ["a"], "metrics": True},
    )
    assert arguments.engine_arguments == {"ctx_size": 2048, "kv_format": "k4v4", "threads": 1}
    assert arguments.serve_options.api_keys == ("a",)
    assert arguments.serve_options.metrics


def test_adapters_are_those_of_the_replicas_that_answer() -> None:
    arguments = Arguments(threads=1, adapters={"tone": "tone/", "style": ["style.gguf", 0.5]})
    expected = {"tone": "tone/", "style": ("style.gguf", 0.5)}
    assert arguments.load_arguments == {"threads": 1, "adapters": expected}
    assert arguments.engine_arguments == {"threads": 1}
    model = served_model(arguments.model, arguments.load_arguments)
    assert model.adapters == expected


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({}, "threads"),
        ({"threads": 0}, "threads"),
        ({"threads": 1, "replica": 2}, "replica"),
        ({"threads": 1, "engine": {"threads": 2}}, "stands beside it"),
        ({"threads": 1, "engine": {"ctx": 2}}, "`engine` has ctx; allowed are .*ctx_size"),
        ({"threads": 1, "engine": {"kv_format": "int3"}}, "int8"),
        ({"threads": 1, "adapters": {"tone": 1}}, "adapters.tone"),
        ({"threads": 1, "server": {"port": 1}}, "`server` has port"),
        ({"threads": 1, "server": {"host": "0.0.0.0"}}, "api_keys"),
    ],
)
def test_what_is_wrong_is_named(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Arguments(**wrong)


@pytest.mark.slow
def test_nothing_imports_ray_unless_asked() -> None:
    code = (
        "import sys, edgellm.ray, edgellm.ray.prefix_routing, edgellm.engine.hand_over,"
        "edgellm.ray.batch_inference, edgellm.ray.forwarding; print('ray' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "False\n"


def test_without_ray_it_is_said_what_to_install() -> None:
    code = (
        "import sys; sys.modules['ray'] = None\n"
        "import edgellm.ray\n"
        "try:\n    edgellm.ray.application\n"
        "except ModuleNotFoundError as error:\n    print(error)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 'pip install "ray[data,serve]"' in run.stdout
