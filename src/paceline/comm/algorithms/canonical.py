"""Canonical all-reduce: the same bits for any number of ranks and any split of the shards among them.

Idea: the sum is defined by the shards alone, as one fixed balanced binary tree over the shard index
(reduction_order.py). A rank folds the largest whole subtrees of the shards it holds; those partials travel.
Each rank owns a slice of the tensor, gets all partials of that slice, folds them along the tree and shares
the result.
What travels: with one partial per rank the ring's optimum, 2(N-1)/N of the message per rank; a rank that
holds p partials sends its slices p times.
What it costs: 2 rounds of latency, as `direct`; the fold reads what `direct` reads. 16-bit floats travel as
fp32 partials.
What it asks: a window where there is one, else messages between any two ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cache, lru_cache

import numpy as np
import torch
from torch import Tensor

from paceline.comm.algorithms.reduce_request import ReduceRequest
from paceline.comm.algorithms.shm.all_reduce import reduce_in_window
from paceline.comm.algorithms.shm.checksums import ChecksumRequest, corrupt, digest
from paceline.comm.algorithms.shm.task import ReductionTask, mark_untouched
from paceline.comm.call_status import CollectiveCall
from paceline.comm.cost import LinkCosts, Situation
from paceline.comm.ops import ReduceOp, accumulator_dtype
from paceline.comm.reduction_order import Node, Recipe, cut, fold_over, tree_fold
from paceline.comm.transport.base import Messages, Transport, peers_of
from paceline.core.errors import PacelineError


def run(request: ReduceRequest) -> None:
    """Reduce with one shard per rank: its contribution."""
    transport, out = request.transport, request.out
    flat = request.flat.to(accumulator_dtype(request.flat.dtype))
    order = recipe(transport.world_size, request.op)
    combine(ReductionTask(transport, request.call, order, [flat], out, request.deadline))


@cache
def recipe(size: int, op: ReduceOp) -> Recipe:
    """Fold one shard per rank along the tree."""
    return recipe_for(tuple((Node(rank, 0),) for rank in range(size)), size, op)


@lru_cache(maxsize=256)
def recipe_for(nodes: tuple[tuple[Node, ...], ...], shards: int, op: ReduceOp) -> Recipe:
    """Return how the partials that the ranks hold (`nodes` by rank) become the sum; the same splits recur."""
    sources = tuple((rank, position) for rank, own in enumerate(nodes) for position in range(len(own)))
    return Recipe(
        tree_fold([nodes[rank][position] for rank, position in sources], shards), sources, op, shards
    )


def combine(task: ReductionTask) -> None:
    """Run a task: in the window where there is one, else by messages between any two ranks."""
    transport, partials, out, checksum = task.transport, task.partials, task.out, task.checksum
    if transport.window is not None:
        reduce_in_window(task)
        return
    rank, peers = transport.rank, peers_of(transport)
    slices = [slice(*part) for part in cut(out.numel(), transport.world_size)]
    mine = slices[rank]
    own = [partial[mine] for partial in partials]
    sends = [(peer, partial[slices[peer]]) for peer in peers for partial in partials]
    size, wide = out[mine].numel(), accumulator_dtype(out.dtype)
    inputs = [
        own[position] if source == rank else torch.empty(size, dtype=wide, device="cpu")
        for source, position in task.recipe.sources
    ]
    arriving = [
        (source, tensor)
        for (source, _), tensor in zip(task.recipe.sources, inputs, strict=True)
        if source != rank
    ]
    checksums = None if checksum is None else MessageChecksums(checksum, sends, own)
    try:
        _exchange(task, checksums, sends, arriving)
    except PacelineError as error:
        if checksums is None or checksums.intact():
            mark_untouched(error)
        raise
    fold_over(task.recipe, inputs, out[mine])
    # A rank that finds a result damaged on its way fails alone: the results of the others are right, and they
    # know it.
    results = [(peer, out[mine]) for peer in peers]
    checksums = None if checksum is None else MessageChecksums(ChecksumRequest(), results)
    _exchange(task, checksums, results, [(peer, out[slices[peer]]) for peer in peers])


def _exchange(
    task: ReductionTask, checksums: MessageChecksums | None, sends: Messages, receives: Messages
) -> None:
    if checksums is None:
        task.transport.exchange(task.call, sends, receives, task.deadline)
    else:
        checksums.exchange(task.transport, task.call, receives, task.deadline)


class MessageChecksums:
    """One rank's checksums in one exchange of messages: those for a peer travel ahead of its messages. `own`
    is what this rank does not send but uses itself."""

    def __init__(self, request: ChecksumRequest, sends: Messages, own: Sequence[Tensor] = ()) -> None:
        self._sends, self._own = sends, own
        self._values = self._digests()
        request.taken()

    def intact(self) -> bool:
        """Return whether this rank's data still matches its checksums."""
        return self._digests() == self._values

    def exchange(
        self, transport: Transport, call: CollectiveCall, receives: Messages, deadline: float
    ) -> None:
        outgoing: dict[int, list[int]] = {}
        for (peer, _), value in zip(self._sends, self._values, strict=False):
            outgoing.setdefault(peer, []).append(value)
        announced = {
            peer: torch.empty(count, dtype=torch.int64, device="cpu")
            for peer, count in Counter(peer for peer, _ in receives).items()
        }
        checksums = [
            (peer, torch.from_numpy(np.array(values, dtype=np.uint64).view(np.int64)))
            for peer, values in outgoing.items()
        ]
        transport.exchange(call, [*checksums, *self._sends], [*announced.items(), *receives], deadline)
        due = {peer: iter(values.numpy().view(np.uint64).tolist()) for peer, values in announced.items()}
        for peer, tensor in receives:
            if digest([tensor]) != next(due[peer]):
                raise corrupt(transport, peer, call.text)
        if digest(self._own) != self._values[-1]:
            raise corrupt(transport, transport.rank, call.text)

    def _digests(self) -> list[int]:
        return [*(digest([tensor]) for _, tensor in self._sends), digest(self._own)]


def cost(situation: Situation, links: LinkCosts) -> float:
    """Return infinity: "auto" never takes it, because asking for the same bits is the caller's decision."""
    return float("inf")
