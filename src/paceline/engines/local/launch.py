"""Start a group of ranks, wait for their results, raise one clear error if any fails, leave nobody behind.

The policy is here; `group` does the listening. Must not know what ranks compute or how they communicate.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.core.errors import CommTimeoutError, PeerLostError, UsageError
from paceline.engines.local import call, client, payload, protocol, stacks, verdict
from paceline.engines.local.group import Group
from paceline.engines.local.protocol import Order, Plain

_START_SECONDS = 300.0


@dataclass(frozen=True)
class Launch:
    """One group of ranks to be.

    entry        "module:function", called in each rank with a `child.Task`
    preload      modules that the fork server imports once, before any rank
    descriptors  handed to every rank, in this order
    options      plain data for the entry
    threads      per rank for numeric libraries; None: OMP_NUM_THREADS, else an equal share of the cores
    timeout      seconds that ranks may take, from their start to the end of the last
    grace        seconds that the others have to end by themselves after one failed
    """

    entry: str
    function: Callable[..., Any]
    args: tuple[Any, ...] = ()
    workers: int = 1
    preload: tuple[str, ...] = ()
    descriptors: tuple[int, ...] = ()
    options: Mapping[str, Plain] = field(default_factory=dict)
    reducers: payload.Reducers = field(default_factory=dict)
    threads: int | None = None
    timeout: float | None = None
    grace: float = 1.0


def run(launch: Launch) -> list[Any]:
    """Run the group to its end and return the results by rank."""
    check(launch)
    packed, packed_call = call.pack(launch.function, launch.args, launch.reducers)
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, packed)
        order = protocol.write_order(
            order_here(launch.entry, launch.workers, launch.preload, launch.threads, launch.options)
        )
        stack.callback(os.close, order)
        group = stack.enter_context(contextlib.closing(_open(launch, order, packed)))
        _wait(group, launch)
        failures = group.failures(packed_call.classes)
        if failures:
            raise verdict.judge(failures)
        return [call.unpack_result(file, packed_call, rank) for rank, file in group.results()]


def _open(launch: Launch, order: int, packed: int) -> Group:
    for stream in (sys.stdout, sys.stderr):
        # What was printed before must not appear after what the ranks print.
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    for _ in range(2):
        held = client.server()
        try:
            return _start(Group(held, launch.workers), order, packed, launch.descriptors)
        except ConnectionError:
            # It ended since it was last looked at; the next one is new.
            held.retired = True
    raise PeerLostError(
        "the fork server ends as soon as it is started",
        remedy="its own output above says why; `python -c 'import torch'` shows if the installation is sound",
    )


def _start(group: Group, order: int, packed: int, files: Sequence[int]) -> Group:
    try:
        group.start(order, packed, files)
    except BaseException:
        group.close()
        raise
    return group


def _wait(group: Group, launch: Launch) -> None:
    limit = time.monotonic() + _START_SECONDS
    started = False
    stop_at: float | None = None
    while not group.done:
        if group.all_ready and not started:
            started = True
            limit = time.monotonic() + launch.timeout if launch.timeout is not None else float("inf")
        if group.anyone_failed and stop_at is None:
            stop_at = time.monotonic() + launch.grace
        now = time.monotonic()
        if stop_at is not None and now >= stop_at:
            group.kill()
            stop_at = float("inf")
        elif stop_at is None and now >= limit:
            _give_up(group, launch, started)
        group.listen(min(limit if stop_at is None else stop_at, now + 3600.0) - now)


def _give_up(group: Group, launch: Launch, started: bool) -> None:
    waiting = group.unfinished
    if not started:
        raise CommTimeoutError(
            f"{stacks.name_ranks(waiting)} did not start within {_START_SECONDS:g} seconds",
            waiting_for=waiting,
            remedy="importing " + ", ".join(launch.preload) + " seems to hang: try it in a plain Python",
        )
    where = stacks.tell(group.ask_where(waiting))
    raise CommTimeoutError(
        f"{stacks.name_ranks(waiting)} of {launch.workers} did not finish within {launch.timeout:g} seconds\n"
        f"{where}",
        waiting_for=waiting,
        remedy="see what these ranks are doing at the lines above, or pass a longer timeout=",
    )


def order_here(
    entry: str, workers: int, preload: tuple[str, ...], threads: int | None, options: Mapping[str, Plain]
) -> Order:
    """An order for ranks that are to find what this process has around it: folder, paths, environment."""
    try:
        cwd = os.getcwd()
    except FileNotFoundError:
        cwd = None
    return Order(
        entry=entry,
        workers=workers,
        preload=preload,
        threads=threads,
        options=options,
        sys_path=tuple(client.import_paths()),
        argv=tuple(sys.argv),
        cwd=cwd,
        environ=dict(os.environ),
        affinity=tuple(sorted(os.sched_getaffinity(0))),
    )


def check(launch: Launch) -> None:
    """UsageError for a launch that cannot work, before anything is started."""
    if not callable(launch.function):
        raise UsageError(
            f"the first argument must be a function, and {launch.function!r} cannot be called",
            remedy="pass the function itself, without calling it: spawn(train), not spawn(train())",
        )
    _check_whole("workers", launch.workers)
    if launch.threads is not None:
        _check_whole("threads", launch.threads)
    check_seconds("timeout", launch.timeout)
    names: Sequence[object] = launch.preload
    if not all(isinstance(name, str) and name for name in names):
        raise UsageError(
            f"preload must be a sequence of module names, not {names!r}", remedy='write preload=("name",)'
        )


def check_seconds(name: str, value: object) -> None:
    """UsageError unless `value` is None or a number of seconds that one can wait."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not value > 0):
        raise UsageError(
            f"{name} must be a number of seconds above 0, or None, not {value!r}",
            remedy="leave it out to wait without a limit",
        )


def _check_whole(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UsageError(
            f"{name} must be a whole number from 1 up, not {value!r}", remedy=f"pass {name}=1 or more"
        )
