"""Actions that the machine decides on, for the shell to carry out; all frozen values.

The shell carries actions out in their order: `supervisor/action_executor.py` with real processes,
`simulation/simulated_supervisor.py` in virtual time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from paceline.control.messages import ControlMessage, Dismissed, ViewPlan
from paceline.elastic.machine.settings import LOCAL_AGENT

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
"""crash: killed by a signal; silent: no heartbeats; hung: heartbeats without progress; memory: killed by the
kernel for memory; preempted: asked to leave (SIGTERM) or its host left: another budget; unattended: left
because no supervisor was there: no budget; restart: starts again because another member was lost with state
that no other has, and there is no checkpoint to go back to: no budget; unreachable: it and a peer could not
connect, or the link between them does not carry data."""


@dataclass(frozen=True)
class StartWorker:
    """Start a process for `slot` at `agent_id`; its hello names `member`."""

    member: int
    slot: int
    agent_id: int = LOCAL_AGENT


@dataclass(frozen=True)
class KillWorker:
    """End the process now, whatever it does."""

    member: int
    reason: str


@dataclass(frozen=True)
class ProbeWorkers:
    """Inspect the processes of members that send no heartbeats; each answer is a ProcessProbed. There is no
    answer where the host cannot be reached or the process is gone. The processes are not touched."""

    members: tuple[int, ...]


@dataclass(frozen=True)
class RequestDial:
    """Ask a worker to dial each of these peers, and each peer to dial it; the answers are DialResult."""

    member: int
    peers: tuple[int, ...]


@dataclass(frozen=True)
class Send:
    """Send one message to these members: Prepare, Stop or Dismissed. A Prepare or Stop may repeat one whose
    connection was lost; a Dismissed may go to a worker that the machine does not know."""

    members: tuple[int, ...]
    message: ControlMessage


@dataclass(frozen=True)
class InstallView:
    """Send the view to all members of the plan. The shell adds processes, hosts and endpoints."""

    plan: ViewPlan
    reason: str


@dataclass(frozen=True)
class RejectAgent:
    """Turn away a host that joined and cannot take part: its agent shows the reason and ends."""

    agent_id: int
    reason: str


@dataclass(frozen=True)
class RequestAgents:
    """Have the engine that runs the agents change their number, so that they offer this many workers."""

    workers: int


@dataclass(frozen=True)
class RecordFailure:
    """Journal: worker_failed. `sure`: the phase is known, not taken from the last heartbeat. `final`: the job
    ends because of it, and the caller gets the error itself."""

    member: int
    slot: int
    phase: str
    kind: FailureKind
    reason: str
    sure: bool = False
    final: bool = False


@dataclass(frozen=True)
class RecordRepair:
    """Journal: repaired. `seconds` from the first failure to the installed view."""

    generation: int
    seconds: float
    lost: tuple[int, ...]  # slots


@dataclass(frozen=True)
class RecordVerdict:
    """Terminal and journal. The shell adds host, pid and the Python line of `member`, before it carries out
    the KillWorker that follows. `sure`: as in RecordFailure; `kind`: of that failure, None where the job
    ends."""

    member: int
    slot: int
    phase: str
    what: str  # one sentence: what happened
    waiting: str  # which ranks wait for it
    done: str  # what was done about it
    sure: bool = False
    kind: FailureKind | None = None


@dataclass(frozen=True)
class EndJob:
    """End the job. `failed` is the member whose error is shown first, if there is one."""

    ok: bool
    reason: str
    failed: int | None = None
    stopped: str | None = None


Action: TypeAlias = (
    StartWorker
    | KillWorker
    | ProbeWorkers
    | RequestDial
    | Send
    | InstallView
    | RejectAgent
    | RequestAgents
    | RecordFailure
    | RecordRepair
    | RecordVerdict
    | EndJob
)


def dismiss(member: int, reason: str) -> Send:
    """Return the message that dismisses a worker without blame."""
    return Send((member,), Dismissed(reason=reason))
