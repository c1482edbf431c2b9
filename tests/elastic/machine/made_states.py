"""States of a job made by hand, for the tests of single decisions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from paceline.control.field_types import Progress
from paceline.control.messages import Heartbeat, ViewPlan
from paceline.elastic.machine import invariants, machine
from paceline.elastic.machine.actions import Action
from paceline.elastic.machine.machine_events import MachineEvent, ProcessProbed
from paceline.elastic.machine.settings import MachineSettings
from paceline.elastic.machine.state import JobPhase, JobState, Slot, Worker, WorkerStatus

NOW = 1000.0


def made(
    agents: Sequence[int] = (0, 0, 0), phase: JobPhase = JobPhase.RUNNING, shards: int = 6, **settings: Any
) -> JobState:
    """Members 1, 2, ... of slots 0, 1, ... on these hosts, in a view of generation 3, heard just now."""
    job = JobState(MachineSettings(workers=len(agents), shards=shards, **settings))
    job.phase = phase
    job.generation = 3
    numbers = tuple(range(1, len(agents) + 1))
    for number, agent_id in zip(numbers, agents, strict=True):
        slot = number - 1
        job.workers[number] = Worker(number, slot, agent_id, WorkerStatus.MEMBER, NOW - 50.0)
        job.slots[slot] = Slot(slot, agent_id, worker=number)
        job.last_message_at[number] = NOW
        if agent_id:
            job.agents[agent_id] = f"host{agent_id}"
    job.next_member = len(agents) + 1
    each = shards // len(agents)
    blocks = tuple(tuple(range(each * rank, each * (rank + 1))) for rank in range(len(agents)))
    job.view = ViewPlan(generation=3, members=numbers, slots=tuple(range(len(agents))), shards=blocks)
    job.progressed_at = job.asked_at = job.assigned_at = job.started_at = NOW
    job.productive_at = job.now = NOW
    return job


def at(job: JobState, now: float) -> JobState:
    """The same job at this time."""
    job.now = now
    return job


def fresh_actions(job: JobState, now: float = NOW) -> list[Action]:
    """Begin another step at this time; its actions come into the list."""
    job.now, job.actions = now, []
    return job.actions


def beat(
    job: JobState,
    member: int,
    phase: str = "forward",
    seconds: float = 0.0,
    waits_for: tuple[int, ...] = (),
    shard_seconds: float = 0.5,
    step_seconds: float = 1.0,
    longest: float = 0.0,
    progress: Progress | None = None,
    at: float = NOW,
) -> None:
    """The last heartbeat of a member."""
    job.last_message_at[member] = at
    job.heartbeats[member] = Heartbeat(
        phase=phase,
        seconds=seconds,
        progress=progress,
        waits_for=waits_for,
        shard_seconds=shard_seconds,
        step_seconds=step_seconds,
        longest=longest,
    )


def change(job: JobState, member: int, **changed: Any) -> Worker:
    """A worker with other values."""
    job.workers[member] = replace(job.workers[member], **changed)
    return job.workers[member]


LIMITS = {"hang_least": 4.0, "hang_steps": 16.0, "slow_phase_seconds": 64.0, "silence_least": 2.0}


def job_with_limits(*agents: int, **more: Any) -> JobState:
    return made(agents or (0, 0, 0), **{**LIMITS, **more})


def held(job: JobState, member: int, silent: float = 1.5) -> None:
    """Its process runs, and the interpreter has been held since its last message, `silent` seconds ago."""
    job.last_message_at[member] = NOW - silent
    job.probes[member] = (NOW - 0.25, ProcessProbed(member, stopped=False))


def after(job: JobState, event: MachineEvent, now: float = NOW) -> tuple[JobState, list[Action]]:
    """The state and the actions that follow; the invariants hold."""
    state, actions, reason = machine.step(job, event, now)
    broken = invariants.validate(state) + invariants.validate_step(job, state, actions, reason)
    assert broken == [], f"{event}: {broken}"
    return state, list(actions)
