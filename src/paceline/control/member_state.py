"""State, events and actions of the member machine; member_machine.py has the transitions."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final, TypeAlias

import msgspec

from paceline.control.field_types import Progress
from paceline.control.messages import (
    CollectiveFailed,
    ControlMessage,
    MemberFinished,
    Prepare,
    View,
    WorkerException,
)


class MemberPhase(Enum):
    JOINING = "joining"  # no supervisor has accepted this worker
    WAITING = "waiting"  # in no group: reports when asked, and opens the view that follows
    OPENING = "opening"  # connects to the members of a view, then gets the view's state
    IN_VIEW = "in view"  # trains
    FINISHED = "finished"  # has announced the end of the run; another member may still need its state
    LEAVING = "leaving"  # was dismissed, or raised without a state to save: the process ends
    ORPHANED = "orphaned"  # no supervisor comes back: saves if it is the first, and ends


ENDED: Final = (MemberPhase.LEAVING, MemberPhase.ORPHANED)


class MemberState(msgspec.Struct, frozen=True):
    """State of a worker's membership. A struct: each step makes a new state, which costs a tenth of a
    dataclass here.

    invited      the view that was accepted last, opened or not; all earlier generations are over
    view         the view that was opened last: the group of the training thread, or the one it left
    prepare      the request to stop that no view has followed yet
    interrupted  why the training thread has to leave its group at once
    has_state    whether this worker holds the state of a step boundary
    trained      whether it ever held one, or began to receive one; `fresh`: its weights are those that the
                 model was built with
    unanswered   what this worker announced and waits for an answer to: that it is finished, that a collective
                 or its code failed. A supervisor that was restarted may not know, so it is sent again.
    leave        why this worker asked to leave
    """

    member: int
    patience: float
    phase: MemberPhase = MemberPhase.JOINING
    invited: View | None = None
    view: View | None = None
    prepare: Prepare | None = None
    interrupted: str | None = None
    has_state: bool = False
    trained: bool = False
    fresh: bool = True
    unanswered: ControlMessage | None = None
    leave: str | None = None

    @property
    def generation(self) -> int:
        """The generation of the view that was opened last; 0: none."""
        return 0 if self.view is None else self.view.generation

    @property
    def index(self) -> int:
        """The view index of this worker in `invited`."""
        return -1 if self.invited is None else self.invited.members.index(self.member)

    @property
    def wants_pause(self) -> bool:
        """Whether the group has to change after the next step that all members commit."""
        return self.prepare is not None

    @property
    def ended(self) -> bool:
        return self.phase in ENDED


# events of the worker itself; the others are control messages


@dataclass(frozen=True)
class ViewOpened:
    """The members of the invited view are connected."""


@dataclass(frozen=True)
class StateReady:
    """The training thread holds the view's state."""

    progress: Progress


@dataclass(frozen=True)
class GroupLeft:
    """The training thread has left its group at a step boundary, or had to abandon the open step. `failure`:
    the collective, or the opening of the view, that failed; None: a pause, or an interrupt, whose reason the
    machine knows."""

    failure: CollectiveFailed | None = None


@dataclass(frozen=True)
class CodeRaised:
    """The user's code raised. Where the exception `holds` a state, the worker waits to save it in a view."""

    exception: WorkerException


@dataclass(frozen=True)
class RunFinished:
    """The run is over on this worker, as far as it knows."""

    message: MemberFinished


@dataclass(frozen=True)
class LeaveRequested:
    """This worker was asked to go (SIGTERM)."""

    reason: str


@dataclass(frozen=True)
class SupervisorAway:
    """No supervisor answers, still. Times are of the clock of `now`.

    lost_at        when the connection to the supervisor was lost
    blocked_since  since when the training thread waits for other members in a collective; None: it does not
    restarting     a new start of the run waits for the processes of this one to leave
    replaced       the run's folder belongs to another start already
    """

    lost_at: float
    blocked_since: float | None = None
    restarting: bool = False
    replaced: bool = False


TrainingEvent: TypeAlias = "ViewOpened | StateReady | GroupLeft | CodeRaised | RunFinished"
MemberEvent: TypeAlias = "ControlMessage | TrainingEvent | LeaveRequested | SupervisorAway"


# actions


@dataclass(frozen=True)
class TrainingAction:
    """An action that waits for the training thread; the others are carried out at once."""


@dataclass(frozen=True)
class SendMessage:
    message: ControlMessage


@dataclass(frozen=True)
class Interrupt:
    """End what the training thread waits for; it comes back with `GroupLeft`."""

    reason: str


@dataclass(frozen=True)
class RequestStop:
    """Stop the run after the next common step: save, and finish."""

    reason: str


@dataclass(frozen=True)
class StopReconnecting:
    """No supervisor will ever accept this worker."""

    reason: str


@dataclass(frozen=True)
class SendReport(TrainingAction):
    """Say how far this worker is and what it holds, for the view of `generation`."""

    generation: int


@dataclass(frozen=True)
class OpenView(TrainingAction):
    """Connect to the members of this view; then feed `ViewOpened`, or `GroupLeft` with the failure."""

    view: View


@dataclass(frozen=True)
class KeepState(TrainingAction):
    """The state is the view's already. Like the three that follow: then feed `StateReady`, or `GroupLeft`."""


@dataclass(frozen=True)
class SendState(TrainingAction):
    """Send the state to these view indices."""

    to: tuple[int, ...]


@dataclass(frozen=True)
class ReceiveState(TrainingAction):
    """Receive the state from this view index."""

    source: int


@dataclass(frozen=True)
class Restore(TrainingAction):
    """Load a checkpoint, together with all members.

    before      >= 0: of at most this step; later ones are not trusted
    first       the first view of the job: what the user asked to resume from
    fresh       the weights are still those that the model was built with: they are compared with the others'
    trained     this process has trained: without a checkpoint only a new process has the initial state
    """

    before: int
    first: bool
    fresh: bool
    trained: bool


@dataclass(frozen=True)
class Train(TrainingAction):
    """The view is installed. `ends`: take no step, save and end, for this reason. `journal_after` >= 0: this
    worker writes the journal's lines after that step again."""

    ends: str = ""
    journal_after: int = -1


@dataclass(frozen=True)
class Exit(TrainingAction):
    """End. `orphaned`: because no supervisor is left, so nothing more is sent."""

    reason: str
    code: int = 0
    orphaned: bool = False


MemberAction: TypeAlias = "SendMessage | Interrupt | RequestStop | StopReconnecting | TrainingAction"
Decision = tuple[MemberState, tuple[MemberAction, ...]]
