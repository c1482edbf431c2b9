"""What the machine knows: workers, slots, the view, and what is under way.

Workers and slots are frozen values. A State is handed from step to step: `machine.step` works on a copy and
leaves the one it was given as it was. Must not decide anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from typing import final

from paceline.core.control.messages import Progress
from paceline.elastic.model import (
    HOME,
    Beaten,
    EndJob,
    Phase,
    Probed,
    Reported,
    Settings,
    Standing,
    ViewPlan,
)
from paceline.elastic.trails import Ballot, Dispute, Trail

# A tuple: membership goes by identity, and hashing an enum's members is slow.
IN_VIEW = (Standing.MEMBER, Standing.LEAVING, Standing.DONE)


@final
@dataclass(frozen=True)
class Worker:
    """One incarnation of a worker process.

    since    when it was asked for, said hello, or was first in a view, whichever came last
    back     False: it is expected back after the supervisor's restart and has not come
    digest   of its weights, when it is DONE
    leaves   why it is to leave: "preempted", "scaled" or "straggler"; empty: it is not
    reached  peers of other places that it dialed, and that proved themselves
    dialed   of a ready worker: peers that it was asked to meet, since `dialed_at`
    worked   what State.worked was when it was first in a view
    """

    number: int
    slot: int
    place: int
    standing: Standing
    since: float
    back: bool = True
    digest: str = ""
    stopped: str | None = None
    leaves: str = ""
    reached: frozenset[int] = frozenset()
    dialed: frozenset[int] = frozenset()
    dialed_at: float = 0.0
    worked: float = 0.0


@final
@dataclass(frozen=True)
class Slot:
    """A worker's seat.

    worker     the incarnation that has it now; None: none has
    starts_at  when the next one is to be started, if none has it
    failures   in a row
    weight     of its speed in the deal: halved each time the kernel killed its worker for memory, and whole
               again with the first failure after `forgive_seconds` of good work
    replaced   how often its worker was replaced for being slow
    given_up   the budget is spent
    wanted     False: to be gone when its worker has left
    """

    number: int
    place: int = HOME
    worker: int | None = None
    starts_at: float | None = None
    failures: int = 0
    total_failures: int = 0
    weight: float = 1.0
    replaced: int = 0
    given_up: bool = False
    wanted: bool = True

    @property
    def usable(self) -> bool:
        """Whether a worker has it, or will have it again."""
        return self.wanted and not self.given_up


@final
@dataclass
class State:
    """Everything the next decision depends on.

    view        the one that is installed or being installed; in PREPARING the one before
    heard       when each worker last said anything; `beats` its last heartbeat
    probed      what was last found of the process of a worker that did not beat, and when
    held        workers that are stopped together, and so not judged
    waiting     who has not reported (PREPARING) or not installed (INSTALLING)
    asked_at    when the members were last asked for something
    abort       whether they were asked to abort, or to stop at a boundary
    lost        slots whose worker failed since `failed_at`, before the view was whole again
    furthest    the furthest progress anybody told, at `moved_at`; `pace` is a typical time per step of those
                who are in the view, `shard_seconds` per shard, also of those who were before them
    base        the least progress with which a member installed the view
    committed   whether any step was ever committed
    worked      seconds of this job in which steps were committed, up to the last commit at `worked_at`;
                forming views, restoring and waiting do not count
    hangs       members that were expelled as hung since the last commit
    narrow      the job is stopping, and its view does not form: one member goes on alone, to save
    breaks      how often in a row collectives broke with nobody gone; `suspicion`: how often
                each member named each other one then
    doubts      who was asked whether it still reaches whom, at `doubted_at`, and has not said; `walls`: what
                each found: the text about packets that were lost on the way, empty where there is none
    raised      steps in which somebody's code raised
    votes       hashes of steps that have not been judged, by member
    agreed      the last step after which all were seen to hold the same state
    lineage     whose state a member took over, where no independent member has confirmed it since: the two
                are one vote
    dispute     the hashes of a step after which members differed without a majority, until that step has been
                computed again; `disputes` counts them in a row, `trails` is what members put into the
                steps since, by member
    tainted     checkpoints after restore_before and up to this step may be wrong; -1: none
    due         when a Ticked is wanted
    gather_at   until when joiners wait for others
    failing     member and reason of the failure that ends the job, once those who are left have saved
    tidy        the deal is not the one that speeds alone would give: what was held stayed where it was
    """

    settings: Settings
    phase: Phase = Phase.STARTING
    generation: int = 0
    view: ViewPlan | None = None
    workers: dict[int, Worker] = field(default_factory=dict)
    slots: dict[int, Slot] = field(default_factory=dict)
    agents: dict[int, str] = field(default_factory=dict)
    next_member: int = 1

    heard: dict[int, float] = field(default_factory=dict)
    beats: dict[int, Beaten] = field(default_factory=dict)
    probed: dict[int, tuple[float, Probed]] = field(default_factory=dict)
    held: frozenset[int] = frozenset()
    furthest: Progress | None = None
    base: Progress | None = None
    moved_at: float = 0.0
    pace: float = 0.0
    shard_seconds: float = 0.0
    committed: bool = False

    waiting: frozenset[int] = frozenset()
    reports: dict[int, Reported] = field(default_factory=dict)
    asked_at: float = 0.0
    abort: bool = False
    reason: str = ""
    lost: tuple[int, ...] = ()
    failed_at: float | None = None
    restore: bool = False
    restore_before: int = -1
    tainted: int = -1

    worked: float = 0.0
    worked_at: float = 0.0
    hangs: int = 0
    narrow: bool = False
    preemptions: int = 0
    breaks: int = 0
    suspicion: dict[tuple[int, int], int] = field(default_factory=dict)
    doubts: frozenset[tuple[int, int]] = frozenset()
    doubted_at: float = -inf
    walls: dict[tuple[int, int], str] = field(default_factory=dict)
    raised: frozenset[int] = frozenset()
    votes: dict[Ballot, Mapping[int, str]] = field(default_factory=dict)
    agreed: int = 0
    lineage: dict[int, int] = field(default_factory=dict)
    dispute: Dispute | None = None
    disputes: int = 0
    trails: dict[int, Trail] = field(default_factory=dict)

    started_at: float = 0.0
    dealt_at: float = 0.0
    gather_at: float = inf
    tidy: bool = True
    stop: str | None = None
    stop_at: float = 0.0
    failing: tuple[int, str] | None = None
    due: float = inf
    ended: EndJob | None = None


_dicts = (
    "workers",
    "slots",
    "agents",
    "heard",
    "beats",
    "probed",
    "reports",
    "suspicion",
    "walls",
    "votes",
    "lineage",
    "trails",
)


def initial(settings: Settings) -> State:
    """Nothing has happened; the first event is Began."""
    return State(settings=settings)


def copied(state: State) -> State:
    """A copy that may be changed. The values in its dictionaries are replaced, never changed."""
    copy = object.__new__(State)
    fields = copy.__dict__
    fields.update(state.__dict__)
    for name in _dicts:
        fields[name] = fields[name].copy()
    return copy


def in_view(state: State) -> list[Worker]:
    """The workers that are in the view, dead ones left out."""
    return [worker for worker in state.workers.values() if worker.standing in IN_VIEW]


def nobody_in_view(state: State) -> bool:
    return not any(worker.standing in IN_VIEW for worker in state.workers.values())


def ready(state: State) -> list[Worker]:
    return [worker for worker in state.workers.values() if worker.standing is Standing.READY]


def usable_slots(state: State) -> list[Slot]:
    return [slot for slot in state.slots.values() if slot.usable]


def be_due(state: State, at: float) -> None:
    """Something happens at this time at the latest."""
    if at < state.due:
        state.due = at


def ranks(slots: list[int]) -> str:
    """ "rank 3", "ranks 1, 2 and 5", "ranks 0, 1, 2 and 61 others"."""
    names = [str(slot) for slot in sorted(slots)]
    if len(names) > 6:
        names = [*names[:3], f"{len(names) - 3} others"]
    if len(names) < 2:
        return f"rank {names[0]}" if names else "nobody"
    return f"ranks {', '.join(names[:-1])} and {names[-1]}"
