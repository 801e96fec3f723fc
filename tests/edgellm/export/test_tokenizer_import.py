"""Tokenizers and settings that do not fit their model."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgellm.errors import EdgeLLMError, ModelFormatError, TokenizerError
from edgellm.export import export
from edgellm.export.tokenizer_import import import_tokenizer
from edgellm.graphs.checkpoint import open_checkpoint
from edgellm.store.manifest import TokenizerEntry
from edgellm.text.template import ChatTemplate
from edgellm.text.tokenizer import Tokenizer

MakeModel = Callable[..., Path]


def change(path: Path, **values: Any) -> None:
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(content | values))


@pytest.mark.parametrize("id", [320, 10**6, 1 << 31])
def test_a_token_without_a_row_in_the_embedding(make_model: MakeModel, id: int) -> None:
    """There are fewer tokens than rows; it is the largest id that counts."""
    folder = make_model()
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"]["A"] = id
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(TokenizerError, match=rf"token 'A' has the id {id}.*0 to 319 is allowed"):
        import_tokenizer(open_checkpoint(folder))


def test_rows_without_a_token_are_padding(make_model: MakeModel) -> None:
    checkpoint = open_checkpoint(make_model(vocab_size=512))
    assert import_tokenizer(checkpoint).tokenizer.get_vocab_size() == 259


@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
@pytest.mark.parametrize("eos", [-1, [257, -1], 320, 10**9, 10**30, "</s>", True, 1.0, {"a": 1}])
def test_end_tokens_that_are_none(make_model: MakeModel, file: str, eos: object) -> None:
    folder = make_model()
    checkpoint = open_checkpoint(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    change(folder / file, eos_token_id=eos)
    with pytest.raises(ModelFormatError, match="eos_token_id is"):
        import_tokenizer(checkpoint)


@pytest.mark.parametrize("eos", [None, [], 300, [257, 300]])
def test_end_tokens_that_the_tokenizer_lacks_are_left_out(
    make_model: MakeModel, eos: object
) -> None:
    folder = make_model()
    change(folder / "generation_config.json", eos_token_id=eos)
    assert import_tokenizer(open_checkpoint(folder)).entry.eos == ("</s>",)


@pytest.mark.parametrize(
    "settings", [{"top_k": float("nan")}, {"top_k": "4"}, {"temperature": True}, {"top_p": [1]}]
)
def test_generation_settings_of_another_type(make_model: MakeModel, settings: dict) -> None:
    folder = make_model()
    change(folder / "generation_config.json", **settings)
    with pytest.raises(ModelFormatError, match=rf"generation_config\.json.*{next(iter(settings))}"):
        import_tokenizer(open_checkpoint(folder))


def test_generation_settings_keep_their_names(make_model: MakeModel) -> None:
    folder = make_model()
    change(
        folder / "generation_config.json",
        temperature=1,
        top_k=5,
        repetition_penalty=1.5,
        top_p=None,
        do_sample=True,
    )
    assert import_tokenizer(open_checkpoint(folder)).generation == {
        "temperature": 1.0,
        "top_k": 5,
        "repeat_penalty": 1.5,
    }


def test_greedy_models_keep_their_penalty(make_model: MakeModel) -> None:
    folder = make_model()
    settings = {"do_sample": False, "temperature": 0.6, "repetition_penalty": 1.05}
    change(folder / "generation_config.json", **settings)
    found = import_tokenizer(open_checkpoint(folder)).generation
    assert found == {"temperature": 0.0, "repeat_penalty": 1.05}


def test_generation_settings_that_no_answer_could_have(make_model: MakeModel) -> None:
    folder = make_model()
    change(folder / "generation_config.json", temperature=-5)
    words = rf"{folder}: generation settings: `temperature` is -5\.0; allowed is a number, 0 to 100"
    with pytest.raises(ModelFormatError, match=words):
        import_tokenizer(open_checkpoint(folder))


def test_gguf_chat_template_that_is_a_number(tmp_path: Path) -> None:
    import gguf

    path, tokens = tmp_path / "model.gguf", [f"t{i}" for i in range(40)]
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in {
        "block_count": 1,
        "context_length": 128,
        "embedding_length": 32,
        "feed_forward_length": 32,
        "attention.head_count": 1,
    }.items():
        writer.add_uint32(f"llama.{key}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_uint32("tokenizer.chat_template", 7)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * 40)
    writer.add_array("tokenizer.ggml.merges", ["t 0"])
    writer.add_tensor("token_embd.weight", np.zeros((40, 32), np.float32))
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(32, np.float32))
    for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
        writer.add_tensor(f"blk.0.{name}.weight", np.zeros((32, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(EdgeLLMError, match=r"chat_template|damaged vocabulary"):
        export(path, tmp_path / "out", name="x", source="x", precisions=["packed"])


PANICS: dict[str, dict[str, Any]] = {
    "template": {
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<nothing>", "type_id": 0}}],
            "pair": [],
            "special_tokens": {},
        }
    },
    "length": {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
    "pattern": {
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"Regex": r"(?:(?:a|aa)+)+$(?<=b)"},
            "behavior": "Isolated",
            "invert": False,
        }
    },
}


def test_known_panics_are_refused_before(
    make_model: MakeModel, capfd: pytest.CaptureFixture[str]
) -> None:
    """A panic writes a trace to stderr first."""
    folder = make_model()
    capfd.readouterr()
    for kind, words in (("template", "special token '<nothing>'"), ("length", "FixedLength")):
        original = (folder / "tokenizer.json").read_text()
        change(folder / "tokenizer.json", **PANICS[kind])
        with pytest.raises(TokenizerError, match=rf"tokenizer\.json: .*{words}"):
            import_tokenizer(open_checkpoint(folder))
        (folder / "tokenizer.json").write_text(original)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("kind", PANICS)
def test_panics_of_the_library_are_tokenizer_errors(make_model: MakeModel, kind: str) -> None:
    folder = make_model()
    change(folder / "tokenizer.json", **PANICS[kind])

    def use() -> None:
        import_tokenizer(open_checkpoint(folder))
        Tokenizer(folder, TokenizerEntry(None, False, ())).encode("a" * 5000 + "c")

    with pytest.raises(TokenizerError, match=r"tokenizer\.json|failed on this text"):
        use()


@pytest.mark.slow
def test_a_full_disk_is_an_error_of_the_system(tiny_model: Path, tmp_path: Path) -> None:
    """A limit on file size stands for a full disk: writes fail half-way in the same way."""
    code = (
        "import resource, signal, sys; from pathlib import Path;"
        "from edgellm.export.tokenizer_import import import_tokenizer;"
        "from edgellm.graphs.checkpoint import open_checkpoint;"
        "imported = import_tokenizer(open_checkpoint(Path(sys.argv[1])));"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "try: imported.save(Path(sys.argv[2]))\n"
        "except OSError as error: print(error.strerror)"
    )
    command = [sys.executable, "-c", code, str(tiny_model), str(tmp_path)]
    found = subprocess.run(command, capture_output=True, text=True)
    assert found.stdout == "File too large\n", found.stderr


def test_a_saved_tokenizer_is_the_same(tiny_model: Path, tmp_path: Path) -> None:
    imported = import_tokenizer(open_checkpoint(tiny_model))
    imported.save(tmp_path)
    imported.tokenizer.save(str(tmp_path / "by the library.json"))
    saved = (tmp_path / "tokenizer.json").read_bytes()
    assert saved == (tmp_path / "by the library.json").read_bytes()


def test_sampling_defaults_of_a_gguf_file(smollm2_gguf: Path) -> None:
    checkpoint = open_checkpoint(smollm2_gguf)
    assert import_tokenizer(checkpoint).generation == {}
    checkpoint.metadata = {
        **checkpoint.metadata,
        "general.sampling.temp": 0.6,
        "general.sampling.top_k": 20,
        "general.sampling.penalty_repeat": 1.05,
        "general.sampling.mirostat": 2,
    }
    expected = {"temperature": 0.6, "top_k": 20, "repeat_penalty": 1.05}
    assert import_tokenizer(checkpoint).generation == expected


DEFAULT, TOOL_USE = "{{ messages[0].content }}\n", "\n  {% if tools %}t{% endif %}  \n"


def template_of(folder: Path) -> str | None:
    return import_tokenizer(open_checkpoint(folder)).chat_template


def named(**templates: Any) -> list[dict[str, Any]]:
    return [{"name": name, "template": template} for name, template in templates.items()]


def settings_file(folder: Path) -> None:
    change(
        folder / "tokenizer_config.json",
        chat_template=named(default=DEFAULT, tool_use=TOOL_USE, rag="{{ x }}"),
    )


def own_files(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text(DEFAULT)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text(TOOL_USE)


def settings_and_file(folder: Path) -> None:
    own_files(folder)
    (folder / "chat_template.jinja").unlink()
    change(folder / "tokenizer_config.json", chat_template=DEFAULT)


@pytest.mark.parametrize("write", [settings_file, own_files, settings_and_file])
def test_a_template_for_tools_is_taken_where_there_are_tools(
    make_model: MakeModel, write: Callable[[Path], None]
) -> None:
    folder = make_model()
    write(folder)
    source = template_of(folder)
    assert source is not None
    template, chat = ChatTemplate(source), [{"role": "user", "content": "Hi"}]
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert template.render(chat) == ChatTemplate(DEFAULT).render(chat) == "Hi"
    found = template.render(chat, tools=tools)
    assert found == ChatTemplate(TOOL_USE).render(chat, tools=tools) == "\nt  "


def test_a_template_for_tools_of_a_gguf_file(smollm2_gguf: Path) -> None:
    checkpoint = open_checkpoint(smollm2_gguf)
    key, taken = "tokenizer.chat_template", "{{ tools[0].function.name }}"
    checkpoint.metadata = {**checkpoint.metadata, f"{key}.tool_use": taken}
    imported = import_tokenizer(checkpoint)
    assert imported.chat_template is not None
    assert taken in imported.chat_template
    assert checkpoint.metadata[key] in imported.chat_template
    assert ChatTemplate(imported.chat_template).traits.takes_tools


def test_which_template_is_taken(make_model: MakeModel) -> None:
    folder = make_model()
    change(folder / "tokenizer_config.json", chat_template=named(tool_use=TOOL_USE))
    assert template_of(folder) is None  # it is for nothing but tools
    change(folder / "tokenizer_config.json", chat_template=None)
    change(folder / "chat_template.json", chat_template="of the processor")
    assert template_of(folder) == "of the processor"
    change(folder / "tokenizer_config.json", chat_template="of the tokenizer")
    assert template_of(folder) == "of the tokenizer"
    change(folder / "tokenizer_config.json", chat_template=named(default="a", tool_use="a"))
    assert template_of(folder) == "a"
    (folder / "chat_template.jinja").write_text("of the file")
    assert template_of(folder) == "of the file"


@pytest.mark.parametrize("template", [7, named(default=7), named(default="a", tool_use=[1])])
def test_templates_that_are_no_text(make_model: MakeModel, template: Any) -> None:
    folder = make_model()
    change(folder / "tokenizer_config.json", chat_template=template)
    with pytest.raises(ModelFormatError, match="is not text"):
        template_of(folder)


def test_a_template_file_that_is_no_utf8(make_model: MakeModel) -> None:
    folder = make_model()
    (folder / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ModelFormatError, match=r"chat_template\.jinja.*utf-8"):
        template_of(folder)
