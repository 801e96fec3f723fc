"""PyPI's clients that pull in much: each in a virtual environment of its own, made once."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from requirements import unavailable

from edgellm.store.home import home, locked

FOLDER = Path(__file__).parent / "pypi"
# None of them asks anybody but the server.
ENVIRONMENT = {
    "ANONYMIZED_TELEMETRY": "False",
    "HF_HUB_OFFLINE": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "OTEL_SDK_DISABLED": "true",
    "PYTHONUTF8": "1",
}


@dataclass(frozen=True)
class Client:
    """Packages, and a script that uses them.

    Attributes:
        requirements: with the versions that were tried.
    """

    name: str
    requirements: Sequence[str]

    def python(self) -> Path:
        """The interpreter of its environment, which is made if it is not there yet."""
        text = "\n".join([sys.version, *self.requirements])
        digest = hashlib.sha256(text.encode()).hexdigest()[:12]
        target = home() / "clients" / f"{self.name}-{digest}"
        complete = target / "complete"
        with locked(target):
            if not complete.exists():
                self._install(target)
                complete.touch()
        return target / "bin" / "python"

    def run(self, folder: Path, *arguments: str) -> dict[str, Any]:
        """What `pypi/use_NAME.py` prints, by name.

        Args:
            folder: its home, where it runs.
        """
        script = FOLDER / f"use_{self.name}.py"
        lines = self.process(folder, str(script), *arguments).splitlines()
        told = [json.loads(line) for line in lines if line.startswith('{"name"')]
        return {line["name"]: line["value"] for line in told}

    def process(self, folder: Path, *arguments: str) -> str:
        """What a Python command of the environment prints."""
        kept = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
        done = subprocess.run(
            [self.python(), "-P", *arguments],
            cwd=folder,
            env={**kept, **ENVIRONMENT, "HOME": str(folder), "PYTHONDONTWRITEBYTECODE": "1"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            timeout=300,
            start_new_session=True,  # no terminal is theirs
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
        return done.stdout

    def _install(self, target: Path) -> None:
        # not moved there when it is complete: an environment knows where it lies
        shutil.rmtree(target, ignore_errors=True)
        pip = [target / "bin" / "python", "-m", "pip", "install", "--quiet", "--no-compile"]
        for command in ([sys.executable, "-m", "venv", target], [*pip, *self.requirements]):
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                why = done.stderr.strip()[-300:]
                unavailable("clients", f"{self.name} cannot be installed: {why}")


CLIENTS = {
    client.name: client
    for client in (
        Client("aider", ["aider-chat==0.86.2"]),
        Client("instructor", ["instructor==1.17.0"]),
        Client("litellm", ["litellm==1.106.2", "mcp==2.3.0"]),  # which it imports for tools
        Client("llama_index", ["llama-index-llms-openai-like==0.8.1"]),
        Client("llm", ["llm==0.36"]),
        Client("lm_eval", ["lm-eval==0.4.13", "aiohttp", "tenacity"]),
        Client("mistralai", ["mistralai==3.7.0"]),
        Client("pydantic_ai", ["pydantic-ai-slim[openai]==2.68.0"]),
    )
}
