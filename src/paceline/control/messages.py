"""Messages of the control channel, as frozen dataclasses that travel as plain data.

    member      ->  supervisor    MemberHello, Heartbeat, DialResult, MemberReport, ViewInstalled,
                                  CollectiveFailed, JournalLines, StepReceipt, InjectionRequest,
                                  WorkerException, LeaveRequest, ShardComputed, MemberFinished
    agent       ->  supervisor    AgentHello, WorkerFileChunk, WorkerExited, StackReply     (of another host)
    tool        ->  supervisor    ToolRequest                               (paceline scale, stop, status)
    supervisor  ->  member        MemberAccepted, Ack, DialRequest, Prepare, View, Stop, Dismissed,
                                  ShardComputed
    supervisor  ->  agent         AgentAccepted, PayloadChunk, AgentStart, StackRequest,
                                  AgentNotice, AgentEnd
    supervisor  ->  tool          ToolReply

The first message of a connection names protocol and version, and is understood by other versions (see
message_codec.py): therefore first messages, and the refusals that answer them, keep their `kind` for ever.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, ClassVar, dataclass_transform

from paceline.control.field_types import (
    Count,
    ExitStatus,
    MaybeCount,
    MaybeSmall,
    Name,
    Port,
    Progress,
    Reason,
    Seconds,
    Signed,
    Small,
    StepKey,
    Trace,
    Whole,
    WorkerCount,
)
from paceline.core.version import PROTOCOL, VERSION

REGISTRY: dict[str, type[ControlMessage]] = {}


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
@dataclass(frozen=True, kw_only=True)
class ControlMessage:
    """The common part. A subclass becomes a frozen dataclass, and is registered by its `kind`: its name, or a
    wire name that is the same in all versions."""

    kind: ClassVar[str] = ""

    def __init_subclass__(cls) -> None:
        cls.kind = cls.__dict__.get("kind", cls.__name__)
        if cls.kind:
            REGISTRY[cls.kind] = cls
        dataclass(frozen=True, kw_only=True)(cls)


# from a member


class MemberHello(ControlMessage):
    """A worker is ready to be a member; with a generation it is one, and has lost its connection.

    member      the number that the supervisor gave it
    endpoint    where it listens for the members of a view (host may be empty)
    host        equal for processes that can share memory; hostname is for people
    generation  of the view it is in; 0: none
    """

    kind: ClassVar[str] = "Hello"
    member: Small
    slot: Small
    pid: Small
    host: Name
    hostname: Name
    endpoint: tuple[Name, Port]
    fingerprint: dict[Name, Name] = field(default_factory=dict)
    model: Name = ""
    generation: Count = 0
    progress: Progress | None = None
    protocol: Small = PROTOCOL
    version: Name = VERSION


class Heartbeat(ControlMessage):
    """A sign of life: what the training thread does, for how long already, and for which members it waits.

    phase          start, data, forward, backward, collective, optimizer, checkpoint, evaluation, wait
    waits_for      members that this one waits for in a collective
    shard_seconds  running mean of this member's time per shard; step_seconds of its time per step
    longest        longest previous duration of this phase, for phases that do not occur in every step
                   (checkpoint, evaluation). 0 if unknown: first occurrence, or waiting for storage.
    """

    phase: Name
    seconds: Seconds
    progress: Progress | None = None
    waits_for: tuple[Small, ...] = ()
    shard_seconds: Seconds = 0.0
    step_seconds: Seconds = 0.0
    longest: Seconds = 0.0
    rss: Count = 0


class DialResult(ControlMessage):
    """This worker dialed the endpoint of `peer`. `trouble`: both ends and the address, empty where the peer
    proved itself; `lossy`: packets do not arrive (a refused connection may have met a peer that has died)."""

    peer: Small
    trouble: Name = ""
    lossy: bool = False


class MemberReport(ControlMessage):
    """A member has stopped for `generation`.

    progress           None: it has no state yet
    held_shards        shards of the open step whose gradient it holds
    has_private_state  whether shards have state that only the member has which computes them
    private_shards     where this member has it: (committed steps, shards) for each moment it can be given for
    digest             of parameters and optimizers: equal for members of equal progress
    agreed             last step after which all members of a view held the same state
    trail              short hashes of what this member put into its latest steps
    memory_changed     its weights have changed in its memory since its last update
    peers_differed     members of its view, perhaps gone, had other weights after that update
    """

    generation: Count
    progress: Progress | None
    held_shards: tuple[Small, ...] = ()
    has_private_state: bool = False
    digest: Name = ""
    agreed: MaybeCount = -1
    private_shards: tuple[tuple[Count, tuple[Small, ...]], ...] = ()
    trail: tuple[tuple[Count, Name], ...] = ()
    memory_changed: bool = False
    peers_differed: bool = False


class ViewInstalled(ControlMessage):
    """A member is in the view of `generation`, has its state, and proceeds. After a restore `progress` is the
    last step that is known to be good."""

    generation: Count
    progress: Progress | None = None


class CollectiveFailed(ControlMessage):
    """A collective of `generation` failed at this member. `accused`: members whose data did not match its
    checksum; `unreachable`: members that could not be reached, where it is known which."""

    generation: Count
    reason: Reason
    accused: tuple[Small, ...] = ()
    unreachable: tuple[Small, ...] = ()


class JournalLines(ControlMessage):
    """Events for the journal, each as its JSON line, from the first member of the view."""

    kind: ClassVar[str] = "Told"  # the name in spool files, which later versions read
    generation: Count
    lines: tuple[str, ...]


class StepReceipt(ControlMessage):
    """This member committed the steps first..last in `generation`, and computed `shards` of each of them.

    hashes         state hashes by step, of audited steps: "kind:digest", or the digest alone
    shard_hashes   hashes of this member's gradients in audited steps: [step, shard, hash]
    agreed         >= 0: the hashes are of a step after which the members differed; after this one they were
                   the same
    trail          as in MemberReport
    """

    kind: ClassVar[str] = "Receipt"  # the name in spool files, which later versions read
    generation: Count
    first: Count
    last: Count
    shards: tuple[Small, ...]
    hashes: dict[StepKey, Name] = field(default_factory=dict)
    shard_hashes: tuple[tuple[Count, Small, Name], ...] = ()
    agreed: MaybeCount = -1
    trail: tuple[tuple[Count, Name], ...] = ()


class InjectionRequest(ControlMessage):
    """A fault on demand acts here as soon as this message is acknowledged: fault `index` of the chaos, which
    acted `before` times in this worker. `line` is the event for the journal."""

    index: Small
    before: Small
    line: str


class WorkerException(ControlMessage):
    """The worker's code raised. `fault` is a PacelineError's, else "code"; "user": trying again cannot help.
    `holds`: the worker has the state of a step boundary (`progress`) and waits to save it; else it ends."""

    summary: Reason
    traceback: Trace
    phase: Name
    fault: Name = "code"
    step: Count = 0
    shard: MaybeSmall = -1
    holds: bool = False
    progress: Progress | None = None


class LeaveRequest(ControlMessage):
    """The worker was asked to go (SIGTERM): release it at the next step boundary."""

    reason: Reason


class ShardComputed(ControlMessage):
    """Backup policy: a member of the view has computed this shard; the supervisor tells the others."""

    generation: Count
    step: Count
    shard: Small


class MemberFinished(ControlMessage):
    """The run is over at this member, with this hash of its weights; `stopped`: why, where it was asked to
    stop. It waits to be dismissed, and still answers a Prepare: others may need its state."""

    generation: Count
    progress: Progress
    hash: Name
    stopped: Reason | None = None


# from an agent and from tools


class AgentHello(ControlMessage):
    """A host offers to run this many workers. `agent` is the number it was given before, if it was: it has
    the payload, and has lost its connection."""

    kind: ClassVar[str] = "Offer"
    workers: WorkerCount
    host: Name
    hostname: Name
    pid: Small
    agent: Small = 0
    protocol: Small = PROTOCOL
    version: Name = VERSION


class WorkerFileChunk(ControlMessage):
    """A part of a file of `size` bytes that a worker of the agent left, sent before its WorkerExited: the
    result (`part` 0), or report (1) and exception (2) of its failure."""

    member: Small
    part: Small
    size: Count
    offset: Count
    data: bytes


class WorkerExited(ControlMessage):
    """A worker of the agent ended; `status` is an exit code, or a signal's number negated. `memory`: the
    kernel killed it because memory ran out."""

    member: Small
    status: ExitStatus
    reason: Reason
    memory: bool = False


class StackReply(ControlMessage):
    """Answer to StackRequest: the kernel's state of the process, and its Python frames, innermost first. To a
    probe: whether the process is `stopped`; where it is gone there is no answer."""

    member: Small
    state: Reason
    frames: tuple[Reason, ...]
    stopped: bool | None = None


class ToolRequest(ControlMessage):
    """A tool's request: "scale" with a number, "stop" with a reason, "status"."""

    kind: ClassVar[str] = "Ask"
    what: Name
    number: Signed = 0
    text: Reason = ""
    protocol: Small = PROTOCOL
    version: Name = VERSION


# from the supervisor


class MemberAccepted(ControlMessage):
    """The worker is known. `patience`: how long it trains without a supervisor before it saves and leaves.
    `injected`: faults on demand that its rank has met, by their index in the chaos, each as often."""

    heartbeat: Seconds
    patience: Seconds
    injected: tuple[Whole, ...] = ()


class Ack(ControlMessage):
    """The member's messages up to this number are in the journal; later ones are sent again on reconnect."""

    number: Whole


class DialRequest(ControlMessage):
    """Dial these peers, [member, slot, host, port] of each, and answer those that dial: a DialResult each."""

    peers: tuple[tuple[Small, Small, Name, Port], ...]


class Prepare(ControlMessage):
    """Stop and report for `generation`: at once (abort the collective), or after the next common step."""

    generation: Whole
    abort: bool
    reason: str


class ViewPlan(ControlMessage):
    """A view as the supervisor's machine decides it: parallel tuples by view index. Never sent as it is.

    source         view index of the member that transfers its state to those in `stale_indexes`; -1: none
    stale_indexes  view indexes of the members that take their state from the source
    restore        all members take the state of the newest good checkpoint instead (or begin anew);
                   `restore_before` >= 0: the newest of at most that step; members remove later ones, which
                   hold wrong weights
    disputed       >= 0: a step after which members differed without a majority: each member that comes to it
                   again sends its hashes
    ends           why no step is taken in this view: its members save the state that they have, and end
    """

    kind: ClassVar[str] = ""
    generation: Whole
    members: tuple[Whole, ...]
    slots: tuple[Whole, ...]
    shards: tuple[tuple[Whole, ...], ...]
    source: Whole = -1
    stale_indexes: tuple[Whole, ...] = ()
    restore: bool = False
    restore_before: Whole = -1
    disputed: MaybeCount = -1
    ends: str = ""

    def to_view(self, **processes: Any) -> View:
        """Return the message to the members: the plan, with their `processes`, hosts and endpoints."""
        return View(**{each.name: getattr(self, each.name) for each in fields(ViewPlan)}, **processes)

    @cached_property
    def max_shards(self) -> int:
        """Most shards of one member; 0 where the assignment is not known."""
        return max(map(len, self.shards), default=0)


class View(ViewPlan):
    """The members that train from now on, and where they are.

    segment    shared memory, if all are on the supervisor's host: [pid, descriptor, inode, device]
    journaled  last step that is in the journal: the first member sends what is missing
    backup     shards of slow members are computed by idle ones too
    """

    kind: ClassVar[str] = "View"
    pids: tuple[Whole, ...]
    hosts: tuple[str, ...]
    hostnames: tuple[str, ...]
    endpoints: tuple[tuple[str, Whole], ...]
    segment: tuple[Whole, ...] = ()
    journaled: Whole = 0
    backup: bool = False


class Stop(ControlMessage):
    """Finish the step, save, and end."""

    reason: str


class Dismissed(ControlMessage):
    """The worker is no member: it ends, with this exit code."""

    kind: ClassVar[str] = "Dismissed"
    reason: str
    code: Whole = 0


class AgentAccepted(ControlMessage):
    """The job's payload follows in chunks; `digest` (SHA-256) is of all of them together. `options`: an
    AgentLaunch (worker_options.py) as plain data."""

    agent: Whole
    payload_bytes: Whole
    digest: str
    options: dict[str, Any] = field(default_factory=dict)


class PayloadChunk(ControlMessage):
    """A part of the payload."""

    offset: Whole
    data: bytes


class AgentStart(ControlMessage):
    """Start worker `member` for `slot`; `attempt` counts the slot's workers from 1."""

    member: Whole
    slot: Whole
    attempt: Whole = 1


class StackRequest(ControlMessage):
    """Find out where worker `member` is, which will be ended: a stopped one may be let run to dump its stack.
    `probe`: it may be well, and is not touched; only the state of its process is asked for."""

    member: Whole
    probe: bool = False


class AgentNotice(ControlMessage):
    """Text that the agent's user should read."""

    text: str


class AgentEnd(ControlMessage):
    """Kill worker `member`; -1: all, and leave with this exit code. `unfinished`: the run has more to do."""

    kind: ClassVar[str] = "End"
    member: Whole
    reason: str
    code: Whole = 0
    unfinished: bool = False


class ToolReply(ControlMessage):
    """Answer to a tool's request: whether it was carried out, and what to show."""

    kind: ClassVar[str] = "Answer"
    done: bool
    text: str
    facts: dict[str, Any] = field(default_factory=dict)
