"""Models of a pool that tests load when they say so."""

from __future__ import annotations

import threading

from serving import served
from waiting import CEILING_S

from edgellm import LLM
from edgellm.serve import ServedModel

HUB = "hf:org/hub:Q4_K_M"


class Loads:
    """Models that are loaded when they may be.

    Attributes:
        done: what was loaded.
        begun: set when a load begins.
        go: cleared: loads wait.
    """

    def __init__(self, llm: LLM) -> None:
        self.done: list[str] = []
        self.begun, self.go = threading.Event(), threading.Event()
        self.go.set()
        self._model = served(llm)

    def model(self, id: str, *, bytes: int = 100, error: Exception | None = None) -> ServedModel:
        def open() -> LLM:
            self.begun.set()
            assert self.go.wait(CEILING_S)
            self.done.append(id)
            if error is not None:
                raise error
            return self._model.open()

        return ServedModel(id, open, lambda: bytes)
