"""Storage of layer states: what convolutions and recurrences keep of all tokens before a position.

    states  [blocks, layers, elements]  f32

A state has the same size after any number of tokens. A block holds the states of its layers after
one token, the last of the tokens that its place in a sequence stands for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class StateBlocks:
    """A pool of states, with the methods of `KVBlocks` that do not know of tokens."""

    states: NDArray[np.float32]

    @property
    def count(self) -> int:
        return int(self.states.shape[0])

    @property
    def arrays(self) -> tuple[NDArray[Any], ...]:
        return (self.states,)

    @property
    def nbytes(self) -> int:
        """Memory of the pool when every block is in use."""
        return self.states.nbytes

    def clear(self, table: Sequence[int]) -> None:
        """Fill blocks with zeros, which gives them memory; pages of a new pool have none yet."""
        self.states[list(table)] = 0

    def block(self, block: int) -> list[NDArray[Any]]:
        return [self.states[block]]

    def first_rows(self, block: int, rows: int) -> list[NDArray[Any]]:
        """Copy a block; its states are of all `rows` tokens that it stands for."""
        return [self.states[block].copy()]

    def copy_rows(self, source: int, target: int, rows: int) -> None:
        self.states[target] = self.states[source]


@dataclass(frozen=True)
class StateRows:
    """Consecutive rows of one sequence, and the states of a layer before and after them.

    Attributes:
        source: state before the first row `[state_size]`; None: all numbers are 0.
        targets: numbers of rows in ascending order, and the array that takes the state after them.
            The last is for all rows. The first array may be the source.
    """

    source: NDArray[np.float32] | None
    targets: Sequence[tuple[int, NDArray[np.float32]]]

    @property
    def rows(self) -> int:
        return self.targets[-1][0] if self.targets else 0

    def check(self, size: int) -> None:
        """Refuse states of another size than `size` numbers, or targets that do not ascend.

        Raises:
            ValueError: one does not fit.
        """
        ends = [rows for rows, _ in self.targets]
        if ends != sorted(set(ends)) or not ends or ends[0] < 1:
            raise ValueError(f"states after {ends} rows; needed are ascending numbers from 1 on")
        for state in (self.source, *(state for _, state in self.targets)):
            if state is None:
                continue
            if not state.flags.c_contiguous:
                raise ValueError("a state with gaps; needed is one without")
            if state.dtype != np.float32 or state.shape != (size,):
                raise ValueError(
                    f"state is {state.dtype} {state.shape}; needed is float32 ({size},)"
                )


@dataclass(frozen=True)
class StateView:
    """The blocks that a step reads a sequence's states from and writes them to.

    Attributes:
        source: block with the states before the step's first row; None: all are zero.
        targets: number of rows, and the block that takes the states after them, in order. The last
            is for the states after all rows, those before it for the ends of full blocks.
    """

    blocks: StateBlocks
    source: int | None
    targets: tuple[tuple[int, int], ...]

    def of_layer(self, slot: int) -> StateRows:
        """Return the states of one layer.

        Args:
            slot: the layer's place in the blocks.
        """
        states = self.blocks.states[:, slot]
        source = None if self.source is None else states[self.source]
        return StateRows(source, [(rows, states[block]) for rows, block in self.targets])

    @property
    def ids(self) -> list[int]:
        """Ids of all blocks that are read or written."""
        read = () if self.source is None else (self.source,)
        return [*read, *(block for _, block in self.targets)]


def allocate_states(*, blocks: int, layers: int, elements: int) -> StateBlocks:
    """Allocate a pool of states; pages are not touched, so memory grows as blocks are written."""
    return StateBlocks(np.empty((blocks, layers, elements), np.float32))
