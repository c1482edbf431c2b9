"""The supervisor: one thread, one loop. Turns what happens into events and has the machine's actions done.

    members, agents, tools --messages--> events --> machine.step --> actions --> messages, processes, journal

The machine decides; the components of this package know sockets, processes and files. The supervisor can be
killed at any moment: workers train on, and the next supervisor resumes from the snapshot in the run's folder
and with the sockets that the parent kept.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import socket
from collections.abc import Callable
from functools import partial
from typing import Final, final

from paceline.control import channel, supervisor_address
from paceline.control.channel import Channel
from paceline.control.run_status import RunStatus
from paceline.control.supervisor_address import SupervisorAddress
from paceline.control.worker_options import AgentLaunch, WorkerOptions
from paceline.core import fd_messages
from paceline.core.authenticated_listener import AuthenticatedListener, AuthenticatedSocket
from paceline.core.clock import Clock
from paceline.core.errors import PacelineError, WireError
from paceline.core.events import RunFailed, SupervisorStarted
from paceline.core.handshake import CONTROL
from paceline.elastic.machine import machine, machine_events as events
from paceline.elastic.machine.actions import EndJob, RecordFailure, RecordVerdict
from paceline.elastic.machine.job_event_handlers import size_refusal
from paceline.elastic.machine.settings import LOCAL_AGENT
from paceline.elastic.machine.state import JobPhase, JobState
from paceline.elastic.supervisor import parent_messages, supervisor_recovery
from paceline.elastic.supervisor.action_executor import ActionExecutor
from paceline.elastic.supervisor.agents import Agents
from paceline.elastic.supervisor.component_ports import Component, Loop
from paceline.elastic.supervisor.connection import Connection, InvalidPeers
from paceline.elastic.supervisor.control_port import PendingHellos, RefusedPeers, answer_tool, worker_facts
from paceline.elastic.supervisor.journal_writer import JOURNAL_FILE, JournalWriter
from paceline.elastic.supervisor.member_handler import (
    AgentHandler,
    InjectedFaults,
    JoinTerms,
    MemberHandler,
)
from paceline.elastic.supervisor.parent_connection import Parent
from paceline.elastic.supervisor.parent_messages import JobSpec, KeptWorkers
from paceline.elastic.supervisor.process_probe import ProcessProbe
from paceline.elastic.supervisor.supervisor_recovery import SnapshotFile, SupervisorSnapshot
from paceline.elastic.supervisor.verdict_reports import VerdictReports
from paceline.elastic.supervisor.view_messages import ViewMessages
from paceline.elastic.supervisor.worker_record import WorkerRecords
from paceline.elastic.supervisor.workers import Shutdown, WorkerLauncher, Workers, job_outcome
from paceline.engines.local.engine_messages import LaunchOrder
from paceline.engines.local.worker_handle import WorkerProcess

_MAX_TURN_SECONDS: Final = 5.0
_STALL_SECONDS: Final = 1.0
# From about 130 turns a second on, the loop pauses before it polls: one turn handles several messages.
_BUSY_GAP: Final = 0.0075
_PAUSE_SECONDS: Final = 0.01


@final
class Supervisor:
    """Makes the components of a job, in the order in which they need each other, and runs the loop.

    What touches the operating system is an argument, so that a test drives `begin` and `turn` without a
    process: `loop` has the clock and the selector, `listen` opens the control port, rather at the given port
    of the supervisor before this one, and `start_process` starts a worker.
    """

    def __init__(
        self,
        spec: JobSpec,
        payload: int,
        parent: socket.socket,
        kept: KeptWorkers,
        loop: Loop,
        wall_clock: Clock,
        listen: Callable[[int], socket.socket],
        start_process: Callable[[LaunchOrder, int], WorkerProcess] = WorkerProcess.start,
    ) -> None:
        job = spec.job
        self._spec, self._kept, self._loop = spec, kept, loop
        self._snapshot_file = SnapshotFile(job.folder)
        if spec.attempt == 1:
            self._snapshot_file.remove()
        self._snapshot = self._snapshot_file.load() or SupervisorSnapshot()
        self._secret = self._find_secret()
        self._state = JobState(job.settings)
        self._shutdown: Shutdown | None = None
        self._outcome: tuple[int, ...] = ()
        self._got_sigterm = False
        self._last_turn, self._usual_gap = 0.0, 1.0

        clock = loop.clock
        self._records = WorkerRecords()
        self._journal = JournalWriter(job.folder / JOURNAL_FILE, clock, wall_clock, self._records.ack_process)
        self._refused = RefusedPeers(clock)
        order = dataclasses.replace(spec.order, world_size=job.settings.workers)
        options = dataclasses.replace(job.options, ports=job.listening.ports)
        # Without the paths of certificates: those of another host are its own.
        for_agents = dataclasses.replace(options, tls=None)
        launch = AgentLaunch(order.entry, order.preload, order.threads, for_agents)
        self._agents = Agents(loop, self._refused, payload, launch, job.settings.agent_seconds)
        self._verdicts = VerdictReports(clock, self._journal, job.folder, self._agents)
        self._listener = listen(self._snapshot.port)
        self._invalid_peers = InvalidPeers(clock, self._verdicts.warn)
        self._parent = Parent(loop, parent, options.patience)
        self._views = ViewMessages(backup=job.settings.stragglers == "backup", exact=options.exact)
        host, port = self._listener.getsockname()[:2]
        self.address = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host), port
        own = dataclasses.replace(
            options, address=self.address, secret=self._secret.hex(), folder=str(job.folder), listen=host
        )
        self._workers = Workers(
            loop,
            WorkerLauncher(order, payload, own, start_process),
            self._records,
            self._agents,
            self._parent,
            self._journal.flush,
            self._verdicts.report_open,
            self._import_spool,
        )
        self._probe = ProcessProbe(loop, self._records, self._agents, job.folder)
        self._executor = ActionExecutor(
            self._records,
            self._workers,
            self._agents,
            self._journal,
            self._verdicts,
            self._views,
            self._probe,
            self._parent,
        )
        self._faults = InjectedFaults(set(self._snapshot.injected), self._journal, self._records, self._save)
        first = self._snapshot.fingerprint, self._snapshot.model
        self._terms = JoinTerms(job.settings.heartbeat, options.patience, options.exact, *first)
        self._components = self._open(options)

    def _open(self, options: WorkerOptions) -> tuple[Component, ...]:
        """Accept members, agents and tools; return all components that have times to act at."""
        clock = self._loop.clock
        members = MemberHandler(
            self._loop,
            self._records,
            self._workers,
            self._journal,
            self._views,
            self._faults,
            self._refused,
            self._terms,
        )
        agents = AgentHandler(self._agents, self._records, self._workers, self._verdicts, self._probe)
        tools = partial(answer_tool, self._loop, lambda size: size_refusal(self._state, size), self._status)
        self._handshakes = PendingHellos(
            clock, self._refused, members.accept, agents.accept, tools, self._verdicts.warn
        )
        self._unproven = AuthenticatedListener(
            self._listener,
            CONTROL,
            self._secret,
            self._loop.selector,
            self._on_authenticated,
            tls=options.tls.server() if options.tls is not None else None,
            on_problem=self._verdicts.warn,
        )
        return (
            self._unproven,
            self._handshakes,
            self._refused,
            agents,
            self._workers,
            self._journal,
            self._verdicts,
            self._parent,
        )

    def run(self) -> None:
        """Supervise the job until it is over and the parent has its outcome."""
        signal.signal(signal.SIGTERM, self._on_sigterm)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            self.begin()
            while self.turn():
                pass
        finally:
            self.close()

    def begin(self) -> None:
        """Announce the address, complete the journal, and start the machine."""
        spec, folder = self._spec, self._spec.job.folder
        host, port = self.address
        tls = spec.job.options.tls
        files = {} if tls is None else {name: str(path) for name, path in vars(tls).items()}
        supervisor_address.write(
            folder, SupervisorAddress(host=host, port=port, pid=os.getpid(), attempt=spec.attempt, **files)
        )
        # Before anything else is written: it happened before.
        self._import_spool()
        self._journal.write(
            SupervisorStarted(
                time=self._journal.time(), pid=os.getpid(), attempt=spec.attempt, address=f"{host}:{port}"
            )
        )
        self._parent.send("up", host=host, port=port)
        began = events.SupervisorBegan() if spec.attempt == 1 else self._snapshot.began
        if spec.attempt > 1 and self._snapshot_file.trouble:
            began = supervisor_recovery.recover(
                folder / JOURNAL_FILE, self._kept, self._snapshot_file.trouble, self._verdicts.warn
            )
        for _, agent_id in began.members.values():
            if agent_id != LOCAL_AGENT:
                self._agents.expect(agent_id)
        # In this order: the machine knows the members before it learns that some have ended.
        self._loop.emit(began)
        self._workers.adopt(began.members, self._snapshot.processes, self._kept)
        self._decide_all()

    def turn(self) -> bool:
        """Wait for something to happen, and handle it; False once the job is over."""
        loop, shutdown = self._loop, self._shutdown
        before = loop.clock.now()
        due = min(self._machine_due, *(component.due for component in self._components))
        if shutdown is not None:
            due = min(due, shutdown.due)
        timeout = min(max(0.0, due - before), _MAX_TURN_SECONDS)
        if self._is_busy(before):
            loop.clock.sleep(_PAUSE_SECONDS)
        ready = loop.selector.select(timeout)
        now = loop.clock.now()
        if now - before - timeout > _STALL_SECONDS:
            # The supervisor itself did not run: first of all, so that no worker is blamed for the silence.
            loop.emit(events.Tick(stalled=now - before - timeout))
            self._decide_all()
        # Messages before deadlines: a heartbeat that has arrived counts before the worker counts as silent.
        for key, mask in ready:
            key.data(mask, now)
        for component in self._components:
            if now >= component.due:
                component.tick(now)
        if self._got_sigterm:
            self._got_sigterm = False
            loop.emit(events.StopRequested("the supervisor got SIGTERM"))
        if now >= self._machine_due:
            loop.emit(events.Tick())
        self._decide_all()
        if self._shutdown is not None:
            self._shutdown.tick(now)
            if self._shutdown.over:
                self._finish(self._shutdown.end)
                return False
        return True

    def close(self) -> None:
        """Close everything; workers that still run are not touched."""
        self._listener.close()
        self._unproven.close()
        self._handshakes.close()
        self._refused.close()
        # Before the workers' files are closed: they may wait to be sent.
        self._parent.close()
        fd_messages.close_all(self._outcome[:1])
        self._workers.close()
        self._views.release()
        self._journal.close()
        self._loop.selector.close()

    @property
    def _machine_due(self) -> float:
        # During the shutdown the machine decides nothing: its deadline would pass, and the loop would spin.
        deadline = machine.next_deadline(self._state) if self._shutdown is None else None
        return float("inf") if deadline is None else deadline

    def _is_busy(self, now: float) -> bool:
        """Return whether heartbeats come so fast that to handle several at once saves more than it delays.
        Never during a view change: members wait for each other and for the supervisor then."""
        gap, self._last_turn = now - self._last_turn, now
        self._usual_gap += 0.05 * (min(gap, 1.0) - self._usual_gap)
        running = self._state.phase is JobPhase.RUNNING and self._shutdown is None
        return running and self._usual_gap < _BUSY_GAP

    def _decide_all(self) -> None:
        reason, self._loop.kill_reason = self._loop.kill_reason, ""
        if reason:
            self._end(EndJob(ok=False, reason=reason, stopped=reason), at_once=True)
        while self._loop.events:
            event = self._loop.events.popleft()
            if self._shutdown is None:
                self._decide(event)

    def _decide(self, event: events.MachineEvent) -> None:
        committed = self._state.committed
        try:
            self._state, actions, _ = machine.step(self._state, event, self._loop.clock.now())
        except Exception as error:
            if not isinstance(event, events.FromMember):
                raise
            # The machine works on a copy: its state is as it was before this event.
            self._reject(event.member, f"{event.message.kind}: {type(error).__name__}: {error}")
            return
        judged = {action.member for action in actions if isinstance(action, RecordVerdict)}
        # The order makes a kill of this supervisor at any line harmless. Failures are written before the
        # snapshot: the next supervisor would not notice them again. The snapshot is written before any other
        # action: a generation or a member number that was sent must never be used twice.
        for action in actions:
            if isinstance(action, RecordFailure):
                self._executor.execute(action, judged)
        if actions or not events.is_routine(event) or self._state.committed is not committed:
            self._save()
        for action in actions:
            if isinstance(action, EndJob):
                self._end(action)
            elif not isinstance(action, RecordFailure):
                self._executor.execute(action, judged)

    def _end(self, end: EndJob, *, at_once: bool = False) -> None:
        if not at_once:
            self._verdicts.close()
        # While the members that sent it are there: once they are gone, it cannot be sent again.
        self._journal.flush(over=True)
        self._shutdown = Shutdown(end, self._records, self._workers, self._loop.clock, at_once=at_once)

    def _finish(self, end: EndJob) -> None:
        self._agents.close(end.reason, unfinished=end.stopped is not None or not end.ok)
        if not end.ok:
            self._journal.write(
                RunFailed(time=self._journal.time(), step=self._journal.journaled, reason=end.reason)
            )
        self._journal.flush(over=True)
        # The machine's view: it outlives a supervisor, and not every member returns all of the result.
        view = self._state.view.members if self._state.view is not None else ()
        outcome = job_outcome(end, view, self._records, self._workers.exits, self._verdicts.last_text)
        self._snapshot_file.remove()
        supervisor_address.remove(self._spec.job.folder)
        self._outcome = parent_messages.pack_outcome(outcome)
        self._parent.send("ended", self._outcome)

    def _reject(self, member: int, what: str) -> None:
        """Drop the connection of a member whose message the machine cannot handle."""
        connection = self._records.find(member).connection
        if connection is None:
            self._verdicts.warn(WireError(f"what worker {member} sent could not be handled: {what}"))
            return
        connection.reject(what)
        connection.check()

    def _save(self) -> None:
        """Write the snapshot for the next supervisor."""
        self._snapshot_file.save(
            SupervisorSnapshot(
                began=machine.snapshot(self._state),
                port=self._unproven.address[1],
                fingerprint=self._terms.fingerprint,
                model=self._terms.model,
                processes={n: (r.pid, r.hostname) for n, r in self._records.live.items() if r.pid},
                injected=self._faults.known,
            )
        )

    def _import_spool(self) -> None:
        self._journal.import_spool(self._spec.job.folder, self._secret)

    def _on_authenticated(self, context: bytes, proven: AuthenticatedSocket) -> None:
        """Begin the handshake of a peer that has proved the secret."""
        channel.tune(proven.sock)
        self.connect(Channel(proven.sock, proven.session), proven.host)

    def connect(self, opened: Channel, host: str) -> None:
        """Wait for the first message of a peer at `host`: it decides which component handles the peer."""
        self._handshakes.add(
            Connection(opened, host, self._loop.selector, self._handshakes, self._invalid_peers.add)
        )

    def _status(self) -> RunStatus:
        records, now = self._records.live.values(), self._loop.clock.now()
        return RunStatus(
            phase=self._state.phase.value,
            generation=self._state.generation,
            step=self._journal.journaled,
            attempt=self._spec.attempt,
            refused=self._unproven.refused,
            dropped=self._invalid_peers.dropped,
            workers=tuple(worker_facts(records, self._views.latest, now)),
        )

    def _on_sigterm(self, *_: object) -> None:
        self._got_sigterm = True

    def _find_secret(self) -> bytes:
        folder = self._spec.job.folder
        if self._spec.attempt > 1:
            with contextlib.suppress(PacelineError):
                return supervisor_address.read_secret(folder)
        secret = self._spec.job.secret or supervisor_address.new_secret()
        supervisor_address.write_secret(folder, secret)
        return secret
