"""Reference of several residual streams in float64; streams are `[S, C, E]`."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from edgellm.kernels.altup import AltUpWeights

Floats = NDArray[np.float64]
# Least mean square of a stream that is brought to the magnitude of another.
_LEAST = 1e-5


def enter(first: Floats, project: Callable[[Floats], Floats]) -> Floats:
    """Return the streams before the first layer.

    Args:
        first: the first one, `[C, E]`.
        project: gives all others of it, `[C, (S - 1) * E]`.
    """
    others = project(first).reshape(len(first), -1, first.shape[1]).swapaxes(0, 1)
    return _level(np.concatenate((first[None], others)))


def predict(weights: AltUpWeights, streams: Floats, epsilon: float) -> Floats:
    """Return what a layer expects of the streams; it computes the first one."""
    count = len(streams)
    factors = _route(weights, streams[0], epsilon) @ weights.predict.T.astype(np.float64)
    return np.asarray(
        streams + np.einsum("csk,kce->sce", factors.reshape(-1, count, count), streams)
    )


def correct(weights: AltUpWeights, predicted: Floats, made: Floats, epsilon: float) -> Floats:
    """Return the streams behind a layer.

    Args:
        made: what the layer made of the first one, `[C, E]`.
    """
    factors = 1 + _route(weights, made, epsilon) @ weights.correct.T.astype(np.float64)
    return np.asarray(predicted + (made - predicted[0]) * factors.T[:, :, None])


def leave(streams: Floats, project: Callable[[Floats, int], Floats]) -> Floats:
    """Return the mean of the streams behind the last layer, `[C, E]`.

    Args:
        project: takes one of the others back, by its number among them.
    """
    back = [project(stream, index) for index, stream in enumerate(streams[1:])]
    return np.asarray(_level(np.stack((streams[0], *back))).mean(axis=0))


def _route(weights: AltUpWeights, x: Floats, epsilon: float) -> Floats:
    scale = 1 / np.sqrt((x * x).mean(axis=-1, keepdims=True) + epsilon)
    normed = x * scale * weights.router_norm
    return np.asarray(np.tanh(normed @ weights.router.T.astype(np.float64)))


def _level(streams: Floats) -> Floats:
    """Give the other streams the magnitude of the first one."""
    squares = (streams * streams).mean(axis=-1, keepdims=True)
    scales = np.sqrt(squares[0] / np.maximum(squares, _LEAST))
    return np.asarray(np.concatenate((streams[:1], streams[1:] * scales[1:])))
