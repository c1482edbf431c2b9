"""Partial sums of the shards of one worker along the canonical tree, while it computes them.

Shard gradients are summed along the canonical tree (comm/reduction_order.py). Two siblings are added as soon
as both are there, the right one into the left one, so shards may come in any order and the result has the
same bits; in order, at most one partial sum per level waits: O(log shards) pieces of memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from paceline.comm.reduction_order import Node
from paceline.train.step.gradient_memory import FlatGradients


class PartialSums:
    """The partial sums of one step. Pieces of memory are kept for the next step."""

    def __init__(self, make: Callable[[], FlatGradients]) -> None:
        self._make = make
        self._all: list[FlatGradients] = []
        self._free: list[FlatGradients] = []
        self._held: dict[Node, FlatGradients] = {}

    def start(self, shards: int, *, apart: bool = False) -> None:
        """Begin a step, forgetting what an abandoned one left. `apart`: which shards count is known only at
        the end, so each keeps its memory until `count_only`."""
        self._shards, self._apart = shards, apart
        self._free, self._held = list(reversed(self._all)), {}

    def add_shard(self, shard: int, gradients: Sequence[Tensor | None], scalars: Tensor) -> None:
        """Add a shard's contribution, which may be overwritten afterwards."""
        if self._apart:
            leaf = self._held[Node(shard, 0)] = self.take()
            leaf.store(gradients, scalars)
            return
        node = self._whole(Node(shard, 0))
        left = self._held.pop(Node(node.index - 1, node.level), None) if node.index % 2 else None
        if left is not None:
            # Added where its left sibling is: the shard itself needs no memory.
            left.add(gradients, scalars)
            node, made = self._parent(node), left
        else:
            made = self.take()
            made.store(gradients, scalars)
        self._merge(node, made)

    def count_only(self, shards: Sequence[int]) -> None:
        """Sum these of the shards that were kept apart, and forget the others."""
        leaves = {shard: self._held[Node(shard, 0)] for shard in shards}
        self._apart, self._held = False, {}
        for shard, leaf in sorted(leaves.items()):
            self._merge(self._whole(Node(shard, 0)), leaf)

    def _merge(self, node: Node, made: FlatGradients) -> None:
        while (sibling := self._held.pop(Node(node.index ^ 1, node.level), None)) is not None:
            first, second = (sibling, made) if node.index % 2 else (made, sibling)
            first.add_flat(second)
            self._free.append(second)
            node, made = self._parent(node), first
        self._held[node] = made

    @property
    def partials(self) -> list[FlatGradients]:
        """One per node of the tree that this worker can sum by itself, in order."""
        return [self._held[node] for node in sorted(self._held, key=lambda node: node.first)]

    def move(self) -> None:
        """Move what is held to new memory: the old belongs to the transport of a group that is over."""
        self._all, self._free = [], []
        for node, old in list(self._held.items()):
            new = self.take()
            new.copy_flat(old)
            self._held[node] = new

    def _whole(self, node: Node) -> Node:
        """Return the highest node that stands for the same shards: at the ragged end a node whose sibling
        lies beyond the last shard stands for its parent too."""
        while node.index and node.index % 2 == 0 and (node.index + 1) << node.level >= self._shards:
            node = Node(node.index >> 1, node.level + 1)
        return node

    def _parent(self, node: Node) -> Node:
        return self._whole(Node(node.index >> 1, node.level + 1))

    def take(self) -> FlatGradients:
        """Take a piece of memory: for a partial sum, or for a result where this worker has none."""
        if not self._free:
            made = self._make()
            self._all.append(made)
            return made
        return self._free.pop()
