"""Ranks that serve a chief: when they end, and what the chief learns of their losses."""

from __future__ import annotations

import socket
import threading
from queue import SimpleQueue

import pytest
from tests.waiting import wait_for

from paceline.core.errors import PeerLostError
from paceline.frontends.framework_trainers.server_ranks import ServedRanks, serve_until_done


class Served:
    """A rank that serves a chief, in a thread."""

    def __init__(self, meeting: tuple[str, int, str], rank: int) -> None:
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._serve, args=(meeting, rank))
        self._thread.start()

    def _serve(self, meeting: tuple[str, int, str], rank: int) -> None:
        try:
            serve_until_done(meeting, rank)
        except BaseException as error:
            self.error = error

    def end(self) -> BaseException | None:
        self._thread.join(10.0)
        assert not self._thread.is_alive()
        return self.error


def chief(servers: int, workers: int) -> tuple[ServedRanks, tuple[str, int, str]]:
    listener = socket.create_server(("127.0.0.1", 0))
    return ServedRanks(listener, "a" * 32, servers, workers), (
        "127.0.0.1",
        listener.getsockname()[1],
        "a" * 32,
    )


def stood_ready(meeting: tuple[str, int, str], *ranks: int) -> dict[int, socket.socket]:
    """Return the connections of ranks that say nothing more."""
    host, port, token = meeting
    links = {rank: socket.create_connection((host, port)) for rank in ranks}
    for rank, link in links.items():
        link.sendall(f"{token} {rank}\n".encode())
    return links


def test_served_ranks_end_with_their_chief() -> None:
    served, meeting = chief(1, 1)
    ranks = [Served(meeting, 1), Served(meeting, 2)]
    served.await_all()
    served.fitted()
    served.close()
    assert [rank.end() for rank in ranks] == [None, None]


@pytest.mark.parametrize("trainings", [0, 1])
def test_served_ranks_notice_that_their_chief_is_lost_in_a_training(trainings: int) -> None:
    served, meeting = chief(1, 0)
    rank = Served(meeting, 1)
    served.await_all()
    for _ in range(trainings):
        served.fitting()
        served.fitted()
    served.fitting()
    served.close()
    error = rank.end()
    assert isinstance(error, PeerLostError)
    assert "the chief, rank 0, was lost before its training was done" in str(error)


def test_served_ranks_of_a_chief_that_only_evaluates_end_well() -> None:
    served, meeting = chief(1, 1)
    ranks = [Served(meeting, 1), Served(meeting, 2)]
    served.await_all()
    served.close()
    assert [rank.end() for rank in ranks] == [None, None]


def test_the_chief_notices_a_lost_rank_and_lets_no_stranger_in() -> None:
    served, (host, port, token) = chief(1, 2)
    stranger = socket.create_connection((host, port))
    stranger.sendall(b"b" * 32 + b" 1\n")
    own = stood_ready((host, port, token), 1, 2, 3)
    served.await_all()
    assert stranger.recv(1) == b""
    assert served.take_lost() == []
    own[3].close()
    lost: list[int] = []

    def is_lost() -> bool:
        lost.extend(served.take_lost())
        return bool(lost)

    wait_for(is_lost)
    assert lost == [3]
    served.close()
    for link in (stranger, *own.values()):
        link.close()


@pytest.mark.parametrize(
    ("gone", "said"),
    [
        ([1], "rank 1, a parameter server, was lost with its variables"),
        ([4, 3], "rank 3, the last worker, was lost"),
    ],
)
@pytest.mark.parametrize("asks_late", [False, True])
def test_the_chief_learns_that_no_step_can_be_made(gone: list[int], said: str, asks_late: bool) -> None:
    served, meeting = chief(2, 2)
    own = stood_ready(meeting, 1, 2, 3, 4)
    served.await_all()
    told: SimpleQueue[PeerLostError] = SimpleQueue()
    if not asks_late:
        served.tell_when_over(told.put)
    others: list[int] = []

    def is_noted() -> bool:
        others.extend(served.take_lost())
        return others == gone[:-1]

    def is_told_at_once() -> bool:
        served.tell_when_over(told.put)
        return not told.empty()

    for number, rank in enumerate(gone, 1):
        own[rank].close()
        if number < len(gone):
            wait_for(is_noted)
            assert told.empty()
    if asks_late:
        wait_for(is_told_at_once)
    error = told.get(timeout=30.0)
    assert str(error).startswith(said)
    assert error.rank == gone[-1]
    assert served.take_lost() == []  # nothing goes on without it
    served.close()
    for link in own.values():
        link.close()
