"""Mixers with states in C++: the weights of each in a layer, and the op by itself."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgellm.kernels.delta_net import DeltaNetWeights
from edgellm.kernels.delta_net.native import DeltaNetLayer, delta_net
from edgellm.kernels.mamba2 import Mamba2Weights
from edgellm.kernels.mamba2.native import Mamba2Layer, mamba2
from edgellm.kernels.short_conv import ShortConvWeights
from edgellm.kernels.short_conv.native import ShortConvLayer, short_conv
from edgellm.kernels.state_blocks import StateRows

Floats = NDArray[np.float32]


_Mix = Callable[[ctypes.CDLL, Floats, Any, Sequence[StateRows], float, int], Floats]

# By the class of their weights, in the order of `Mixer` in call.h, where 0 is attention: the
# structure of the weights, and the op, with the model's epsilon and a number of threads.
MIXERS: Mapping[type, tuple[Any, _Mix]] = {
    ShortConvWeights: (ShortConvLayer, lambda c, x, w, s, _, n: short_conv(c, x, w, s, threads=n)),
    Mamba2Weights: (Mamba2Layer, lambda c, x, w, s, _, n: mamba2(c, x, w.vectors, s, threads=n)),
    DeltaNetWeights: (
        DeltaNetLayer,
        lambda c, x, w, s, epsilon, n: delta_net(c, x, w, s, epsilon=epsilon, threads=n),
    ),
}
