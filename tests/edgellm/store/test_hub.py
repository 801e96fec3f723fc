"""Against a hub on this machine that has two requests: what a repository holds, and a file."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from edgellm import EdgeLLMError, SourceError, UnsupportedModelError, load
from edgellm.graphs.checkpoint import open_checkpoint
from edgellm.progress import Progress
from edgellm.store.sources import resolve

COMMIT = "0123456789abcdef0123456789abcdef01234567"
UNSUPPORTED = json.dumps({"model_type": "deepseek_v32"}).encode()


class Hub(http.server.ThreadingHTTPServer):
    """One repository, org/repo; `fetched` are the files that were asked for."""

    files: Mapping[str, bytes]
    fetched: list[str]
    down = False


class Handler(http.server.BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        if self.server.down:
            return self.send_error(500)
        path = self.path.partition("?")[0]
        if path.startswith("/api/models/org/repo/tree/"):
            return self._send(
                [
                    {"type": "file", "path": name, "size": len(data), "oid": name}
                    for name, data in self.server.files.items()
                ]
            )
        if path.startswith(("/api/models/org/repo/revision/", "/api/models/org/repo")):
            names = [{"rfilename": name} for name in self.server.files]
            return self._send({"id": "org/repo", "sha": COMMIT, "siblings": names})
        name = path.removeprefix("/org/repo/resolve/").partition("/")[2]
        if name not in self.server.files:
            return self.send_error(404)
        if self.command == "GET":
            self.server.fetched.append(name)
        self._send(self.server.files[name], name)

    do_HEAD = do_GET

    def _send(self, body: Any, etag: str = "") -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.send_header("ETag", f'"{etag.replace("/", "-")}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """The only hub there is, and an empty cache."""
    from huggingface_hub import constants

    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    hub = Hub(("127.0.0.1", 0), Handler)
    hub.fetched = []
    endpoint = f"http://127.0.0.1:{hub.server_port}"
    files = f"{endpoint}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", files)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield hub
    hub.shutdown()
    thread.join()
    hub.server_close()


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_folder_is_downloaded_once_and_serves_offline(
    hub: Hub, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = files_of(tiny_model)
    doubled = {
        "consolidated.safetensors": b"the same again",
        "original/model.safetensors": b"and again",
        "original/params.json": b"{}",
        "README.md": b"text",
    }
    template = {"additional_chat_templates/tool_use.jinja": b"{{ tools }}"}
    hub.files = {**wanted, **doubled, **template}
    source = resolve("hf:org/repo")
    assert source.revision == COMMIT
    assert set(hub.fetched) == {*wanted, *template}
    open_checkpoint(source.path)
    from huggingface_hub import constants

    hub.down = True
    assert resolve("hf:org/repo") == source
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert resolve("hf:org/repo") == source
    assert len(hub.fetched) == len({*wanted, *template})


@pytest.mark.parametrize(
    ("config", "error", "words"),
    [
        (UNSUPPORTED, UnsupportedModelError, "'deepseek_v32' is not supported"),
        (b"{", EdgeLLMError, "not readable as JSON"),
    ],
)
def test_a_model_that_is_not_supported_is_refused_before_its_weights_come(
    hub: Hub, config: bytes, error: type[EdgeLLMError], words: str
) -> None:
    hub.files = {"config.json": config, "model.safetensors": bytes(100)}
    with pytest.raises(error, match=words):
        resolve("hf:org/repo")
    assert hub.fetched == ["config.json"]


def test_a_model_that_its_options_refuse_is_refused_before_its_weights_come(hub: Hub) -> None:
    config = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "head_dim": 32}
    config |= {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    config |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    config |= {"rms_norm_eps": 1e-6, "max_position_embeddings": 512, "model_type": "qwen3_moe"}
    hub.files = {"config.json": json.dumps(config).encode(), "model.safetensors": bytes(100)}
    with pytest.raises(UnsupportedModelError, match=r"`decode` is 'chunked'.*has experts"):
        load("hf:org/repo", prefill="cpu", decode="chunked", precision="f32")
    assert hub.fetched == ["config.json"]


GGUFS = {
    "README.md": b"",
    "m-Q4_K_M.gguf": b"4 bits",
    "m-IQ4_K_M.gguf": b"others",
    "m-Q4_K_M-2.gguf.sha": b"",
    "mmproj-Q8_0.gguf": b"eyes",
    "Q8_0/m-Q8_0-00001-of-00002.gguf": b"8 bits",
    "Q8_0/m-Q8_0-00002-of-00002.gguf": b"more",
    "m-f16.gguf": b"halves",
    "m-v2-f16.gguf": b"other halves",
}


@pytest.mark.parametrize(
    ("name", "fetched"),
    [
        ("hf:org/repo!m-Q4_K_M.gguf", ["m-Q4_K_M.gguf"]),
        ("hf:org/repo:Q4_K_M", ["m-Q4_K_M.gguf"]),
        ("hf:org/repo@main:iq4_k_m", ["m-IQ4_K_M.gguf"]),
        (
            "hf:org/repo:Q8_0",
            ["Q8_0/m-Q8_0-00001-of-00002.gguf", "Q8_0/m-Q8_0-00002-of-00002.gguf"],
        ),
    ],
)
def test_one_gguf_file_is_downloaded_with_all_its_parts(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, name: str, fetched: list[str]
) -> None:
    hub.files = GGUFS
    source = resolve(name)
    assert source.path.read_bytes() == GGUFS[fetched[0]]
    assert source.path.name == Path(fetched[0]).name
    assert sorted(hub.fetched) == fetched
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert resolve(name) == source


@pytest.mark.parametrize("beside", [{}, {"config.json": b'{"model_type": "llama"}'}])
def test_a_repository_of_gguf_files_says_what_to_type(hub: Hub, beside: dict[str, bytes]) -> None:
    hub.files = {**GGUFS, **beside}
    with pytest.raises(SourceError, match="a repository of GGUF files") as caught:
        resolve("hf:org/repo@main")
    words = str(caught.value)
    assert "write hf:org/repo@main!Q8_0/m-Q8_0-00001-of-00002.gguf or" in words
    assert "hf:org/repo@main:Q4_K_M" in words
    assert words.endswith(
        "it has Q8_0/m-Q8_0-00001-of-00002.gguf, m-IQ4_K_M.gguf, m-Q4_K_M.gguf, m-f16.gguf, "
        "m-v2-f16.gguf"
    )
    assert hub.fetched == []


@pytest.mark.parametrize(
    ("name", "files", "words"),
    [
        ("hf:org/repo:Q2_K", GGUFS, "Q2_K is no GGUF file of it; write hf:org/repo!Q8_0/m-Q8_0"),
        ("hf:org/repo:F16", GGUFS, r"F16 stands for m-f16\.gguf, m-v2-f16\.gguf; write"),
        ("hf:org/repo!README.md", GGUFS, r"README\.md is no GGUF file of it"),
        ("hf:org/repo:Q8_0", {"config.json": b""}, "the repository has none"),
        ("hf:org/repo", {"config.json": b"{}", "pytorch_model.bin": b""}, "must be converted"),
        ("hf:org/another", GGUFS, "the Hugging Face hub: "),
    ],
)
def test_what_a_repository_does_not_have(
    hub: Hub, name: str, files: Mapping[str, bytes], words: str
) -> None:
    hub.files = files
    with pytest.raises(SourceError, match=words) as caught:
        resolve(name)
    assert "\n" not in str(caught.value)
    assert hub.fetched == []


def test_bytes_are_reported(hub: Hub, capfd: pytest.CaptureFixture[str]) -> None:
    size = 40 << 20  # huggingface_hub reads 10 MB at a time
    hub.files = {"m-Q4_K_M.gguf": bytes(size), "m-Q8_0.gguf": b"other"}
    reports: list[Progress] = []
    resolve("hf:org/repo:Q4_K_M", progress=reports.append)
    assert {(each.label, each.total, each.unit) for each in reports} == {
        ("downloading hf:org/repo:Q4_K_M", size, "bytes")
    }
    done = [each.done for each in reports]
    assert done == sorted(done)
    assert done[-1] == size
    assert len(done) > 2
    reports.clear()
    resolve("hf:org/repo:Q4_K_M", progress=reports.append)
    assert reports == []
    assert capfd.readouterr().err == ""
