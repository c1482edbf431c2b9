"""Exit codes of an agent whose host leaves a job that trains on, or that finds no job."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import closing, suppress

import pytest
from tests.control.far_end import SECRET, FarEnd, hear
from tests.virtual_clock import VirtualClock

from paceline.control.messages import AgentHello
from paceline.control.spool import STOPPED_EXIT_CODE, SUPERVISOR_LOST_EXIT_CODE
from paceline.core.errors import RendezvousError
from paceline.elastic.supervisor.agent import Agent


def test_an_agent_that_leaves_before_the_end_asks_to_come_again():
    """0 would complete an index of a Kubernetes Job for good: no pod would come in its place."""
    with closing(FarEnd()) as far:
        agent = Agent(far.address, SECRET, 2, until_finished=True)
        codes: list[int] = []
        thread = threading.Thread(target=lambda: codes.append(agent.run()))
        thread.start()
        with closing(far.accept()) as channel:
            ((_, joined),) = hear(channel)
            agent.leave()
            thread.join()
            ((_, left),) = hear(channel)
    assert isinstance(joined, AgentHello)
    assert isinstance(left, AgentHello)
    assert (joined.workers, left.workers, codes) == (2, 0, [STOPPED_EXIT_CODE])


@pytest.fixture
def silent() -> Iterator[tuple[str, int]]:
    """An address at which nothing listens."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield ("127.0.0.1", bound.getsockname()[1])


def test_an_agent_that_finds_no_job_asks_to_come_again(silent: tuple[str, int]):
    """1 would count as a failure of the engine's job, whose first node may wait for hours."""
    said: list[str] = []
    clock = VirtualClock(autojump=True)
    agent = Agent(silent, SECRET, 1, say=said.append, first_wait=30.0, until_finished=True, clock=clock)
    assert agent.run() == SUPERVISOR_LOST_EXIT_CODE
    assert clock.now() >= 30.0
    (told,) = said
    assert "there is no supervisor at" in told


def test_an_agent_that_is_told_to_leave_before_there_is_a_job(silent: tuple[str, int]):
    clock = VirtualClock(autojump=True)
    agent = Agent(silent, SECRET, 1, first_wait=3600.0, until_finished=True, clock=clock)
    agent.leave()
    assert (agent.run(), clock.now()) == (STOPPED_EXIT_CODE, 0.0)


def test_without_an_engine_the_absence_of_a_job_is_an_error(silent: tuple[str, int]):
    with pytest.raises(RendezvousError, match="there is no supervisor"):
        Agent(silent, SECRET, 1, first_wait=1.0, clock=VirtualClock(autojump=True)).run()


def test_an_agent_that_is_refused_fails():
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def refuse() -> None:
            with suppress(OSError):  # the listener is shut down
                while True:
                    listener.accept()[0].close()

        thread = threading.Thread(target=refuse)
        thread.start()
        clock = VirtualClock(autojump=True)
        agent = Agent(listener.getsockname(), SECRET, 1, first_wait=60.0, until_finished=True, clock=clock)
        with pytest.raises(RendezvousError, match="refused the connection"):
            agent.run()
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
