"""A loaded model with the loop that computes all of its answers."""

from __future__ import annotations

from dataclasses import replace

from edgellm.engine.loaded_model import LoadedModel
from edgellm.engine.loop import Loop
from edgellm.options import EngineOptions
from edgellm.progress import ProgressCallback
from edgellm.store.bundle import Bundle


class Engine(LoadedModel):
    """A loaded model with its loop, shared by sessions."""

    def __init__(
        self,
        bundle: Bundle,
        options: EngineOptions,
        *,
        tails_only: bool = True,
        why_cpu: str | None = None,
        progress: ProgressCallback | None = None,
    ) -> None:
        """See `LoadedModel`."""
        super().__init__(bundle, options, tails_only=tails_only, why_cpu=why_cpu, progress=progress)
        used = replace(options, scheduling=self.scheduling)
        self.loop = Loop(self.thread, self.cache, used, prefill=self.prefill, decoder=self.decoder)
