"""Ranks that disagree, and a rank that dies: how long until all ranks know, and what they are told."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from bench.report import Report, Target, main
from paceline.comm.context import DistributedContext
from paceline.core.errors import PacelineError
from paceline.frontends.spawn import spawn

RANKS = 4
ODD = 2  # the rank that does something else


def other_shape(ctx: DistributedContext) -> None:
    ctx.all_reduce(torch.ones(100 if ctx.rank != ODD else 101))


def other_dtype(ctx: DistributedContext) -> None:
    ctx.all_reduce(torch.ones(100, dtype=torch.float32 if ctx.rank != ODD else torch.float64))


def other_operation(ctx: DistributedContext) -> None:
    ctx.all_reduce(torch.ones(100), "sum" if ctx.rank != ODD else "max")


def other_order(ctx: DistributedContext) -> None:
    first, second = (
        (ctx.barrier, lambda: ctx.broadcast(1))
        if ctx.rank != ODD
        else (lambda: ctx.broadcast(1), ctx.barrier)
    )
    first()
    second()


def missing_rank(ctx: DistributedContext) -> None:
    if ctx.rank != ODD:
        ctx.all_reduce(torch.ones(100))


def waiting_elsewhere(ctx: DistributedContext) -> None:
    if ctx.rank == ODD:
        ctx.receive(0)
    else:
        ctx.all_reduce(torch.ones(100))


def busy_elsewhere(ctx: DistributedContext) -> None:
    if ctx.rank == ODD:
        ctx.receive(0, timeout=8)  # stands for any work that goes on and on
    else:
        ctx.all_reduce(torch.ones(100), timeout=4)


def killed(ctx: DistributedContext) -> None:
    data = torch.ones(1 << 20)
    for step in range(10_000):
        if ctx.rank == ODD and step == 50:
            Path(os.environ["BENCH_NOTES"], "killed").write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)
        ctx.all_reduce(data)


def observed(ctx: DistributedContext, case: Callable[[DistributedContext], None]) -> None:
    """Runs a case and notes what this rank was told, and when; outlives the others' failure to do so."""
    ctx.barrier()
    start = time.time()
    try:
        case(ctx)
        outcome = "finished"
    except PacelineError as error:
        outcome = f"{type(error).__name__}: {error}"
    Path(os.environ["BENCH_NOTES"], str(ctx.rank)).write_text(f"{start} {time.time()} {outcome}")


def run() -> Report:
    """Time until every rank has an error, and what it says."""
    report = Report(
        "disagreement",
        "Ranks that disagree",
        ("case", "seconds", "who was told", "what the first of them was told"),
    )
    cases = (
        other_shape,
        other_dtype,
        other_operation,
        other_order,
        missing_rank,
        waiting_elsewhere,
        busy_elsewhere,
        killed,
    )
    for case in cases:
        with tempfile.TemporaryDirectory() as notes:
            os.environ["BENCH_NOTES"] = notes
            try:
                spawn(observed, case, workers=RANKS, threads=1)
            except PacelineError as error:
                report.notes.append(f"{case.__name__}: spawn raised {type(error).__name__}")
            since = Path(notes, "killed")
            seconds: dict[int, float] = {}
            told: dict[int, str] = {}
            for rank in range(RANKS):
                note = Path(notes, str(rank))
                if not note.exists():
                    continue  # the rank that was killed
                start, end, outcome = note.read_text().split(" ", 2)
                if outcome != "finished":
                    seconds[rank] = float(end) - float(since.read_text() if since.exists() else start)
                    told[rank] = outcome.replace(f"{Path.cwd()}/", "")
        if case is busy_elsewhere:
            seconds.pop(ODD, None)  # the busy rank's own wait is not a collective
        worst = max(seconds.values())
        kinds = ", ".join(f"{rank}: {text.partition(':')[0]}" for rank, text in told.items())
        report.rows.append((case.__name__, f"{worst:.2f}", kinds, told[min(told)]))
        bound = 1.0 if case is killed else 5.0
        report.targets.append(
            Target(f"{case.__name__}, slowest rank to know", worst, bound, at_least=False, unit=" s")
        )
    return report


if __name__ == "__main__":
    main(run)
