"""The faults of the matrix: what is done to whom, in which phase, and what the journal has to say about it.

Expectations are about the journal: the rank, the phase and the cause of `worker_failed`, or, where no worker
is to blame, the event that tells what happened; for damaged data, the workers' logs. Must not know how a case
is run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from paceline.core import events
from paceline.core.events import Event

WORKERS = 4
STEPS = 60
FAULT_STEP = 22
RANK = 2
EVERY_PHASE = ("data", "forward", "backward", "collective", "optimizer", "checkpoint", "evaluation")

Judge = Callable[[Sequence[Event], str], tuple[str, bool]]
"""From the journal and the text of all logs: what they say, and whether it is right."""
Tool = Literal["chaos", "disk", "shard", "supervisor", "network"]


@dataclass(frozen=True)
class Case:
    """One run. `seconds` is the longest that training may stand still."""

    kind: str
    phase: str
    seconds: float
    judge: Judge
    chaos: str = ""
    tool: Tool = "chaos"

    @property
    def name(self) -> str:
        return f"{self.kind}, {self.phase}" if self.phase else self.kind


def blames(phase: str, *causes: str) -> Judge:
    """A rank failed, and the first one that did was RANK, in this phase (any, where it is empty)."""

    def judge(journal: Sequence[Event], logs: str) -> tuple[str, bool]:
        failed = [event for event in journal if isinstance(event, events.WorkerFailed)]
        if not failed:
            return "no rank failed", False
        first = failed[0]
        right = first.rank == RANK and first.cause in causes and phase in ("", first.phase)
        for verdict in journal:
            if isinstance(verdict, events.Verdict):
                right = right and verdict.rank == RANK and phase in ("", verdict.phase)
        others = len({event.rank for event in failed} - {RANK})
        said = f"rank {first.rank}, {first.phase}: {first.cause}"
        return said + (f", and {others} more" if others else ""), right and not others

    return judge


def blames_both_lives(cause: str) -> Judge:
    """RANK failed in its first life in `forward`, and its replacement while it joined."""

    def judge(journal: Sequence[Event], logs: str) -> tuple[str, bool]:
        failed = [event for event in journal if isinstance(event, events.WorkerFailed)]
        told = [(event.rank, event.phase, event.cause) for event in failed]
        said = "; ".join(f"rank {rank}, {phase}: {why}" for rank, phase, why in told) or "no rank failed"
        return said, told == [(RANK, "forward", "crash"), (RANK, "wait", cause)]

    return judge


def _straggler(journal: Sequence[Event], logs: str) -> tuple[str, bool]:
    """A later assignment gives RANK fewer shards than the others, and no rank failed."""
    assignments = [
        dict(zip(event.members, map(len, event.shards), strict=True))
        for event in journal
        if isinstance(event, events.ViewChanged)
    ]
    fewer = [one for one in assignments if RANK in one and one[RANK] < max(one.values())]
    failed = any(isinstance(event, events.WorkerFailed) for event in journal)
    if not fewer:
        return "the assignment stayed as it was", False
    return f"rank {RANK} has {fewer[-1][RANK]} shards of {sum(fewer[-1].values())}", not failed


def _disk_full(journal: Sequence[Event], logs: str) -> tuple[str, bool]:
    """Checkpoints failed while the disk was full, later ones did not, and no worker was blamed."""
    failed = [event.step for event in journal if isinstance(event, events.CheckpointFailed)]
    saved = [event.step for event in journal if isinstance(event, events.CheckpointSaved)]
    blamed = any(isinstance(event, events.WorkerFailed) for event in journal)
    said = f"not saved: steps {failed}, saved: {saved}"
    return said, bool(failed) and bool(saved) and max(saved) > max(failed) and not blamed


def _replica_used(journal: Sequence[Event], logs: str) -> tuple[str, bool]:
    """Damaged records were named and read from the replica: no rank failed and no sample was left out."""
    troubles = [event for event in journal if isinstance(event, events.WorkerFailed | events.SampleSkipped)]
    named = logs.count("used the copy at")
    return f"{named} records read from the replica, {len(troubles)} troubles", bool(named) and not troubles


def _second_supervisor(journal: Sequence[Event], logs: str) -> tuple[str, bool]:
    started = [event.attempt for event in journal if isinstance(event, events.SupervisorStarted)]
    failed = any(isinstance(event, events.WorkerFailed) for event in journal)
    return f"supervisors {started}, {'a' if failed else 'no'} worker failed", started == [1, 2] and not failed


def _chaos(kind: str, phase: str, seconds: float, fault: str, *causes: str, said: str | None = None) -> Case:
    where = f" phase={phase}" if phase else ""
    text = f"{fault} rank={RANK} step={FAULT_STEP}{where}"
    return Case(kind, phase, seconds, blames(phase if said is None else said, *causes), text)


def cases() -> list[Case]:
    """All of them: at least 14 kinds."""
    found = []
    for phase in EVERY_PHASE:
        found.append(_chaos("exception", phase, 3.0, "raise", "raised"))
        found.append(_chaos("exit", phase, 3.0, "exit", "exit"))
        found.append(_chaos("kill -9", phase, 3.0, "kill", "crash"))
    for phase in ("data", "forward", "collective", "optimizer"):
        found.append(_chaos("SIGSTOP", phase, 10.0, "stop", "silent", "hung"))
    for kind, fault, cause in (("exception", "raise", "raised"), ("kill -9", "kill", "crash")):
        text = f"kill rank={RANK} step={FAULT_STEP} phase=forward; {fault} rank={RANK} phase=wait attempt=2"
        found.append(Case(kind, "while joining", 3.0, blames_both_lives(cause), text))
    found.append(_chaos("hang in data loading", "data", 15.0, "hang", "hung"))
    found.append(_chaos("hang in a collective", "collective", 15.0, "hang", "hung"))
    found += [_chaos("hang", phase, 15.0, "hang", "hung") for phase in ("forward", "backward", "optimizer")]
    found += [_chaos("hang", phase, 15.0, "hang", "hung") for phase in ("checkpoint", "evaluation")]
    found += [
        _chaos("deadlock", phase, 10.0, "deadlock", "silent", "hung") for phase in ("forward", "collective")
    ]
    found.append(Case("straggler", "", 5.0, _straggler, f"slow rank={RANK} step=5 factor=40"))
    found += [_chaos("memory kill", phase, 5.0, "oom", "memory") for phase in ("forward", "optimizer")]
    found.append(Case("disk full", "checkpoint", 5.0, _disk_full, tool="disk"))
    found.append(
        Case(
            "corrupted gradient",
            "collective",
            3.0,
            blames("collective", "corrupt"),
            f"corrupt rank={RANK} step={FAULT_STEP}",
        )
    )
    found.append(Case("corrupted shard file", "data", 3.0, _replica_used, tool="shard"))
    found.append(_chaos("silent network", "collective", 10.0, "partition for=30s", "silent", "hung"))
    found.append(Case("partition of one host", "", 15.0, blames("", "silent", "crash"), tool="network"))
    found.append(Case("lost supervisor", "", 5.0, _second_supervisor, tool="supervisor"))
    found.append(_chaos("preemption (SIGTERM)", "forward", 3.0, "leave", "preempted", said=""))
    return found
