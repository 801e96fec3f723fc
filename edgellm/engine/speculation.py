"""Decoding with drafts: several tokens in one step where a guess turns out right."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from edgellm.cache.sequence import Sequence as CachedSequence
from edgellm.engine.draft_policy import Choice, Drafter, DraftPolicy, Evidence, StateDrafter
from edgellm.engine.loaded_model import LoadedModel
from edgellm.engine.prompt_lookup import LookupDrafter, TableDrafter
from edgellm.errors import CacheFullError, first_line
from edgellm.generation_options import GenerationOptions
from edgellm.kernels.sampling import Logits
from edgellm.results import DraftCounts

Floats = NDArray[np.float32]

_log = logging.getLogger(__name__)


def speculation(engine: LoadedModel, options: GenerationOptions, *, salt: str) -> Speculation:
    """Return the drafts of an answer; see `Context` for `salt`."""
    if not (engine.decoder.exact_rows and options.speculate and options.speculate_most != 0):
        return Speculation((), DraftPolicy())
    drafters: list[Drafter] = [LookupDrafter(engine.ctx_size)]
    if engine.token_table is not None:
        root = engine.cache.index.salted_root(salt).name
        drafters.append(TableDrafter(engine.token_table, root=root))
    model = engine.draft_model
    if model is not None:
        drafters.append(model.drafter(salt))
    purse = None if model is None else model.purse
    policy = DraftPolicy(purse, state_steps=engine.state_steps)
    return Speculation(drafters, policy, most=options.speculate_most)


class Speculation:
    """Drafts of an answer, with the logits after their tokens until the sampled tokens are known.

    A row has the same bits however many come with it, so sampling from it gives the same token as
    without drafts: greedy text is the same, and so is sampled text of a seed.

    Args:
        most: largest number of tokens of a draft; None: as many as pay.

    Attributes:
        counts: draft tokens so far, and accepted ones, of each drafter.
        failure: a drafter that failed or had to stay out, and why; "": none.
    """

    def __init__(
        self, drafters: Sequence[Drafter], policy: DraftPolicy, *, most: int | None = None
    ) -> None:
        self._drafters = {each.name: each for each in drafters}
        self._policy = policy
        self._most = most
        self._choice: Choice | None = None
        self._draft: list[int] = []
        self._ahead: deque[tuple[int, Logits]] = deque()
        self._seconds: float | None = None
        self._company = 1
        self._hits = 0
        self.counts: dict[str, DraftCounts] = {}
        self.failure = ""

    def choose(self, room: int, tokens: Sequence[int], *, company: int) -> Choice | None:
        """Choose a draft of at most `room` tokens behind the token sampled last; None: none.

        Args:
            tokens: tokens of the prompt, and sampled tokens.
            company: number of sequences in the step.
        """
        most = room if self._most is None else min(room, self._most)
        offers = self._evidence(tokens) if most > 0 else []
        far = next((offer for offer in offers if self._policy.too_far(offer)), None)
        if far is not None and not self.failure:
            self.failure = (
                f"{far.kind.drafter}: {far.behind} tokens behind, which would take longer to catch "
                "up with than drafts may lose"
            )
        self._choice = self._policy.choose(offers, most=most, company=company)
        return self._choice

    def computed_states(
        self, tokens: Sequence[int], sequence: CachedSequence, hidden: Floats
    ) -> None:
        """Show hidden states to the drafters that guess from them; see `StateDrafter`."""
        for drafter in list(self._drafters.values()):
            if isinstance(drafter, StateDrafter):
                try:
                    drafter.computed(tokens, sequence, hidden)
                except Exception as error:
                    self._give_up(drafter, error)

    def draft(self, count: int, tokens: Sequence[int]) -> list[int]:
        """Draft at most `count` tokens to compute together with the token sampled last.

        Args:
            count: number of tokens of `choose`, or fewer; 0: none.
            tokens: as for `choose`.
        """
        choice = self._choice if count else None
        self._draft = self._guess(choice, min(count, choice.count), tokens) if choice else []
        if choice is not None and not choice.kind.token_steps:  # no time went into further ones
            count = len(self._draft)
        self._choice = replace(choice, count=count) if choice is not None and count else None
        return self._draft

    def computed(
        self, logits: Sequence[Logits], *, seconds: float | None, company: int = 1
    ) -> None:
        """Keep the logits after each token of the draft, if there was one.

        Args:
            seconds: seconds that the step took; None if they tell nothing of drafts.
            company: number of sequences in the step.
        """
        self._seconds, self._company, self._hits = seconds, company, 0
        self._ahead.extend(zip(self._draft[: len(logits)], logits, strict=True))
        self._count(drafted=len(logits))

    def after(self, token: int) -> Logits | None:
        """Return the logits after a sampled token; None if the draft did not have it."""
        if not self._ahead or self._ahead[0][0] != token:
            return None
        self._hits += 1
        self._count(accepted=1)
        return self._ahead.popleft()[1]

    def settle(self) -> int:
        """End a step's draft; returns the number of rejected tokens at the sequence's end."""
        wrong, hits, choice = len(self._ahead), self._hits, self._choice
        if self._seconds is not None:
            if choice is None:
                self._policy.plain(self._seconds, company=self._company)
            else:
                self._policy.drafted(self._seconds, choice, drafted=hits + wrong, accepted=hits)
        self._choice, self._draft, self._seconds, self._hits = None, [], None, 0
        self._ahead.clear()
        return wrong

    def close(self) -> None:
        """Give back memory that drafters need only while drafts go on."""
        for drafter in self._drafters.values():
            drafter.close()

    def _count(self, *, drafted: int = 0, accepted: int = 0) -> None:
        if self._choice is not None and drafted + accepted:
            name = self._choice.kind.drafter
            before = self.counts.get(name, DraftCounts())
            self.counts[name] = DraftCounts(before.drafted + drafted, before.accepted + accepted)

    def _evidence(self, tokens: Sequence[int]) -> list[Evidence]:
        offered = []
        for drafter in list(self._drafters.values()):
            try:
                offered.append(drafter.evidence(tokens))
            except Exception as error:
                self._give_up(drafter, error)
        return [evidence for evidence in offered if evidence is not None]

    def _guess(self, choice: Choice, count: int, tokens: Sequence[int]) -> list[int]:
        drafter = self._drafters[choice.kind.drafter]
        try:
            return drafter.propose(tokens, count)
        except CacheFullError:  # other answers have its room: paused ones too
            drafter.close()
            self.failure = f"{drafter.name}: no room in its KV cache beside other answers"
            return []
        except Exception as error:
            self._give_up(drafter, error)
            return []

    def _give_up(self, drafter: Drafter, error: Exception) -> None:
        """Go on without a drafter that has failed: drafts are no part of the answer."""
        del self._drafters[drafter.name]
        self.failure = f"{drafter.name}: {first_line(error)}"
        _log.warning("an answer goes on without drafts of the %s", self.failure, exc_info=error)
        drafter.close()
