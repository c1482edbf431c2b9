"""A worker as a member of a supervised run: the way into the next view, and out of the run.

The member machine (control/member_machine.py) decides; `MachineShell` runs it. Here is how the training
thread carries its actions out, and how the control thread answers (what it says: member_messages.py).
`elastic/` decides which workers are members.
"""

from __future__ import annotations

import logging
import socket
from typing import Literal, final

from paceline.comm.context import DistributedContext
from paceline.comm.cost import LinkCosts
from paceline.comm.rendezvous.view_group import ViewGroup, ViewPeer, open_view
from paceline.control import member_shell_rules, spool
from paceline.control.control_client import ControlClient
from paceline.control.member_state import (
    CodeRaised,
    Exit,
    GroupLeft,
    KeepState,
    LeaveRequested,
    OpenView,
    ReceiveState,
    Restore,
    RunFinished,
    SendReport,
    SendState,
    StateReady,
    Train,
)
from paceline.control.messages import ControlMessage, DialRequest, Heartbeat, MemberHello, ShardComputed, View
from paceline.control.reachability import ReachabilityProber
from paceline.control.worker_options import WorkerOptions
from paceline.core.errors import GROUP_FAILURES, GroupInterruptedError, PacelineError, RendezvousError
from paceline.core.process_state import start_time
from paceline.core.time_limits import COLLECTIVE_SECONDS
from paceline.train import phases as phase_names
from paceline.train.loop.run import Run
from paceline.train.member.machine_shell import MachineShell
from paceline.train.member.member_messages import MemberMessages, collective_failed
from paceline.train.member.outbox import Outbox, worth_keeping
from paceline.train.member.step_reports import StepReports
from paceline.train.state import resume
from paceline.train.stop_signals import StopRequest

_log = logging.getLogger(__name__)


class ReleasedError(Exception):
    """This worker is no longer a member, and ends. `code` is the exit code of its process."""

    def __init__(self, reason: str, code: int = 0) -> None:
        super().__init__(reason)
        self.code = code


class OrphanedError(Exception):
    """No supervisor comes back for this worker."""


class StartOverError(Exception):
    """The state has to be given up, and there is no checkpoint: only a new process has the initial one."""


@final
class Membership:
    """The membership of one worker. `leave` holds the signal that asked it to go."""

    def __init__(
        self,
        options: WorkerOptions,
        run: Run,
        shell: MachineShell,
        client: ControlClient,
        outbox: Outbox,
        reports: StepReports,
        leave: StopRequest,
        listener: socket.socket,
    ) -> None:
        self._options, self._shell, self._client = options, shell, client
        self._outbox, self._reports, self._leave = outbox, reports, leave
        self._listener = listener
        self._state, self._parts, self._phases = run.state, run.parts, run.parts.phases
        self._messages = MemberMessages(options, run, shell, reports, listener.getsockname())
        self._prober = ReachabilityProber(options.member, options.slot, shell.secret, listener, client.send)

    def close(self) -> None:
        """Stop answering peers that probe this worker."""
        self._prober.close()

    def close_connection(self) -> None:
        """Send what waits, and end the control connection."""
        self._client.close()

    # the control thread: a ControlHandler

    def hello(self) -> MemberHello:
        return self._messages.hello()

    def heartbeat(self) -> Heartbeat:
        if self._leave.reason is not None:
            # Not in the signal's handler: it may have interrupted this process with the machine's lock held.
            self._shell.feed(LeaveRequested(self._leave.reason))
        self._outbox.flush()
        return self._messages.heartbeat()

    def receive(self, message: ControlMessage) -> None:
        if isinstance(message, DialRequest):
            self._prober.dial(message.peers)
        elif isinstance(message, ShardComputed):
            self._reports.claims.add(message.generation, message.step, message.shard)
        else:
            self._shell.feed(message)

    def supervisor_away(self) -> None:
        self._shell.tick()

    # the training thread

    def join(self) -> None:
        """Return in the next view, with the state of its most advanced member.

        For a worker that is in no view: a new one, and one that has finished, or failed, and is needed again.
        """
        self._leave_group(None)
        try:
            # Without GroupLeft: the machine is in no view, and has nothing to report to the supervisor.
            self._enter_view()
        except (*GROUP_FAILURES, RendezvousError) as error:
            self.rejoin(error)

    def rejoin(self, error: BaseException | None) -> None:
        """Leave the view, which failed with `error` or has agreed on a pause, and return in the next one."""
        while True:
            # First: this releases peers that wait for this worker and cannot report before. Only then is the
            # machine fed: its report may be the last that the supervisor needs for the next view.
            self._leave_group(error)
            # `invited`, not `view`: the failed one may never have been opened, and its number is what the
            # supervisor has to recognise.
            view = self._shell.state.invited
            failure = None if error is None or view is None else collective_failed(view, error)
            self._shell.feed(GroupLeft(failure))
            try:
                self._enter_view()
                return
            except (*GROUP_FAILURES, RendezvousError) as again:
                # Also where the view could not be opened: the process that made its memory may be gone. Each
                # attempt is another view, with a new generation, so this ends when the supervisor
                # installs a view whose members are all alive, or lets this worker go.
                error = again

    def _leave_group(self, error: BaseException | None) -> None:
        self._phases.enter(phase_names.WAIT)
        # Before the group is left: numbers of its last steps may be on their way from a device, and the group
        # decides which member writes them to the journal.
        self._parts.recorder.flush()
        # With an error: ranks that wait for this one in a collective of the old group get it at once.
        self._parts.team.context.close(error=error or GroupInterruptedError("the group changes"))
        # Before the report, on the same connection: the supervisor then knows the receipts of the last steps
        # when it chooses the member whose state counts.
        self._outbox.flush()

    def _enter_view(self) -> None:
        """Carry out the machine's actions until this worker trains.

        Every group failure on the way is raised, wherever it comes from: the machine is fed GroupLeft, and
        begins again. An interrupt appears here as such a failure: of the opening (`cancelled`), of the check
        after it, or of the collectives that move the state.
        """
        while True:
            match self._shell.next_action():
                case SendReport(generation):
                    self._client.send(self._messages.report(generation))
                case OpenView(view):
                    self._open(view)
                case Train(ends, journal_after):
                    self._reports.start_clock()
                    if ends:
                        self._state.save_and_end(ends)
                    if journal_after >= 0:
                        for event in self._parts.recorder.events_after(journal_after):
                            self._outbox.tell(event)
                    return
                case Exit(reason, code, orphaned):
                    raise OrphanedError(reason) if orphaned else ReleasedError(reason, code)
                case Restore() as action:
                    # A phase of its own, with the limit of a slow one: reading may take longer than a step.
                    self._phases.enter(phase_names.CHECKPOINT, in_view_change=True)
                    self._restore(action)
                    self._phases.enter(phase_names.COLLECTIVE, in_view_change=True)
                    self._shell.feed(StateReady(self._state.progress))
                case SendState() | ReceiveState() | KeepState():
                    # One collective call for all three: residuals are shared by members that need no state,
                    # too. Only after it is StateReady fed: a member that reported to be in the view before
                    # could be chosen as the source of the next one without having the state.
                    opened = self._shell.state.invited
                    assert opened is not None
                    self._state.synchronize(opened.source, opened.stale_indexes)
                    self._shell.feed(StateReady(self._state.progress))

    def _open(self, view: View) -> None:
        rows = zip(view.slots, view.pids, view.hosts, view.hostnames, view.endpoints, strict=True)
        peers = [ViewPeer(*row) for row in rows]
        # The prober and the view share one listener.
        with self._prober.paused():
            transport, links = open_view(
                ViewGroup(view.generation, self._shell.state.index, peers, self._shell.secret, view.segment),
                self._listener,
                links=LinkCosts.from_plain(self._options.links),
                cancelled=self._shell.cancelled,
                ports=self._options.ports,
            )
        timeout = self._parts.config.timeout or COLLECTIVE_SECONDS
        context = DistributedContext.from_transport(transport, timeout=timeout, links=links)
        # No shard of others is computed where a shard has private state, nor where only the first rank can
        # read its samples.
        may_back_up = self._parts.config.compression is None and self._parts.samples is not None
        self._shell.install(context, view, may_back_up=may_back_up)
        # After `install`: partial sums move to the new group's memory, and the checkpointer's first call in
        # the new group is made by all members at the same place.
        self._state.rebind()

    def _restore(self, action: Restore) -> None:
        self._parts.transaction.abandon()
        if action.before >= 0 and self._parts.checkpointer is not None:
            self._parts.checkpointer.discard_after(action.before)
        which = self._parts.config.resume if action.first else "auto"
        resume.resume(self._state, which, action.before, fresh=action.fresh)
        resume.note_start(self._state, disowned=action.before >= 0)
        if member_shell_rules.must_start_over(action, has_checkpoint=self._state.parent is not None):
            raise StartOverError("there is no checkpoint to go back to")

    def finish(self, digest: str) -> Literal["dismissed", "orphaned", "needed"]:
        """Stay until every member is finished. "orphaned": the supervisor stays away. "needed": another
        member needs the state of this one, which has to `join` the next view."""
        self._outbox.flush()
        self._shell.feed(RunFinished(self._messages.finished(digest)))
        self._phases.enter(phase_names.WAIT)
        action = self._shell.next_action()
        if isinstance(action, Exit):
            return "orphaned" if action.orphaned else "dismissed"
        assert isinstance(action, SendReport)
        self._client.send(self._messages.report(action.generation))
        return "needed"

    # what this worker holds

    def failed(self, error: BaseException, traceback_text: str, *, phase: str, holds: bool) -> None:
        """Report that this worker's code raised in `phase`. With `holds` the worker has to `join` again."""
        self._outbox.flush()
        exception = self._messages.exception(error, traceback_text, phase=phase, holds=holds)
        self._shell.feed(CodeRaised(exception))

    def spool_undelivered(self) -> None:
        """Leave what no supervisor has acknowledged in the run's folder, for the next start of the run.

        Without a folder that this host sees, it is lost: other members have the lines of the steps, and the
        audit counts this worker's shards as confirmed by commit.
        """
        # First: a supervisor that comes back now would get half of it.
        self._client.close()
        # The member whose part it was to send the lines of the steps may be gone.
        for event in self._parts.recorder.events_after(0) if self.is_first_alive else ():
            self._outbox.tell(event)
        self._outbox.flush()
        options, folder = self._options, self._shell.folder
        if folder is None:
            return
        try:
            kept = worth_keeping(self._client.undelivered())
            spool.write(folder, self._shell.secret, options.member, options.slot, kept)
        except PacelineError as error:
            # The state is saved, which counts more.
            _log.error("undelivered messages are lost: %s", error)

    @property
    def saving_after_error(self) -> Literal["none", "alone", "in view"]:
        """How this member, whose code has raised, saves its state."""
        return member_shell_rules.saving_after_error(self._shell.state, self._state.worth_saving)

    def why_unsaved(self) -> str | None:
        """Return why this worker, which no supervisor comes back for, does not save its state; None: it
        does."""
        step, checkpointer = self._state.position.step, self._parts.checkpointer
        residuals = self._parts.transaction.residuals
        residuals.settle(step)
        is_saved = checkpointer is not None and checkpointer.has(step)
        return member_shell_rules.why_unsaved(
            self._shell.state, self._lives, covers_all=residuals.covers_all, is_saved=is_saved
        )

    @property
    def is_first_alive(self) -> bool:
        return member_shell_rules.is_first_alive(self._shell.state, self._lives)

    def _lives(self, index: int) -> bool:
        view = self._shell.state.view
        assert view is not None
        return view.hosts[index] != self._messages.host or bool(start_time(view.pids[index]))
