"""Machines that this one is not: other systems, other processors, and one without a network."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import httpx
import pytest
from children import run_python
from requirements import unavailable

from edgellm.errors import OptionError
from edgellm.kernels.native import library
from edgellm.llm import LLM, load
from edgellm.serve import ServeOptions

# Without a prompt to compare with, so greedily: how sums are rounded differs between processors.
ANSWER = """
    import json, sys
    from edgellm.llm import load

    llm = load(sys.argv[1], ctx_size=256)
    print(json.dumps(llm.generate("a long way", temperature=0, max_tokens=12).tokens))
    """


@pytest.fixture(scope="module")
def tiny(tiny_model: Path) -> LLM:
    return load(str(tiny_model), ctx_size=256)


@pytest.fixture(scope="module")
def tokens(tiny: LLM) -> list[int]:
    return list(tiny.generate("a long way", temperature=0, max_tokens=12).tokens)


def answer(before: str, bundle: Path, **environment: str) -> list[int]:
    """The tokens of a process that does something before it loads the model."""
    printed = run_python(dedent(before) + dedent(ANSWER), str(bundle), **environment)
    return list(json.loads(printed.splitlines()[-1]))


def test_an_answer_without_what_only_unix_has(tiny: LLM, tokens: list[int]) -> None:
    before = """
        import elsewhere
        elsewhere.enter()
        """
    assert answer(before, tiny.engine.bundle.path) == tokens


def test_all_modules_can_be_imported_without_what_only_unix_has() -> None:
    """Those of the command line that need a terminal of Unix are imported where there is one."""
    code = """
        import elsewhere
        elsewhere.enter()

        import importlib, pkgutil, sys
        import edgellm

        missing = set()
        for module in pkgutil.walk_packages(edgellm.__path__, "edgellm."):
            try:
                importlib.import_module(module.name)
            except ModuleNotFoundError as error:
                if error.name in elsewhere.MODULES:
                    missing.add(module.name)
        print(sorted(missing - {"edgellm.cli.type_ahead"}))
        """
    assert run_python(dedent(code)) == "[]\n"


@pytest.mark.slow
def test_the_tests_can_be_collected_without_what_only_unix_has() -> None:
    code = """
        import elsewhere
        elsewhere.enter()

        import sys
        import pytest

        sys.exit(pytest.main(["--collect-only", "-q", "-n0", "-m", "", "-p", "no:cacheprovider"]))
        """
    run_python(dedent(code))


def test_a_socket_is_refused_where_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(socket, "AF_UNIX")
    with pytest.raises(OptionError, match="no Unix sockets on this system"):
        ServeOptions(host="x.sock")


@pytest.mark.parametrize("isa", ["scalar", "avx2"])
def test_an_answer_with_another_instruction_set(tiny: LLM, tokens: list[int], isa: str) -> None:
    found = library()
    if found is None:
        unavailable("native", "installed without a compiler")
    before = found.edgellm_isa()
    is_here = found.edgellm_set_isa(isa.encode())
    found.edgellm_set_isa(before)
    if not is_here:
        pytest.skip(f"this processor has no {isa}")
    assert answer("", tiny.engine.bundle.path, EDGELLM_CPU_ISA=isa) == tokens


def test_an_answer_without_compiled_kernels(tiny_model: Path) -> None:
    """As where the package was installed without a compiler: other precisions, so other tokens."""
    before = """
        from edgellm.kernels import native

        native.library = lambda: None
        """
    assert len(answer(before, tiny_model)) == 12


# The command line, in a process that ends where it would reach for another machine.
OFFLINE = """
    import os, sys

    def end(event, arguments):
        if event in ("socket.connect", "socket.getaddrinfo", "socket.sendto"):
            print(event, arguments, file=sys.stderr, flush=True)
            os._exit(9)

    sys.addaudithook(end)

    from edgellm.cli.main import main

    main()
    """


def test_the_command_line_opens_no_connection(tiny: LLM) -> None:
    options = ("-p", "a long way", "-n", "12", "--temp", "0", "--raw")
    run_python(dedent(OFFLINE), "run", str(tiny.engine.bundle.path), *options)


def test_a_server_opens_no_connection(tiny: LLM) -> None:
    command = [sys.executable, "-c", dedent(OFFLINE), "serve", str(tiny.engine.bundle.path)]
    with subprocess.Popen([*command, "--port", "0"], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            address = next(line for line in process.stderr if line.startswith("serving "))
            url = address.split(" at ")[1].split(" ")[0]
            body = {"prompt": "a long way", "max_tokens": 12}
            answer = httpx.post(f"{url}/v1/completions", json=body, timeout=300, trust_env=False)
            assert answer.status_code == 200
            assert process.poll() is None
        finally:
            process.kill()
