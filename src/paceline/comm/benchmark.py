"""Measure all-reduce on this machine: against torch.distributed's Gloo, against memory copies, and for the
cost model.

The functions here run inside ranks (they take a context) and return plain data; starting ranks, printing and
saving is the caller's business. Rounds of the methods are interleaved, medians are taken, and the slowest
rank counts.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from paceline.comm.context import DistributedContext
from paceline.comm.cost import LinkCost, LinkCosts
from paceline.core.wording import counted

SIZES = (4096, 1 << 20, 25 << 20, 100 << 20)
METHODS = ("direct", "direct, ctx.empty", "canonical", "canonical, ctx.empty", "ring", "tree")
_ROUNDS = 5


@dataclass(frozen=True)
class Row:
    """One method at one size: the median seconds of the slowest rank, and what that means."""

    ranks: int
    nbytes: int
    method: str
    seconds: float
    gloo_seconds: float
    copy_seconds: float  # to copy the message once, on all ranks at the same time

    @property
    def speedup(self) -> float:
        """The factor by which this method is faster than Gloo in the same run."""
        return self.gloo_seconds / self.seconds

    @property
    def copy_fraction(self) -> float:
        """The time of the least possible traffic, 2(N-1)/N of the message per rank, at the speed of a memory
        copy, over the time it took."""
        return 2 * (self.ranks - 1) / self.ranks * self.copy_seconds / self.seconds

    def to_plain(self) -> dict[str, Any]:
        return {**asdict(self), "speedup": self.speedup, "copy_fraction": self.copy_fraction}


def compare(
    ctx: DistributedContext,
    sizes: Sequence[int] = SIZES,
    methods: Sequence[str] = METHODS,
    rounds: int = _ROUNDS,
) -> list[Row]:
    """Time every method at every size, Gloo and a plain copy among them. One intra-op thread per rank."""
    torch.set_num_threads(1)
    rows: list[Row] = []
    with _gloo_group(ctx):
        for nbytes in sizes:
            actions = _actions(ctx, nbytes, methods)
            actions["gloo"] = partial(dist.all_reduce, torch.zeros(nbytes // 4))
            calls = 100 if nbytes <= 1 << 16 else 10 if nbytes <= 1 << 22 else 3
            medians = interleaved(ctx, actions, rounds, calls)
            rows += [
                Row(ctx.world_size, nbytes, method, medians[method], medians["gloo"], medians["copy"])
                for method in methods
            ]
    return rows


def interleaved(
    ctx: DistributedContext, actions: dict[str, Callable[[], object]], rounds: int, calls: int
) -> dict[str, float]:
    """Return median seconds per call by name: blocks of calls take turns, every call starts together on all
    ranks, and the slowest rank's time counts."""
    times: dict[str, list[float]] = {name: [] for name in actions}
    for _ in range(rounds):
        for name, action in actions.items():
            action()  # the first call of a block finds cold caches left by the block before
            for _ in range(calls):
                ctx.barrier()
                start = time.perf_counter()
                action()
                times[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(values) for name, values in times.items()}
    slowest = ctx.all_reduce(list(medians.values()), "max")
    return dict(zip(medians, slowest, strict=True))


def calibrate(ctx: DistributedContext) -> LinkCosts:
    """Measure what a message and the window cost here, and links between hosts where there are several."""
    torch.set_num_threads(1)
    small, large = 4096, 8 << 20
    inside = LinkCost.fit((small, _ring_step(ctx, small)), (large, _ring_step(ctx, large)))
    defaults = LinkCosts()
    window = defaults.window
    if ctx.transport.window is not None:
        share = 2 * (ctx.world_size - 1) / ctx.world_size
        low = interleaved(ctx, _actions(ctx, small, ["direct"]), 3, 50)["direct"]
        high = interleaved(ctx, _actions(ctx, large, ["direct"]), 3, 4)["direct"]
        window = LinkCost.fit((int(small * share), low), (int(large * share), high))
    between = inside if ctx.transport.topology.hosts > 1 else defaults.between
    kind = "between hosts and " if ctx.transport.topology.hosts > 1 else ""
    source = f"measured {kind}inside the host with {counted(ctx.world_size, 'rank')}"
    return LinkCosts(window, inside, between, overhead=inside.latency / 3, source=source)


def _ring_step(ctx: DistributedContext, nbytes: int) -> float:
    """Return the seconds of a round in which every rank sends `nbytes` to the right."""
    steps = 2 * (ctx.world_size - 1)
    if steps == 0:
        return 1e-6
    data = torch.zeros(nbytes // 4 * ctx.world_size)
    actions: dict[str, Callable[[], object]] = {"": lambda: ctx.all_reduce(data, algorithm="ring", out=data)}
    return interleaved(ctx, actions, 3, 10 if nbytes < 1 << 20 else 3)[""] / steps


def _actions(ctx: DistributedContext, nbytes: int, methods: Sequence[str]) -> dict[str, Callable[[], object]]:
    # Zeros stay zeros however often they are summed: no overflow, and nothing but the all-reduce is timed.
    ordinary = torch.zeros(nbytes // 4)
    copy_to = torch.zeros(nbytes // 4)
    shared = ctx.empty(nbytes // 4).zero_()

    def action(method: str) -> Callable[[], object]:
        algorithm, _, memory = method.partition(", ")
        data = shared if memory else ordinary
        return lambda: ctx.all_reduce(data, algorithm=algorithm, out=data)

    actions = {method: action(method) for method in methods}
    actions["copy"] = lambda: copy_to.copy_(ordinary)
    return actions


@contextmanager
def _gloo_group(ctx: DistributedContext) -> Iterator[None]:
    """Make torch.distributed's default group on Gloo among the ranks of a context, to measure against it."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if ctx.is_master else None
    port = ctx.broadcast(None if store is None else store.port)
    if store is None:
        store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=ctx.rank, world_size=ctx.world_size)
    try:
        yield
    finally:
        ctx.barrier()
        dist.destroy_process_group()
        ctx.barrier()  # the store lives in rank 0: no rank may still need it
