"""npm's packages, installed once, and scripts that run with them."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

from requirements import unavailable

from edgellm.store.home import home, locked, replacing_folder

FOLDER = Path(__file__).parent / "npm"
INSTALL = ("ci", "--ignore-scripts", "--no-audit", "--no-fund")


def packages() -> Path:
    """A folder with the `node_modules` of the lock file, 81 MB."""
    npm = shutil.which("npm")
    if npm is None or shutil.which("node") is None:
        unavailable("node", "needs Node.js with npm")
    lock = FOLDER / "package-lock.json"
    target = home() / "clients" / f"npm-{hashlib.sha256(lock.read_bytes()).hexdigest()[:12]}"
    with locked(target):
        if target.exists():
            return target
        with replacing_folder(target, make_parents=True) as partial:
            for file in (lock, FOLDER / "package.json"):
                shutil.copy(file, partial)
            done = subprocess.run([npm, *INSTALL], cwd=partial, capture_output=True, text=True)
            if done.returncode:
                unavailable(
                    "clients", f"npm cannot install the clients: {done.stderr.strip()[-300:]}"
                )
    return target


def run(script: str, url: str, folder: Path) -> dict[str, Any]:
    """What a script printed, by name.

    Args:
        folder: where it runs: Node.js looks for packages beside the file.
    """
    (folder / "node_modules").symlink_to(packages() / "node_modules")
    shutil.copy(FOLDER / script, folder)
    command = ["node", "--unhandled-rejections=strict", script, url]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return {line["name"]: line["value"] for line in lines}
