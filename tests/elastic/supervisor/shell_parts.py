"""Parts of a supervisor without any process: a virtual clock, socket pairs, and what travels on them."""

from __future__ import annotations

import os
import selectors
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.virtual_clock import VirtualClock

from paceline.control.channel import Channel
from paceline.control.messages import AgentHello, ControlMessage, Heartbeat, MemberHello, StepReceipt
from paceline.control.worker_options import AgentLaunch, WorkerOptions
from paceline.core import events, fd_messages, journal, session_auth
from paceline.core.clock import Clock
from paceline.core.events import RunResumed, StepCommitted
from paceline.elastic.machine.machine_events import MachineEvent
from paceline.elastic.supervisor import parent_messages
from paceline.elastic.supervisor.action_executor import ActionExecutor
from paceline.elastic.supervisor.agents import Agents
from paceline.elastic.supervisor.component_ports import Component, Loop
from paceline.elastic.supervisor.connection import Connection, ConnectionOwner
from paceline.elastic.supervisor.control_port import RefusedPeers
from paceline.elastic.supervisor.journal_writer import JOURNAL_FILE, JournalWriter
from paceline.elastic.supervisor.member_handler import (
    AgentHandler,
    InjectedFaults,
    JoinTerms,
    MemberHandler,
)
from paceline.elastic.supervisor.parent_connection import Parent
from paceline.elastic.supervisor.process_probe import ProcessProbe
from paceline.elastic.supervisor.verdict_reports import VerdictReports
from paceline.elastic.supervisor.view_messages import ViewMessages
from paceline.elastic.supervisor.worker_record import WorkerRecord, WorkerRecords
from paceline.elastic.supervisor.workers import WorkerLauncher, Workers
from paceline.engines.local import engine_messages, memfd_pickle
from paceline.engines.local.engine_messages import EngineMessage, LaunchOrder
from paceline.engines.local.worker_handle import WorkerProcess

SECRET = b"s" * 32


def step(number: int) -> str:
    """The journal line of a step."""
    return events.to_json(StepCommitted(time=float(number), step=number, epoch=0, loss=0.5, samples=8))


def resumed(number: int) -> str:
    return events.to_json(RunResumed(time=1.0, version=1, step=number, epoch=0, workers=2))


def receipt(first: int, last: int, *, generation: int = 1, shards: tuple[int, ...] = (0, 1)) -> StepReceipt:
    return StepReceipt(generation=generation, first=first, last=last, shards=shards)


def written(path: Path, kind: type) -> list[Any]:
    """The events of a kind in a journal."""
    return [event for event in journal.read(path).events if isinstance(event, kind)]


def new_writer(
    path: Path, clock: Clock | None = None, flushed: list[tuple[int, int]] | None = None
) -> JournalWriter:
    """A journal writer at 1e9 seconds since 1970; `flushed` gets the processes that can be acknowledged."""
    on_flush = list[tuple[int, int]]().append if flushed is None else flushed.append
    return JournalWriter(path, clock or VirtualClock(), VirtualClock(1e9), on_flush)


class Peer:
    """The other end of a connection: a worker, an agent or a tool, as far as it speaks."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel

    def send(self, message: ControlMessage) -> None:
        self.channel.send(message)

    def received(self) -> list[ControlMessage]:
        """All messages that have come since the last call."""
        return [message for _, message in self.channel.receive()]

    @property
    def is_cut(self) -> bool:
        """Whether the supervisor closed the connection, after what it sent."""
        while self.channel.receive():
            pass
        return bool(self.channel.closed)


class Parts:
    """A loop, and peers that are connected to it. `emitted` are the events since the last look."""

    def __init__(self) -> None:
        self.clock = VirtualClock(1000.0)
        self.loop = Loop(self.clock, selectors.DefaultSelector())
        self._peers: list[Peer] = []
        self._sockets: list[socket.socket] = []
        self.processes: list[WorkerProcess] = []

    def connect(
        self, owner: ConnectionOwner, host: str = "127.0.0.1", **more: Any
    ) -> tuple[Connection, Peer]:
        """A connection that is registered with the loop, and its other end."""
        ours, theirs = socket.socketpair()
        number = str(len(self._peers)).encode()
        keys = [session_auth.session_keys(SECRET, number, accepts=accepts) for accepts in (True, False)]
        peer = Peer(Channel(theirs, keys[1]))
        self._peers.append(peer)
        return Connection(Channel(ours, keys[0]), host, self.loop.selector, owner, **more), peer

    def process(self, pid: int = 0) -> tuple[WorkerProcess, socket.socket]:
        """A worker process as its supervisor sees it, and the socket on which its fork server reports."""
        ours, theirs = fd_messages.pair()
        process = WorkerProcess(ours)
        self._sockets.append(theirs)
        self.processes.append(process)
        if pid:
            process.set_pid(pid)
        return process, theirs

    def deliver(self) -> None:
        """Handle all that has arrived, as the loop does."""
        while ready := self.loop.selector.select(0):
            for key, mask in ready:
                key.data(mask, self.clock.now())

    def emitted(self) -> list[MachineEvent]:
        found = list(self.loop.events)
        self.loop.events.clear()
        return found

    def close(self) -> None:
        for peer in self._peers:
            peer.channel.close()
        for process in self.processes:
            process.close()
        for sock in self._sockets:
            sock.close()
        for key in list((self.loop.selector.get_map() or {}).values()):
            if isinstance(key.fileobj, Channel):
                key.fileobj.close()
        self.loop.selector.close()


@pytest.fixture
def signals(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Signals that were sent to workers, which have the pid of the test and must not get them."""
    sent: list[int] = []
    monkeypatch.setattr(WorkerProcess, "signal", lambda process, number: sent.append(number))
    return sent


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> list[WorkerProcess]:
    """Processes that were killed."""
    found: list[WorkerProcess] = []
    monkeypatch.setattr(WorkerProcess, "kill", lambda process: found.append(process))
    return found


@pytest.fixture
def parts(signals: list[int]) -> Iterator[Parts]:
    made = Parts()
    yield made
    made.close()


class Shell(Parts):
    """The components around the workers' processes, wired as the supervisor wires them; `started` are the
    launched orders with the socket on which the fork server of each reports."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.journal_file = folder / JOURNAL_FILE
        self.started: list[tuple[LaunchOrder, socket.socket]] = []
        self.spool_imports = 0
        self.payload = memfd_pickle.dump("payload")
        parent, self.parent_end = fd_messages.pair()
        self._sockets.append(self.parent_end)
        self.parent_end.setblocking(False)
        self.records = WorkerRecords()
        self.journal = new_writer(self.journal_file, self.clock)
        self.refused = RefusedPeers(self.clock)
        self.agents = Agents(self.loop, self.refused, self.payload, AgentLaunch("tests:none"), 10.0)
        self.verdicts = VerdictReports(self.clock, self.journal, folder, self.agents)
        self.parent = Parent(self.loop, parent, 20.0)
        launcher = WorkerLauncher(ORDER, self.payload, WorkerOptions(chaos="none"), self._launch)
        self.workers = Workers(
            self.loop,
            launcher,
            self.records,
            self.agents,
            self.parent,
            self.journal.flush,
            self.verdicts.report_open,
            self._import_spool,
        )
        self.views = ViewMessages(backup=False)
        self.probe = ProcessProbe(self.loop, self.records, self.agents, folder)
        self.agent_handler = AgentHandler(self.agents, self.records, self.workers, self.verdicts, self.probe)
        self.executor = ActionExecutor(
            self.records,
            self.workers,
            self.agents,
            self.journal,
            self.verdicts,
            self.views,
            self.probe,
            self.parent,
        )
        self.faults = InjectedFaults(set(), self.journal, self.records, lambda: None)
        self.members = MemberHandler(
            self.loop,
            self.records,
            self.workers,
            self.journal,
            self.views,
            self.faults,
            self.refused,
            JoinTerms(0.25, 20.0, exact=True),
        )

    def _launch(self, order: LaunchOrder, payload: int) -> WorkerProcess:
        process, theirs = self.process()
        self.started.append((order, theirs))
        return process

    def _import_spool(self) -> None:
        self.spool_imports += 1

    def start(self, member: int, slot: int) -> WorkerRecord:
        """A worker of this machine, whose process is this test's."""
        self.workers.start(member, slot, 0)
        engine_messages.send(self.started[-1][1], EngineMessage(engine_messages.STARTED, pid=os.getpid()))
        self.deliver()
        return self.records.live[member]

    def join(self, member: int, slot: int, **more: Any) -> Peer:
        """A worker's connection, after its hello."""
        connection, peer = self.connect(self.refused)
        self.members.accept(connection, hello(member, slot, **more))
        return peer

    def agent(self, workers: int = 2, number: int = 0) -> Peer:
        """An agent's connection, after its hello."""
        connection, peer = self.connect(self.refused, host="10.0.0.9")
        greeting = AgentHello(workers=workers, host="g", hostname="far", pid=9, agent=number)
        self.agent_handler.accept(connection, greeting)
        return peer

    def to_parent(self) -> list[tuple[str, dict[str, Any]]]:
        """What the parent got since; its descriptors are closed."""
        found: list[tuple[str, dict[str, Any]]] = []
        while True:
            try:
                message = parent_messages.receive(self.parent_end)
            except BlockingIOError:
                return found
            if message is None:
                return found
            fd_messages.close_all(message[2])
            found.append(message[:2])

    def pass_time(self, seconds: float) -> None:
        """Let time pass, and have all components act at their times."""
        until = self.clock.now() + seconds
        components: list[Component] = [
            self.refused,
            self.agent_handler,
            self.workers,
            self.journal,
            self.verdicts,
            self.parent,
        ]
        while True:
            due = min(until, *(component.due for component in components))
            self.clock.advance(max(0.0, due - self.clock.now()))
            self.deliver()
            for component in components:
                if component.due <= self.clock.now():
                    component.tick(self.clock.now())
            if due >= until:
                return

    def close(self) -> None:
        self.workers.close()
        self.views.release()
        self.journal.close()
        self.parent.close()
        os.close(self.payload)
        super().close()


ORDER = LaunchOrder(
    entry="tests:none",
    workers=1,
    preload=(),
    threads=1,
    options={},
    sys_path=(),
    argv=(),
    cwd=None,
    environ={},
    affinity=(),
    world_size=4,
)


@pytest.fixture
def shell(tmp_path: Path, signals: list[int]) -> Iterator[Shell]:
    made = Shell(tmp_path)
    yield made
    made.close()


def ended(sock: socket.socket, status: int) -> None:
    """Report the end of a process, as its fork server does."""
    engine_messages.send(sock, EngineMessage(engine_messages.EXITED, status=status))


def hello(member: int, slot: int, **more: Any) -> MemberHello:
    fields: Mapping[str, Any] = {
        "pid": os.getpid(),
        "host": "h",
        "hostname": "here",
        "endpoint": ("127.0.0.1", 5),
        "fingerprint": {"cpu": "same"},
        **more,
    }
    return MemberHello(member=member, slot=slot, **fields)


def heartbeat(step: int, phase: str = "forward") -> Heartbeat:
    return Heartbeat(
        phase=phase,
        seconds=0.5,
        progress=(step, 0, 0),
        waits_for=(),
        shard_seconds=0.001,
        step_seconds=0.01,
    )
