"""Whatever is said to the machine, in whatever order: it never raises, and the invariants hold."""

from __future__ import annotations

from random import Random
from typing import get_args

from hypothesis import given, settings, strategies as st
from tests.elastic.machine.machine_driver import (
    Driven,
    beat_of,
    exception_of,
    failure_at,
    finish_of,
    hello_of,
    installed_by,
    leave_of,
    report_of,
    vote_of,
)

from paceline.control.field_types import Progress
from paceline.elastic.machine import machine
from paceline.elastic.machine.actions import FailureKind
from paceline.elastic.machine.machine_events import (
    AgentJoined,
    AgentLost,
    MachineEvent,
    ScaleRequested,
    StopRequested,
    Tick,
    WorkerLost,
)
from paceline.elastic.machine.state import JobPhase, WorkerStatus

PHASES = (
    "start",
    "data",
    "forward",
    "backward",
    "collective",
    "optimizer",
    "checkpoint",
    "evaluation",
    "wait",
)
KINDS = get_args(FailureKind)


def progress(rng: Random) -> Progress | None:
    return None if rng.random() < 0.2 else (rng.randrange(10), rng.randrange(2), rng.randrange(3))


def shards(rng: Random) -> tuple[int, ...]:
    return tuple(rng.randrange(-1, 9) for _ in range(rng.randrange(5)))


def anyone(rng: Random, job: Driven) -> int:
    return rng.choice([*job.state.workers, *job.state.workers, 999, 0])


def people(rng: Random, job: Driven, most: int) -> tuple[int, ...]:
    return tuple(anyone(rng, job) for _ in range(rng.randrange(most + 1)))


def generation(rng: Random, job: Driven) -> int:
    now = job.state.generation
    return rng.choice([now, now, now, now, max(0, now - 1), now + 1, 0])


def cooperative(rng: Random, job: Driven) -> MachineEvent:
    """What a job that makes headway would hear next."""
    state = job.state
    if state.phase is JobPhase.PREPARING and state.pending:
        return report_of(rng.choice(sorted(state.pending)), state.generation, progress(rng), shards(rng))
    if state.phase is JobPhase.INSTALLING and state.pending:
        return installed_by(rng.choice(sorted(state.pending)), state.generation)
    for worker in state.workers.values():
        if state.phase is JobPhase.RETURNING and not worker.reconnected:
            return hello_of(worker.number, worker.slot, worker.agent_id, state.generation, (1, 0, 0))
        if worker.status is WorkerStatus.STARTING:
            return hello_of(worker.number, worker.slot, worker.agent_id)
    return beat_of(anyone(rng, job), "forward", 0.01, (rng.randrange(10), 0, 0), (), 0.01, 0.02)


def any_event(rng: Random, job: Driven) -> MachineEvent:
    who = anyone(rng, job)
    match rng.randrange(24):
        case 0:
            seconds = rng.choice([0.1, 1.0, 50.0])
            times = (rng.choice([0.0, 0.01, 0.2, 2.0]), 0.02)
            return beat_of(who, rng.choice(PHASES), seconds, progress(rng), people(rng, job, 3), *times)
        case 1 | 2:
            return WorkerLost(who, rng.choice(KINDS), "gone")
        case 3:
            return failure_at(who, generation(rng, job), "cut", people(rng, job, 2), people(rng, job, 2))
        case 4:
            return report_of(who, generation(rng, job), progress(rng), shards(rng), rng.random() < 0.3)
        case 5:
            return exception_of(who, "ValueError", rng.choice(["code"] * 8 + ["user"]), rng.randrange(99), 0)
        case 6:
            return vote_of(who, rng.randrange(6), rng.choice(["a", "a", "a", "b"]), generation(rng, job))
        case 7:
            return leave_of(who, "SIGTERM")
        case 8:
            return finish_of(who, (9, 1, 0), rng.choice(["x", "x", "x", "y"]), None, generation(rng, job))
        case 9:
            agent_id = rng.randrange(3)
            return (
                AgentJoined(agent_id, 2, f"host{agent_id}")
                if rng.random() < 0.5
                else AgentLost(agent_id, "left")
            )
        case 10:
            return ScaleRequested(rng.randrange(8)) if rng.random() < 0.8 else StopRequested("enough")
        case 11:
            return hello_of(who, rng.randrange(5), 0, generation(rng, job))
        case 12 | 13:
            return Tick(rng.choice([0.0, 0.0, 0.0, 30.0]))
        case _:
            return cooperative(rng, job)


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 2**32), length=st.integers(1, 80))
def test_the_laws_hold_whatever_is_said(seed, length):
    rng = Random(seed)
    policy = rng.choice(["wait", "rebalance", "replace", "backup"])
    job = Driven(rng.randrange(1, 5), rng.randrange(1, 9), stragglers=policy)
    for _ in range(length):
        # An early tick, a late one, and everything between.
        job.tell(any_event(rng, job), after=rng.choice([0.0, 0.0, 0.01, 0.3, 2.5, 31.0]))
        if rng.random() < 0.03:
            began = machine.snapshot(job.state)
            before = job.state.generation
            job = Driven(job.state.settings.workers, job.state.settings.shards, began)
            assert job.state.generation >= before
