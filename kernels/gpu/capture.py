"""Launches that are the same every time, without the time that it takes to launch them."""

from __future__ import annotations

from collections.abc import Callable

import torch


class Captured:
    """A function that queues work on a device, kept as a CUDA graph from its first call on.

    It must always do the same with the same memory; what differs stands in that memory. Without a
    device, where kernels are interpreted, it is called every time.
    """

    def __init__(self, launch: Callable[[], None], device: str) -> None:
        self._launch = launch
        self._device = device
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self) -> None:
        if self._graph is not None:
            self._graph.replay()
            return
        self._launch()  # compiles the kernels, which must not happen in a capture
        if self._device == "cpu":
            return
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._launch()
        self._graph = graph
