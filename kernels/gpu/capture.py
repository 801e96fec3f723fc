"""Repeated kernel launches as CUDA graphs, which save the time of launching."""

from __future__ import annotations

from collections.abc import Callable

import torch


class Captured:
    """Function that queues work on a device, captured as a CUDA graph in its first call.

    The function must always do the same with the same memory, and read all differences from that
    memory. Without a device, where kernels are interpreted, it is called every time.
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
