"""Rules that the shells of the member machine share: a real worker's and a simulated one's. Pure.

They are no step of the machine, because they need what only a shell knows (peers that live, versions that are
saved, shards that are held), but each is decided here once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable
from typing import Final, Literal

from paceline.control.member_state import (
    Exit,
    GroupLeft,
    MemberAction,
    MemberEvent,
    MemberState,
    Restore,
    SendReport,
    TrainingAction,
)
from paceline.control.messages import MemberFinished

LACKS_RESIDUALS: Final = "the residuals of compression are with members that cannot be reached"

_SMOOTHING: Final = 0.8  # of the running means: a few steps decide


def queue_up(
    event: MemberEvent, actions: Iterable[MemberAction], queued: deque[TrainingAction]
) -> list[MemberAction]:
    """Queue what the training thread has to do about `event`; return the actions that cannot wait for it."""
    if isinstance(event, GroupLeft):
        # What is queued was decided for the group that the training thread has just left: opening it or
        # moving state in it would fail. A report and an exit belong to no group, and are not decided again.
        due = [action for action in queued if isinstance(action, SendReport | Exit)]
        queued.clear()
        queued.extend(due)
    at_once: list[MemberAction] = []
    for action in actions:
        if isinstance(action, TrainingAction):
            queued.append(action)
        else:
            at_once.append(action)
    return at_once


def must_start_over(restore: Restore, has_checkpoint: bool) -> bool:
    """Return whether a worker that carries out `restore` has to end and another process has to start:
    without a checkpoint all members begin anew, and a worker that has trained no longer has the initial
    weights."""
    return restore.trained and not has_checkpoint


def is_first_alive(state: MemberState, lives: Callable[[int], bool]) -> bool:
    """Return whether this worker holds the state and no member before it in its view lives. `lives` takes a
    view index; a member that cannot be seen from here (on another host) has to count as alive, because two
    members must not save one version at the same time."""
    if state.view is None or not state.has_state:
        return False
    return not any(map(lives, range(state.view.members.index(state.member))))


def why_unsaved(
    state: MemberState, lives: Callable[[int], bool], *, covers_all: bool, is_saved: bool
) -> str | None:
    """Return why this worker, an orphan, does not save its state; None: it does. `covers_all`: it has the
    private state of all shards; `is_saved`: a version of its step exists."""
    if not is_first_alive(state, lives):
        return "that is for another member, if one holds the state"
    if is_saved or isinstance(state.unanswered, MemberFinished):
        # A worker that is finished has saved with its group.
        return "a version of this step exists"
    return None if covers_all else LACKS_RESIDUALS


def saving_after_error(state: MemberState, worth_saving: bool) -> Literal["none", "alone", "in view"]:
    """Return how a worker whose code raised saves its state, which is `worth_saving` where no version has it:
    in a group of one at once, so that a worker that takes its place continues from there, else together with
    the other members, if the supervisor decides that the run ends."""
    if state.view is None or not state.has_state or not worth_saving:
        return "none"
    return "in view" if len(state.view.members) > 1 else "alone"


def kept_shards(held: Collection[int], block: Collection[int]) -> frozenset[int]:
    """Return the shards of the open step that a member keeps in a view that assigns it `block`: all that it
    holds or none, because the partial sum of several shards cannot be divided."""
    return frozenset(held) if set(held) <= set(block) else frozenset()


def running_mean(mean: float, value: float) -> float:
    """Return the mean with one more value; 0: there was none before."""
    return value if mean == 0.0 else _SMOOTHING * mean + (1.0 - _SMOOTHING) * value
