"""Adapters on the command line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from requirements import unavailable
from tiny_adapters import pairs_of, write_peft

from edgellm import LLM, load
from edgellm.cli.config import path_and_scale, read_config
from edgellm.cli.serve import _served
from edgellm.kernels.native import library

Cli = Callable[..., CompletedProcess[str]]
pytestmark = pytest.mark.usefixtures("edgellm_home")
ASKED = ("-p", "abc", "--raw", "-n", "6", "--temp", "0", "--no-stats", "-c", "128")


@pytest.fixture(autouse=True)
def native() -> None:
    if library() is None:
        unavailable("native", "installed without a compiler")


@pytest.fixture(scope="module")
def folders(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    return {
        name: write_peft(root / name, pairs_of(tiny_model, seed=seed, size=1.0))
        for seed, name in enumerate(("one", "two"))
    }


def answers(model: Path, folders: dict[str, Path]) -> dict[str | None, str]:
    with load(str(model), adapters=folders, ctx_size=128) as llm:
        return {name: text(llm, name) for name in (None, *folders)}


def text(llm: LLM, adapter: str | None) -> str:
    return llm.generate("abc", adapter=adapter, max_tokens=6, temperature=0).text


def test_run_answers_with_an_adapter(cli: Cli, tiny_model: Path, folders: dict[str, Path]) -> None:
    expected = answers(tiny_model, folders)
    one, two = (f"{name}={folder}" for name, folder in folders.items())

    def run(*options: str) -> CompletedProcess[str]:
        return cli("run", str(tiny_model), *ASKED, *options)

    assert run().stdout.strip("\n") == expected[None].strip("\n")
    assert run("--lora", str(folders["one"])).stdout.strip("\n") == expected["one"].strip("\n")
    both = ("--lora", one, "--lora-scaled", f"{two}:1.0")
    assert run(*both, "--adapter", "two").stdout.strip("\n") == expected["two"].strip("\n")
    refused = {
        "choose with --adapter NAME": run(*both),
        "--adapter is 'three'; loaded are one, two": run(*both, "--adapter", "three"),
        "each with its own NAME": run("--lora", one, "--lora", one),
        "neither a folder nor a .gguf file": run("--lora", "nothing"),
        "needs the native kernels": run(
            "--lora", one, "--decode", "portable", "--prefill", "cpu", "--precision", "f32"
        ),
    }
    for message, found in refused.items():
        assert found.returncode
        assert message in found.stderr


def test_a_kept_prefix_is_of_an_adapter(
    cli: Cli, tiny_model: Path, folders: dict[str, Path]
) -> None:
    lora = ("--lora", str(folders["one"]))
    kept = ("cache", "add", "of-one", str(tiny_model), "--raw", "-c", "128", "-p", "ab")
    assert cli(*kept, *lora).returncode == 0
    asked = ("--cache", "of-one", "-p", "c", "-n", "6", "--temp", "0", "--no-stats", "-c", "128")
    found = cli("run", str(tiny_model), *asked, *lora)
    expected = answers(tiny_model, folders)["one"]
    assert found.stdout.strip("\n") == expected.strip("\n"), found.stderr
    missing = cli("run", str(tiny_model), *asked)
    assert missing.returncode
    assert "no prefix 'of-one' is kept" in missing.stderr


def test_bench_measures_with_an_adapter(
    cli: Cli, tiny_model: Path, folders: dict[str, Path]
) -> None:
    sizes = ("-p", "16", "-n", "4", "-r", "1", "-c", "128", "-o", "json")
    found = cli("bench", str(tiny_model), *sizes, "--lora", str(folders["one"]))
    assert found.returncode == 0, found.stderr
    assert [each["test"] for each in json.loads(found.stdout)] == ["pp16", "tg4"]


def test_a_configuration_file_has_adapters(
    cli: Cli, tiny_model: Path, folders: dict[str, Path], tmp_path: Path
) -> None:
    expected = answers(tiny_model, folders)
    file = tmp_path / "edgellm.toml"
    head = f'[models.m]\nsource = "{tiny_model}"\n'
    table = f'[models.m.adapters]\none = "{folders["one"]}"\ntwo = "{folders["two"]}:1"\n'
    file.write_text(head + table)
    config = ("--config", str(file))

    def run(*options: str) -> str:
        return cli("run", "m", *ASKED, *config, *options).stdout.strip("\n")

    assert run() == expected[None].strip("\n")
    assert run("--adapter", "two") == expected["two"].strip("\n")
    file.write_text(head + 'adapter = "one"\n' + table)
    assert run() == expected["one"].strip("\n")
    file.write_text(head + "[models.m.adapters]\none = 3\n")
    assert "a path is expected" in cli("run", "m", *ASKED, *config).stderr


def test_serve_gives_adapters_to_the_first_model(
    tiny_model: Path, folders: dict[str, Path], tmp_path: Path
) -> None:
    file = tmp_path / "edgellm.toml"
    file.write_text("")
    adapters = {"one": (str(folders["one"]), 0.5)}
    arguments = {"ctx_size": 128, "adapters": adapters}
    models = (f"a={tiny_model}", f"b={tiny_model}")
    first, second = _served(models, (), read_config(file), arguments, lambda _: None)  # type: ignore[arg-type]
    assert (first.adapters, second.adapters) == (adapters, {})


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("a/b", ("a/b", 1.0)),
        ("a/b:0.5", ("a/b", 0.5)),
        ("c:\\a", ("c:\\a", 1.0)),
        ("c:\\a:-2", ("c:\\a", -2.0)),
        ("a:inf", ("a:inf", 1.0)),
        (":3", (":3", 1.0)),
    ],
)
def test_a_scale_stands_behind_the_last_colon(given: str, expected: tuple[str, float]) -> None:
    assert path_and_scale(given) == expected
