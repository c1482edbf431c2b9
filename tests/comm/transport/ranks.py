"""Ranks as real processes, forked from the test: each runs a function and hands its outcome back through a
pipe.
"""

from __future__ import annotations

import os
import pickle
import select
import signal
import socket
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from paceline.comm.context import DistributedContext
from paceline.core.errors import CommTimeoutError, PeerError


@dataclass(frozen=True)
class Outcome:
    """How a rank ended: its value, its error, or the signal that killed it."""

    value: Any = None
    error: BaseException | None = None
    signal: int = 0
    seconds: float = 0.0


@contextmanager
def free_port() -> Iterator[int]:
    """A port that no other process gets while the block lasts, and at which a rank may serve."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


def run_processes(
    world_size: int, fn: Callable[..., Any], *args: Any, timeout: float = 40.0
) -> list[Outcome]:
    """Calls fn(rank, world_size, *args) in `world_size` processes; never raises for what a rank does."""
    started = [_fork(rank, world_size, fn, args) for rank in range(world_size)]
    end = time.monotonic() + timeout
    try:
        return [_read(pid, pipe, end) for pid, pipe in started]
    finally:
        for pid, pipe in started:
            os.close(pipe)
            try:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            except (ProcessLookupError, ChildProcessError):
                continue


def run_contexts(
    world_size: int,
    fn: Callable[..., Any],
    *args: Any,
    backend: str = "auto",
    hosts: int = 1,
    environment: Mapping[str, str] | None = None,
) -> list[Outcome]:
    """Calls fn(context, *args) in processes whose contexts find each other, spread over `hosts` hosts."""
    with free_port() as port:
        return run_processes(
            world_size, _in_context, fn, args, backend, hosts, f"127.0.0.1:{port}", dict(environment or {})
        )


def values(outcomes: list[Outcome]) -> list[Any]:
    """What the ranks returned; raises the first failure, causes before what follows from them."""
    failures = [outcome.error for outcome in outcomes if outcome.error is not None]
    if failures:
        raise min(failures, key=lambda error: isinstance(error, PeerError | CommTimeoutError))
    assert not any(outcome.signal for outcome in outcomes), outcomes
    return [outcome.value for outcome in outcomes]


def _in_context(
    rank: int,
    world_size: int,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    backend: str,
    hosts: int,
    address: str,
    environment: dict[str, str],
) -> Any:
    os.environ.update(environment)
    if hosts > 1:
        os.environ["PACELINE_HOST"] = f"host{rank * hosts // world_size}"
    with DistributedContext(world_size, rank, address=address, backend=backend, timeout=30.0) as ctx:
        return fn(ctx, *args)


def _fork(rank: int, world_size: int, fn: Callable[..., Any], args: tuple[Any, ...]) -> tuple[int, int]:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writer)
        return pid, reader
    os.close(reader)
    # The parent's pool of threads did not come along.
    torch.set_num_threads(1)
    start = time.monotonic()
    try:
        outcome = Outcome(value=fn(rank, world_size, *args), seconds=time.monotonic() - start)
    except BaseException as error:
        error.add_note(traceback.format_exc())
        outcome = Outcome(error=error, seconds=time.monotonic() - start)
    try:
        data = pickle.dumps(outcome)
    except Exception as error:
        data = pickle.dumps(Outcome(error=RuntimeError(f"{outcome!r} cannot be sent: {error}")))
    with os.fdopen(writer, "wb") as stream:
        stream.write(data)
    os._exit(0)


def _read(pid: int, pipe: int, end: float) -> Outcome:
    data = bytearray()
    while True:
        ready, _, _ = select.select([pipe], [], [], max(end - time.monotonic(), 0.0))
        if not ready:
            return Outcome(error=TimeoutError(f"process {pid} did not end"))
        piece = os.read(pipe, 1 << 16)
        if not piece:
            break
        data += piece
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        return Outcome(signal=os.WTERMSIG(status))
    outcome = pickle.loads(bytes(data))
    assert isinstance(outcome, Outcome)
    return outcome
