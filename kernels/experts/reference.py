"""Reference of the router in float64."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgellm.kernels.experts import Routing

Floats = NDArray[np.float64]


def shares(
    logits: Floats,
    routing: Routing,
    selection_bias: NDArray[np.floating] | None = None,
    scales: NDArray[np.floating] | None = None,
) -> Floats:
    """Compute the share that each expert has in a row's output, 0 for those that are not chosen.

    Args:
        logits: the router's logits `[C, X]`, with their bias.
        selection_bias: what is added to the scores `[X]` for the choice alone.
        scales: factors of the shares of the experts `[X]`.

    Returns:
        Shares `[C, X]`.
    """
    if routing.scores == "sigmoid":
        scores = 1 / (1 + np.exp(-logits))
    else:
        scores = np.exp(logits - logits.max(axis=-1, keepdims=True))
        scores /= scores.sum(axis=-1, keepdims=True)
    ranks = scores if selection_bias is None else scores + selection_bias
    if routing.groups > 1:
        ranks = _of_best_groups(ranks, routing)
    chosen = np.argsort(-ranks, axis=-1, kind="stable")[:, : routing.used]
    kept = np.zeros_like(scores)
    np.put_along_axis(kept, chosen, np.take_along_axis(scores, chosen, axis=-1), axis=-1)
    if routing.normalized:
        kept /= kept.sum(axis=-1, keepdims=True)
    return np.asarray(kept * routing.scale * (1.0 if scales is None else scales))


def _of_best_groups(ranks: Floats, routing: Routing) -> Floats:
    """Return the ranks `[C, X]`, with -inf for experts of groups that are not chosen from."""
    groups = ranks.reshape(len(ranks), routing.groups, -1)
    best = np.sort(groups, axis=2)[:, :, -2 if routing.scores == "sigmoid" else -1 :]
    chosen = np.argsort(-best.sum(axis=2), axis=1, kind="stable")[:, : routing.used_groups]
    kept = np.full_like(groups, -np.inf)
    np.put_along_axis(kept, chosen[..., None], np.take_along_axis(groups, chosen[..., None], 1), 1)
    return kept.reshape(ranks.shape)
