"""Ranks that are killed or stop inside a collective, on every transport that has processes."""

from __future__ import annotations

import mmap
import os
import signal
import struct
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.comm.transport.ranks import free_port, run_contexts, run_processes, values

from paceline.comm.context import DistributedContext
from paceline.core.errors import CommTimeoutError, DisagreementError, PacelineError, PeerLostError
from paceline.testing import leaks

TRANSPORTS: dict[str, dict[str, Any]] = {
    "shm": {"backend": "shm"},
    "gloo": {"backend": "gloo"},
    "hybrid": {"hosts": 2},
}


def reduce_until_a_rank_dies(
    ctx: DistributedContext, size: int, algorithm: str, clock: mmap.mmap
) -> tuple[float, tuple[int, ...]]:
    """Rank 2 is killed inside an all-reduce; the others return when they knew, and whom they named."""
    inside = threading.Event()
    if ctx.rank == 2:

        def kill() -> None:
            inside.wait()
            clock[:8] = struct.pack("d", time.monotonic())
            os.kill(os.getpid(), signal.SIGKILL)

        threading.Thread(target=kill, daemon=True).start()
    data = torch.ones(size)
    try:
        for turn in range(10_000):
            if turn == 3:
                inside.set()
            ctx.all_reduce(data, algorithm=algorithm)
    except PeerLostError as error:
        return time.monotonic(), error.ranks
    raise AssertionError("no rank died")


@pytest.mark.parametrize("size", [10, 2_000_000])
@pytest.mark.parametrize(
    ("transport", "algorithm"),
    [
        ("shm", "direct"),
        ("shm", "ring"),
        ("gloo", "ring"),
        ("gloo", "native"),
        ("hybrid", "ring"),
        ("hybrid", "hierarchical"),
    ],
)
def test_the_death_of_a_rank_is_noticed_within_a_second(transport: str, algorithm: str, size: int) -> None:
    with mmap.mmap(-1, 8) as clock:
        outcomes = run_contexts(4, reduce_until_a_rank_dies, size, algorithm, clock, **TRANSPORTS[transport])
        (died,) = struct.unpack("d", clock[:8])
    assert outcomes[2].signal == signal.SIGKILL
    took = []
    for rank in (0, 1, 3):
        error = outcomes[rank].error
        assert error is None, "".join(getattr(error, "__notes__", [])) or error
        noticed, named = outcomes[rank].value
        assert named == (2,)
        took.append(noticed - died)
    # On a busy machine a rank may wait for its turn; none waits for a timeout, which would be 30 s.
    assert min(took) < 1.0
    assert max(took) < 5.0


def reduce_beside_a_stopped_rank(ctx: DistributedContext) -> tuple[float, str, tuple[int, ...]]:
    """Rank 1 is stopped; the others return how long they waited, their error, and the ranks it calls lost."""
    pids = ctx.all_gather(os.getpid())
    ctx.barrier()
    start = time.monotonic()
    if ctx.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    try:
        ctx.all_reduce(torch.ones(2_000_000), algorithm="ring", timeout=1.0)
    except (CommTimeoutError, PeerLostError) as error:
        took = time.monotonic() - start
        if ctx.rank == 0:
            os.kill(pids[1], signal.SIGKILL)
        return took, f"{type(error).__name__}: {error}", getattr(error, "ranks", ())
    raise AssertionError("a stopped rank took part")


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_stopped_rank_ends_the_wait_at_the_deadline(transport: str) -> None:
    outcomes = run_contexts(3, reduce_beside_a_stopped_rank, **TRANSPORTS[transport])
    assert outcomes[1].signal == signal.SIGKILL
    for rank in (0, 2):
        assert outcomes[rank].error is None, outcomes[rank].error
        took, text, lost = outcomes[rank].value
        assert took < 10.0
        # The first rank that gives up ends the wait of the other one with a CommTimeoutError too. Rank 1 is
        # killed after rank 0 has its error: rank 2, if it is late, may find the loss of rank 1 or of rank 0.
        if rank == 0 or not lost:
            assert text.startswith("CommTimeoutError: ")
            assert "\n  rank 1: " in text
        else:
            assert text.startswith("PeerLostError: ")
            assert {*lost} <= {0, 1}


def disagree_on_known_lines(ctx: DistributedContext) -> str:
    try:
        if ctx.rank == 0:
            ctx.all_reduce(torch.ones(3))  # line of rank 0
        elif ctx.rank == 1:
            ctx.all_reduce(torch.ones(4))  # line of rank 1
        else:
            ctx.barrier()  # line of rank 2
    except DisagreementError as error:
        return str(error)
    raise AssertionError("no rank noticed")


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_disagreement_names_calls_and_lines(transport: str) -> None:
    with open(__file__) as file:
        source = list(file)
    lines = [
        next(number for number, line in enumerate(source, 1) if f"# line of rank {rank}" in line)
        for rank in range(3)
    ]
    for outcome in run_contexts(3, disagree_on_known_lines, **TRANSPORTS[transport]):
        assert outcome.error is None, outcome.error
        for rank, call in enumerate(("float32[3]", "float32[4]", "barrier()")):
            line = next(line for line in outcome.value.splitlines() if line.startswith(f"  rank {rank}:"))
            assert call in line
            assert f"{__file__}:{lines[rank]}" in line


def miss_a_call(ctx: DistributedContext, over: Path) -> str:
    """Rank 1 is busy with something else, for longer than the other wants to wait."""
    gone = threading.Event()
    if ctx.rank == 1:
        for _ in range(1200):
            if over.exists():
                break
            gone.wait(0.05)  # busy here
        return ""
    try:
        ctx.barrier(timeout=1.5)
    except CommTimeoutError as error:
        return str(error)
    finally:
        over.touch()
    raise AssertionError("rank 1 took part")


def test_a_busy_rank_is_shown_with_its_line(tmp_path: Path) -> None:
    text = run_contexts(2, miss_a_call, tmp_path / "over", backend="gloo")[0].value
    assert "rank 1: has not made this call; it is busy elsewhere (at " in text
    assert "threading.py" in text or __file__ in text


def open_and_close(rank: int, world_size: int, port: int, hosts: int) -> list[str]:
    """Many contexts one after the other in one process; what they leave behind."""
    if hosts > 1:
        os.environ["PACELINE_HOST"] = f"host{rank * hosts // world_size}"
    before = leaks.snapshot()
    for turn in range(12):
        if turn == 2:
            # Libraries keep a thing or two from their first use on.
            before = leaks.snapshot()
        backend = ("auto", "gloo")[turn % 2]
        ctx = DistributedContext(world_size, rank, address=f"127.0.0.1:{port}", backend=backend, timeout=20)
        ctx.all_reduce(torch.ones(100_000), algorithm="ring")
        ctx.send(ctx.rank, (ctx.rank + 1) % world_size)
        ctx.receive()
        if turn % 4 == 3:
            with pytest.raises(PacelineError):
                ctx.all_reduce(torch.ones(100_000 + rank), algorithm="ring")
        ctx.close()
        del ctx
    return leaks.since(before)


@pytest.mark.parametrize("hosts", [1, 2])
def test_nothing_is_left_of_a_context(hosts: int) -> None:
    with free_port() as port:
        assert values(run_processes(3, open_and_close, port, hosts)) == [[]] * 3
