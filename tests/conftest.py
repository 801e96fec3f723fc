"""Fixtures: the real default model, a tiny random one, and poisoned memory."""

from __future__ import annotations

import gc
import hashlib
import importlib
import inspect
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from profiles import load_profile
from requirements import unavailable
from tiny_models import save_tokenizer

from edgellm.backends import thread_pool
from edgellm.backends.batch import Backend, Rows, Span
from edgellm.backends.int8_support import int8_products_are_exact
from edgellm.backends.selection import select
from edgellm.engine.one_sequence import compute_prompt
from edgellm.errors import EdgeLLMError
from edgellm.export import export
from edgellm.export.calibrate import CalibrationOptions
from edgellm.kernels.gpu import device
from edgellm.llm import LLM, load
from edgellm.options import EngineOptions
from edgellm.store.bundle import Bundle
from edgellm.store.home import home, locked, models_dir, replacing_folder
from edgellm.store.prepare import prepare
from edgellm.store.sources import DEFAULT_MODEL, resolve

# Processes that tests start import the installed package, not the folder they are started in.
os.environ["PYTHONSAFEPATH"] = "1"

# A shell's job in the background ignores Ctrl-C, and so would all processes that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Without a GPU, Triton kernels run in Triton's interpreter, which is chosen when they are imported.
_NO_GPU = "Triton's interpreter is chosen" if device.interpreted() else device.why_not()
if _NO_GPU is not None:
    os.environ["TRITON_INTERPRET"] = "1"
_INTERPRETER = "triton.runtime.interpreter"

# Its source distribution carries vocabularies with expected tokens, llama.cpp's own tests.
_VOCABULARIES = "llama-cpp-python==0.3.36"
# A newer one carries the chat templates of 70 models.
_TEMPLATES = "llama-cpp-python==0.3.36"
# Its wheel carries SentencePiece models.
_MISTRAL_VOCABULARIES = "mistral-common==1.13.1"

load_profile()

# What is downloaded once and kept, under the user's EDGELLM_HOME.
_KEPT = ("models", "clients")
# A folder's name, behind which the number of the process follows.
_HOME, _DAY_S = "edgellm-tests-", 86_400


def pytest_configure(config: pytest.Config) -> None:
    """Give the tests a home of their own, whose bundles go with it; workers share it.

    Each worker has cores of its own: threads that wait for each other while other processes have
    their cores spin, which took half of the time.
    """
    if hasattr(config, "workerinput"):
        if hasattr(os, "sched_setaffinity"):
            number = int(config.workerinput["workerid"].removeprefix("gw"))
            own = sorted(os.sched_getaffinity(0))[number :: config.workerinput["workercount"]]
            with suppress(OSError):  # where a sandbox forbids it
                os.sched_setaffinity(0, own or os.sched_getaffinity(0))
        return
    for library in ("OMP", "OPENBLAS"):  # threads of a worker's judges, which else wait for cores
        os.environ.setdefault(f"{library}_NUM_THREADS", "1")
    for left in Path(tempfile.gettempdir()).glob(f"{_HOME}*-*"):  # by a run that was killed
        process = left.name.removeprefix(_HOME).partition("-")[0]
        old = time.time() - left.stat().st_mtime > _DAY_S  # not another container's
        if old and process.isdigit() and not psutil.pid_exists(int(process)):
            shutil.rmtree(left, ignore_errors=True)
    kept, own = home(), Path(tempfile.mkdtemp(prefix=f"{_HOME}{os.getpid()}-"))
    for name in _KEPT:
        (kept / name).mkdir(parents=True, exist_ok=True)
        (own / name).symlink_to(kept / name, target_is_directory=True)
    os.environ["EDGELLM_HOME"] = str(own)
    config.add_cleanup(lambda: shutil.rmtree(own, ignore_errors=True))


@pytest.hookimpl(tryfirst=True)  # before those that are not wanted are left out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what is slow: all precisions of the real model, most of Triton in its interpreter."""
    for item in items:
        interpreted = _NO_GPU is not None and item.get_closest_marker("triton")
        smoke = item.get_closest_marker("smoke")
        all_precisions = "smollm2_all" in getattr(item, "fixturenames", ())
        if all_precisions or (interpreted and not smoke):
            item.add_marker(pytest.mark.slow)
        if _NO_GPU is not None and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=f"needs a GPU: {_NO_GPU}"))


def pytest_collection_finish(session: pytest.Session) -> None:
    if _INTERPRETER in sys.modules or any(x.get_closest_marker("slow") for x in session.items):
        quicken_interpreter()


def quicken_interpreter() -> None:
    """Have Triton's interpreter look once for what it patches in Triton's language.

    It looks again at each call of a device function, for a third of its time.
    """
    names = dict[object, list[str]]()

    def patch(package: Any, builder: object, scope: object) -> None:
        is_builtin = interpreter.tl.core.is_builtin
        if package not in names:
            members = inspect.getmembers(package)
            names[package] = [name for name, member in members if is_builtin(member)]
        if any(is_builtin(getattr(package, name)) for name in names[package][:1]):
            for name in names[package]:
                interpreter._patch_attr(package, name, getattr(package, name), builder, scope)

    with suppress(ImportError):
        interpreter = importlib.import_module(_INTERPRETER)
        interpreter._patch_builtin = patch


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what has w8a8 for a parameter where it is not as near to float as it should be."""
    callspec = getattr(item, "callspec", None)
    parameters = () if callspec is None else callspec.params.values()
    wanted = any(
        value == "w8a8"
        if isinstance(value, str)
        else isinstance(value, dict) and value.get("precision") == "w8a8"
        for value in parameters
    )
    if wanted and not int8_products_are_exact():
        pytest.skip("ONNX Runtime's int8 products saturate on this processor")


@pytest.fixture(scope="session", autouse=True)
def pool() -> None:
    """ONNX Runtime's pool, whose size would else be the choice of whichever test loads first."""
    thread_pool.start(None)


@pytest.fixture(scope="module", autouse=True)
def small_heap() -> None:
    """What is imported or kept before, out of garbage collection: a whole one takes 0.4 s."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # or extensions speak of leaks at the end


@pytest.fixture(scope="session", autouse=True)
def no_waits_for_the_disk() -> Iterator[None]:
    """Nobody pulls the plug of a test: an export waits forty times for 8 ms.

    What is synced when is tested with a model of a disk, and processes of their own do wait.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", os.fstat)  # which also refuses what is not open
        yield


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The real weights of the default model; downloaded once into EDGELLM_HOME."""
    try:
        return resolve(DEFAULT_MODEL).path
    except EdgeLLMError as error:
        unavailable("model", f"the default model is not here and cannot be downloaded: {error}")


@pytest.fixture(scope="session")
def smollm2(smollm2_gguf: Path) -> Bundle:
    """The default model's bundle as a user gets it, and its portable decode."""
    usual = select(EngineOptions()).precisions
    return prepare(DEFAULT_MODEL, precisions=lambda config: {"int4", "packed", *usual(config)})


@pytest.fixture(scope="session")
def smollm2_all(smollm2_gguf: Path) -> Bundle:
    """The default model's bundle with all precisions, some of which take a minute."""
    precisions = ("f32", "int4", "packed", "w8a16-qdq", "w8a8")
    return prepare(DEFAULT_MODEL, precisions=precisions, out=home() / "smollm2-all")


@pytest.fixture(scope="session")
def chosen_llm(smollm2: Bundle) -> LLM:
    """The default model as a user gets it."""
    return load(str(smollm2.path))


@pytest.fixture
def llm(chosen_llm: LLM) -> LLM:
    return chosen_llm


@pytest.fixture(scope="session")
def portable_llm(smollm2_all: Bundle) -> LLM:
    """The default model without the native kernels' fused step: graphs in ONNX Runtime."""
    return load(str(smollm2_all.path), prefill="cpu", decode="portable")


@pytest.fixture(scope="session")
def reference_llm(smollm2_all: Bundle) -> LLM:
    """The default model in float32 throughout."""
    return load(str(smollm2_all.path), precision="f32", decode="reference", kv_format="f32")


def files_of(package: str, pattern: str, target: Path, *options: str) -> Path:
    """`target`, with those files of a package that match; downloaded if it is not there yet."""
    with locked(target):  # two workers may want it at once
        if not target.exists():
            _download_files(package, pattern, target, *options)
    return target


def _download_files(package: str, pattern: str, target: Path, *options: str) -> None:
    with (
        tempfile.TemporaryDirectory() as folder,
        replacing_folder(target, make_parents=True) as partial,
    ):
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", *options]
        result = subprocess.run([*command, "--dest", folder, package], capture_output=True)
        if result.returncode:
            unavailable("clients", f"no package index, or it has no {package}")
        (archive,) = Path(folder).iterdir()
        kind = "zip" if archive.suffix == ".whl" else "gztar"
        shutil.unpack_archive(archive, folder, kind)
        for file in Path(folder).rglob(pattern):
            shutil.copy(file, partial)


@pytest.fixture(scope="session")
def llama_cpp_vocabularies() -> Path:
    """Folder with llama.cpp's ggml-vocab-*.gguf and the texts and tokens that go with them."""
    target = models_dir() / "llama-cpp-vocabularies-0.3.36"
    from_source = ("--no-binary", "llama-cpp-python")
    return files_of(_VOCABULARIES, "ggml-vocab-*", target, *from_source)


@pytest.fixture(scope="session")
def llama_cpp_templates() -> Path:
    """Folder with llama.cpp's collection of released chat templates, *.jinja."""
    from_source = ("--no-binary", "llama-cpp-python")
    return files_of(_TEMPLATES, "*.jinja", models_dir() / "llama-cpp-templates", *from_source)


@pytest.fixture(scope="session")
def mistral_vocabularies() -> Path:
    """Folder with Mistral's SentencePiece models, as they lie in `mistral_common/data`."""
    return files_of(_MISTRAL_VOCABULARIES, "*.model.v*", models_dir() / "mistral-vocabularies")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder with a random two-layer Llama and a tokenizer of 320 tokens."""
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def deep_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with more layers."""
    return make_tiny_model(tmp_path_factory.mktemp("deep"), num_hidden_layers=6)


@pytest.fixture(scope="session")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with a longer context."""
    return make_tiny_model(tmp_path_factory.mktemp("long"), max_position_embeddings=8192)


@pytest.fixture(scope="session")
def export_static(tiny_model: Path) -> Callable[..., Path]:
    """Exports the tiny model with static scales: `export_static(out)`, or with other options."""

    def run(out: Path, *, model: Path = tiny_model, **options: Any) -> Path:
        defaults = {
            "precisions": ("f32", "int4", "packed", "w8a16-qdq"),
            "calibration": CalibrationOptions(windows=8, window=32),
        }
        export(model, out, name="tiny", source=str(model), **{**defaults, **options})
        return out

    return run


class _Recorded:
    """A back end that counts how many tokens ran where."""

    def __init__(self, backend: Backend) -> None:
        self._backend, self.places = backend, Counter[str]()
        self.rows_at_once = backend.rows_at_once

    def run(self, spans: Sequence[Span], **options: Any) -> list[Rows]:
        results = self._backend.run(spans, **options)
        for computed in results:
            self.places.update(computed.places)
        return results


@pytest.fixture(scope="session")
def logits_and_places() -> Callable[[LLM, list[int]], tuple[np.ndarray, dict[str, int]]]:
    """Prefills a sequence of its own: the last logits, and how many tokens ran where."""

    def run(llm: LLM, tokens: list[int]) -> tuple[np.ndarray, dict[str, int]]:
        sequence, backend = llm.engine.cache.sequence(), _Recorded(llm.engine.prefill)
        logits = compute_prompt(backend, tokens, sequence).copy()
        sequence.truncate(0)
        return logits, dict(backend.places)

    return run


@pytest.fixture(scope="session")
def write_model() -> Callable[..., Path]:
    """Writes a tiny model into a folder: `write_model(folder, num_hidden_layers=1)`."""
    return make_tiny_model


@pytest.fixture
def make_model(tmp_path: Path) -> Callable[..., Path]:
    """Makes tiny models with changes to their config."""

    def make(**changes: Any) -> Path:
        return make_tiny_model(tmp_path / "model", **changes)

    return make


@pytest.fixture
def edgellm_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty EDGELLM_HOME."""
    home = tmp_path / "home"
    monkeypatch.setenv("EDGELLM_HOME", str(home))
    return home


@dataclass(frozen=True)
class WheelIndex:
    """A package index in a folder."""

    root: Path

    @property
    def url(self) -> str:
        return (self.root / "simple").as_uri()

    def add(self, filename: str, members: Mapping[str, bytes], *, attributes: str = "") -> Path:
        """Offer a wheel; `attributes` are of its link."""
        wheel = self.root / filename
        with zipfile.ZipFile(wheel, "w") as archive:
            for member, data in members.items():
                archive.writestr(member, data)
        digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
        project = filename.partition("-")[0].replace("_", "-")
        page = self.root / "simple" / project / "index.html"
        page.parent.mkdir(parents=True, exist_ok=True)
        with page.open("a") as file:
            file.write(f'<a href="../../{filename}#sha256={digest}" {attributes}>{filename}</a>\n')
        return wheel


@pytest.fixture
def wheel_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WheelIndex:
    """The only package index there is, empty."""
    for name in ("PIP_EXTRA_INDEX_URL", "UV_DEFAULT_INDEX", "UV_INDEX", "UV_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    index = WheelIndex(tmp_path / "index")
    (index.root / "simple").mkdir(parents=True)
    monkeypatch.setenv("PIP_INDEX_URL", index.url)
    return index


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs the command in this process, which saves its start: `cli("run", "-p", "Hi", stdin="")`.

    Standard streams are files. What a process of its own alone shows is tested in one.
    """
    from edgellm.cli.main import run_command

    def run(
        *arguments: str, stdin: str | bytes = "", env: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        with monkeypatch.context() as patch, ExitStack() as opened:
            files = {}
            for name in ("stdin", "stdout", "stderr"):
                files[name] = opened.enter_context(
                    tempfile.TemporaryFile("w+", encoding="utf-8", newline="")
                )
                patch.setattr(sys, name, files[name])
            files["stdin"].buffer.write(stdin.encode() if isinstance(stdin, str) else stdin)
            files["stdin"].seek(0)
            for variable, value in (env or {}).items():
                patch.setenv(variable, value)
            code = run_command([*arguments], interrupted=threading.Event())
            written = []
            for name in ("stdout", "stderr"):
                files[name].seek(0)
                written.append(files[name].read())
        return subprocess.CompletedProcess(arguments, code, *written)

    return run


def make_tiny_model(folder: Path, **changes: Any) -> Path:
    """Write a random Llama; weights are scaled so that activations stay near 1.

    Args:
        changes: of its config, and `model_type`, `dtype` and `max_shard_size`.
    """
    import torch
    import transformers

    torch.manual_seed(0)
    settings = {
        "vocab_size": 320,
        "hidden_size": 96,
        "intermediate_size": 160,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": False,
        "initializer_range": 0.1,
        "bos_token_id": 256,
        "eos_token_id": 257,
        **changes,
    }
    name = settings.pop("model_type", "llama").capitalize()
    config_class = getattr(transformers, f"{name}Config")
    model_class = getattr(transformers, f"{name}ForCausalLM")
    shard = settings.pop("max_shard_size", "1GB")
    dtype = settings.pop("dtype", torch.float32)
    model = model_class(config_class(**settings)).to(dtype)
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith(".bias"):
            torch.nn.init.normal_(parameter)
    model.save_pretrained(folder, max_shard_size=shard)
    save_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def triton_device() -> str:
    """Where Triton kernels run: on a GPU, or interpreted on this CPU."""
    pytest.importorskip("torch")
    pytest.importorskip("triton")
    from edgellm.kernels.gpu import device

    return device.require()
