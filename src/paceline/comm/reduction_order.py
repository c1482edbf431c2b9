"""The order in which partial results are combined, as a small program that is planned once and run block by
block.

A `ReductionOrder` is a list of binary steps over numbered inputs. `left_fold(n)` combines them one after
the other; `tree_fold(nodes)` combines them along the canonical tree: the balanced binary tree over shard
indices in which a node of level l covers 2**l shards, aligned. Because every partial is a whole node of
that one tree, the bits of the result do not depend on who computed which partial.

Pure planning plus torch kernels; knows nothing of ranks or memory layouts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from paceline.comm.ops import Kernel, ReduceOp, accumulator_dtype, finish, kernel_of
from paceline.core.errors import InternalError

BLOCK_BYTES = 256 * 1024
"""Blocks this large stay in the second-level cache while all partials of them are folded."""


NOTHING = torch.empty(0, device="cpu")
"""Stands for an operand that is not there: the step only copies."""

BoundStep = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]
"""(copied into the target first, left, right, target); None in the last three is the result."""


Segment = tuple[int, int]


def cut(size: int, parts: int, align: int = 1) -> list[Segment]:
    """Cut `size` elements into `parts` ranges, as even as the alignment allows."""
    units = -(-size // align)
    edges = [min(size, units * part // parts * align) for part in range(parts + 1)]
    return list(pairwise(edges))


@dataclass(frozen=True, order=True)
class Node:
    """A node of the canonical tree: covers shards [index * 2**level, (index + 1) * 2**level)."""

    index: int
    level: int

    @property
    def first(self) -> int:
        return self.index << self.level


@dataclass(frozen=True)
class ReductionOrder:
    """Steps (target, left, right) over registers: 0..inputs-1 are the inputs, later ones are temporaries; the
    last step writes the result."""

    inputs: int
    temporaries: int
    steps: tuple[tuple[int, int, int], ...]

    @cached_property
    def in_place(self) -> tuple[tuple[int, int], ...]:
        """The steps as (left, right) over inputs alone: each adds into its left operand, so the result is in
        the last one's (`home`).

        For inputs that may be overwritten: needs no temporaries and touches no other memory.
        """
        home: dict[int, int] = {}  # where a register's value is, as an input
        pairs = []
        for target, left, right in self.steps:
            a, b = home.get(left, left), home.get(right, right)
            pairs.append((a, b))
            home[target] = a
        return tuple(pairs)

    @cached_property
    def home(self) -> int:
        """The input that has the result after `in_place`: the first one of the tree."""
        pairs = self.in_place
        return pairs[-1][0] if pairs else 0

    def run(self, kernel: Kernel, inputs: Sequence[Tensor], out: Tensor, scratch: Sequence[Tensor]) -> None:
        """Fold the inputs into `out`; `scratch` has `temporaries` tensors of its dtype, at least as long."""
        size = out.numel()
        for widened, left, right, target in self.bind(inputs, [spare[:size] for spare in scratch], out.dtype):
            into = out if target is None else target
            if widened is not None:
                into.copy_(widened)
            if right is not NOTHING:
                kernel(out if left is None else left, out if right is None else right, out=into)

    def bind(self, inputs: Sequence[Tensor], scratch: Sequence[Tensor], wide: torch.dtype) -> list[BoundStep]:
        """Bind the steps to memory, with None where the result goes; can be kept and run many times."""
        if not self.steps:
            return [(inputs[0], None, NOTHING, None)]
        registers: list[Tensor | None] = [*inputs, *scratch, None]
        bound: list[BoundStep] = []
        for target, left, right in self.steps:
            a, b, into = registers[left], registers[right], registers[target]
            # Two narrow operands would be added in their own dtype and rounded; one wide operand widens
            # the sum.
            if a is not None and b is not None and a.dtype != wide and b.dtype != wide:
                bound.append((a, into, b, into))
            else:
                bound.append((None, a, b, into))
        return bound


@dataclass(frozen=True)
class Recipe:
    """Recipe from the ranks' partials to the result: input i is partial `sources[i]`, a (rank, position)
    pair."""

    order: ReductionOrder
    sources: tuple[tuple[int, int], ...]
    op: ReduceOp
    contributions: int

    @cached_property
    def most_partials(self) -> int:
        return max(position for _, position in self.sources) + 1

    @cached_property
    def _hash(self) -> int:
        return hash(self.sources)

    def __hash__(self) -> int:
        # Taken once, and of one field: every reduction looks its prepared form up by the recipe, which has an
        # entry per rank.
        return self._hash


def left_fold(inputs: int) -> ReductionOrder:
    """Fold from left to right, ((0 + 1) + 2) + ...: the cheapest order, and the same on every rank."""
    out = inputs
    steps = [(out, 0, 1)] if inputs > 1 else []
    steps += [(out, out, index) for index in range(2, inputs)]
    return ReductionOrder(inputs, 0, tuple(steps))


def tree_fold(nodes: Sequence[Node], shards: int) -> ReductionOrder:
    """Combine whole nodes that together cover every shard exactly once, along the canonical tree."""
    order = sorted(range(len(nodes)), key=lambda position: nodes[position].first)
    steps: list[tuple[int, int, int]] = []
    free: list[int] = []
    used = 0
    stack: list[tuple[Node, int]] = []  # a binary counter: levels fall from bottom to top
    first_temporary = len(nodes)

    def temporary() -> int:
        nonlocal used
        if free:
            return free.pop()
        used += 1
        return first_temporary + used - 1

    def merge() -> None:
        _, b = stack.pop()
        left, a = stack.pop()
        target = a if a >= first_temporary else b if b >= first_temporary else temporary()
        steps.append((target, a, b))
        if b >= first_temporary and b != target:
            free.append(b)
        stack.append((Node(left.index >> 1, left.level + 1), target))

    for position in order:
        node = nodes[position]
        # A ragged end: a node whose sibling lies beyond the last shard stands for its parent too.
        stack.append((node, position))
        while len(stack) > 1 and _siblings(stack[-2][0], stack[-1][0]):
            merge()
    while len(stack) > 1:
        top = stack[-1][0]
        below = stack[-2][0]
        while top.level < below.level:
            top = Node(top.index >> 1, top.level + 1)
        stack[-1] = (top, stack[-1][1])
        if not _siblings(below, top):
            raise InternalError(
                f"nodes {list(nodes)} do not cover {shards} shards", remedy="report this with the list"
            )
        merge()
    if not steps:
        return ReductionOrder(len(nodes), 0, ())
    return _result_in_out(ReductionOrder(len(nodes), used, tuple(steps)))


def _siblings(left: Node, right: Node) -> bool:
    return left.level == right.level and left.index % 2 == 0 and right.index == left.index + 1


def _result_in_out(order: ReductionOrder) -> ReductionOrder:
    """Rename the temporary that ends as the result to the output register: saves a buffer and a copy."""
    final = order.steps[-1][0]
    out = order.inputs + order.temporaries - 1

    def rename(register: int) -> int:
        if register == final:
            return out
        return register - 1 if register > final else register

    steps = tuple((rename(t), rename(a), rename(b)) for t, a, b in order.steps)
    return ReductionOrder(order.inputs, order.temporaries - 1, steps)


def covering_nodes(shards_held: Iterable[int], shards: int) -> list[Node]:
    """Return the maximal nodes of the canonical tree of `shards` whose every existing leaf is held."""
    covering: list[Node] = []
    # From the leaves up, so that it costs what is held, and not the whole tree.
    row, width, level = sorted({shard for shard in shards_held if 0 <= shard < shards}), shards, 0
    while row:
        full = set(row)
        above = []
        for index in row:
            if width == 1 or not (index ^ 1 in full or index ^ 1 >= width):
                covering.append(Node(index, level))
            elif index % 2 == 0:
                above.append(index >> 1)
        row, width, level = above, (width + 1) >> 1, level + 1
    return [_trim(node, shards) for node in sorted(covering, key=lambda node: node.first)]


def _trim(node: Node, shards: int) -> Node:
    """Return the lowest node that covers the same existing leaves: a ragged node equals its left child."""
    while node.level > 0 and (2 * node.index + 1) << (node.level - 1) >= shards:
        node = Node(2 * node.index, node.level - 1)
    return node


def fold_shards(
    tensors: Mapping[int, Tensor], nodes: Sequence[Node], kernel: Kernel, shards: int
) -> list[Tensor]:
    """Fold each node's shards along the tree below it, in the accumulator's dtype."""
    partials: list[Tensor] = []
    for node in nodes:
        last = min(node.first + (1 << node.level), shards)
        leaves = [tensors[shard] for shard in range(node.first, last)]
        order = tree_fold([Node(shard, 0) for shard in range(node.first, last)], shards)
        wide = accumulator_dtype(leaves[0].dtype)
        if len(leaves) == 1:
            partials.append(leaves[0] if leaves[0].dtype == wide else leaves[0].to(wide))
            continue
        out = torch.empty(leaves[0].numel(), dtype=wide, device="cpu")
        run_blocks(order, kernel, leaves, out)
        partials.append(out)
    return partials


def run_blocks(order: ReductionOrder, kernel: Kernel, inputs: Sequence[Tensor], out: Tensor) -> None:
    """Run a fold over long tensors in blocks that fit the cache."""
    size = out.numel()
    block = max(1, BLOCK_BYTES // out.element_size())
    scratch = [torch.empty(min(block, size), dtype=out.dtype, device="cpu") for _ in range(order.temporaries)]
    for start in range(0, size, block):
        stop = min(start + block, size)
        order.run(kernel, [tensor[start:stop] for tensor in inputs], out[start:stop], scratch)


def fold_over(recipe: Recipe, inputs: Sequence[Tensor], out: Tensor) -> None:
    """Fold block by block, as `run_blocks`, and finish the sum; `out` may be one of the inputs. Each block is
    summed beside `out` and copied while it is in the cache: a whole slice beside it would cost its pages and
    a second pass."""
    order, kernel, wide = recipe.order, kernel_of(recipe.op), accumulator_dtype(out.dtype)
    size = out.numel()
    block = min(max(1, BLOCK_BYTES // wide.itemsize), size)
    room = [torch.empty(block, dtype=wide, device="cpu") for _ in range(order.temporaries + 1)]
    for start in range(0, size, max(block, 1)):
        stop = min(start + block, size)
        total = room[-1][: stop - start]
        order.run(kernel, [tensor[start:stop] for tensor in inputs], total, room[:-1])
        finish(recipe.op, total, recipe.contributions)
        out[start:stop].copy_(total)
