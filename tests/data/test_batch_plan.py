"""Positions of a run, slices of a batch and blocks of shards: complete, disjoint, in order."""

from __future__ import annotations

from itertools import chain, pairwise

import pytest

from paceline.core.errors import UsageError
from paceline.data.batch_plan import DataPosition, ShardSlice, assign, slices_of_step, split_evenly


def test_a_run_begins_at_the_beginning():
    assert DataPosition() == DataPosition(epoch=0, offset=0, step=0, samples=0)


def test_a_step_moves_the_position_by_what_it_took_and_the_samples_by_what_it_applied():
    here = DataPosition(epoch=2, offset=10, step=7, samples=100)
    assert here.after(taken=8, applied=5) == DataPosition(epoch=2, offset=18, step=8, samples=105)


def test_the_next_epoch_begins_at_its_first_position_and_forgets_no_step():
    here = DataPosition(epoch=2, offset=10, step=7, samples=100)
    assert here.next_epoch() == DataPosition(epoch=3, offset=0, step=7, samples=100)


@pytest.mark.parametrize("count", range(10))
@pytest.mark.parametrize("parts", range(1, 8))
def test_an_even_split_is_complete_and_in_order_and_its_lengths_differ_by_one_at_most(count, parts):
    runs = split_evenly(count, parts)
    assert len(runs) == parts
    assert (runs[0][0], runs[-1][1]) == (0, count)
    assert all(one[1] == other[0] for one, other in pairwise(runs))
    lengths = [stop - start for start, stop in runs]
    assert min(lengths) >= 0
    assert max(lengths) - min(lengths) <= 1


def test_an_even_split_by_hand():
    assert split_evenly(7, 3) == [(0, 2), (2, 4), (4, 7)]


def test_the_pieces_of_a_slice_cover_it_and_none_is_longer_than_asked_for():
    part = ShardSlice(shard=1, start=10, stop=17)
    assert part.count == 7
    assert part.pieces(3) == [(10, 13), (13, 16), (16, 17)]
    assert part.pieces(1) == [(at, at + 1) for at in range(10, 17)]
    assert part.pieces(7) == part.pieces(8) == part.pieces(None) == [(10, 17)]


@pytest.mark.parametrize("micro_batch", [None, 1, 4])
def test_an_empty_slice_has_no_pieces(micro_batch):
    assert ShardSlice(0, 5, 5).pieces(micro_batch) == []


def test_a_full_step_is_split_evenly_from_its_offset_on():
    parts = slices_of_step(offset=100, count=8, batch=8, shards=4)
    assert parts == (
        ShardSlice(0, 100, 102),
        ShardSlice(1, 102, 104),
        ShardSlice(2, 104, 106),
        ShardSlice(3, 106, 108),
    )


def test_a_short_step_fills_the_first_shards_and_leaves_the_last_ones_empty():
    parts = slices_of_step(offset=100, count=3, batch=8, shards=4)
    assert [(part.start, part.stop) for part in parts] == [(100, 102), (102, 103), (103, 103), (103, 103)]
    assert [part.shard for part in parts] == [0, 1, 2, 3]


@pytest.mark.parametrize("shards", range(1, 10))
@pytest.mark.parametrize("workers", range(1, 12))
def test_every_shard_is_computed_by_one_worker_in_blocks_of_which_the_longer_come_first(shards, workers):
    blocks = assign(shards, workers)
    assert len(blocks) == workers
    assert list(chain.from_iterable(blocks)) == list(range(shards))
    lengths = [len(block) for block in blocks]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] - lengths[-1] <= 1


@pytest.mark.parametrize(
    ("shards", "workers", "text"),
    [
        (0, 1, "0 shards for 1 worker\n"),
        (1, 0, "1 shard for 0 workers\n"),
        (0, 0, "0 shards for 0 workers\n"),
        (-1, 2, "-1 shards for 2 workers\n"),
        (2, -1, "2 shards for -1 workers\n"),
    ],
)
def test_shards_or_workers_that_are_none_are_refused(shards, workers, text):
    with pytest.raises(UsageError, match=text):
        assign(shards, workers)
