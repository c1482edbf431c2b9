"""State of the machine: workers, slots, the view, and the change that is under way.

Workers and slots are frozen values. `machine.step` works on a copy of the JobState and leaves the one it was
given as it was.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from math import inf
from typing import final

from paceline.control.field_types import Progress
from paceline.control.messages import Heartbeat, MemberReport, ViewPlan
from paceline.core.wording import ranks
from paceline.elastic.machine.actions import Action, EndJob
from paceline.elastic.machine.hash_votes import Dispute, HashKey, Trail
from paceline.elastic.machine.machine_events import ProcessProbed
from paceline.elastic.machine.settings import LOCAL_AGENT, MachineSettings


class JobPhase(enum.Enum):
    """Phase of the whole job, from its first workers to its end; `machine.TABLE` lists the transitions."""

    STARTING = "starting"  # waits for the first workers (or for replacements of all of them)
    RUNNING = "running"  # a view is installed, its members train
    PREPARING = "preparing"  # members were asked to stop and report; some have not
    INSTALLING = "installing"  # a view was sent; some members have not installed it
    STOPPING = "stopping"  # members were asked to save and end
    RETURNING = "returning"  # the supervisor began again; waits for its members to reconnect
    ENDED = "ended"

    # The table is asked by phase for every event; members are singletons, and Enum's hash is slow Python.
    __hash__ = object.__hash__


class WorkerStatus(enum.Enum):
    """Status of a worker, from its start request to the end of the run."""

    STARTING = "starting"  # requested, no hello yet
    READY = "ready"  # said hello, in no view
    MEMBER = "member"  # in the view
    LEAVING = "leaving"  # in the view, left out of the next one
    DONE = "done"  # at the end of the run


# A tuple: membership goes by identity, and hashing an enum's members is slow.
IN_VIEW = (WorkerStatus.MEMBER, WorkerStatus.LEAVING, WorkerStatus.DONE)
NOT_IN_VIEW = (WorkerStatus.STARTING, WorkerStatus.READY)


@final
@dataclass(frozen=True)
class Worker:
    """One incarnation of a worker process.

    since         time of its request, of its hello, or of its first view, whichever came last
    reconnected   False: expected back after the supervisor's restart, not here yet
    digest        of its weights, when it is DONE
    leave_reason  "preempted", "scaled" or "straggler"; empty: it stays
    reached       peers of other hosts that it dialed and that proved themselves
    dialing       of a ready worker: peers that it was asked to dial, since `dialed_at`
    productive_before  JobState.productive_seconds when it was first in a view
    failed_in     generation whose collective failed at it last
    """

    number: int
    slot: int
    agent_id: int
    status: WorkerStatus
    since: float
    reconnected: bool = True
    digest: str = ""
    stop_reason: str | None = None
    leave_reason: str = ""
    reached: frozenset[int] = frozenset()
    dialing: frozenset[int] = frozenset()
    dialed_at: float = 0.0
    productive_before: float = 0.0
    failed_in: int = 0


@final
@dataclass(frozen=True)
class Slot:
    """A stable place in the job, held by one worker after another; its number is the rank that people read.

    worker        its present incarnation, if there is one
    start_at      when the next incarnation is started, if there is none
    failures      in a row
    weight        of its speed in the assignment: halved each time the kernel killed its worker for memory, 1
                  again with the first failure after `forgive_seconds` of committed steps
    replacements  how often its worker was replaced for being slow
    given_up      the budget is spent
    wanted        False: removed when its worker has left
    """

    number: int
    agent_id: int = LOCAL_AGENT
    worker: int | None = None
    start_at: float | None = None
    failures: int = 0
    total_failures: int = 0
    weight: float = 1.0
    replacements: int = 0
    given_up: bool = False
    wanted: bool = True

    @property
    def usable(self) -> bool:
        """Whether the slot has a worker, or will get one."""
        return self.wanted and not self.given_up


@final
@dataclass
class JobState:
    """Everything the next decision depends on; and, while `machine.step` handles an event, its time and the
    actions that were decided so far.

    now, actions       of the event that is handled, or was handled last
    view               installed or being installed; in PREPARING the one before
    last_message_at    of each worker; `heartbeats` holds its latest heartbeat
    probes             time and result of the latest probe of a worker without heartbeats
    stopped_together   workers that are stopped with all others of their host, and therefore not judged
    pending            members that have not reported (PREPARING) or not installed (INSTALLING)
    asked_at           when the members were last asked for something
    abort              whether they were asked to abort, or to stop at a step boundary
    lost_slots         slots whose worker failed since `failed_at`, before the view was whole again
    max_progress       largest progress that any member has reported, at `progressed_at`
    step_seconds       typical time per step of the present members; `shard_seconds` per shard, also of
                       earlier members
    base_progress      smallest progress with which a member installed the view
    committed          whether any step was ever committed
    productive_seconds time in which steps were committed, up to the last commit at `productive_at`; forming
                       views, restoring and waiting do not count
    hangs              members that were expelled as hung since the last commit
    saves_alone        the job is stopping and its view does not form: one member saves for all
    failed_collectives in a row, with no member lost; `suspicions`: how often each member named each other
    pending_dials      link probes without an answer, sent at `dials_sent_at`; `dial_results`: the text about
                       packets lost on the way, empty where there is none
    raised_steps       steps in which a worker's code raised
    votes              state hashes of steps that have not been judged, by member
    agreed_step        last step after which all members held the same state
    lineage            whose state a member took over, where no independent member has confirmed it since:
                       the two are one vote
    dispute            hashes of a step after which members differed without a majority, until that step has
                       been computed again; `dispute_count` counts them in a row, `trails` is what members
                       put into the steps since
    tainted_until      checkpoints after `restore_before` up to this step may be wrong; -1: none
    next_tick_at       latest time of the next Tick
    gather_until       joiners wait until then for others
    fatal_failure      member and reason of the failure that ends the job, once the others have saved
    is_contiguous      shards are assigned by speed alone: no held shard was kept where it was
    too_few_at         since when the job has too few workers and waits for agents; None: it has enough
    """

    settings: MachineSettings
    now: float = field(default=0.0, compare=False)
    actions: list[Action] = field(default_factory=list, compare=False)
    phase: JobPhase = JobPhase.STARTING
    generation: int = 0
    view: ViewPlan | None = None
    workers: dict[int, Worker] = field(default_factory=dict)
    slots: dict[int, Slot] = field(default_factory=dict)
    agents: dict[int, str] = field(default_factory=dict)
    next_member: int = 1

    last_message_at: dict[int, float] = field(default_factory=dict)
    heartbeats: dict[int, Heartbeat] = field(default_factory=dict)
    probes: dict[int, tuple[float, ProcessProbed]] = field(default_factory=dict)
    stopped_together: frozenset[int] = frozenset()
    max_progress: Progress | None = None
    base_progress: Progress | None = None
    progressed_at: float = 0.0
    step_seconds: float = 0.0
    shard_seconds: float = 0.0
    committed: bool = False

    pending: frozenset[int] = frozenset()
    reports: dict[int, MemberReport] = field(default_factory=dict)
    asked_at: float = 0.0
    abort: bool = False
    reason: str = ""
    lost_slots: tuple[int, ...] = ()
    failed_at: float | None = None
    restore: bool = False
    restore_before: int = -1
    tainted_until: int = -1

    productive_seconds: float = 0.0
    productive_at: float = 0.0
    hangs: int = 0
    saves_alone: bool = False
    preemptions: int = 0
    failed_collectives: int = 0
    suspicions: dict[tuple[int, int], int] = field(default_factory=dict)
    pending_dials: frozenset[tuple[int, int]] = frozenset()
    dials_sent_at: float = -inf
    dial_results: dict[tuple[int, int], str] = field(default_factory=dict)
    raised_steps: frozenset[int] = frozenset()
    votes: dict[HashKey, Mapping[int, str]] = field(default_factory=dict)
    agreed_step: int = 0
    lineage: dict[int, int] = field(default_factory=dict)
    dispute: Dispute | None = None
    dispute_count: int = 0
    trails: dict[int, Trail] = field(default_factory=dict)

    started_at: float = 0.0
    assigned_at: float = 0.0
    gather_until: float = inf
    is_contiguous: bool = True
    stop_reason: str | None = None
    stop_requested_at: float = 0.0
    fatal_failure: tuple[int, str] | None = None
    too_few_at: float | None = None
    next_tick_at: float = inf
    ended: EndJob | None = None

    def copy(self) -> JobState:
        """Copy the state and its dictionaries; their values are replaced, never changed."""
        copy = object.__new__(JobState)
        values = copy.__dict__
        values.update(self.__dict__)
        for name in _dicts:
            values[name] = kept.copy() if (kept := values[name]) else {}
        return copy

    def tick_by(self, at: float) -> None:
        """Ensure a tick no later than `at`."""
        if at < self.next_tick_at:
            self.next_tick_at = at


_dicts = tuple(each.name for each in fields(JobState) if each.default_factory is dict)


def in_view(state: JobState) -> list[Worker]:
    """Return the workers that are in the view, dead ones left out."""
    return [worker for worker in state.workers.values() if worker.status in IN_VIEW]


def ready(state: JobState) -> list[Worker]:
    return [worker for worker in state.workers.values() if worker.status is WorkerStatus.READY]


def usable_slots(state: JobState) -> list[Slot]:
    return [slot for slot in state.slots.values() if slot.usable]


def rank_names(workers: Iterable[Worker], one: str = "", many: str = "") -> str:
    """Name the ranks of workers, with a verb for one and for many; see `wording.ranks`."""
    return ranks([worker.slot for worker in workers], one, many)
