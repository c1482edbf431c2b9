"""Who continues after deaths, and that all who live find each other."""

from __future__ import annotations

import errno
import socket
import threading
import time
from contextlib import ExitStack
from itertools import pairwise
from typing import Any

import pytest
from tests.waiting import wait_for

from paceline.comm.context import DistributedContext
from paceline.comm.rendezvous.launcher_policies import why_survivors_end
from paceline.comm.rendezvous.view_group import ViewPeer
from paceline.comm.survivors import process_liveness, survivor_meeting
from paceline.comm.survivors.process_liveness import LivenessListener, LivingProcess, look
from paceline.comm.survivors.survivor_meeting import SurvivorMeeting, survivors
from paceline.core.errors import PeerLostError, RendezvousError
from paceline.testing.thread_transport import run_ranks

SECRET = b"of these processes"


# the decision


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ({1: "alive", 2: "alive"}, (0, 1, 2)),
        ({1: "gone", 2: "alive"}, (0, 2)),
        ({1: "gone", 2: "gone"}, (0,)),
        ({1: "silent", 2: "alive"}, (0, 2)),  # the larger part
        ({1: "silent", 2: "gone"}, (0,)),  # equal parts: the one with the lowest rank
    ],
)
def test_who_continues(answers: dict[int, Any], expected: tuple[int, ...]) -> None:
    assert survivors((0, 1, 2), answers, 0) == expected


@pytest.mark.parametrize("answers", [{0: "silent", 1: "silent"}, {0: "silent", 1: "gone"}])
def test_the_smaller_part_does_not_continue(answers: dict[int, Any]) -> None:
    with pytest.raises(PeerLostError, match="dead or cut off cannot be seen"):
        survivors((0, 1, 2), answers, 2)


# liveness


def _process(rank: int, port: int, host: str = "far", started: int = 1) -> LivingProcess:
    return LivingProcess(ViewPeer(rank, 1, host, host, ("127.0.0.1", 0)), started, port)


def test_what_processes_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_liveness, "LOOK_SECONDS", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as mute, socket.create_server(("127.0.0.1", 0)) as closed:
        refused = closed.getsockname()[1]
        closed.close()
        first = LivenessListener(socket.create_server(("127.0.0.1", 0)), SECRET, 1)
        other = LivenessListener(socket.create_server(("127.0.0.1", 0)), SECRET, 7)
        try:
            peers = [
                _process(1, first.port),
                _process(2, refused),
                _process(3, mute.getsockname()[1]),
                _process(4, other.port),  # another process listens there since
                _process(5, first.port, host="near", started=0),  # process 1 of this host is not that old
            ]
            assert look(peers, SECRET, "near") == {1: "alive", 2: "gone", 3: "silent", 4: "gone", 5: "gone"}
        finally:
            first.close()
            other.close()
            first.close()  # a second time does nothing
        assert look(peers[:1], SECRET, "near") == {1: "gone"}


class FullSocket(socket.socket):
    """Finds no free descriptor for the first connections that it is to accept."""

    failures = 3

    def accept(self) -> tuple[socket.socket, Any]:
        self.tried.append(time.monotonic())
        if len(self.tried) <= self.failures:
            raise OSError(errno.EMFILE, "Too many open files")
        return super().accept()

    def listening(self) -> FullSocket:
        self.tried: list[float] = []
        self.bind(("127.0.0.1", 0))
        self.listen()
        return self


def test_without_a_free_descriptor_a_caller_waits_and_the_thread_rests() -> None:
    full, hopeless = FullSocket().listening(), FullSocket().listening()
    hopeless.failures = 10**9
    listeners = LivenessListener(full, SECRET, 1), LivenessListener(hopeless, SECRET, 2)
    try:
        with socket.create_connection(("127.0.0.1", listeners[1].port)):
            wait_for(lambda: hopeless.tried)
            with socket.create_connection(("127.0.0.1", listeners[0].port)) as caller:
                caller.settimeout(60)
                assert caller.recv(100)
            assert len(full.tried) == 4
            assert all(later - earlier >= 0.1 for earlier, later in pairwise(full.tried))
            listeners[1].close()  # while it rests
    finally:
        for listener in listeners:
            listener.close()


def test_a_process_travels_as_plain_data() -> None:
    process = _process(3, 77)
    assert LivingProcess.from_plain(process.to_plain()) == process


# the meeting


def _meet(context: DistributedContext, dead: set[int], also: threading.Event | None = None) -> Any:
    meeting = SurvivorMeeting.arrange(context, "127.0.0.1", 20.0)
    rank = context.rank
    try:
        context.barrier()
        context.close()
        if rank in dead:
            return None
        wait_for(lambda: set(meeting.gone()) >= dead)
        with meeting.meet() as met:
            return met.labels, met.all_gather(rank), meeting.ranks
    finally:
        meeting.close()


@pytest.mark.parametrize("dead", [{3}, {0}, {1, 2}, {0, 1, 2}])
def test_all_who_live_meet(dead: set[int]) -> None:
    left = tuple(sorted({0, 1, 2, 3} - dead))
    for rank, found in enumerate(run_ranks(4, _meet, dead, timeout=40)):
        assert found is None if rank in dead else [list(one) for one in found] == [list(left)] * 3


def test_one_dies_on_the_way_to_the_meeting() -> None:
    """Rank 0 waits for rank 1, which then dies instead of coming."""
    waiting = threading.Event()

    def rank(context: DistributedContext) -> Any:
        meeting = SurvivorMeeting.arrange(context, "127.0.0.1", 20.0)
        try:
            context.barrier()
            context.close()
            if context.rank == 2:
                return None
            if context.rank == 1:
                waiting.wait(20)
                return None
            wait_for(lambda: meeting.gone() == (2,))
            waiting.set()
            with meeting.meet() as met:
                return list(met.labels)
        finally:
            meeting.close()

    assert run_ranks(3, rank, timeout=40)[0] == [0]


def test_one_that_lives_and_does_not_come_is_named() -> None:
    over = threading.Event()

    def rank(context: DistributedContext) -> str:
        meeting = SurvivorMeeting.arrange(context, "127.0.0.1", 0.5)
        try:
            context.barrier()
            context.close()
            if context.rank == 1:
                over.wait(20)
                return ""
            with pytest.raises(RendezvousError) as caught:
                meeting.meet()
            over.set()
            return str(caught.value)
        finally:
            meeting.close()

    said = run_ranks(2, rank, timeout=40)[0]
    assert "did not meet within 0.5 s" in said
    assert "rank 1 is process" in said


def test_a_silent_process_is_waited_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[Any] = [{1: "silent"}]
    monkeypatch.setattr(survivor_meeting, "look", lambda peers, secret, host: dict(answers[0]))
    processes = [_process(0, 1), _process(1, 1)]
    with socket.socket() as door:
        meeting = SurvivorMeeting(processes, 0, SECRET, door, ExitStack(), 1.0)
        monkeypatch.setattr(survivor_meeting, "SILENT_SECONDS", 100.0)
        assert meeting.gone() == ()
        monkeypatch.setattr(survivor_meeting, "SILENT_SECONDS", 0.0)
        with meeting.meet() as met:  # of two equal parts the one with rank 0
            assert list(met.labels) == [0]


# launchers


@pytest.mark.parametrize(
    ("environment", "match"),
    [
        ({}, ""),
        ({"RANK": "0", "WORLD_SIZE": "2"}, ""),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "mpirun --enable-recovery"),
        ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_MCA_orte_enable_recovery": "1"}, ""),
        ({"OMPI_COMM_WORLD_SIZE": "2", "PRTE_LAUNCHED": "1"}, "mpirun --with-ft ulfm"),
        ({"OMPI_COMM_WORLD_SIZE": "2", "PRTE_LAUNCHED": "1", "OMPI_MCA_mpi_ft_enable": "1"}, ""),
        ({"TORCHELASTIC_RUN_ID": "none"}, "paceline run"),
        ({"SLURM_PROCID": "0"}, ""),
        ({"SLURM_PROCID": "0", "SLURM_KILL_BAD_EXIT": "1"}, "kill-on-bad-exit=0"),
    ],
)
def test_launchers_that_end_survivors(environment: dict[str, str], match: str) -> None:
    found = why_survivors_end(environment)
    assert match in found
    assert bool(found) == bool(match)
