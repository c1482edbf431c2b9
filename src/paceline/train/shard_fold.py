"""Folds the shards of one worker while it computes them: a binary counter of partial sums.

Shard gradients are summed along the canonical tree (comm/fold.py). A worker's block of shards is folded into
the largest whole subtrees that lie in it; as shards come in order, a subtree is complete as soon as its right
half is, so at most one partial per level waits: O(log shards) pieces of memory. Must not know what a shard
computes, nor who holds the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from paceline.comm.fold import Node
from paceline.train.gradients import Flat


def merges_after(block: Sequence[int], shards: int) -> list[int]:
    """How many times the two newest partials are added after each shard of a contiguous block."""
    top = max(shards - 1, 0).bit_length()
    stack: list[Node] = []
    counts = []
    for shard in block:
        node, merges = Node(shard, 0), 0
        while True:
            # At the ragged end a node whose sibling lies beyond the last shard stands for its parent too.
            while node.level < top and node.index % 2 == 0 and (node.index + 1) << node.level >= shards:
                node = Node(node.index >> 1, node.level + 1)
            if not (stack and node.index % 2 and stack[-1] == Node(node.index - 1, node.level)):
                break
            stack.pop()
            node, merges = Node(node.index >> 1, node.level + 1), merges + 1
        stack.append(node)
        counts.append(merges)
    return counts


class ShardFold:
    """The partial sums of one step. Pieces of memory are kept for the next step."""

    def __init__(self, make: Callable[[], Flat]) -> None:
        self._make = make
        self._free: list[Flat] = []
        self._all: list[Flat] = []
        self._stack: list[Flat] = []
        self._merges: list[int] = []
        self._block: tuple[int, ...] = ()
        self._next = 0
        self._shards = 0

    def start(self, block: Sequence[int], shards: int) -> None:
        """Begins a step, forgetting what an abandoned one left."""
        if self._block != tuple(block) or self._shards != shards:
            self._block, self._shards = tuple(block), shards
            self._merges = merges_after(self._block, shards)
        self._free, self._stack, self._next = list(reversed(self._all)), [], 0

    def deposit(self, gradients: Sequence[Tensor | None], tail: Tensor) -> None:
        """The next shard's contribution, which may be overwritten afterwards."""
        merges = self._merges[self._next]
        self._next += 1
        if merges:
            # Added where its left sibling is: the shard itself needs no memory.
            self._stack[-1].add(gradients, tail)
            merges -= 1
        else:
            leaf = self._take()
            leaf.store(gradients, tail)
            self._stack.append(leaf)
        for _ in range(merges):
            right = self._stack.pop()
            self._stack[-1].add_flat(right)
            self._free.append(right)

    @property
    def partials(self) -> list[Flat]:
        """One per node that this worker can fold by itself, in order."""
        return self._stack

    def spare(self) -> Flat:
        """Memory for a result where this worker has no partial of its own."""
        return self._take()

    def _take(self) -> Flat:
        if not self._free:
            made = self._make()
            self._all.append(made)
            return made
        return self._free.pop()
