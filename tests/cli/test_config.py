"""`edgellm.toml`: names and options of models."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

from edgellm import LLM, OptionError, load
from edgellm.cli.config import Config, ModelConfig, read_config
from edgellm.store.sources import KNOWN, KnownModel

Cli = Callable[..., CompletedProcess[str]]

TEXT = """
default = "coder"
serve = ["coder", "chat"]

[models.coder]
source = "hf:org/coder-GGUF:Q4_K_M"
ctx_size = 512
temperature = 0.25
stop = ["END"]
system = "Be brief."
pinned = true

[models.chat]
source = "chat.gguf"
"""


def written(folder: Path, text: str) -> Path:
    file = folder / "edgellm.toml"
    file.write_text(text)
    return file


def test_what_a_file_says(tmp_path: Path) -> None:
    config = read_config(written(tmp_path, TEXT))
    assert (config.default, config.serve) == ("coder", ("coder", "chat"))
    assert config.model("coder") == ModelConfig(
        source="hf:org/coder-GGUF:Q4_K_M",
        arguments={
            "ctx_size": 512,
            "defaults": {"temperature": 0.25, "stop": ["END"]},
            "system": "Be brief.",
        },
        pinned=True,
    )
    assert config.model("other.gguf") == ModelConfig(source="other.gguf")


def test_paths_are_beside_the_file(tmp_path: Path) -> None:
    (tmp_path / "chat.gguf").touch()
    config = read_config(written(tmp_path, TEXT))
    assert config.model("chat").source == str(tmp_path / "chat.gguf")


def test_a_draft_model_is_a_path_beside_the_file_or_a_name(tmp_path: Path) -> None:
    (tmp_path / "small.gguf").touch()
    here = str(tmp_path / "small.gguf")
    for name, meant in (("small.gguf", here), ("hf:org/s", "hf:org/s"), ("mine", here)):
        text = f'[models.large]\nsource = "l.gguf"\ndraft = "{name}"\n'
        file = written(tmp_path, f'{text}[models.mine]\nsource = "small.gguf"\n')
        assert read_config(file).model("large").arguments["draft"] == meant


@pytest.mark.slow
def test_a_draft_model_for_a_command_that_answers(
    cli: Cli, tiny_bundle: str, write_model: Callable[..., Path], tmp_path: Path
) -> None:
    """It has a name in the file; commands that draft nothing do without."""
    draft = write_model(tmp_path / "small", num_hidden_layers=1)
    text = f'[models.large]\nsource = {tiny_bundle!r}\ndraft = "nowhere"\nctx_size = 128\n'
    file = written(tmp_path, f"{text}[models.small]\nsource = {str(draft)!r}\n")
    config = ["--config", str(file)]
    options = ["--raw", "--temp", "0", "-n", "30", "--ignore-eos", "--json"]
    plain = cli("run", tiny_bundle, "-p", "Hi", *options)
    found = cli("run", "large", "-p", "Hi", "-md", "small", *config, *options)
    assert found.returncode == plain.returncode == 0, found.stderr
    assert json.loads(found.stdout)["text"] == json.loads(plain.stdout)["text"]
    wrong = cli("run", "large", "-p", "Hi", *config, *options)
    assert (wrong.returncode, "--draft is 'nowhere'" in wrong.stderr) == (1, True)
    measured = cli("bench", "large", "-p", "4", "-n", "4", "-r", "1", *config)
    assert measured.returncode == 0, measured.stderr
    assert cli("bench", "large", "--draft", "small", *config).returncode == 2


def test_errors_of_the_file_name_its_keys(cli: Cli, tmp_path: Path) -> None:
    file = written(tmp_path, "[models.a]\nsource = 'x'\nmax_tokens = -1")
    found = cli("run", "a", "hi", "--config", str(file))
    assert found.returncode == 2
    assert "[models.a]: 'max_tokens' is -1" in found.stderr


def test_the_file_in_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGELLM_HOME", str(tmp_path))
    assert read_config(None) == Config()
    written(tmp_path, TEXT)
    assert read_config(None).default == "coder"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("default = 5", "'default' is 5"),
        ("serve = 'coder'", "'serve' is 'coder'"),
        ("serve = [5]", "'serve' is"),
        ("defualt = 'x'", "no key 'defualt'; 'default' may be meant"),
        ("[models.a]", r"\[models.a\] has no 'source'"),
        ("[models]\na = 5", r"\[models.a\] is 5; a table"),
        ("[models.a]\nsource = 'x'\ntemprature = 1", "no key 'temprature'; 'temperature' may be"),
        ("[models.a]\nsource = 'x'\ntemperature = -1", r"\[models.a\]: 'temperature' is -1"),
        ("[models.a]\nsource = 'x'\nctx_size = 'big'", r"\[models.a\]: 'ctx_size' is 'big'"),
        ("[models.a]\nsource = 'x'\npinned = 1", "'pinned' is 1; a bool"),
        ("[models.'a b']\nsource = 'x'", "a name has letters"),
        ("[models.a", "edgellm.toml: "),
    ],
)
def test_errors_name_file_and_place(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(OptionError, match=words):
        read_config(written(tmp_path, text))


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="No such file"):
        read_config(tmp_path / "none.toml")
    (tmp_path / "bytes.toml").write_bytes(b"\xff")
    with pytest.raises(OptionError, match=r"bytes\.toml"):
        read_config(tmp_path / "bytes.toml")


def test_run_takes_a_name_of_the_file(cli: Cli, tiny_bundle: str, tmp_path: Path) -> None:
    """Its options hold where the command line has none of its own."""
    text = f"[models.mine]\nsource = {tiny_bundle!r}\nmax_tokens = 3\nctx_size = 128\nseed = 1\n"
    file = written(tmp_path, text)
    ask = ("run", "mine", "a", "--raw", "--json", "--ignore-eos", "--config", str(file))
    assert json.loads(cli(*ask).stdout)["generation_tokens"] == 3
    assert json.loads(cli(*ask, "-n", "2").stdout)["generation_tokens"] == 2
    assert json.loads(cli(*ask, "-n", "-1", "-c", "20").stdout)["generation_tokens"] > 3
    long = cli(*ask[:2], "a b " * 200, *ask[3:])
    assert "context holds 128" in long.stderr
    wrong = cli("run", "other", "a", "--config", str(file))
    assert wrong.returncode == 1
    assert "not a known model name" in wrong.stderr


def test_every_command_that_loads_takes_a_name(cli: Cli, tiny_bundle: str, tmp_path: Path) -> None:
    file = written(tmp_path, f"[models.mine]\nsource = {tiny_bundle!r}\nctx_size = 64\n")
    found = cli("plan", "65", "-m", "mine", "--config", str(file))
    assert "does not fit into a context of 64" in found.stderr
    lines = tmp_path / "lines.jsonl"
    lines.write_text('{"prompt": "a", "max_tokens": 2}\n')
    done = cli("run", "mine", "--batch", str(lines), "--raw", "--config", str(file))
    assert json.loads(done.stdout)["generation_tokens"] == 2


def test_a_system_prompt_of_its_own(tiny_model: Any) -> None:
    plain, told = (load(str(tiny_model), system=system) for system in (None, "Be brief."))
    prompts = [
        llm.chat(system=system, max_tokens=1)
        for llm, system in ((plain, "Be brief."), (told, None), (told, ""), (plain, None))
    ]
    for chat in prompts:
        chat.send("hi")
    same, by_default, none, without = (list(chat.messages) for chat in prompts)
    assert same[:2] == by_default[:2]
    assert none[0].content == ""
    assert without[0].role == "user"


def test_the_system_prompt_of_an_alias(tiny_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    known = KnownModel(str(tiny_model), 1, "to test", system="Be brief.")
    monkeypatch.setitem(KNOWN, str(tiny_model), known)
    assert load(str(tiny_model)).system == "Be brief."
    assert load(str(tiny_model), system="Be long.").system == "Be long."
    assert load(str(tiny_model)).chat().messages[0].content == "Be brief."


def test_defaults_of_a_model_in_python(tiny_model: Any) -> None:
    llm: LLM = load(str(tiny_model), defaults={"temperature": 0.5, "max_tokens": 2})
    assert llm.generation_options().temperature == 0.5
    assert len(llm.generate("a", ignore_eos=True).tokens) == 2
    assert len(llm.generate("a", ignore_eos=True, max_tokens=3).tokens) == 3
    with pytest.raises(OptionError, match="temperature"):
        load(str(tiny_model), defaults={"temperature": -1})
    with pytest.raises(TypeError, match="temprature"):
        load(str(tiny_model), defaults={"temprature": 1})  # type: ignore[typeddict-unknown-key]
