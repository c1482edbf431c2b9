"""A window of a foreign transport: reductions ask for the two Protocols of transport/base.py and no more."""

from __future__ import annotations

import ctypes
import threading
import time
from typing import Any

import pytest
import torch
from tests.comm.ranks import LARGE, sha, wide_range
from torch import Tensor

from paceline.comm.call_status import CollectiveCall
from paceline.comm.transport.base import Window
from paceline.core.errors import CommTimeoutError, DisagreementError
from paceline.testing.thread_transport import run_ranks


class Shared:
    """What the threads of one group share."""

    def __init__(self, world_size: int, reach: bool) -> None:
        self.reach = reach
        self.changed = threading.Condition()
        self.ticks = [0] * world_size
        self.entries: list[list[Any]] = [[None] * world_size for _ in range(2)]
        self.small = torch.zeros(2, world_size, 4096, dtype=torch.uint8)
        self.staging = torch.zeros(3, world_size, 1 << 16, dtype=torch.uint8)
        self.results = torch.zeros(3, 1 << 16, dtype=torch.uint8)


class ThreadWindow:
    """One rank's window among threads of a process: no segment, no futex, no class of transport/shm."""

    def __init__(self, shared: Shared, rank: int) -> None:
        self._shared, self._rank = shared, rank
        self.small, self.staging, self.results = shared.small, shared.staging, shared.results
        self.reachable: bool | None = None
        self.prepared: dict[object, object] = {}
        self.next_slot = 0

    def offset_of(self, tensor: Tensor) -> int | None:
        return None

    def at(self, offset: int, nbytes: int) -> Tensor:
        raise AssertionError("no tensor lies in this window")

    def can_reach(self, call: CollectiveCall, deadline: float) -> bool:
        self.reachable = self._shared.reach
        return self.reachable

    def read(self, rank: int, address: int, into: Tensor, call: CollectiveCall, deadline: float) -> None:
        ctypes.memmove(into.data_ptr(), address, into.nbytes)

    def write(self, rank: int, address: int, data: Tensor, call: CollectiveCall, deadline: float) -> None:
        ctypes.memmove(address, data.data_ptr(), data.nbytes)

    def signal(self, call: CollectiveCall | None = None, source: int = 0, target: int = 0) -> int:
        with self._shared.changed:
            if call is not None:
                entry = (call.sequence, call.signature, source, target)
                self._shared.entries[self.next_slot][self._rank] = entry
                self.next_slot ^= 1
            self._shared.ticks[self._rank] += 1
            self._shared.changed.notify_all()
            return self._shared.ticks[self._rank]

    def wait(self, tick: int, call: CollectiveCall, deadline: float) -> None:
        with self._shared.changed:
            left = deadline - time.monotonic()
            if not self._shared.changed.wait_for(lambda: min(self._shared.ticks) >= tick, left):
                raise CommTimeoutError(f"tick {tick} of {call.text}", waiting_for=())

    def barrier(self, call: CollectiveCall, deadline: float) -> None:
        self.wait(self.signal(call), call, deadline)
        self.locations(call, deadline)

    def locations(self, call: CollectiveCall, deadline: float) -> tuple[list[int], list[int]]:
        entries = self._shared.entries[self.next_slot ^ 1]
        if any(entry[:2] != (call.sequence, call.signature) for entry in entries):
            raise DisagreementError("ranks made different calls", calls={})
        return [entry[2] for entry in entries], [entry[3] for entry in entries]

    def is_unreachable(self, tick: int) -> bool:
        return False


def results(ctx: Any) -> list[str]:
    """Small and large reductions, twice each: by the ways that the window offers."""
    found = []
    for length in (7, LARGE, 7, LARGE):
        for algorithm in ("direct", "canonical"):
            data = wide_range(ctx.rank, length)
            found.append(sha(ctx.all_reduce(data, "average", algorithm)))
            found.append(sha(ctx.all_reduce(data.bfloat16(), "sum", algorithm, out=data.bfloat16())))
    ctx.barrier()
    return found


@pytest.mark.parametrize("reach", [False, True])
def test_reductions_over_a_foreign_window_give_the_same_bits(reach: bool) -> None:
    shared = Shared(3, reach)

    def foreign(ctx: Any) -> tuple[list[str], bool | None, int]:
        window: Window = ThreadWindow(shared, ctx.rank)
        ctx.transport.window = window
        return results(ctx), window.reachable, shared.ticks[ctx.rank]

    expected = run_ranks(3, results)
    outcomes = run_ranks(3, foreign)
    assert [found for found, _, _ in outcomes] == expected
    assert {(reachable, ticks > 0) for _, reachable, ticks in outcomes} == {(reach, True)}
