"""Events that the machine takes: messages of members as they are, processes, hosts, people and the clock."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from paceline.control.messages import ControlMessage, Heartbeat, ViewPlan
from paceline.elastic.machine.actions import FailureKind
from paceline.elastic.machine.hash_votes import Dispute, Trail


@dataclass(frozen=True)
class SupervisorBegan:
    """The supervisor begins, or begins again with what its snapshot holds.

    `machine.snapshot(state)` is the event to begin again with. It must be on disk before the actions of a
    step are carried out, whenever it has changed: else a generation could be used twice. Only the first three
    fields are needed; without the others budgets and weights begin anew.

    starting   of `members`, those that were in no view
    view       the last view that was sent
    slots      slot -> (agent id, failures in a row, weight in the assignment, given up)
    committed  whether any step was ever committed
    restore    a restore was decided and not carried out; `restore_before` as in ViewPlan
    tainted_until  checkpoints after `restore_before` up to this step are not trusted; -1: none
    fatal_failure  member and reason of the failure that ends the job, once the others have saved
    dispute    as in JobState, with `dispute_count`, and the `votes` (step, kind, digest by member) and
               `trails` that have come in while it is open
    """

    generation: int = 0
    members: Mapping[int, tuple[int, int]] = field(default_factory=dict)  # member -> (slot, agent id)
    next_member: int = 1
    starting: tuple[int, ...] = ()
    view: ViewPlan | None = None
    slots: Mapping[int, tuple[int, int, float, bool]] = field(default_factory=dict)
    preemptions: int = 0
    committed: bool = False
    shard_seconds: float = 0.0
    agreed_step: int = 0
    restore: bool = False
    restore_before: int = -1
    tainted_until: int = -1
    stop_reason: str | None = None
    fatal_failure: tuple[int, str] | None = None
    lineage: Mapping[int, int] = field(default_factory=dict)
    dispute: Dispute | None = None
    dispute_count: int = 0
    votes: tuple[tuple[int, str, Mapping[int, str]], ...] = ()
    trails: Mapping[int, Trail] = field(default_factory=dict)


class FromMember(NamedTuple):
    """A message of a worker, as it came. A tuple: nearly every event is one, and nothing compares it."""

    member: int
    message: ControlMessage


@dataclass(frozen=True)
class ProcessProbed:
    """The host of a worker without heartbeats has found its process (liveness.py).

    stopped   the kernel does not let it run: SIGSTOP, a debugger, a freezer
    phase     the phase in its shared page, entered `seconds` ago; -1.0: not known
    ran       seconds since its heartbeat thread last had the interpreter; -1.0: not known
    """

    member: int
    stopped: bool
    phase: str = ""
    seconds: float = -1.0
    ran: float = -1.0


@dataclass(frozen=True)
class WorkerLost:
    """A worker's process ended, or its connection closed and stayed closed."""

    member: int
    kind: FailureKind
    reason: str


@dataclass(frozen=True)
class AgentJoined:
    """Another host offers this many workers."""

    agent_id: int
    workers: int
    name: str


@dataclass(frozen=True)
class AgentLost:
    """A host left, and all its workers with it."""

    agent_id: int
    reason: str


@dataclass(frozen=True)
class ScaleRequested:
    """A person wants this many workers in total."""

    workers: int


@dataclass(frozen=True)
class StopRequested:
    """A person wants the job to save and end."""

    reason: str


@dataclass(frozen=True)
class Tick:
    """Time has passed. `stalled`: seconds in which the supervisor itself did not run (a suspended host), for
    which no worker is blamed."""

    stalled: float = 0.0


MachineEvent: TypeAlias = (
    SupervisorBegan
    | FromMember
    | ProcessProbed
    | WorkerLost
    | AgentJoined
    | AgentLost
    | ScaleRequested
    | StopRequested
    | Tick
)


def is_routine(event: MachineEvent) -> bool:
    """Return whether the event is a heartbeat or a tick: most events are, and most of them change nothing."""
    return isinstance(event, Tick) or (isinstance(event, FromMember) and isinstance(event.message, Heartbeat))
