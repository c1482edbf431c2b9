"""The supervisor's loop without a process: `begin` and `turn` on a virtual clock, with peers on socket pairs.

The selector lets virtual time pass instead of waiting, and a test can have the supervisor itself not run for
a while. Members answer as workers do; what the machine was told is recorded.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.elastic.supervisor.shell_parts import ORDER, SECRET, Parts, Peer, ended, heartbeat, hello, written
from tests.virtual_clock import VirtualClock

from paceline.control import messages
from paceline.control.channel import Channel
from paceline.core import fd_messages, session_auth
from paceline.core.events import RunFailed, SupervisorStarted, ViewChanged, WorkerFailed
from paceline.elastic.machine import machine
from paceline.elastic.machine.machine_events import FromMember, MachineEvent, StopRequested, Tick
from paceline.elastic.machine.settings import MachineSettings
from paceline.elastic.supervisor import parent_messages
from paceline.elastic.supervisor.component_ports import Loop
from paceline.elastic.supervisor.journal_writer import JOURNAL_FILE
from paceline.elastic.supervisor.parent_messages import JobOutcome, JobSpec, SupervisedJob
from paceline.elastic.supervisor.supervisor import Supervisor
from paceline.elastic.supervisor.workers import CLEAN_EXIT_SECONDS
from paceline.engines.local import memfd_pickle
from paceline.engines.local.engine_messages import LaunchOrder
from paceline.engines.local.worker_handle import WorkerProcess

ABSENT = 1 << 30
"""No process has this pid: a probe of a silent worker finds nothing."""

SETTINGS = MachineSettings(workers=2, shards=4)


class VirtualSelector(selectors.DefaultSelector):
    """Lets virtual time pass where a selector would wait; `stall`: the process does not run for so long."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__()
        self.clock = clock
        self.stall = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready:
            self.clock.advance(timeout or 0.0)
        self.clock.advance(self.stall)
        self.stall = 0.0
        return ready or super().select(0)


class Driven(Parts):
    """A supervisor whose turns the test takes. `started`: orders, and the sockets of their fork server;
    `peers` by member; `told`: events that the machine has handled."""

    def __init__(self, folder: Path, told: list[MachineEvent], attempt: int = 1) -> None:
        super().__init__()
        self.clock = VirtualClock(1000.0, autojump=True)
        self.loop.selector.close()
        self.selector = VirtualSelector(self.clock)
        self.loop = Loop(self.clock, self.selector)
        self.folder, self.told = folder, told
        self.started: list[tuple[LaunchOrder, socket.socket]] = []
        self.peers: dict[int, Peer] = {}
        self.outcome: JobOutcome | None = None
        self.payload = memfd_pickle.dump("payload")
        parent, self.parent_end = fd_messages.pair()
        self._sockets.append(self.parent_end)
        self.parent_end.setblocking(False)
        self.supervisor = Supervisor(
            JobSpec(SupervisedJob("tests:none", (), SETTINGS, folder), ORDER, attempt, 0),
            self.payload,
            parent,
            {},
            self.loop,
            VirtualClock(1e9),
            lambda preferred: socket.create_server(("127.0.0.1", 0)),
            self._launch,
        )

    def _launch(self, order: LaunchOrder, payload: int) -> WorkerProcess:
        process, theirs = self.process()
        self.started.append((order, theirs))
        return process

    def join(self, member: int, slot: int) -> None:
        """Connect a worker; its hello arrives with the next turn."""
        ours, theirs = socket.socketpair()
        keys = [session_auth.session_keys(SECRET, b"%d" % member, accepts=side) for side in (True, False)]
        self.peers[member] = Peer(Channel(theirs, keys[1]))
        self._peers.append(self.peers[member])
        self.supervisor.connect(Channel(ours, keys[0]), "127.0.0.1")
        self.peers[member].send(hello(member, slot, pid=ABSENT + member))

    def answer(self) -> None:
        """Have every member answer what it got, as a worker does."""
        for peer in self.peers.values():
            for message in peer.received():
                match message:
                    case messages.DialRequest():
                        for dialed, *_ in message.peers:
                            peer.send(messages.DialResult(peer=dialed))
                    case messages.Prepare():
                        peer.send(messages.MemberReport(generation=message.generation, progress=None))
                    case messages.View():
                        peer.send(messages.ViewInstalled(generation=message.generation))
                        peer.send(heartbeat(1))

    def until(self, reached: Callable[[], object], turns: int = 100) -> None:
        """Take turns until something is reached; members answer in between."""
        for _ in range(turns):
            if reached():
                return
            self.answer()
            assert self.supervisor.turn()
        raise AssertionError(f"not reached in {turns} turns; told: {self.told[-5:]}")

    def in_view(self) -> None:
        """Begin, and have both workers join and train."""
        self.supervisor.begin()
        for member, (order, _) in enumerate(self.started):
            self.join(int(str(order.options["member"])), member)
        self.until(lambda: all(FromMember(member, heartbeat(1)) in self.told for member in self.peers))
        self.told.clear()

    def finish(self, turns: int = 100) -> None:
        """Take turns until the job is over. A loop with a deadline that stays in the past would spin."""
        assert not all(self.supervisor.turn() for _ in range(turns))

    def to_parent(self) -> list[str]:
        """The kinds of messages that the parent got since."""
        kinds = []
        with contextlib.suppress(BlockingIOError):
            while (message := parent_messages.receive(self.parent_end)) is not None:
                kind, _, descriptors = message
                kinds.append(kind)
                if kind == "ended":
                    self.outcome = parent_messages.unpack_outcome(descriptors)
                    descriptors = self.outcome.descriptors
                fd_messages.close_all(descriptors)
        return kinds

    def events_of(self, kind: type) -> list[object]:
        return written(self.folder / JOURNAL_FILE, kind)

    def close(self) -> None:
        self.supervisor.close()
        os.close(self.payload)
        for peer in self._peers:
            peer.channel.close()
        for sock in self._sockets:
            sock.close()


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[MachineEvent]:
    """Events that the machine has handled, in their order."""
    handled: list[MachineEvent] = []
    step = machine.step

    def recorded(state, event, now):
        handled.append(event)
        return step(state, event, now)

    monkeypatch.setattr(machine, "step", recorded)
    return handled


@pytest.fixture
def job(tmp_path: Path, told: list[MachineEvent], signals: list[int]) -> Iterator[Driven]:
    driven = Driven(tmp_path, told)
    yield driven
    driven.close()


def test_begin_announces_the_supervisor_and_starts_the_workers(job: Driven):
    job.supervisor.begin()
    assert [order.first_rank for order, _ in job.started] == [0, 1]
    assert job.to_parent() == ["up", "keep", "keep"]
    (began,) = job.events_of(SupervisorStarted)
    assert isinstance(began, SupervisorStarted)
    host, port = job.supervisor.address
    assert (began.attempt, began.address) == (1, f"{host}:{port}")
    assert json.loads((job.folder / "control.json").read_text())["port"] == port
    # Before the first process: a supervisor that takes over never gives these numbers to other workers.
    members = json.loads((job.folder / "supervisor.json").read_text())["began"]["members"]
    assert [slot for slot, _ in members.values()] == [0, 1]


def test_workers_that_join_are_in_one_view(job: Driven):
    job.in_view()
    (view,) = job.events_of(ViewChanged)
    assert isinstance(view, ViewChanged)
    assert view.members == [0, 1]
    assert sorted(shard for shards in view.shards for shard in shards) == [0, 1, 2, 3]


def test_a_message_that_has_arrived_counts_before_a_deadline_that_has_passed(job: Driven):
    job.in_view()
    job.clock.advance(SETTINGS.silence_least + 0.1)
    for peer in job.peers.values():
        peer.send(heartbeat(2))
    assert job.supervisor.turn()
    kinds = [type(event) for event in job.told]
    assert kinds[:2] == [FromMember, FromMember]
    assert job.events_of(WorkerFailed) == []
    for peer in job.peers.values():
        assert not any(isinstance(message, messages.Prepare) for message in peer.received())


def test_a_worker_that_says_nothing_is_replaced(job: Driven, killed):
    """The same time as in the tests around this one, but nothing arrives and the supervisor runs."""
    job.in_view()
    _, speaking = job.peers.values()

    def failed() -> bool:
        job.clock.advance(SETTINGS.heartbeat)
        speaking.send(heartbeat(2))
        return bool(job.events_of(WorkerFailed))

    job.until(failed)
    (failure,) = job.events_of(WorkerFailed)
    assert isinstance(failure, WorkerFailed)
    assert (failure.rank, failure.cause) == (0, "silent")
    job.until(lambda: killed)
    assert {*killed} == {job.processes[0]}
    assert [order.first_rank for order, _ in job.started] == [0, 1, 0]
    assert not any(event.stalled for event in job.told if isinstance(event, Tick))


def test_a_stall_of_the_supervisor_is_told_first_and_no_worker_is_blamed(job: Driven):
    job.in_view()
    job.selector.stall = 60.0
    for peer in job.peers.values():
        peer.send(heartbeat(2))
    assert job.supervisor.turn()
    stalled, *rest = job.told
    assert isinstance(stalled, Tick)
    assert 55.0 < stalled.stalled <= 60.0  # it would have waited for a moment anyway
    assert [type(event) for event in rest[:2]] == [FromMember, FromMember]
    # Also where no heartbeat had arrived: workers of a host that was suspended say nothing for a moment.
    job.selector.stall = 60.0
    job.told.clear()
    assert job.supervisor.turn()
    assert isinstance(job.told[0], Tick)
    assert job.told[0].stalled > 1.0
    assert job.events_of(WorkerFailed) == []


def test_a_stop_while_workers_start_ends_the_job_at_once(job: Driven, killed):
    job.supervisor.begin()
    parent_messages.send(job.parent_end, "stop", reason="Ctrl-C")
    assert job.supervisor.turn()
    assert StopRequested("Ctrl-C") in job.told
    assert {*killed} == {*job.processes}  # they have nothing to save
    for _, sock in job.started:
        ended(sock, -9)
    job.finish()
    assert job.to_parent()[-1] == "ended"
    assert job.outcome is not None
    assert job.outcome.stopped == "Ctrl-C"
    assert not (job.folder / "supervisor.json").exists()
    assert not (job.folder / "control.json").exists()


def test_the_shutdown_kills_workers_that_do_not_end_and_waits_no_longer_for_them(job: Driven, killed):
    job.in_view()
    job.clock.advance(0.3)  # so that no other component is due when the workers are to be killed
    for peer in job.peers.values():
        peer.send(messages.MemberFinished(generation=1, progress=(4, 0, 0), hash="same"))
    job.until(
        lambda: any(isinstance(m, messages.Dismissed) for m in next(iter(job.peers.values())).received())
    )
    kill_at = job.clock.now() + CLEAN_EXIT_SECONDS
    told = len(job.told)
    while not killed:
        assert job.supervisor.turn()
    assert job.clock.now() == pytest.approx(kill_at)
    job.finish()
    assert {*killed} == {*job.processes}
    assert len(job.told) == told  # the machine decides nothing any more
    assert job.to_parent()[-1] == "ended"
    assert job.outcome is not None
    assert job.outcome.ok


def test_a_kill_by_the_parent_saves_nothing_and_waits_for_no_deadline_of_the_machine(job: Driven, killed):
    job.in_view()
    parent_messages.send(job.parent_end, "kill", reason="killed by the caller")
    assert job.supervisor.turn()
    assert {*killed} == {*job.processes}
    job.finish()  # although not even SIGKILL ends them
    (failed,) = job.events_of(RunFailed)
    assert isinstance(failed, RunFailed)
    assert failed.reason == "killed by the caller"


def test_a_busy_supervisor_pauses_to_handle_several_messages_in_a_turn(job: Driven):
    """A pause moves this clock by itself: turns that follow each other at once are busy."""
    job.in_view()
    first, second = job.peers.values()
    pauses = []
    for number in range(200):
        first.send(heartbeat(number + 2))
        before = job.clock.now()
        assert job.supervisor.turn()
        pauses.append(job.clock.now() - before)
        job.clock.advance(0.001)
        if number % 50 == 0:
            second.send(heartbeat(number + 2))
    assert pauses[0] == 0.0
    assert pauses[-1] == pytest.approx(0.01)
    assert job.events_of(WorkerFailed) == []
