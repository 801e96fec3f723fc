"""A loaded model with the loop that computes all of its answers."""

from __future__ import annotations

from dataclasses import replace

from edgellm.engine.draft_opening import open_draft, open_mtp
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
        draft: Bundle | None = None,
        adapters: int = 0,
        tails_only: bool = True,
        why_cpu: str | None = None,
        progress: ProgressCallback | None = None,
    ) -> None:
        """See `LoadedModel`.

        Raises:
            OptionError: see `open_draft`.
        """
        super().__init__(
            bundle,
            options,
            draft=draft,
            adapters=adapters,
            tails_only=tails_only,
            why_cpu=why_cpu,
            progress=progress,
        )
        if draft is not None:
            self.draft_model = open_draft(self, draft)
        elif options.draft is None:
            self.draft_model = open_mtp(self)
        used = replace(options, scheduling=self.scheduling)
        self.loop = Loop(self.thread, self.cache, used, prefill=self.prefill, decoder=self.decoder)
