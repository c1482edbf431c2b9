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

import paceline
from paceline.core.errors import ResourceError, UsageError
from paceline.elastic.supervisor.agent import Agent
from paceline.engines.engine import NodeStatus
from paceline.frontends import overrides
from paceline.frontends.mpi_calls import MpiRanks
from paceline.frontends.mpi_meeting import LeadingRank, MeetingPlace
from paceline.frontends.overrides import Overrides
from paceline.train.settings.train_config import TrainConfig


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


def leading_rank(tmp_path: Path, ranks: int, lost: set[int]) -> MpiRanks:
    """Rank 0 of an mpirun, the others of which are gone or do not come."""
    environment = {"PMIX_SERVER_TMPDIR": str(tmp_path)}
    return MpiRanks(MeetingPlace(0, ranks, True, "job@1", environment, lost=lost), leads=True)


def settings_of_a_call(ranks: MpiRanks, config: TrainConfig, chosen: Overrides) -> TrainConfig:
    """Return the settings with which a call of all ranks trains under options of `paceline train`."""
    with overrides.in_force(chosen):
        return ranks.call_together(config, lambda: overrides.current().apply(config))


@pytest.mark.parametrize(
    "chosen",
    [
        Overrides({"workers": 3}),
        Overrides({}, ("workers=3",)),
        Overrides({"workers": 3, "engine": paceline.Mpi(nodes=3)}),
        Overrides({}, ("engine=mpi",)),
        Overrides({"workers": 3, "global_batch": 24, "shards": 3}),
    ],
)
def test_the_ranks_that_live_are_the_workers_whatever_the_options_say(
    tmp_path: Path, chosen: Overrides
) -> None:
    ranks = leading_rank(tmp_path, 3, {1, 2})
    found = settings_of_a_call(ranks, TrainConfig(), chosen)
    assert (found.workers, found.engine) == (1, paceline.Mpi(nodes=1))
    assert found.shards == chosen.options.get("shards", 4)


def test_a_rank_that_succeeds_another_goes_on_with_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Agent, "run", lambda agent: agent.selector.close() or 0)
    environment = {"PMIX_SERVER_TMPDIR": str(tmp_path)}
    first, second = (MeetingPlace(rank, 2, True, "job@1", environment) for rank in range(2))
    chosen = Overrides({"resume": 3, "run_dir": "given"}, ("resume=4", "run_dir=set", "epochs=2"))

    def die() -> None:
        with LeadingRank(first, 1) as leading:
            leading.folder = "begun"
            leading.call_agents(("127.0.0.1", 9), bytes(32))
            wait_for(lambda: leading.statuses()[0].state == "ended", "rank 1 is no agent any more")

    thread = threading.Thread(target=die)
    thread.start()
    try:
        found = settings_of_a_call(MpiRanks(second, leads=False), TrainConfig(), chosen)
    finally:
        thread.join()
    assert (found.run_dir, found.resume, found.epochs) == ("begun", "auto", 2)
    assert (found.workers, found.engine) == (1, paceline.Mpi(nodes=1))


@pytest.mark.parametrize(
    ("chosen", "said"),
    [
        (Overrides({"workers": 2}), "workers=2 under mpirun with 3 ranks"),
        (Overrides({}, ("workers=4",)), "workers=4 under mpirun with 3 ranks"),
        (Overrides({"workers": 3, "engine": paceline.Slurm(nodes=3)}), "engine=slurm under mpirun"),
        (Overrides({}, ("engine=slurm",)), "engine=slurm under mpirun"),
    ],
)
def test_options_that_mpirun_contradicts_are_refused(tmp_path: Path, chosen: Overrides, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        settings_of_a_call(leading_rank(tmp_path, 3, {1, 2}), TrainConfig(), chosen)


def test_a_file_asks_for_no_number_of_ranks(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text("workers = 2\nshards = 6\n")
    ranks = leading_rank(tmp_path, 3, {1, 2})
    found = settings_of_a_call(ranks, TrainConfig(), Overrides(file=str(file)))
    assert (found.workers, found.shards) == (1, 6)
