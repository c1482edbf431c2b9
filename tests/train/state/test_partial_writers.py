"""Checkpoints of a group some of whose ranks do not see the place: the others write all, and give it back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.train.state.savers import SHARED, saver_of

from paceline.checkpoint.store import CheckpointStore
from paceline.comm.context import DistributedContext
from paceline.core import events
from paceline.data.batch_plan import DataPosition
from paceline.testing.thread_transport import run_ranks
from paceline.train.state import resume
from paceline.train.state.checkpointing import RunContents


def save(context: DistributedContext, place: Path, seeing: tuple[int, ...]) -> list[events.Event]:
    """Every rank has something of its own. Who does not see the place has another one, which stays empty."""
    told: list[events.Event] = []
    writes = context.rank in seeing
    saver = saver_of(context, place if writes else place / "not-there", told, writes=writes)
    assert saver.writers == seeing
    own = {f"residual/{context.rank}": torch.full((2,), float(context.rank))}
    saver.begin(DataPosition(step=7), RunContents(SHARED, own, {"number": 41}), {})
    saver.drain()
    saver.close()
    return told


@pytest.mark.parametrize("seeing", [(0, 1, 2, 3), (0, 1), (2,), (1, 3)])
def test_who_sees_the_place_writes_all(seeing, tmp_path):
    told = run_ranks(4, save, tmp_path, seeing)
    # The first of those who write speaks.
    assert [[type(event) for event in one] for one in told] == [
        [events.CheckpointSaved] if rank == seeing[0] else [] for rank in range(4)
    ]
    assert not (tmp_path / "not-there").exists()
    checkpoint = CheckpointStore(tmp_path).open()
    assert checkpoint.manifest.info.workers == 4
    assert checkpoint.state == {"number": 41}
    found = checkpoint.tensors()
    assert found.keys() == {*SHARED, *(f"residual/{rank}" for rank in range(4))}
    assert all(bool((found[name] == SHARED[name]).all()) for name in SHARED)
    assert found["residual/3"].tolist() == [3.0, 3.0]


def test_where_no_rank_sees_it_the_version_fails_and_training_goes_on(tmp_path):
    told = run_ranks(4, save, tmp_path, ())
    assert [[type(event) for event in one] for one in told] == [[events.CheckpointFailed], [], [], []]
    (failed,) = told[0]
    assert isinstance(failed, events.CheckpointFailed)
    assert "no worker is left that sees" in failed.reason


def fetch(
    context: DistributedContext, place: Path, readers: tuple[int, ...]
) -> resume.LoadedCheckpoint | None:
    store = CheckpointStore(place if context.rank in readers else place / "not-there")
    return resume.fetch(context, store, "auto", -1, readers)


@pytest.mark.parametrize("readers", [(0, 1, 2), (1,), (1, 2), ()])
def test_who_does_not_see_it_gets_the_state_from_who_does(readers, tmp_path):
    run_ranks(1, save, tmp_path, (0,))
    for found in run_ranks(3, fetch, tmp_path, readers):
        if not readers:
            assert found is None
            continue
        assert found is not None
        assert (found.version, found.run, found.state) == (1, "mark", {"number": 41})
        assert found.tensors["model/c"].tolist() == [8.0] * 8
