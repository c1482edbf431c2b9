"""Events of a run, as frozen dataclasses that are one JSON object each.

Readers of a journal may be older than its writer: fields they do not know are dropped, event types they do
not know (or can no longer read) come back as UnknownEvent, which writes itself out unchanged. Events never
ask a clock: `time` is wall-clock seconds, given by the process that saw the event.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar, dataclass_transform

from paceline.core import type_conversion
from paceline.core.errors import UsageError, WireError

E = TypeVar("E", bound="type[Event]")


@dataclass(frozen=True, kw_only=True)
class Event:
    """The common part; concrete events are registered by name."""

    type: ClassVar[str] = ""
    time: float


RECALLED = -1  # instead of a generation: see StepCommitted

_known: dict[str, type[Event]] = {}

# A run writes an event per step: an encoder made once, and no copy of the event.
_encode = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
def register(cls: E) -> E:
    """Make `cls` a frozen dataclass, if it is none, and readable: a class decorator. The `type` of `cls` is
    its name in snake_case."""
    if "__dataclass_params__" not in vars(cls):
        dataclass(frozen=True, kw_only=True)(cls)
    name = re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()
    other = _known.get(name)
    if other is not None and other.__qualname__ != cls.__qualname__:
        raise UsageError(f"two events are called {name}: {other!r} and {cls!r}", remedy="rename one of them")
    cls.type = name
    _known[name] = cls
    return cls


@register
class WorkerStarted(Event):
    """A worker process runs and can be given work."""

    rank: int
    pid: int
    host: str


@register
class WorkerFailed(Event):
    """A worker is gone; `phase` is what it was doing, `reason` one sentence for people. `cause` is one word:
    crash, exit, raised, memory, silent, hung, corrupt, dissent, preempted, straggler, unattended, restart,
    unreachable; empty in runs without a supervisor."""

    rank: int
    pid: int
    phase: str
    reason: str
    host: str = ""
    cause: str = ""


@register
class SupervisorStarted(Event):
    """A supervisor took the run over; `attempt` counts from 1."""

    pid: int
    attempt: int
    address: str


@register
class ViewChanged(Event):
    """The members that train from now on, and the shards of each: parallel lists, in the order of the group.
    `step` is the last one committed before; `behind` are the ranks that get the state after it from another,
    because they come anew or because the view before ended when they had not yet got its last result."""

    generation: int
    reason: str
    members: list[int]  # ranks as people know them
    shards: list[list[int]]
    pids: list[int]
    hosts: list[str]
    step: int
    behind: list[int] = field(default_factory=list)


@register
class Repaired(Event):
    """Training continues after workers were lost: `seconds` from noticing the loss to the new view."""

    generation: int
    seconds: float
    lost: list[int]


@register
class Verdict(Event):
    """The reason why progress stopped: which rank, on which host, doing what, at which line of Python, what
    the others waited for and what was done about it. `text` is all of it as it stands on the terminal."""

    rank: int
    host: str
    pid: int
    phase: str
    line: str
    waiting: str
    action: str
    text: str


@register
class FaultInjected(Event):
    """A fault on demand is about to act, in the worker of this rank. `fault` is its text, `index` its place
    among those that were asked for, from 0."""

    rank: int
    step: int
    phase: str
    fault: str
    index: int


@register
class StepsReceived(Event):
    """A worker's receipt: it committed steps first..last, and computed these shards of each of them."""

    rank: int
    pid: int
    generation: int
    first: int
    last: int
    shards: list[int]


@register
class ShardHashed(Event):
    """The hash of one shard's gradient in an audited step, as the worker that computed it has it."""

    step: int
    shard: int
    rank: int
    hash: str


@register
class StepCommitted(Event):
    """Every member has applied this step; `samples` counts those of the step.

    It took `taken` positions of the epoch from `offset` on; -1 in journals from before these were kept.
    `generation` is the view that it was committed in: 0 for a run without a supervisor, RECALLED where the
    step is known only from a checkpoint, because the reporting rank was killed before it sent the event.
    `sample` is a hash of a part of the weights that it was computed with, the same on all ranks.
    Of `seconds`, the reporting rank was in the exchange with the other ranks for `comm_time` and waited for
    data for `data_time`; `compute_efficiency` is the share that it computed. None: not measured.
    """

    step: int
    epoch: int
    loss: float
    samples: int
    seconds: float = 0.0
    hash: str | None = None
    sample: str | None = None
    offset: int = -1
    taken: int = -1
    learning_rate: float = 0.0
    grad_norm: float | None = None
    skipped: bool = False
    metrics: dict[str, float] = field(default_factory=dict)
    generation: int = 0
    comm_time: float | None = None
    data_time: float | None = None
    compute_efficiency: float | None = None


@register
class RunStarted(Event):
    """A run begins; `definition` are the settings that its weights are a function of. `disowned`: as in
    RunResumed."""

    workers: int
    shards: int
    samples: int | None
    definition: dict[str, Any]
    fingerprint: dict[str, str]
    disowned: bool = False


@register
class RunResumed(Event):
    """A run resumes from a checkpoint: steps after `step` that stand above in the journal are done again.
    `disowned`: because ranks held different states, so that these steps may have been wrong."""

    version: int
    step: int
    epoch: int
    workers: int
    disowned: bool = False


@register
class RunEnded(Event):
    """A run is over; `reason` is "finished", or why it ended earlier. `hash` is that of the weights that it
    returned: those of its last step, or of the step `restored`, which had the best evaluation."""

    step: int
    epoch: int
    reason: str
    hash: str
    restored: int | None = None


@register
class RunFailed(Event):
    """A supervised run is over without having come to its end; `step` is the last one in the journal."""

    step: int
    reason: str


@register
class Evaluated(Event):
    """The model was evaluated after this step."""

    step: int
    epoch: int
    samples: int
    metrics: dict[str, float]
    seconds: float = 0.0


@register
class MetricReported(Event):
    """A number that the user's code on this rank reported (`paceline.metrics.report`), in `step`."""

    name: str
    value: float
    rank: int = 0
    step: int = 0
    tags: dict[str, str] = field(default_factory=dict)


@register
class EpochEnded(Event):
    """A pass over the data is over: means over its samples, and what the evaluation after it gave."""

    epoch: int
    steps: int
    samples: int
    loss: float
    seconds: float
    metrics: dict[str, float] = field(default_factory=dict)
    validation: dict[str, float] = field(default_factory=dict)
    skipped: int = 0


@register
class CheckpointSaved(Event):
    """A version is durable; `stall` is how long training stood still for it, `seconds` until it was safe."""

    version: int
    step: int
    bytes: int
    stall: float
    seconds: float
    epoch: int = 0


@register
class CheckpointFailed(Event):
    """A version could not be written; training continues, earlier versions stay."""

    version: int
    step: int
    reason: str


@register
class SampleSkipped(Event):
    """A sample was left out of a step: it cannot be read, and the data's policy is to skip it."""

    step: int
    epoch: int
    index: int
    reason: str


@register
class Note(Event):
    """A sentence for people who read the journal."""

    text: str
    rank: int | None = None


@dataclass(frozen=True, kw_only=True)
class UnknownEvent(Event):
    """An event of a newer (or broken) writer: its name and its fields as they were."""

    name: str
    data: dict[str, Any] = field(default_factory=dict)


def to_json(event: Event) -> str:
    """Return one line of standard JSON; NaN and infinities, which JSON lacks, become strings."""
    if isinstance(event, UnknownEvent):
        plain = {"type": event.name, "time": event.time, **event.data}
    else:
        if _known.get(event.type) is not type(event):
            raise UsageError(
                f"{type(event).__name__} is not a registered event",
                remedy="decorate it with @events.register",
            )
        plain = {"type": event.type, **vars(event)}
    try:
        try:
            return _encode(plain)
        except ValueError:
            return _encode(type_conversion.finite(plain))
    except TypeError as error:
        raise UsageError(
            f"a {event.type} event holds what JSON cannot: {error}", remedy="give events plain data only"
        ) from error


def from_json(line: str | bytes) -> Event:
    """Return the event of one line; WireError when the line is not an event at all."""
    try:
        data = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise WireError(f"not JSON: {error}", remedy="the line was cut short or overwritten") from error
    if not isinstance(data, dict) or not isinstance(data.get("type"), str):
        raise WireError("JSON, but not an event: it has no type", remedy="check that the file is a journal")
    name = data.pop("type")
    cls = _known.get(name)
    if cls is not None:
        fields = type_conversion.fields_of(cls)
        known = {key: value for key, value in data.items() if key in fields}
        try:
            event: Event = type_conversion.convert(known, cls, name)
        except type_conversion.ConversionError:
            return _unknown(name, data)
        return event
    return _unknown(name, data)


def _unknown(name: str, data: dict[str, Any]) -> UnknownEvent:
    try:
        time = type_conversion.convert(data.pop("time", math.nan), float, "time")
    except type_conversion.MismatchError:
        time = math.nan
    return UnknownEvent(time=time, name=name, data=data)
