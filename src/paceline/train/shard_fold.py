"""Folds the shards of one worker while it computes them: partial sums along the canonical tree.

Shard gradients are summed along the canonical tree (comm/fold.py). Two siblings are added as soon as both are
there, the right one into the left one, so shards may come in any order and the result has the same bits; in
order, at most one partial per level waits: O(log shards) pieces of memory. Must not know what a shard
computes, nor who holds the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from paceline.comm.fold import Node
from paceline.train.gradients import Flat


class ShardFold:
    """The partial sums of one step. Pieces of memory are kept for the next step."""

    def __init__(self, make: Callable[[], Flat]) -> None:
        self._make = make
        self._all: list[Flat] = []
        self._free: list[Flat] = []
        self._held: dict[Node, Flat] = {}
        self._shards = 1
        self._apart = False

    def start(self, shards: int, *, apart: bool = False) -> None:
        """Begins a step, forgetting what an abandoned one left. `apart`: which shards count is known only at
        the end, so each keeps its memory until `keep_only`."""
        self._shards, self._apart = shards, apart
        self._free, self._held = list(reversed(self._all)), {}

    def deposit(self, shard: int, gradients: Sequence[Tensor | None], tail: Tensor) -> None:
        """A shard's contribution, which may be overwritten afterwards."""
        if self._apart:
            leaf = self._held[Node(shard, 0)] = self._take()
            leaf.store(gradients, tail)
            return
        node = self._whole(Node(shard, 0))
        left = self._held.pop(Node(node.index - 1, node.level), None) if node.index % 2 else None
        if left is not None:
            # Added where its left sibling is: the shard itself needs no memory.
            left.add(gradients, tail)
            node, made = self._parent(node), left
        else:
            made = self._take()
            made.store(gradients, tail)
        self._merge(node, made)

    def keep_only(self, shards: Sequence[int]) -> None:
        """Of shards that were kept apart these count: they are folded, the others are forgotten."""
        leaves = {shard: self._held[Node(shard, 0)] for shard in shards}
        self._apart, self._held = False, {}
        for shard, leaf in sorted(leaves.items()):
            self._merge(self._whole(Node(shard, 0)), leaf)

    def _merge(self, node: Node, made: Flat) -> None:
        while (sibling := self._held.pop(Node(node.index ^ 1, node.level), None)) is not None:
            first, second = (sibling, made) if node.index % 2 else (made, sibling)
            first.add_flat(second)
            self._free.append(second)
            node, made = self._parent(node), first
        self._held[node] = made

    @property
    def partials(self) -> list[Flat]:
        """One per node that this worker can fold by itself, in order."""
        return [self._held[node] for node in sorted(self._held, key=lambda node: node.first)]

    def spare(self) -> Flat:
        """Memory for a result where this worker has no partial of its own."""
        return self._take()

    def move(self) -> None:
        """What is held goes to new memory: the old belongs to a group that is over."""
        self._all, self._free = [], []
        for node, old in list(self._held.items()):
            new = self._take()
            new.copy_flat(old)
            self._held[node] = new

    def _whole(self, node: Node) -> Node:
        """At the ragged end a node whose sibling lies beyond the last shard stands for its parent too."""
        top = max(self._shards - 1, 0).bit_length()
        while node.level < top and node.index % 2 == 0 and (node.index + 1) << node.level >= self._shards:
            node = Node(node.index >> 1, node.level + 1)
        return node

    def _parent(self, node: Node) -> Node:
        return self._whole(Node(node.index >> 1, node.level + 1))

    def _take(self) -> Flat:
        if not self._free:
            made = self._make()
            self._all.append(made)
            return made
        return self._free.pop()
