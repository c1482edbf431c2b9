"""The contract suite on every transport that Paceline ships."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.comm.transport.ranks import run_contexts, values

from paceline.comm.transport.threads import run_ranks
from paceline.testing.transport_contract import TransportContract


class TestThreads(TransportContract):
    def run(self, world_size: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
        return run_ranks(world_size, fn, *args)


class TestSharedMemory(TransportContract):
    def run(self, world_size: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
        return values(run_contexts(world_size, fn, *args, backend="shm"))


class TestGloo(TransportContract):
    def run(self, world_size: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
        return values(run_contexts(world_size, fn, *args, backend="gloo"))


class TestHybrid(TransportContract):
    """Three ranks on two hosts: 0 and 1 share one. Two ranks would be one per host, which is plain Gloo."""

    world_sizes = (3, 4)

    def run(self, world_size: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
        return values(run_contexts(world_size, fn, *args, hosts=2))
