"""Groups for views: from a segment or over the network, called off at any time, without a trace."""

from __future__ import annotations

import gc
import os
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.comm.ranks import LARGE, raised
from tests.comm.transport.ranks import run_processes, values
from tests.comm.views import SECRET, Job, peers, view_context
from tests.waiting import wait_for

from paceline.comm.context import DistributedContext
from paceline.comm.rendezvous.view_group import ViewGroup, ViewPeer, open_view
from paceline.core.errors import GroupInterruptedError, PacelineError, RendezvousError, UsageError
from paceline.core.shm_segment_layout import create_segment


@contextmanager
def segment(world_size: int) -> Iterator[tuple[int, int, int, int]]:
    fd = create_segment(world_size)
    try:
        about = os.fstat(fd)
        yield os.getpid(), fd, about.st_ino, about.st_dev
    finally:
        os.close(fd)


def total(ctx: DistributedContext) -> tuple[str, float]:
    return ctx.backend, float(ctx.all_reduce(torch.full((LARGE,), 1.0 + ctx.rank))[7])


@pytest.mark.parametrize(
    ("hosts", "backend"),
    [(["a", "b"], "gloo"), (["a", "a", "b"], "hybrid"), (["a", "a"], "shm"), (["a"], "shm")],
)
def test_members_meet_at_the_first_ones_listener(hosts: list[str], backend: str) -> None:
    with Job(len(hosts)) as job:
        expected = (backend, sum(range(len(hosts) + 1)))
        for generation in range(3):
            assert job.view(range(len(hosts)), hosts, generation, total) == [expected] * len(hosts)


def test_members_come_and_go_and_the_first_one_changes() -> None:
    hosts = ["a", "b", "c", "d"]
    with Job(4) as job:
        for generation, members in enumerate([(0, 1, 2), (1, 2), (1, 2, 3), (3, 0), (0, 1, 2, 3)]):
            found = job.view(members, [hosts[member] for member in members], generation, total)
            assert found == [("gloo", sum(range(len(members) + 1)))] * len(members)


def test_the_first_one_may_come_last() -> None:
    with Job(2) as job:
        early = job.pool.submit(job.open, 1, (0, 1), ("a", "b"), 1)
        with job.open(0, (0, 1), ("a", "b"), 1) as first, early.result(20) as second:
            assert (first.rank, second.rank) == (0, 1)


def test_strangers_and_ranks_of_other_views_do_no_harm() -> None:
    with Job(3) as job, ExitStack() as stack:
        port = job.listeners[0].getsockname()[1]
        for nonsense in (b"", b"GET / HTTP/1.1\r\n\r\n" * 20, os.urandom(4000)):
            stranger = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            stranger.sendall(nonsense)
        off = threading.Event()
        late = job.pool.submit(job.open, 1, (0, 2), ("a", "c"), 1, off)
        intruder_off = threading.Event()
        intruder = ThreadPoolExecutor(1)
        wrong = intruder.submit(job.open, 1, (0, 2), ("a", "c"), 2, intruder_off, b"another secret")
        first = intruder_first(job)
        assert first == [("gloo", 3.0)] * 2
        for event, future in ((off, late), (intruder_off, wrong)):
            event.set()
            assert isinstance(future.exception(20), GroupInterruptedError)
        intruder.shutdown()


def intruder_first(job: Job) -> list[Any]:
    def one(rank: int) -> Any:
        with job.open(rank, (0, 1), ("a", "b"), 2) as ctx:
            return total(ctx)

    with ThreadPoolExecutor(2) as pool:
        return [future.result(30) for future in [pool.submit(one, rank) for rank in range(2)]]


@pytest.mark.parametrize("hosts", [("a", "b", "c"), ("a", "a", "b")], ids=["apart", "together"])
@pytest.mark.parametrize("missing", [0, 1, 2])
def test_forming_is_called_off_at_once(hosts: tuple[str, ...], missing: int) -> None:
    """One member never comes; the others are told, wherever they are by then."""
    off = threading.Event()
    with Job(3) as job:
        waiting = [
            job.pool.submit(job.open, rank, (0, 1, 2), hosts, 1, off) for rank in range(3) if rank != missing
        ]
        stores = int(missing != 0)
        wait_for(lambda: sum("paceline-store" in one.name for one in threading.enumerate()) >= stores)
        assert not any(future.done() for future in waiting)
        start = time.monotonic()
        off.set()
        assert all(isinstance(future.exception(20), GroupInterruptedError) for future in waiting)
        assert time.monotonic() - start < 5.0  # some ten milliseconds on a quiet machine; forming has 20 s
        # The next view is as good as any.
        assert job.view((0, 1, 2), ("a", "b", "c"), 2, total) == [("gloo", 6.0)] * 3


def test_a_view_that_no_peer_comes_to_ends_by_itself() -> None:
    with Job(2) as job:
        error = raised(RendezvousError, lambda: job.open(0, (0, 1), ("a", "b"), 1, forming_seconds=0.2))
        assert "rank 1" in str(error)


def test_bad_arguments() -> None:
    with Job(1) as job:
        lonely = peers(job.listeners, ["a"], [0])
        for rank, members in ((1, lonely), (-1, lonely), (2, [*lonely, *lonely]), (0, [*lonely, *lonely])):
            with pytest.raises(UsageError):
                open_view(ViewGroup(1, rank, members, SECRET), None)


def here(world_size: int) -> list[ViewPeer]:
    return [ViewPeer(slot, 0, "here", "here", ("", 0)) for slot in range(world_size)]


def in_segment(rank: int, world_size: int, about: tuple[int, ...]) -> Any:
    ctx = view_context(ViewGroup(3, rank, here(world_size), b"", about))
    with ctx:
        return total(ctx)


def test_a_segment_of_another_process() -> None:
    with segment(3) as about:
        assert values(run_processes(3, in_segment, about)) == [("shm", 6.0)] * 3
        pid, fd, inode, device = about
        for wrong in (
            (pid, fd, inode + 1, device),
            (pid, 9999, inode, device),
            (2**22 - 3, fd, inode, device),
        ):
            error = raised(RendezvousError, lambda wrong=wrong: in_segment(0, 3, wrong))
            assert error.remedy


def mappings() -> int:
    return sum("memfd:paceline" in line for line in Path("/proc/self/maps").read_text().splitlines())


def resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def regroup_often(rank: int, world_size: int, segments: list[tuple[int, ...]]) -> Any:
    """Each view folds, is interrupted or closed, and hands a tensor over to the next one."""
    held: torch.Tensor | None = None
    seen = []
    gc.disable()  # mappings go with the context, not some time later
    for generation, about in enumerate(segments):
        ctx = view_context(ViewGroup(generation, rank, here(world_size), b"", about))
        mine = ctx.empty(LARGE)
        mine.copy_(held) if held is not None else mine.fill_(1)
        ctx.all_reduce(mine, "average", out=mine)
        ctx.all_reduce(torch.ones(10))
        ctx.all_gather(generation)
        if generation % 2:
            other = threading.Thread(target=ctx.interrupt, args=("next view",))
            other.start()
            try:
                while True:
                    ctx.barrier()
            except PacelineError as error:
                ctx.close(error.with_traceback(None))
            other.join()
            del other
        else:
            ctx.barrier()
            ctx.close()
        held = mine
        del ctx, mine
        if generation in (20, len(segments) - 1):
            seen.append(
                (mappings(), len(os.listdir("/proc/self/fd")), threading.active_count(), resident_mb())
            )
    return seen


def test_two_hundred_views_leave_nothing_behind() -> None:
    with ExitStack() as stack:
        segments = [stack.enter_context(segment(2)) for _ in range(200)]
        for early, late in values(run_processes(2, regroup_often, segments)):
            assert early[:3] == late[:3]
            assert late[0] <= 1  # of the tensor that is held
            assert late[3] - early[3] < 10
