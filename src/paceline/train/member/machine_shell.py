"""Run the member machine of a worker: one lock, two threads.

The control thread feeds messages, the training thread feeds what became of its work. Messages, interrupts and
requests to stop are carried out at once, with the lock held, so that they happen in the order of the events;
the other actions wait in a queue for the training thread.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import final

from paceline.comm.context import DistributedContext
from paceline.control import liveness_lock, member_machine, supervisor_address
from paceline.control.control_client import ControlClient
from paceline.control.member_shell_rules import queue_up
from paceline.control.member_state import (
    Interrupt,
    MemberAction,
    MemberEvent,
    MemberState,
    RequestStop,
    SendMessage,
    StopReconnecting,
    SupervisorAway,
    TrainingAction,
    ViewOpened,
)
from paceline.control.messages import View
from paceline.control.worker_options import WorkerOptions
from paceline.core.clock import Clock, MonotonicClock
from paceline.core.errors import GroupInterruptedError, PacelineError
from paceline.train.phases import COLLECTIVE, OUTSIDE_GROUP, Phases
from paceline.train.stop_signals import StopRequest
from paceline.train.team import Team

_log = logging.getLogger(__name__)

_POLL_SECONDS = 0.25


@final
class MachineShell:
    """The machine of one worker, and its group. `folder` is the run's, where this host sees it."""

    def __init__(
        self,
        options: WorkerOptions,
        client: ControlClient,
        team: Team,
        phases: Phases,
        stop: StopRequest,
        folder: Path | None,
        clock: Clock | None = None,
    ) -> None:
        self._clock: Clock = clock or MonotonicClock()
        self.state = MemberState(options.member, options.patience)
        self.cancelled = threading.Event()  # ends the opening of a view
        self.secret, self.folder = bytes.fromhex(options.secret), folder
        self._client, self._team, self._phases, self._stop = client, team, phases, stop
        self._lock = threading.Lock()
        self._queued = threading.Condition(self._lock)
        self._actions: deque[TrainingAction] = deque()
        self._member_in: dict[int, int] = {}  # of the installed view, by slot: every heartbeat needs it

    def feed(self, event: MemberEvent) -> None:
        """Step the machine; from any thread, but not from a signal handler."""
        # One lock around the step and its actions: otherwise two threads could step the machine in one order
        # and carry the actions out in the other, and the supervisor would see them reversed.
        with self._lock:
            self.state, actions = member_machine.step(self.state, event, self._clock.now())
            for action in queue_up(event, actions, self._actions):
                self._carry_out(action)
            if self.state.interrupted is None:
                # Here, and not where the view is opened: an interrupt that the machine orders after it has
                # ordered to open a view must stay set until the training thread comes to open it.
                self.cancelled.clear()
            if self._actions:
                self._queued.notify()

    def _carry_out(self, action: MemberAction) -> None:
        match action:
            case SendMessage(message):
                self._client.send(message)
            case Interrupt(reason):
                # Both, because the training thread may be on either side of `install`: `cancelled` ends the
                # opening of a view, during which the context is that of the group before, closed already; in
                # an open view the context ends what waits in it.
                self.cancelled.set()
                self._team.context.interrupt(reason)
            case RequestStop(reason):
                if self._stop.reason is None:
                    # For this worker's log: on the terminal the caller reports the stop, once.
                    _log.info("%s: this worker finishes the step, saves and ends", reason)
                self._stop.ask(reason)
            case StopReconnecting(reason):
                self._client.stop_reconnecting(reason)

    def next_action(self) -> TrainingAction:
        """Wait for what the training thread has to do next."""
        while True:
            with self._queued:
                if self._queued.wait_for(lambda: self._actions, _POLL_SECONDS):
                    return self._actions.popleft()
            self.tick()

    def install(self, context: DistributedContext, view: View, *, may_back_up: bool) -> None:
        """Make an opened view the group of this worker, in phase COLLECTIVE: heartbeats name the members that
        it waits for from here on, so that the supervisor expels the one that hangs in a state transfer and
        not those that wait for it; and without a supervisor `tick` sees that this worker is blocked."""
        # Under the lock, so that an interrupt comes wholly before or wholly after it. One before has ended
        # only the closed context of the last group, and is found by `check`; one after finds the new context.
        with self._lock:
            backup = view.backup and may_back_up
            self._team.install(context, view.shards, view.generation, backup=backup)
            self._member_in = _by_slot(view)
        self.feed(ViewOpened())
        # After ViewOpened: without the machine's view `waits_for` names no member.
        self._phases.enter(COLLECTIVE, in_view_change=True)
        self.check()

    def check(self) -> None:
        """Raise GroupInterruptedError if the training thread has to leave its group at once."""
        reason = self.state.interrupted
        if reason is not None:
            raise GroupInterruptedError(reason)

    def tick(self) -> None:
        """Feed the time without a supervisor, if there is none."""
        lost_at = self._client.lost_at
        if lost_at is None:
            return
        # A worker that has waited in a collective for as long as the supervisor is unreachable is probably
        # partitioned from its peers too, and no supervisor will interrupt it: the machine does.
        blocked = self._clock.now() - self._phases.now[1] if self.waits_for() else None
        restarting = self.folder is not None and liveness_lock.is_leave_requested(self.folder)
        replaced = self.state.invited is None and self._is_folder_taken()
        self.feed(SupervisorAway(lost_at, blocked_since=blocked, restarting=restarting, replaced=replaced))

    def _is_folder_taken(self) -> bool:
        if self.folder is None:
            return False
        try:
            return supervisor_address.read_secret(self.folder) != self.secret
        except PacelineError:
            return True

    def waits_for(self) -> tuple[int, ...]:
        """Return the members that the training thread waits for in a collective."""
        if self.state.view is None or self._phases.name in OUTSIDE_GROUP:
            return ()
        member_in = self._member_in  # read once: the training thread may install another view meanwhile
        return tuple(member_in[slot] for slot in self._team.context.waiting_for() if slot in member_in)


def members_in(view: View, slots: Sequence[int]) -> tuple[int, ...]:
    """Return the members of a view in these slots, by which errors and waits name ranks; a slot that is not
    in the view is left out."""
    member_in = _by_slot(view)
    return tuple(member_in[slot] for slot in slots if slot in member_in)


def _by_slot(view: View) -> dict[int, int]:
    return dict(zip(view.slots, view.members, strict=True))
