"""Machines that this one is not: other systems, other processors, and one without a network."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import httpx
import pytest
import tiny_answer
from children import run_python
from requirements import unavailable

from edgellm.errors import OptionError
from edgellm.kernels.native import library
from edgellm.llm import load
from edgellm.serve import ServeOptions

ANSWER = """
    import sys, tiny_answer
    print(tiny_answer.answer(sys.argv[1]))
    """
WITHOUT_UNIX = """
    import elsewhere
    elsewhere.enter()
    """


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_answer.make(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def bundle(model: Path) -> str:
    return str(load(str(model)).engine.bundle.path)


# A process that a test starts has the cores of the test's worker, perhaps one.
ON_ALL_CORES = """
    import os

    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, range(os.cpu_count()))
    """


def answer(before: str, model: str, **environment: str) -> str:
    """The tokens of a process that does something before it loads the model."""
    return run_python(dedent(before) + dedent(ANSWER), model, **environment)


def test_an_answer_without_what_only_unix_has(bundle: str) -> None:
    assert answer(WITHOUT_UNIX, bundle) == f"{tiny_answer.TOKENS}\n"


@pytest.mark.slow
def test_all_modules_can_be_imported_without_what_only_unix_has() -> None:
    """Those of the command line that need a terminal of Unix are imported where there is one."""
    code = """
        import importlib, pkgutil
        import edgellm

        missing = set()
        for module in pkgutil.walk_packages(edgellm.__path__, "edgellm."):
            try:
                importlib.import_module(module.name)
            except ModuleNotFoundError as error:
                if error.name in elsewhere.MODULES:
                    missing.add(module.name)
        print(sorted(missing - {"edgellm.cli.prompt_input"}))
        """
    assert run_python(dedent(WITHOUT_UNIX) + dedent(code)) == "[]\n"


@pytest.mark.slow
def test_the_tests_can_be_collected_without_what_only_unix_has() -> None:
    code = """
        import sys
        import pytest

        sys.exit(pytest.main(["--collect-only", "-q", "-n0", "-m", "", "-p", "no:cacheprovider"]))
        """
    run_python(dedent(WITHOUT_UNIX) + dedent(code))


def test_a_socket_is_refused_where_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(socket, "AF_UNIX")
    with pytest.raises(OptionError, match="no Unix sockets on this system"):
        ServeOptions(host="x.sock")


@pytest.mark.slow
@pytest.mark.parametrize("isa", ["scalar", "avx2"])
def test_an_answer_with_another_instruction_set(bundle: str, isa: str) -> None:
    found = library()
    if found is None:
        unavailable("native", "installed without a compiler")
    before = found.edgellm_isa()
    is_here = found.edgellm_set_isa(isa.encode())
    found.edgellm_set_isa(before)
    if not is_here:
        pytest.skip(f"this processor has no {isa}")
    assert answer(ON_ALL_CORES, bundle, EDGELLM_CPU_ISA=isa) == f"{tiny_answer.TOKENS}\n"


def test_an_answer_without_compiled_kernels(model: Path) -> None:
    """As where the package was installed without a compiler; other precisions give other tokens."""
    before = """
        from edgellm.kernels import native

        native.library = lambda: None
        """
    assert answer(before, str(model)).count(",") == len(tiny_answer.TOKENS) - 1


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


def test_the_command_line_opens_no_connection(bundle: str) -> None:
    run_python(dedent(OFFLINE), "run", bundle, "-p", "a long way", "-n", "12", "--raw")


def test_a_server_opens_no_connection(bundle: str) -> None:
    command = [sys.executable, "-c", dedent(OFFLINE), "serve", bundle, "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            address = next(line for line in process.stderr if line.startswith("serving "))
            url = address.split(" at ")[1].split(" ")[0]
            body = {"prompt": "a long way", "max_tokens": 12}
            found = httpx.post(f"{url}/v1/completions", json=body, timeout=300, trust_env=False)
            assert found.status_code == 200
            assert process.poll() is None
        finally:
            process.kill()


def test_onnx_runtime_reports_nothing(tmp_path: Path) -> None:
    """What it will report lies in the user's home until it is sent."""
    code = "from edgellm.backends.thread_pool import session_options; session_options()"
    run_python(code, HOME=str(tmp_path))
    assert list(tmp_path.rglob("*")) == []
