"""Handle messages of members and agents: their identity, progress and failures, as events for the machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, final

from paceline.control import messages
from paceline.core.errors import WireError
from paceline.core.events import Note, WorkerStarted
from paceline.elastic.machine.machine_events import FromMember
from paceline.elastic.machine.settings import LOCAL_AGENT
from paceline.elastic.supervisor.agents import Agents
from paceline.elastic.supervisor.component_ports import EventLoop, WorkerConnections
from paceline.elastic.supervisor.connection import Connection
from paceline.elastic.supervisor.control_port import RefusedPeers
from paceline.elastic.supervisor.journal_writer import JournalWriter
from paceline.elastic.supervisor.process_probe import ProcessProbe
from paceline.elastic.supervisor.verdict_reports import VerdictReports
from paceline.elastic.supervisor.view_messages import ViewMessages
from paceline.elastic.supervisor.worker_record import WorkerRecord, WorkerRecords

# A control client that drops old messages for lack of room leaves a gap in their numbers, of at most this.
_MAX_AHEAD: Final = 1 << 20

FaultKey = tuple[int, int, int, int]
"""Rank, place in the chaos, member, and how often the fault had been injected in that member before."""


@final
@dataclass(frozen=True)
class InjectedFaults:
    """Faults already injected in this run, so that a replacement worker does not inject them again.

    A worker announces a fault before it acts, and waits until the announcement is acknowledged; all of its
    rank are sent to each worker when it joins, and `save` writes them down for the next supervisor.
    """

    faults: set[FaultKey]
    journal: JournalWriter
    records: WorkerRecords
    save: Callable[[], None]

    @property
    def known(self) -> tuple[FaultKey, ...]:
        return tuple(sorted(self.faults))

    def of(self, slot: int) -> tuple[int, ...]:
        """Return the places in the chaos of a rank's faults, each as often as it was injected."""
        return tuple(sorted(index for rank, index, *_ in self.faults if rank == slot))

    def announced(self, record: WorkerRecord, request: messages.InjectionRequest) -> None:
        """Write a fault down and acknowledge it: then it acts."""
        key = (record.slot, request.index, record.member, request.before)
        # Announced again to a supervisor that took over, or because the acknowledgement was lost.
        if key not in self.faults:
            self.faults.add(key)
            self.save()
            self.journal.add_lines((request.line,))
        # An acknowledgement covers all messages before it, receipts too.
        self.journal.flush((record.slot, record.pid))
        if self.journal.has_written_all_of((record.slot, record.pid)):
            self.records.ack(record)


@final
@dataclass
class JoinTerms:
    """The conditions for a worker to join, and the settings in the reply that accepts it.

    heartbeat, patience   seconds between heartbeats, and the job's patience
    exact                 a worker that would not compute the same bits as the others is refused
    fingerprint, model    of the first worker that joined; None: none has
    """

    heartbeat: float
    patience: float
    exact: bool
    fingerprint: dict[str, str] | None = None
    model: str = ""

    def difference(self, hello: messages.MemberHello) -> str:
        """Describe in exact mode what differs from the first worker; empty: nothing."""
        if self.fingerprint is None:
            self.fingerprint, self.model = dict(hello.fingerprint), hello.model
            return ""
        if not self.exact:
            return ""
        ours, theirs = self.fingerprint, hello.fingerprint
        differences = [
            f"{name} is {theirs.get(name, 'missing')!r} instead of {ours.get(name, 'missing')!r}"
            for name in sorted(ours.keys() | theirs.keys())
            if theirs.get(name) != ours.get(name)
        ]
        if hello.model != self.model:
            differences.append("its model has other initial weights or names")
        if not differences:
            return ""
        who = f"rank {hello.slot} on {hello.hostname}"
        return f"{who} would not compute the same bits as the others: {'; '.join(differences)}"


@final
@dataclass(frozen=True)
class MemberHandler:
    """Handles the messages of members."""

    loop: EventLoop
    records: WorkerRecords
    workers: WorkerConnections
    journal: JournalWriter
    views: ViewMessages
    faults: InjectedFaults
    refused: RefusedPeers
    terms: JoinTerms

    def accept(self, connection: Connection, hello: messages.MemberHello) -> None:
        """Take a worker's connection over from its handshake, or refuse it."""
        # A member number is given once, so that a worker that was given up cannot come back as another: an
        # expelled one that reconnects (it was only slow) must not take part in a view that left it out.
        record = self.records.live.get(hello.member)
        if record is None or record.expelled or record.slot != hello.slot:
            what = f"worker {hello.member} of rank {hello.slot}"
            self._refuse(connection, f"{what} is not expected, or no longer")
            return
        process = record.process
        if process is not None and process.pid not in (0, hello.pid):
            self._refuse(connection, f"worker {hello.member} is process {process.pid}, not {hello.pid}")
            return
        difference = self.terms.difference(hello)
        if difference:
            self._refuse(connection, difference, code=1)
            self.journal.write(Note(time=self.journal.time(), text=difference, rank=hello.slot))
            if record.agent_id != LOCAL_AGENT:
                self.workers.remove_agent(record.agent_id, difference, refuse=True)
            return
        self._join(connection, record, hello)

    def _refuse(self, connection: Connection, reason: str, code: int = 0) -> None:
        self.refused.refuse(connection, messages.Dismissed(reason=reason, code=code))

    def _join(self, connection: Connection, record: WorkerRecord, hello: messages.MemberHello) -> None:
        terms, is_new = self.terms, record.hello is None and hello.generation == 0
        if record.connection is not None:
            # The worker reconnected before the end of its old connection was seen.
            record.connection.close()
        record.hello, record.connection, record.progress = hello, connection, hello.progress
        record.disconnected_at = None
        connection.owner = _MemberConnection(self, record)
        self.workers.joined(record)
        if is_new:
            self.journal.write(
                WorkerStarted(time=self.journal.time(), rank=hello.slot, pid=hello.pid, host=hello.hostname)
            )
        connection.send(
            messages.MemberAccepted(
                heartbeat=terms.heartbeat, patience=terms.patience, injected=self.faults.of(record.slot)
            )
        )
        # The last messages to this worker may have been lost with its connection. The machine asks members of
        # a view again; a worker that is in no view yet looks to the machine like one that has just started.
        unconfirmed = (record.stop, record.view, record.prepare) if hello.generation == 0 else (record.stop,)
        for message in (*unconfirmed, record.dismissal):
            if message is not None:
                connection.send(message)
        self.loop.emit(FromMember(hello.member, hello))

    def receive(self, record: WorkerRecord, number: int, message: messages.ControlMessage) -> None:
        """Handle one message. Those that came before a reconnect, and those of expelled workers, are left
        out."""
        if record.expelled:
            return
        if number:
            # After a reconnect a worker sends again all that was not acknowledged. The numbers make that
            # harmless: what was handled on the old connection is dropped here, once for all kinds.
            if number <= record.received:
                return
            if number > record.received + _MAX_AHEAD:
                # Accepted, it would make all that the worker sends next look like duplicates.
                raise WireError(f"message {number} after message {record.received}")
            record.received = number
        if isinstance(message, messages.Heartbeat):
            self._heartbeat(record, message)
        else:
            self._handle(record, message)

    def _heartbeat(self, record: WorkerRecord, heartbeat: messages.Heartbeat) -> None:
        record.heartbeat, record.heartbeat_at = heartbeat, self.loop.clock.now()
        record.progress = heartbeat.progress
        # With a heartbeat, not with each message; and only what is in the file: a supervisor that takes over
        # learns the rest from the worker, which keeps what was not acknowledged.
        if record.received > record.acked and self.journal.has_written_all_of((record.slot, record.pid)):
            self.records.ack(record)
        self.loop.emit(FromMember(record.member, heartbeat))

    def _handle(self, record: WorkerRecord, message: messages.ControlMessage) -> None:
        # Bounds what the message may claim: a step far ahead of the member's own would spoil the journal.
        known = record.progress[0] if record.progress is not None else 0
        match message:
            case messages.JournalLines():
                self.journal.add_lines(message.lines, (record.slot, record.pid), known)
                return
            case messages.InjectionRequest():
                self.faults.announced(record, message)
                return
            case messages.ShardComputed():
                self._forward(record, message)
                return
            case messages.StepReceipt():
                self.journal.add_receipt(record.slot, record.pid, message, known)
                if not message.hashes:
                    return  # the machine decides by votes; most receipts hold none
            case messages.MemberReport():
                record.progress = message.progress
            case messages.ViewInstalled():
                if message.progress is not None:
                    record.progress = message.progress
                self.views.installed(record.member, message.generation)
            case messages.WorkerException():
                record.exception = message
            case messages.MemberFinished():
                record.finished, record.progress = True, message.progress
            case messages.DialResult() | messages.CollectiveFailed() | messages.LeaveRequest():
                pass
            case _:
                raise WireError(f"a {message.kind} message is not a worker's to send")
        self.loop.emit(FromMember(record.member, message))

    def _forward(self, record: WorkerRecord, computed: messages.ShardComputed) -> None:
        """Tell the other members of the view that a shard of this step is computed: none has to do it."""
        view = self.views.latest
        if view is None or not self.views.claim(computed.generation, computed.step, computed.shard):
            return
        self.records.send((member for member in view.members if member != record.member), computed)


@final
@dataclass(frozen=True)
class _MemberConnection:
    """Owns the connection of one member. One that the worker has replaced by another is ignored."""

    handler: MemberHandler
    record: WorkerRecord

    def receive(self, connection: Connection, number: int, message: messages.ControlMessage) -> None:
        if self.record.connection is connection:
            self.handler.receive(self.record, number, message)

    def disconnected(self, connection: Connection, reason: str) -> None:
        if self.record.connection is connection:
            self.handler.workers.disconnected(self.record, reason)


@final
@dataclass(frozen=True)
class AgentHandler:
    """Owns the connections of agents."""

    agents: Agents
    records: WorkerRecords
    workers: WorkerConnections
    verdicts: VerdictReports
    probe: ProcessProbe

    @property
    def due(self) -> float:
        return self.agents.due

    def tick(self, now: float) -> None:
        """Give up agents that stayed away."""
        for agent_id, hostname in self.agents.overdue(now):
            self.workers.remove_agent(agent_id, f"the agent on {hostname} is gone")

    def accept(self, connection: Connection, hello: messages.AgentHello) -> None:
        """Take a connection over from its handshake."""
        connection.owner = self
        self.agents.join(connection, hello)

    def receive(self, connection: Connection, number: int, message: messages.ControlMessage) -> None:
        """Handle one message. An agent cannot speak for the workers of another."""
        agent_id = self.agents.number_of(connection)
        match message:
            case (
                messages.WorkerExited()
                | messages.WorkerFileChunk()
                | messages.StackReply()
                | messages.AgentHello(workers=0)
            ):
                if agent_id is not None:  # else it was given up in the meantime
                    self._handle(agent_id, message)
            case _:
                raise WireError(f"a {message.kind} message is not an agent's to send")

    def disconnected(self, connection: Connection, reason: str) -> None:
        agent_id = self.agents.number_of(connection)
        if agent_id is not None:
            self.agents.disconnected(agent_id)

    def _handle(self, agent_id: int, message: messages.ControlMessage) -> None:
        match message:
            case messages.WorkerExited():
                self.workers.remote_exit(agent_id, message)
            case messages.WorkerFileChunk():
                self.workers.remote_file(agent_id, message)
            case messages.StackReply() if self.records.find(message.member).agent_id != agent_id:
                pass  # of a worker of another host
            case messages.StackReply(stopped=None):
                self.verdicts.stack_found(message.member, message.state, message.frames)
            case messages.StackReply():
                self.probe.reply(message)
            case _:
                self.workers.remove_agent(agent_id, "it was asked to leave")
