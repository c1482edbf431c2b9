"""Ranks on several hosts: network namespaces with real interfaces between them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tests.comm.transport.ranks import Outcome, run_processes, values

from paceline.comm.context import DistributedContext
from paceline.core.errors import CommTimeoutError, PeerLostError
from paceline.testing import netns
from paceline.testing.netns import Hosts

_WHY_NOT = netns.why_not()

pytestmark = [pytest.mark.netns, pytest.mark.skipif(bool(_WHY_NOT), reason=_WHY_NOT or "namespaces work")]

SIZE = 1_000_000


@pytest.fixture
def two_hosts() -> Iterator[Hosts]:
    with Hosts(2) as hosts:
        yield hosts


def run_on(
    hosts: Hosts, per_host: int, fn: Callable[..., Any], *args: Any, backend: str = "auto"
) -> list[Outcome]:
    """Calls fn(context, *args) on every rank, `per_host` of them on each host; rank 0 is on the first."""
    return run_processes(len(hosts.names) * per_host, _on_host, hosts, per_host, backend, fn, args)


def _on_host(
    rank: int,
    world_size: int,
    hosts: Hosts,
    per_host: int,
    backend: str,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
) -> Any:
    hosts.enter(rank // per_host)
    address = f"{hosts.addresses[0]}:29500"
    with DistributedContext(world_size, rank, address=address, backend=backend, timeout=30) as ctx:
        return fn(ctx, *args)


def reduce_counted(ctx: DistributedContext, algorithm: str) -> tuple[str, int, int, float]:
    ctx.enable_profiling()
    total = ctx.all_reduce(torch.full((SIZE,), float(ctx.rank + 1)), algorithm=algorithm)
    stats = ctx.get_communication_stats()["operations"]["all_reduce"][algorithm]
    assert bool((total == total[0]).all())
    return ctx.backend, stats["bytes_between_hosts"], stats["rounds"], float(total[0])


def test_hierarchical_sends_one_hosts_worth_between_hosts(two_hosts: Hosts) -> None:
    before = [two_hosts.sent_bytes(host) for host in range(2)]
    outcomes = values(run_on(two_hosts, 2, reduce_counted, "hierarchical"))
    really = [two_hosts.sent_bytes(host) - then for host, then in enumerate(before)]
    message = SIZE * 4
    assert [backend for backend, *_ in outcomes] == ["hybrid"] * 4
    assert all(total == 10.0 for *_, total in outcomes)
    # Two hosts: 2(H-1)/H of the message is the message itself, sent by each host's first rank and by no
    # other.
    assert [between for _, between, _, _ in outcomes] == [message, 0, message, 0]
    # The interfaces' own counters, with TCP's and Ethernet's headers and the few messages of starting and
    # ending.
    for count in really:
        assert message < count < message * 1.15


def test_a_flat_ring_sends_more_between_hosts(two_hosts: Hosts) -> None:
    outcomes = values(run_on(two_hosts, 2, reduce_counted, "ring"))
    message = SIZE * 4
    # Ranks 1 and 3 are the ones whose neighbour is on the other host: 2(N-1)/N each.
    assert [between for _, between, _, _ in outcomes] == [0, message * 3 // 2, 0, message * 3 // 2]
    assert all(total == 10.0 for *_, total in outcomes)


def everything(ctx: DistributedContext) -> list[Any]:
    found: list[Any] = [ctx.backend, ctx.transport.topology.host_of]
    for algorithm in ("direct", "ring", "tree", "hierarchical", "canonical", "native"):
        found.append(ctx.all_reduce(torch.full((300_000,), 1.5), algorithm=algorithm)[7].item())
    found.append(ctx.all_gather("x" * ctx.rank))
    found.append(ctx.broadcast(torch.arange(100_000) if ctx.rank == 1 else None, root_rank=1).sum().item())
    right, left = (ctx.rank + 1) % ctx.world_size, (ctx.rank - 1) % ctx.world_size
    ctx.send(torch.full((100_000,), ctx.rank), right)
    found.append(ctx.receive(left)[0].item() == left)
    ctx.barrier()
    return found


@pytest.mark.parametrize(("hosts", "per_host", "backend"), [(2, 1, "gloo"), (2, 2, "hybrid"), (4, 1, "gloo")])
def test_everything_between_shaped_hosts(hosts: int, per_host: int, backend: str) -> None:
    with Hosts(hosts) as machines:
        machines.rate("1gbit")
        outcomes = values(run_on(machines, per_host, everything))
    ranks = hosts * per_host
    host_of = tuple(rank // per_host for rank in range(ranks))
    expected = [backend, host_of, *[1.5 * ranks] * 6, ["x" * rank for rank in range(ranks)], 4999950000, True]
    assert outcomes == [expected] * ranks


def test_ring_at_one_gigabit(two_hosts: Hosts) -> None:
    """Correct, and not far from the line rate; the figure itself is measured in bench/."""
    two_hosts.rate("1gbit")
    for total, seconds in values(run_on(two_hosts, 1, _timed_ring)):
        assert total == 3.0
        # 12.5 MB at 1 Gbit/s are 0.1 s. Shaping at all shows in the lower limit.
        assert 0.09 < seconds < 5.0


def _timed_ring(ctx: DistributedContext) -> tuple[float, float]:
    data = torch.full((12_500_000 // 4,), float(ctx.rank + 1))
    ctx.barrier()
    start = time.monotonic()
    total = ctx.all_reduce(data, algorithm="ring")
    return float(total[-1]), time.monotonic() - start


def _reduce_over_a_cut(ctx: DistributedContext, hosts: Hosts) -> tuple[str, float]:
    ctx.barrier()
    if ctx.rank == 0:
        hosts.cut(1)
    start = time.monotonic()
    try:
        for _ in range(100):
            ctx.all_reduce(torch.ones(SIZE), timeout=1.0)
    except (CommTimeoutError, PeerLostError) as error:
        return str(error), time.monotonic() - start
    raise AssertionError("the cut did nothing")


@pytest.mark.parametrize("per_host", [1, 2])
def test_a_cut_link_ends_the_wait_at_the_deadline(two_hosts: Hosts, per_host: int) -> None:
    for rank, (text, seconds) in enumerate(
        values(run_on(two_hosts, per_host, _reduce_over_a_cut, two_hosts))
    ):
        assert seconds < 15.0
        other = range(per_host, 2 * per_host) if rank < per_host else range(per_host)
        assert any(str(peer) in text for peer in other)


def test_hosts_leave_nothing_behind() -> None:
    with Hosts(2) as hosts:
        process = hosts.start(0, ["sleep", "60"])
        names = list(hosts.names)
    assert process.returncode != 0
    existing = netns._run("ip", "netns", "list").split()
    assert not set(names) & set(existing)
