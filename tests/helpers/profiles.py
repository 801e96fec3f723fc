"""Profiles of hypothesis: `steady` for every run, HYPOTHESIS_PROFILE=explore to look further."""

from __future__ import annotations

import os
from typing import Any

from hypothesis import HealthCheck, settings

# A full collection of a heap with torch in it takes longer than the default deadline of 200 ms.
_WITHOUT_CLOCKS: dict[str, Any] = {
    "deadline": None,
    "suppress_health_check": [HealthCheck.too_slow],
}


def load_profile() -> None:
    """Have no clock decide about a property, and every run draw the same examples."""
    settings.register_profile("steady", derandomize=True, **_WITHOUT_CLOCKS)
    settings.register_profile("explore", max_examples=2000, **_WITHOUT_CLOCKS)
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "steady"))
