"""What supervisor and members say to each other, as frozen dataclasses that travel as plain data.

    member  ->  supervisor    Hello, Beat, Dialed, Report, Installed, Broken, Told, Receipt, Injected, Raised,
                              Leaving, Done
    agent   ->  supervisor    Offer, Exited                (a machine that joined and starts workers there)
    tool    ->  supervisor    Ask                          (paceline scale, stop, status)
    supervisor  ->  member    Welcome, Heard, Dial, Prepare, View, Stop, Dismissed, Claimed
    supervisor  ->  agent     Granted, Start, Notice, End
    supervisor  ->  tool      Answer

A message that does not convert exactly, or whose numbers no run can have, is a WireError, and its sender is
dropped. The first message of a connection (Hello, Offer, Ask) names protocol and version; one of another
version is not converted at all, and becomes a Foreign. Must not know sockets.
"""

from __future__ import annotations

import typing
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Final, TypeVar, final

from paceline.core.control import exact
from paceline.core.errors import WireError
from paceline.core.version import PROTOCOL, VERSION

M = TypeVar("M", bound="type[Message]")

# What the wire accepts. A run of 2**48 steps takes nine thousand years at a thousand steps a second.
MOST_STEPS: Final = 1 << 48
MOST_WORKERS: Final = 1 << 12
Count = Annotated[int, exact.Range(0, MOST_STEPS)]
MaybeCount = Annotated[int, exact.Range(-1, MOST_STEPS)]
Small = Annotated[int, exact.Range(0, (1 << 31) - 1)]
MaybeSmall = Annotated[int, exact.Range(-1, (1 << 31) - 1)]
Workers = Annotated[int, exact.Range(0, MOST_WORKERS)]
Port = Annotated[int, exact.Range(0, 65535)]
# Ratios of what members measured decide who computes what: a number of seconds is one that a clock can show.
Seconds = Annotated[float, exact.Range(0, 10**9)]
Step = Annotated[str, exact.Range(0, MOST_STEPS)]
Name = Annotated[str, exact.Length(1024)]
Reason = Annotated[str, exact.Cut(1 << 16)]
Trace = Annotated[str, exact.Cut(1 << 20)]

Progress = tuple[Count, Count, Count]
"""How far a member is: (committed steps, epoch, duties done since the last commit). Ordered."""


@dataclass(frozen=True, kw_only=True)
class Message:
    """The common part; concrete messages are final and register themselves by name."""

    kind: ClassVar[str] = ""


_known: dict[str, type[Message]] = {}
_makers: dict[str, Callable[[dict[Any, Any]], Any]] = {}


def _register(cls: M) -> M:
    cls.kind = cls.__name__
    _known[cls.kind] = cls
    return cls


# from a member


@final
@_register
@dataclass(frozen=True, kw_only=True)
class Hello(Message):
    """A worker that is ready to be a member; after a supervisor's restart, one that is a member already.

    member      the number the supervisor gave when it asked for this worker to be started
    endpoint    where this worker listens for the members of a view that meet there (host may be empty)
    host        equal for processes that can share memory; hostname is for people
    generation  the view it is in, 0: none
    """

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


@final
@_register
@dataclass(frozen=True, kw_only=True)
class Beat(Message):
    """I am alive: what the main thread does, for how long already, for whom it waits.

    phase          start, data, forward, backward, collective, optimizer, checkpoint, evaluation, wait
    waits_for      members, by number, that this one waits for in a collective
    shard_seconds  a running mean of this member's time per shard; step_seconds of its time per step
    longest        seconds that its phase has taken at most before, of those that not every step has; 0: it
                   is the first, or waits for storage, and nobody knows
    """

    phase: Name
    seconds: Seconds
    progress: Progress | None = None
    waits_for: tuple[Small, ...] = ()
    shard_seconds: Seconds = 0.0
    step_seconds: Seconds = 0.0
    longest: Seconds = 0.0
    rss: Count = 0


@final
@_register
@dataclass(frozen=True, kw_only=True)
class Dialed(Message):
    """The endpoint of `peer` was dialed from here. `trouble` is empty where the peer proved itself there;
    `lossy`: packets do not arrive, so the trouble is on the way and not at the peer."""

    peer: Small
    trouble: Name = ""
    lossy: bool = False


@final
@_register
@dataclass(frozen=True, kw_only=True)
class Report(Message):
    """Stopped for `generation`: how far I am, and of which shards of the open step I hold the gradient.
    `alone` is set where shards have state that only the member has which computes them; `owed` says of which
    shards this one has it: (committed steps, shards) for each moment that it can be given for. `digest` is of
    parameters and optimizers' state: members that are equally far have the same. `agreed`: the last step
    after which all members of a view were seen to hold the same state. `trail`: short hashes of what this
    member put into its latest steps. `spoiled`: its weights have changed in its memory since its last
    update; `doubted`: members of its view, which may be gone, had other weights after that update."""

    generation: Count
    progress: Progress | None
    held: tuple[Small, ...] = ()
    alone: bool = False
    digest: Name = ""
    agreed: MaybeCount = -1
    owed: tuple[tuple[Count, tuple[Small, ...]], ...] = ()
    trail: tuple[tuple[Count, Name], ...] = ()
    spoiled: bool = False
    doubted: bool = False


@final
@_register
@dataclass(frozen=True, kw_only=True)
class Installed(Message):
    """In the view of `generation`, with its state, which is so far; training goes on."""

    generation: Count
    progress: Progress | None = None


@final
@_register
@dataclass(frozen=True, kw_only=True)
class Broken(Message):
    """A collective of `generation` failed here. `accused`: members whose data did not match its checksum;
    `unreachable`: members that could not be reached, where it is known which."""

    generation: Count
    reason: Reason
    accused: tuple[Small, ...] = ()
    unreachable: tuple[Small, ...] = ()


@final
@_register
@dataclass(frozen=True, kw_only=True)
class Told(Message):
    """Events for the journal, each as its JSON line, from the first member of the view."""

    generation: Count
    lines: tuple[str, ...]


@final
@_register
@dataclass(frozen=True, kw_only=True)
class Receipt(Message):
    """Steps first..last were committed here in `generation`, and of each of them I computed `shards`.

    hashes         state hashes of audited steps, by step
    shard_hashes   hashes of this member's shards' gradients in audited steps: [step, shard, hash]
    agreed         >= 0: the hashes are of a step after which the members were seen to differ; after this one
                   they were the same
    trail          as in Report
    """

    generation: Count
    first: Count
    last: Count
    shards: tuple[Small, ...]
    hashes: dict[Step, Name] = field(default_factory=dict)
    shard_hashes: tuple[tuple[Count, Small, Name], ...] = ()
    agreed: MaybeCount = -1
    trail: tuple[tuple[Count, Name], ...] = ()


@final
@_register
@dataclass(frozen=True, kw_only=True)
class Injected(Message):
    """A fault on demand acts here as soon as this is Heard: the one at this place of the chaos, which acted
    `before` times in this worker. `line` is the event for the journal."""

    index: Small
    before: Small
    line: str


@final
@_register
@dataclass(frozen=True, kw_only=True)
class Raised(Message):
    """My code raised. `fault` is a PacelineError's, else "code". `holds`: this worker has the state of a step
    boundary (`progress`) and waits for a view in which it is saved, or to be dismissed; else it ends."""

    summary: Reason
    traceback: Trace
    phase: Name
    fault: Name = "code"
    step: Count = 0
    shard: MaybeSmall = -1
    holds: bool = False
    progress: Progress | None = None


@final
@_register
@dataclass(frozen=True, kw_only=True)
class Leaving(Message):
    """I was asked to go (SIGTERM): let me out at the next step boundary."""

    reason: Reason


@final
@_register
@dataclass(frozen=True, kw_only=True)
class ShardDone(Message):
    """Backup policy: this member has computed this shard of this step."""

    generation: Count
    step: Count
    shard: Small


@final
@_register
@dataclass(frozen=True, kw_only=True)
class Done(Message):
    """The run is over here; `stopped` is why, where it was asked to stop."""

    generation: Count
    progress: Progress
    hash: Name
    stopped: Reason | None = None


# from an agent and from tools


@final
@_register
@dataclass(frozen=True, kw_only=True)
class Offer(Message):
    """A machine offers to run so many workers. `agent` is the number it was given before, if it was: it has
    the payload then and comes back after a cut connection."""

    workers: Workers
    host: Name
    hostname: Name
    pid: Small
    agent: Small = 0
    protocol: Small = PROTOCOL
    version: Name = VERSION


@final
@_register
@dataclass(frozen=True, kw_only=True)
class Exited(Message):
    """A worker that the agent had started ended; `status` is an exit code, or a signal's number negated.
    `memory`: the kernel killed it because memory ran out."""

    member: Small
    status: Annotated[int, exact.Range(-1024, 1 << 31)]
    reason: Reason
    memory: bool = False


@final
@_register
@dataclass(frozen=True, kw_only=True)
class Seen(Message):
    """An agent's answer to LookAt: what the kernel says of the worker, and its Python frames, innermost
    first. To one that only probes: whether the process is `stopped`; where it is gone there is no answer."""

    member: Small
    state: Reason
    frames: tuple[Reason, ...]
    stopped: bool | None = None


@final
@_register
@dataclass(frozen=True, kw_only=True)
class Ask(Message):
    """A tool's question: "scale" with a number, "stop" with a reason, "status"."""

    what: Name
    number: Annotated[int, exact.Range(-(1 << 31), 1 << 31)] = 0
    text: Reason = ""
    protocol: Small = PROTOCOL
    version: Name = VERSION


# from the supervisor


@final
@_register
@dataclass(frozen=True, kw_only=True)
class Welcome(Message):
    """You are known. `patience`: how long to go on without a supervisor before saving and leaving.
    `injected`: faults on demand that your rank has met, by their place in the chaos, each as often."""

    heartbeat: float
    patience: float
    injected: tuple[int, ...] = ()


@final
@_register
@dataclass(frozen=True, kw_only=True)
class Heard(Message):
    """Your messages up to this number were heard and what they say is in the journal: forget them. Those
    that were not are said again after a reconnect."""

    number: int


@final
@_register
@dataclass(frozen=True, kw_only=True)
class Dial(Message):
    """Dial these peers, and answer those who dial you, while you do what you do: [member, slot, host, port]
    of each. A Dialed follows for each of them."""

    peers: tuple[tuple[Small, Small, Name, Port], ...]


@final
@_register
@dataclass(frozen=True, kw_only=True)
class Prepare(Message):
    """Stop and report for `generation`: at once (abort the collective), or after the next common step."""

    generation: int
    abort: bool
    reason: str


@final
@_register
@dataclass(frozen=True, kw_only=True)
class View(Message):
    """Who trains from now on, by rank: parallel tuples. `shards[r]` is what rank r computes.

    source    rank that hands its state to those in `behind`; -1: nobody is ahead of anybody
    behind    ranks that take their state from the source
    restore   everybody takes the state of the newest good checkpoint instead (or begins anew);
              `restore_before` >= 0: the newest of at most that step
    segment   shared memory for all of them, where they are on the supervisor's host:
              [pid, descriptor, inode, device]
    journaled the last step that is in the journal: the first rank tells what is missing
    backup    the shards of slow members are computed by idle ones too
    disputed  >= 0: a step after which members differed and no majority said who is right: each member
              that comes to it again sends its hashes
    ends      why no step is taken in this view: its members save the state that they have, and end
    """

    generation: int
    members: tuple[int, ...]
    slots: tuple[int, ...]
    pids: tuple[int, ...]
    hosts: tuple[str, ...]
    hostnames: tuple[str, ...]
    endpoints: tuple[tuple[str, int], ...]
    shards: tuple[tuple[int, ...], ...]
    source: int = -1
    behind: tuple[int, ...] = ()
    restore: bool = False
    restore_before: int = -1
    segment: tuple[int, ...] = ()
    journaled: int = 0
    backup: bool = False
    disputed: MaybeCount = -1
    ends: str = ""


@final
@_register
@dataclass(frozen=True, kw_only=True)
class Stop(Message):
    """Finish the step, save, and end."""

    reason: str


@final
@_register
@dataclass(frozen=True, kw_only=True)
class Dismissed(Message):
    """You are no member any more: end. `code` is the exit code to end with."""

    reason: str
    code: int = 0


@final
@_register
@dataclass(frozen=True, kw_only=True)
class Claimed(Message):
    """Backup policy: a member of the view of `generation` has computed this shard of this step."""

    step: Count
    shard: Small
    generation: Count = 0


@final
@_register
@dataclass(frozen=True, kw_only=True)
class Granted(Message):
    """To an agent: the job's payload follows in pieces; `digest` (SHA-256) is of all of them together."""

    agent: int
    payload_bytes: int
    digest: str
    options: dict[str, Any] = field(default_factory=dict)


@final
@_register
@dataclass(frozen=True, kw_only=True)
class Piece(Message):
    """A piece of the payload."""

    offset: int
    data: bytes


@final
@_register
@dataclass(frozen=True, kw_only=True)
class Start(Message):
    """To an agent: start worker `member` for `slot`; `attempt` counts the slot's workers from 1."""

    member: int
    slot: int
    attempt: int = 1


@final
@_register
@dataclass(frozen=True, kw_only=True)
class LookAt(Message):
    """To an agent: where is worker `member`? It is to end: one that is stopped may be let run to say so.
    `probe`: it may be well, and nothing is done to it; the question is whether its process runs."""

    member: int
    probe: bool = False


@final
@_register
@dataclass(frozen=True, kw_only=True)
class Notice(Message):
    """To an agent: something that its user should read."""

    text: str


@final
@_register
@dataclass(frozen=True, kw_only=True)
class End(Message):
    """To an agent: kill worker `member`; -1: all of them, and leave, with this exit code."""

    member: int
    reason: str
    code: int = 0


@final
@_register
@dataclass(frozen=True, kw_only=True)
class Answer(Message):
    """To a tool: whether it was done, and what to show."""

    done: bool
    text: str
    facts: dict[str, Any] = field(default_factory=dict)


@final
@dataclass(frozen=True, kw_only=True)
class Foreign(Message):
    """A first message of another version, of which only this much is understood. It never travels."""

    what: str
    protocol: int
    version: str

    @property
    def text(self) -> str:
        """For both terminals."""
        who = {"Hello": "a worker", "Offer": "a machine that wants to join"}.get(self.what, "a tool")
        return (
            f"{who} has Paceline {self.version} and speaks protocol {self.protocol}; the supervisor has "
            f"Paceline {VERSION} and speaks protocol {PROTOCOL}"
        )


_FIRST = frozenset({Hello.kind, Offer.kind, Ask.kind})


def _foreign(kind: str, fields: dict[Any, Any]) -> Foreign | None:
    """What a first message says of another version; None: it is of this one."""
    protocol, version = fields.get("protocol", 1), fields.get("version", "0.1.0 or earlier")
    same = protocol == PROTOCOL and (version == VERSION or kind == Ask.kind)
    if same:
        return None
    known = isinstance(protocol, int) and isinstance(version, str)
    return Foreign(
        what=kind,
        protocol=int(protocol) if known else 0,
        version="".join(filter(str.isprintable, str(version)))[:40] if known else "of unknown kind",
    )


def to_plain(message: Message) -> list[Any]:
    """[kind, fields], for `core.wire`."""
    if _known.get(message.kind) is not type(message):
        raise WireError(f"{type(message).__name__} is not a message of the control connection")
    # No message holds another, and nobody changes what a frozen message holds: no deep copy.
    return [message.kind, dict(vars(message))]


def from_plain(plain: Any) -> Message:
    """The message; WireError for anything that is not exactly one."""
    match plain:
        case [str(kind), dict(fields)] if kind in _FIRST and (foreign := _foreign(kind, fields)) is not None:
            return foreign
        case [str(kind), dict(fields)] if kind in _known:
            make = _makers.get(kind)
            if make is None:
                make = _makers[kind] = exact.maker(_known[kind])
            try:
                return typing.cast(Message, make(fields))
            except exact.NotExactError as error:
                raise WireError(f"a {kind} message is damaged: {error}") from error
    raise WireError("not a message of the control connection")
