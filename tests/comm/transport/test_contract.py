"""The contract suite on every transport that Paceline ships."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.comm.transport.ranks import run_contexts, values

from paceline.testing import transport_contract_ranks as ranks
from paceline.testing.thread_transport import run_ranks
from paceline.testing.transport_contract import TransportContract


class _Shipped(TransportContract):
    """All shipped transports report waits: heartbeats of a supervised job need it."""

    def test_a_wait_can_be_seen_if_the_transport_says_so(self) -> None:
        reported, *_ = self.run(2, ranks.watch_a_wait)
        assert reported == (1,)


class TestThreads(_Shipped):
    def run(self, world_size: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
        return run_ranks(world_size, fn, *args)


class TestSharedMemory(_Shipped):
    def run(self, world_size: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
        return values(run_contexts(world_size, fn, *args, backend="shm"))


class TestGloo(_Shipped):
    def run(self, world_size: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
        return values(run_contexts(world_size, fn, *args, backend="gloo"))


class TestHybrid(_Shipped):
    """Three ranks on two hosts: 0 and 1 share one. Two ranks would be one per host, which is plain Gloo."""

    world_sizes = (3, 4)

    def run(self, world_size: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
        return values(run_contexts(world_size, fn, *args, hosts=2))
