"""The words of the machine that decides: what it is told, what it answers, and what it knows.

    step(state, event, now) -> (state, actions, reason)          machine.py

Events come from members, processes, people and the clock; actions are carried out by a shell (supervisor.py)
or by a simulation. Everything is a frozen value. Must not know sockets, processes, files or clocks.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, TypeAlias

from paceline.core.control.messages import Progress
from paceline.elastic.trails import Dispute, Trail

HOME = 0
"""The place where the supervisor itself starts workers; agents of other machines are 1, 2, ..."""


class Phase(enum.Enum):
    """Where the job is."""

    STARTING = "starting"  # waits for the first workers (or for replacements of all of them)
    RUNNING = "running"  # a view is installed, its members train
    PREPARING = "preparing"  # members were asked to stop and report; some have not
    INSTALLING = "installing"  # a view was sent; some members have not said that they are in it
    STOPPING = "stopping"  # members were asked to save and end
    RETURNING = "returning"  # the supervisor began again; waits for its members to come back
    ENDED = "ended"


class Standing(enum.Enum):
    """Where a worker is."""

    STARTING = "starting"  # asked for, has not said hello
    READY = "ready"  # said hello, in no view
    MEMBER = "member"  # in the view
    LEAVING = "leaving"  # in the view, and to be left out of the next
    DONE = "done"  # came to the end of the run


FailureKind = Literal[
    "crash",
    "exit",
    "raised",
    "memory",
    "silent",
    "hung",
    "corrupt",
    "dissent",
    "preempted",
    "straggler",
    "unattended",
    "restart",
    "unreachable",
]
"""crash: killed by a signal; silent: no heartbeats; hung: beats but does not go on; memory: the kernel killed
it for memory; preempted: it was asked to go (SIGTERM) or its machine left: another budget; unattended: it
left because no supervisor was there: no budget at all; restart: it starts over, because another member was
lost with state that no other has, and there is no checkpoint to go back to: no budget either; unreachable: it
and a peer could not connect, or the link between them does not carry data."""


@dataclass(frozen=True)
class Settings:
    """What the machine decides by. Seconds everywhere."""

    workers: int
    shards: int
    min_workers: int = 1
    most_workers: int = 0  # that somebody may ask for; 0: any number
    max_worker_failures: int = 3  # per slot; more, and the slot is given up
    max_preemptions: int = 100  # of all slots together
    backoff: float = 0.5  # before the second start in a row; the first replacement starts at once
    backoff_most: float = 30.0
    jitter: float = 0.25  # share of a back-off that is random
    forgive_seconds: float = 60.0  # of committed steps, after which failures in a row count from nothing
    seed: int = 0
    heartbeat: float = 0.25
    silence_least: float = 2.0  # a member that says nothing for longer may be gone ...
    silence_steps: float = 5.0  # ... and for longer than so many steps is
    hang_least: float = 5.0  # a member that does not go on for longer may hang ...
    hang_steps: float = 20.0  # ... and for longer than so many steps does
    slow_phase_seconds: float = 600.0  # what the first step, the first evaluation and the first save may take
    start_seconds: float = 300.0  # from asking for a worker to its hello
    stop_seconds: float = 600.0  # from asking to stop to the end
    stragglers: Literal["wait", "rebalance", "replace", "backup"] = "rebalance"
    straggler_factor: float = 1.5  # of the median time per shard
    replace_factor: float = 3.0
    rebalance_seconds: float = 2.0  # between two changes of the deal
    agent_seconds: float = 10.0  # that an agent's connection may be away
    install_seconds: float = 60.0  # what handing over the state in a new view may take
    dial_seconds: float = 10.0  # after which workers are asked again whether they reach each other
    check_seconds: float = 9.0  # that members may take to say whether they still reach each other
    cut_short_seconds: float = 2.0  # that a view may take to form while the job stops or a member leaves
    gather_seconds: float = 0.25  # a joiner waits so long for others that were started with it
    saves_on_failure: bool = True  # whether members can save what they have when the job fails for good


@dataclass(frozen=True)
class ViewPlan:
    """A view as the machine decides it: parallel tuples by rank; see messages.View.

    `restore_before` >= 0: checkpoints of later steps hold wrong weights. Those who restore remove them, or a
    later restart could take one. `ends`: why this is the last view, whose members take no step, save and end.
    """

    generation: int
    members: tuple[int, ...]
    slots: tuple[int, ...]
    shards: tuple[tuple[int, ...], ...]
    source: int = -1
    behind: tuple[int, ...] = ()
    restore: bool = False
    restore_before: int = -1
    disputed: int = -1
    ends: str = ""

    @cached_property
    def most_shards(self) -> int:
        """Of one member; 0 where the deal is not known."""
        return max(map(len, self.shards), default=0)


# events


@dataclass(frozen=True)
class Began:
    """The supervisor begins (or begins again, with what it remembers).

    `machine.remembered(state)` is the event to begin again with. It must be kept before the actions of a step
    are carried out, whenever it has changed, else a generation could be used twice. Only the first three
    fields are needed; without the others budgets and weights begin anew.

    starting   of `members`, those that were in no view
    view       the last view that was sent
    slots      slot -> (place, failures in a row, weight in the deal, given up)
    committed  whether any step was ever committed
    shard_seconds  as in State
    restore    a restore was decided and not carried out; `restore_before` as in ViewPlan
    tainted    checkpoints after `restore_before` up to this step are not to be trusted; -1: none
    failing    member and reason of the failure that ends the job, once those who are left have saved
    lineage    as in State
    dispute    as in State, with `disputes`, and the `votes` (step, kind, digest by member) and `trails` that
               have come in while it is open
    """

    generation: int = 0
    members: Mapping[int, tuple[int, int]] = field(default_factory=dict)  # member -> (slot, place)
    next_member: int = 1
    starting: tuple[int, ...] = ()
    view: ViewPlan | None = None
    slots: Mapping[int, tuple[int, int, float, bool]] = field(default_factory=dict)
    preemptions: int = 0
    committed: bool = False
    shard_seconds: float = 0.0
    agreed: int = 0
    restore: bool = False
    restore_before: int = -1
    tainted: int = -1
    stop: str | None = None
    failing: tuple[int, str] | None = None
    lineage: Mapping[int, int] = field(default_factory=dict)
    dispute: Dispute | None = None
    disputes: int = 0
    votes: tuple[tuple[int, str, Mapping[int, str]], ...] = ()
    trails: Mapping[int, Trail] = field(default_factory=dict)


@dataclass(frozen=True)
class Joined:
    """A worker said hello. With a generation it is a member that comes back after a supervisor's restart or
    a cut connection."""

    member: int
    slot: int
    place: int = HOME
    generation: int = 0
    progress: Progress | None = None


@dataclass(frozen=True)
class HasDialed:
    """A worker dialed a peer's endpoint, and the peer proved itself there; else `trouble` says what failed,
    from where to which address; `lossy`: packets are lost on the way. One that is refused or closed may have
    met a peer that has just died."""

    member: int
    peer: int
    trouble: str = ""
    lossy: bool = False


@dataclass(frozen=True)
class Beaten:
    """A member's heartbeat."""

    member: int
    phase: str
    seconds: float
    progress: Progress | None = None
    waits_for: tuple[int, ...] = ()
    shard_seconds: float = 0.0
    step_seconds: float = 0.0
    longest: float = 0.0


@dataclass(frozen=True)
class Probed:
    """The machine of a worker that does not beat looked at its process, which is there (liveness.py).

    stopped   the kernel does not let it run: SIGSTOP, a debugger, a freezer
    phase     where it is by its page, for how many seconds; -1.0: that is not known
    ran       seconds since the thread that beats last had the interpreter; -1.0: that is not known
    """

    member: int
    stopped: bool
    phase: str = ""
    seconds: float = -1.0
    ran: float = -1.0


@dataclass(frozen=True)
class Reported:
    """A member stopped for `generation`; see messages.Report."""

    member: int
    generation: int
    progress: Progress | None
    held: tuple[int, ...] = ()
    alone: bool = False
    digest: str = ""
    agreed: int = -1
    owed: tuple[tuple[int, tuple[int, ...]], ...] = ()
    trail: Trail = ()
    spoiled: bool = False
    doubted: bool = False


@dataclass(frozen=True)
class HasInstalled:
    """A member is in the view of `generation` and has its state. `progress`, where it is told, matters after
    a restore: nothing later is known to be good."""

    member: int
    generation: int
    progress: Progress | None = None


@dataclass(frozen=True)
class HasBroken:
    """A collective failed at a member; `accused` sent it data that does not match its checksum;
    `unreachable` are those it could not reach, where it knows them."""

    member: int
    generation: int
    reason: str
    accused: tuple[int, ...] = ()
    unreachable: tuple[int, ...] = ()


@dataclass(frozen=True)
class Lost:
    """A worker is gone: its process ended or its connection closed and stayed closed."""

    member: int
    kind: FailureKind
    reason: str


@dataclass(frozen=True)
class HasRaised:
    """A worker's code raised. `fault` "user": trying again cannot help. `holds`: it has the state of a step
    boundary and waits, to help save it or to be dismissed; else it ends. `progress`: how far it is."""

    member: int
    summary: str
    fault: str
    step: int
    shard: int
    holds: bool = False
    progress: Progress | None = None


@dataclass(frozen=True)
class Hashed:
    """A member's hash of its state after a step: "kind:digest", or of an audited step the digest alone.
    `generation` 0: not known. `agreed` >= 0: members were seen to differ after the step, and to hold the same
    after this one. `trail`: what it put into the latest steps."""

    member: int
    step: int
    digest: str
    generation: int = 0
    agreed: int = -1
    trail: Trail = ()

    @property
    def kind(self) -> str:
        """Hashes of one kind can be compared with each other."""
        return self.digest.rpartition(":")[0]


@dataclass(frozen=True)
class WantsToLeave:
    """A worker was asked to go (SIGTERM) and wants out at the next step boundary."""

    member: int
    reason: str


@dataclass(frozen=True)
class IsDone:
    """A member came to the end of the run, with this hash of its weights. It waits until it is dismissed, and
    still answers a TellPrepare: others may need its state. `generation` 0: not known."""

    member: int
    progress: Progress
    digest: str
    stopped: str | None = None
    generation: int = 0


@dataclass(frozen=True)
class AgentCame:
    """Another machine offers so many workers."""

    place: int
    workers: int
    name: str


@dataclass(frozen=True)
class AgentLost:
    """A machine left, and all its workers with it."""

    place: int
    reason: str


@dataclass(frozen=True)
class ScaleAsked:
    """Somebody wants so many workers in all."""

    workers: int


@dataclass(frozen=True)
class StopAsked:
    """Somebody wants the job to save and end."""

    reason: str


@dataclass(frozen=True)
class Ticked:
    """Time has passed. `stalled`: so many seconds in which the supervisor itself did not run (a suspended
    machine): nobody is blamed for them."""

    stalled: float = 0.0


Event: TypeAlias = (
    Began
    | Joined
    | HasDialed
    | Beaten
    | Probed
    | Reported
    | HasInstalled
    | HasBroken
    | Lost
    | HasRaised
    | Hashed
    | WantsToLeave
    | IsDone
    | AgentCame
    | AgentLost
    | ScaleAsked
    | StopAsked
    | Ticked
)


# actions


@dataclass(frozen=True)
class StartWorker:
    """Start a process for `slot` at `place`; it says hello as `member`."""

    member: int
    slot: int
    place: int = HOME


@dataclass(frozen=True)
class KillWorker:
    """End the process now, whatever it does."""

    member: int
    reason: str


@dataclass(frozen=True)
class ProbeWorkers:
    """Look at the processes of members that do not beat; the answers are Probed. Where a machine cannot be
    reached, and where the process is gone, there is none. Nothing is done to the processes."""

    members: tuple[int, ...]


@dataclass(frozen=True)
class TellDial:
    """Ask a worker to dial each of these, and each of them to dial it; see HasDialed."""

    member: int
    peers: tuple[int, ...]


@dataclass(frozen=True)
class TellPrepare:
    """Ask members to stop and report; it may come again to a member that had lost its connection."""

    members: tuple[int, ...]
    generation: int
    abort: bool
    reason: str


@dataclass(frozen=True)
class TellView:
    """Tell all members of the plan."""

    plan: ViewPlan
    reason: str


@dataclass(frozen=True)
class TellStop:
    """Ask members to finish the step, save and end; it may come again after a repair."""

    members: tuple[int, ...]
    reason: str


@dataclass(frozen=True)
class Dismiss:
    """Let a worker end in peace. It may be one the machine does not know (any more)."""

    member: int
    reason: str


@dataclass(frozen=True)
class SendAway:
    """A machine that joined cannot take part: its agent is told why, and ends."""

    place: int
    reason: str


@dataclass(frozen=True)
class NoteFailure:
    """For the journal: worker_failed. `sure`: it failed in this phase, wherever it has come since. `final`:
    the job ends for it, and whoever started the job is handed the error itself."""

    member: int
    slot: int
    phase: str
    kind: FailureKind
    reason: str
    sure: bool = False
    final: bool = False


@dataclass(frozen=True)
class NoteRepair:
    """For the journal: repaired. `seconds` from the first failure to the installed view."""

    generation: int
    seconds: float
    lost: tuple[int, ...]  # slots


@dataclass(frozen=True)
class NoteVerdict:
    """For the terminal and the journal. The shell adds host, pid and the Python line of `member`, before it
    carries out the KillWorker that follows. `sure`: as in NoteFailure."""

    member: int
    slot: int
    phase: str
    what: str  # one sentence: what happened
    waiting: str  # what the others wait for
    done: str  # what was done about it
    sure: bool = False


@dataclass(frozen=True)
class EndJob:
    """Everything is over. `failed` is the member whose error is to be shown first, if there is one."""

    ok: bool
    reason: str
    failed: int | None = None
    stopped: str | None = None


Action: TypeAlias = (
    StartWorker
    | KillWorker
    | ProbeWorkers
    | TellDial
    | TellPrepare
    | TellView
    | TellStop
    | Dismiss
    | SendAway
    | NoteFailure
    | NoteRepair
    | NoteVerdict
    | EndJob
)
