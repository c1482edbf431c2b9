"""A rank that follows in a call of all ranks: its own failures are no loss of the rank that leads."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.train import small_run
from tests.waiting import wait_for

from paceline.core.errors import ResourceError
from paceline.elastic.supervisor.agent import Agent
from paceline.engines.engine import NodeStatus
from paceline.frontends.mpi_calls import MpiRanks
from paceline.frontends.mpi_meeting import LeadingRank, MeetingPlace


class Unreadable:
    """Its pickle opens a file that is not there."""

    def __reduce__(self) -> Any:
        return open, ("/nowhere/at/all",)


@contextmanager
def led(tmp_path: Path, result: object, ends: list[NodeStatus] | None = None) -> Iterator[MpiRanks]:
    """A rank 0 that hands out a result as soon as rank 1, which is this process, is there. With `ends` it
    calls for agents before, and notes there how that of rank 1 ended."""
    environment = {"PMIX_SERVER_TMPDIR": str(tmp_path)}
    first, second = (MeetingPlace(rank, 2, True, "job@1", environment) for rank in range(2))
    with LeadingRank(first, 1) as leading:

        def lead() -> None:
            if ends is not None:
                leading.call_agents(("127.0.0.1", 9), bytes(32))
                wait_for(lambda: leading.statuses()[0].state == "ended", "rank 1 is no agent any more")
                ends.extend(leading.statuses())
            leading.publish(result, ok=True)

        thread = threading.Thread(target=lead)
        thread.start()
        try:
            yield MpiRanks(second, leads=False)
        finally:
            thread.join()


def follow(ranks: MpiRanks, tmp_path: Path) -> Any:
    def compute() -> Any:
        raise AssertionError("rank 1 leads, and rank 0 lives")

    return ranks.call_together(small_run.settings(tmp_path, 1), compute)


def test_an_outcome_that_cannot_be_read_is_no_loss_of_the_leading_rank(tmp_path: Path) -> None:
    with led(tmp_path, Unreadable()) as ranks:
        with pytest.raises(ResourceError, match=r"cannot be read here: .*No such file"):
            follow(ranks, tmp_path)
        assert not ranks.leads
        assert ranks.place.term == 0


def test_an_agent_without_room_is_no_loss_of_the_leading_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(agent: Agent) -> int:
        agent.selector.close()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Agent, "run", full)
    ends: list[NodeStatus] = []
    with led(tmp_path, "the result", ends) as ranks:
        assert follow(ranks, tmp_path) == "the result"
        assert not ranks.leads
    (status,) = ends
    assert status.code == 1
    assert status.reason == "rank 1: its agent cannot run: [Errno 28] No space left on device"
