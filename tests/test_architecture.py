"""The rules that keep the house simple: who imports whom, what is packaged, what is exported."""

from __future__ import annotations

import ast
import functools
import graphlib
import importlib
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import edgellm

ROOT = Path(__file__).parent.parent
FOLDERS = ("edgellm", "graphs", "kernels", "quantize", "cli")
# Folder -> what of ours its files may import besides the folder itself.
MAY_IMPORT = {
    "kernels": {"edgellm.errors"},
    "quantize": {"edgellm.errors", "edgellm.kernels"},
    "graphs": {"edgellm.errors", "edgellm.kernels"},
    "edgellm": {"edgellm.graphs", "edgellm.kernels", "edgellm.quantize"},
    "cli": {"edgellm"},
}
# What a program may build on, and all that the command line may: CONTRIBUTING.md lists it.
PUBLIC = {
    "edgellm",
    "edgellm.devices",
    "edgellm.errors",
    "edgellm.export",
    "edgellm.generation_options",
    "edgellm.infill",
    "edgellm.measure.benchmark",
    "edgellm.measure.doctor",
    "edgellm.measure.explain",
    "edgellm.measure.perplexity",
    "edgellm.measure.quality",
    "edgellm.models",
    "edgellm.named_prefix",
    "edgellm.options",
    "edgellm.progress",
    "edgellm.ray",
    "edgellm.results",
    "edgellm.serve",
    "edgellm.store.home",
    "edgellm.tool_use",
}
# Packages of edgellm/, each of which may import those before it; the modules beside them are the
# public API, which may import all, and these, which anyone may.
LAYERS = ("store", "text", "cache", "backends", "engine", "measure")
SHARED = {"checks", "errors", "generation_options", "machine", "options", "progress", "results"}
SHARED |= {"tool_use"}

# Folders of edgellm/serve -> which of them each may import; the modules beside them import none,
# but for those that put all of it together.
SERVE = {
    "http": {"http"},
    "openai": {"http", "openai"},  # which others take messages, tools and options from
    **{name: {"http", "openai", name} for name in ("anthropic", "llama_cpp", "ollama")},
}
SERVE_TOP = {"__init__", "application", "server"}


def python_files(folder: str) -> Iterator[Path]:
    # os.walk does not follow the links edgellm/graphs -> ../graphs
    for parent, _, names in os.walk(ROOT / folder):
        yield from (Path(parent) / name for name in names if name.endswith(".py"))


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imported_modules(path: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute"
            yield node.lineno, node.module or ""
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def place(module: str) -> str:
    """The folder that a module of ours lies in."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in FOLDERS else "edgellm"


@pytest.mark.parametrize("folder", FOLDERS)
def test_imports_run_one_way(folder: str) -> None:
    wrong = []
    for path in python_files(folder):
        for line, module in imported_modules(path):
            if module.split(".")[0] in ("graphs", "kernels", "quantize", "cli"):
                wrong.append(f"{path}:{line}: import edgellm.{module} instead")
            if module.split(".")[0] != "edgellm" or place(module) == folder:
                continue
            allowed = MAY_IMPORT[folder]
            if not any(module == a or module.startswith(f"{a}.") for a in allowed):
                wrong.append(f"{path.relative_to(ROOT)}:{line}: {folder} must not import {module}")
    assert not wrong, "\n".join(wrong)


def test_tests_of_kernels_need_no_runtime() -> None:
    """So they run with sanitizers and in an emulator, where only `.ci/kernel_copy`'s copy is."""
    copied = ("edgellm.kernels", "edgellm.quantize", "edgellm.errors")
    wrong = [
        f"{path.name}:{line}: {module}"
        for path in (ROOT / "tests" / "kernels").glob("*.py")
        for line, module in imported_modules(path)
        if module.startswith("edgellm.") and not module.startswith(copied)
    ]
    assert not wrong, "\n".join(wrong)


def test_no_files_import_each_other_in_a_circle() -> None:
    """Not for types either: what one file is made of can be read without the other."""
    files = {
        ("" if folder == "edgellm" else "edgellm.")
        + ".".join(path.relative_to(ROOT).with_suffix("").parts): path
        for folder in FOLDERS
        for path in python_files(folder)
        if path.name != "__init__.py"  # hands names on
    }
    imports = {
        name: {module for _, module in imported_modules(path) if module in files} - {name}
        for name, path in files.items()
    }
    assert sum(map(len, imports.values())) > 500
    graphlib.TopologicalSorter(imports).prepare()  # names the circle


def test_the_command_line_is_made_of_the_public_api() -> None:
    wrong = []
    for path in python_files("cli"):
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [(node.module, alias.name) for alias in node.names]
            elif isinstance(node, ast.Import):
                names = [(alias.name, "") for alias in node.names]
            elif isinstance(node, ast.Attribute) and ast.unparse(node.value).endswith(".engine"):
                names = [("edgellm.engine", node.attr)]  # what is inside is not for others
            else:
                continue
            for module, name in names:
                if module.split(".")[0] != "edgellm" or module.startswith("edgellm.cli"):
                    continue
                exported = importlib.import_module(module).__dict__.get("__all__")
                shown = name in exported if exported is not None else not name.startswith("_")
                if module not in PUBLIC or not shown:
                    wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}: {module}.{name}")
    assert not wrong, "\n".join(wrong)


def test_the_public_modules_are_listed() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert {name for name in PUBLIC if f"`{name}`" not in text} == set()


@pytest.mark.parametrize("layer", LAYERS)
def test_packages_import_those_below(layer: str) -> None:
    allowed = {*LAYERS[: LAYERS.index(layer) + 1], *SHARED, "export", *FOLDERS[1:4]}
    wrong = []
    for path in python_files(f"edgellm/{layer}"):
        for line, module in imported_modules(path):
            parts = module.split(".")
            if parts[0] == "edgellm" and len(parts) > 1 and parts[1] not in allowed:
                wrong.append(f"{path.relative_to(ROOT)}:{line}: {layer} must not import {module}")
    assert not wrong, "\n".join(wrong)


def test_dialects_do_without_each_other() -> None:
    root = ROOT / "edgellm" / "serve"
    assert {path.parent.name for path in root.glob("*/__init__.py")} == set(SERVE)
    wrong = []
    for path in python_files("edgellm/serve"):
        folder = path.relative_to(root).parts[0]
        if path.parent == root and path.stem in SERVE_TOP:
            continue
        for line, module in imported_modules(path):
            parts = module.split(".")
            if parts[:2] != ["edgellm", "serve"] or len(parts) < 3:
                continue
            if parts[2] in SERVE_TOP or parts[2] in SERVE.keys() - SERVE.get(folder, set()):
                wrong.append(f"{path.relative_to(ROOT)}:{line}: must not import {module}")
    assert not wrong, "\n".join(wrong)


def test_the_runtime_does_without_the_exporter() -> None:
    wrong = []
    for path in python_files("edgellm"):
        alone = path.name in ("doctor.py", "kv_bits.py", "prepare.py", "quality.py")
        exports = path.parent.name == "export" or alone
        for line, module in imported_modules(path):
            if module.startswith("edgellm.export") and not exports:
                wrong.append(f"{path.relative_to(ROOT)}:{line}: {module}")
    assert not wrong, "\n".join(wrong)


def test_one_module_imports_onnx_runtime() -> None:
    """So that its telemetry is off before it is loaded."""
    found = {
        path.name
        for folder in FOLDERS
        for path in python_files(folder)
        if any(module.split(".")[0] == "onnxruntime" for _, module in imported_modules(path))
    }
    assert found == {"thread_pool.py"}


def test_import_is_light() -> None:
    code = (
        "import sys, edgellm, edgellm.llm;"
        "print(*{'torch', 'triton', 'onnxruntime', 'transformers', 'gguf', 'onnx', "
        "'requests', 'jinja2', 'click', 'ml_dtypes'} & set(sys.modules))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert set(found.stdout.split()) <= {"onnx"}  # onnx_ir imports it


def test_first_import_loads_no_library() -> None:
    code = "import sys, edgellm; print(*{'numpy', 'tokenizers', 'click'} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == []


def test_every_folder_with_python_files_is_packaged() -> None:
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    on_disk = {
        ".".join([name, *path.parent.relative_to(ROOT / folder).parts])
        for name, folder in config["package-dir"].items()
        for path in python_files(folder)
    }
    assert set(config["packages"]) == on_disk | set(config["package-dir"])


def test_side_folders_are_not_packages_of_their_own() -> None:
    for folder in FOLDERS[1:]:
        assert not (ROOT / folder / "__init__.py").exists()
        assert (ROOT / "edgellm" / folder).resolve() == ROOT / folder


def test_exported_names_exist() -> None:
    assert len(set(edgellm.__all__)) == len(edgellm.__all__)
    for name in edgellm.__all__:
        assert getattr(edgellm, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        edgellm.nothing  # noqa: B018


def test_sessions_and_chats_show_what_a_user_needs() -> None:
    def public(of: type) -> set[str]:
        return {name for name in dir(of) if not name.startswith("_")}

    answers = {"close", "stats", "stream", "astream", "tokens"}
    session = {"append", "replace", "fork", "rewind", "save", "generate", "agenerate", "cached"}
    session |= {"condense", "acondense"}
    assert public(edgellm.Session) == (answers | session) - {"stats"}  # an attribute
    turns = {"send", "asend", "regenerate", "aregenerate", "add_tool_result"}
    assert public(edgellm.Chat) == answers | turns


def test_every_error_is_exported() -> None:
    from edgellm import errors

    classes = {n for n, v in vars(errors).items() if isinstance(v, type)}
    assert classes <= set(edgellm.__all__)


def test_files_and_functions_stay_small() -> None:
    large = []
    for folder in FOLDERS:
        for path in python_files(folder):
            text = path.read_text(encoding="utf-8")
            if text.count("\n") > 500:
                large.append(f"{path} has {text.count(chr(10))} lines")
            if folder == "kernels":
                continue
            for node in ast.walk(tree_of(path)):
                if isinstance(node, ast.FunctionDef):
                    length = (node.end_lineno or 0) - node.lineno + 1
                    if length > 80:
                        large.append(f"{path}:{node.lineno} {node.name} has {length} lines")
    assert not large, "\n".join(large)


def test_docstrings_say_what_they_are_about() -> None:
    """None begins with a question word or a pronoun in the place of its subject."""
    openers = re.compile(
        r"(What|Who|Whose|Whom|Of|Those|That|This|These|So (?:many|much|long)|As|Likewise|It|How|"
        r"Ones?|Where|When|Nobody|Somebody|Whoever|Whatever|They|There|Neither|Nothing|Also)\b"
    )
    words = re.compile(r"\b(nobody|somebody|whoever|likewise|any more)\b", re.IGNORECASE)
    wrong = []
    for path in (path for folder in FOLDERS for path in python_files(folder)):
        text = path.read_text(encoding="utf-8")
        wrong += [f"{path}: {found}" for found in words.findall(text)]
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                docstring = ast.get_docstring(node) or ""
                wrong += [f"{path}: {docstring[:60]}"] if openers.match(docstring) else []
    assert not wrong, "\n".join(wrong)


def test_one_file_of_the_tests_knows_what_the_engine_keeps_private() -> None:
    private = re.compile(r"\b_(batcher|body|readers|scheduler|live|submitted)\b")
    seam = ROOT / "tests" / "helpers" / "inspection.py"
    assert private.search(seam.read_text(encoding="utf-8"))
    wrong = []
    for path in python_files("tests"):
        name = path.relative_to(ROOT)
        if path in (seam, Path(__file__)) or name.parts[1] == "bench":
            continue
        for line, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            wrong += [f"{name}:{line}: {found}" for found in private.findall(text)]
    assert not wrong, "\n".join(wrong)


def test_walk_names_files_that_exist() -> None:
    text = (ROOT / "docs" / "walk.md").read_text()
    named = re.findall(r"`((?:cli|edgellm|graphs|kernels|quantize)/[\w/]+\.py)`", text)
    assert len(named) >= 8
    assert [name for name in named if not (ROOT / name).exists()] == []
