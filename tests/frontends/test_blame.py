"""Who waits is never blamed for it, in whatever phase it waits: the one that all wait for is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tests.frontends.supervised_runs import check_exactly_once, of, supervised
from tests.train.small_run import UNATTENDED, data, fit, settings, trainer
from torch import Tensor
from torch.utils.data import IterableDataset

from paceline.core import events
from paceline.train.settings.train_config import CheckpointConfig


class Stream(IterableDataset):
    """Read by the first rank, which deals what it reads to the others in the phase `data`."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(list(zip(*data(), strict=True)))


def blamed(folder: Path) -> list[tuple[int, str, str]]:
    return [(event.rank, event.phase, event.cause) for event in of(events.WorkerFailed, folder)]


def test_a_hang_where_the_first_rank_gathers_what_was_saved(tmp_path):
    # A version after each step, and steps that take longer than to write one: after each step the first rank
    # hears from all others that they have written theirs.
    saves = {"checkpoint": CheckpointConfig(every_steps=1, keep_last=2), "epochs": 2}
    right = fit(settings(tmp_path / "calm", 1, fault_tolerance=UNATTENDED, **saves)).state_hash
    folder = tmp_path / "run"
    chaos = "slow rank=all factor=30; hang rank=1 step=6 phase=optimizer"
    assert fit(supervised(folder, 3, chaos, **saves)).state_hash == right
    assert blamed(folder) == [(1, "optimizer", "hung")]
    assert [verdict.rank for verdict in of(events.Verdict, folder)] == [1]
    check_exactly_once(folder)


def test_a_hang_of_the_rank_that_reads_for_all(tmp_path):
    right = trainer(settings(tmp_path / "calm", 1, fault_tolerance=UNATTENDED, epochs=2)).fit(Stream())
    folder = tmp_path / "run"
    config = supervised(folder, 3, "hang rank=0 step=6 phase=data", epochs=2)
    assert trainer(config).fit(Stream()).state_hash == right.state_hash
    assert blamed(folder) == [(0, "data", "hung")]
    (verdict,) = of(events.Verdict, folder)
    assert "ranks 1 and 2 wait for it" in verdict.text
    check_exactly_once(folder)
