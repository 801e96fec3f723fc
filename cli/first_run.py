"""Notes on stderr at the first run in an environment only."""

from __future__ import annotations

import hashlib
import sys

from edgellm.cli.text import say
from edgellm.store.home import home


def say_if_kernels_are_missing() -> None:
    """Say once per environment and EDGELLM_HOME that there are no compiled kernels."""
    from edgellm.devices import native_isa  # with numpy, which no --help needs

    if native_isa() is not None:
        return
    environment = hashlib.sha256(sys.prefix.encode(errors="surrogateescape")).hexdigest()[:16]
    said = home() / "said" / f"no-kernels-{environment}"
    try:
        said.parent.mkdir(parents=True, exist_ok=True)
        said.touch(exist_ok=False)
    except FileExistsError:
        return
    except OSError:
        pass  # the note cannot be marked as said, so it is said at every run
    say(
        "the C++ kernels are not built, so decode is some five times slower; install a C++ "
        "compiler, and then edgellm again"
    )
