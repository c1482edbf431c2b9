"""The sampler: torch's interface, every sample once, states that any number of replicas goes on from."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterator
from itertools import chain

import numpy as np
import pytest
import torch
import torch.utils.data as torch_data
from hypothesis import given, settings, strategies as st

import paceline
from paceline.comm.context import DistributedContext
from paceline.core.errors import UsageError
from paceline.data.permutation import Permutation
from paceline.data.sampler import DistributedSampler


class Numbers(torch_data.Dataset[int]):
    """Sample i is i."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return index


def replicas(size: int, count: int, **settings: object) -> list[DistributedSampler]:
    return [DistributedSampler(range(size), count, rank, **settings) for rank in range(count)]  # type: ignore[arg-type]


def read_ahead(samples: Iterator[int], used: int, ahead: int) -> list[int]:
    """The first `used` samples, after a loader has fetched `ahead` more than that."""
    fetched = [sample for _, sample in zip(range(used + ahead), samples, strict=False)]
    return fetched[:used]


@given(st.integers(0, 300), st.integers(1, 9), st.booleans(), st.integers(0, 5))
@settings(deadline=None)
def test_replicas_share_an_epoch_exactly(size, count, shuffle, epoch):
    samplers = replicas(size, count, shuffle=shuffle)
    for sampler in samplers:
        sampler.set_epoch(epoch)
    shares = [list(sampler) for sampler in samplers]
    assert sorted(chain(*shares)) == list(range(size))
    assert [len(share) for share in shares] == [len(sampler) for sampler in samplers]
    assert [len(share) for share in shares] == [sampler.num_samples for sampler in samplers]
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    assert samplers[0].total_size == size


@given(st.integers(1, 60), st.integers(1, 9), st.booleans())
@settings(deadline=None)
def test_lengths_are_torchs_when_padded_or_dropped(size, count, drop_last):
    for rank in range(count):
        theirs: torch_data.DistributedSampler[int] = torch_data.DistributedSampler(
            Numbers(size), count, rank, shuffle=False, drop_last=drop_last
        )
        ours = DistributedSampler(
            Numbers(size), count, rank, shuffle=False, drop_last=drop_last, pad=not drop_last
        )
        assert list(ours) == list(theirs)
        assert (len(ours), ours.num_samples, ours.total_size) == (
            len(theirs),
            theirs.num_samples,
            theirs.total_size,
        )


@given(st.integers(0, 60), st.integers(1, 9), st.integers(0, 3))
@settings(deadline=None)
def test_padding_repeats_and_dropping_omits_as_few_as_possible(size, count, epoch):
    padded = replicas(size, count, pad=True)
    dropped = replicas(size, count, drop_last=True)
    for sampler in padded + dropped:
        sampler.set_epoch(epoch)
    all_padded = Counter(sample for sampler in padded for sample in sampler)
    all_dropped = [sample for sampler in dropped for sample in sampler]
    assert set(all_padded) == set(range(size))
    assert all_padded.total() == padded[0].total_size == -(-size // count) * count
    assert len(set(all_dropped)) == len(all_dropped) == size // count * count


def test_the_order_is_the_epochs_permutation_dealt_in_turn():
    for rank, sampler in enumerate(replicas(5000, 3, seed=8)):
        sampler.set_epoch(2)
        assert list(sampler) == Permutation(5000, 8, 2).take(0, 5000)[rank::3].tolist()


PHASES = st.lists(
    st.tuples(
        st.integers(1, 6),  # replicas
        st.integers(1, 5),  # batch size
        st.integers(0, 5),  # steps until it stops
        st.integers(0, 20),  # samples the loader reads ahead
    ),
    max_size=5,
)


@given(st.integers(0, 150), PHASES, st.booleans(), st.sampled_from(["", "drop_last", "pad"]))
@settings(max_examples=300, deadline=None)
def test_stops_and_resumes_lose_and_repeat_nothing(size, phases, shuffle, ending):
    """Any number of stops, each resumed on another number of replicas, with a loader that reads ahead."""
    options = {ending: True} if ending else {}
    state = None
    applied: list[int] = []
    last = 1
    for count, batch, steps, ahead in [*phases, (3, 4, 1000, 0)]:
        samplers = replicas(size, count, shuffle=shuffle, **options)
        states = []
        for sampler in samplers:
            if state is not None:
                sampler.load_state_dict(json.loads(json.dumps(state)))
            sampler.set_epoch(sampler.epoch)
            used = min(len(sampler), steps * batch)
            applied += read_ahead(iter(sampler), used, ahead)
            states.append(sampler.state_dict(consumed=used))
        state = states[0]
        # At the uneven end of an epoch others may know of less, never of more.
        assert all(other["position"] <= state["position"] for other in states)
        if len({other["position"] for other in states}) > 1:
            assert state["position"] == size
        if state["position"] == size:
            last = count
            break
    counts = Counter(applied)
    if ending == "drop_last":
        assert max(counts.values(), default=1) == 1
        assert size - len(counts) < last
    elif ending == "pad":
        assert set(counts) == set(range(size))
        assert counts.total() - size < last
    else:
        assert counts == Counter(range(size))


@pytest.mark.parametrize("workers", [0, 2])
def test_resumes_through_a_data_loader(workers):
    """Workers of a loader read ahead; what was trained on is what the caller says."""
    dataset = Numbers(103)
    first: list[list[int]] = []
    for rank in range(4):
        sampler = DistributedSampler(dataset, 4, rank, seed=3)
        loader = torch_data.DataLoader(dataset, batch_size=5, sampler=sampler, num_workers=workers)
        assert len(loader) == [6, 6, 6, 5][rank]
        sampler.set_epoch(1)
        batches = iter(loader)
        first.append([int(sample) for _ in range(3) for sample in next(batches)])
        state = sampler.state_dict(consumed=15)
        assert state["position"] == 60
        if workers == 0:
            assert sampler.state_dict() == state
        else:
            assert sampler.state_dict()["position"] > 60
        del batches
    rest = []
    for rank in range(3):
        sampler = DistributedSampler(dataset, 3, rank, seed=3)
        sampler.load_state_dict(state)
        assert sampler.epoch == 1
        sampler.set_epoch(1)
        loader = torch_data.DataLoader(dataset, batch_size=5, sampler=sampler, num_workers=workers)
        assert len(sampler) == [15, 14, 14][rank]
        rest += [int(sample) for batch in loader for sample in batch]
    assert sorted(chain(*first, rest)) == list(range(103))


def test_a_finished_epoch_goes_on_with_the_next():
    (sampler,) = replicas(10, 1)
    list(sampler)
    state = sampler.state_dict()
    assert state["position"] == 10
    (again,) = replicas(10, 1)
    again.load_state_dict(state)
    passes = []
    for epoch in range(again.epoch, 3):
        again.set_epoch(epoch)
        passes.append(list(again))
    assert [len(samples) for samples in passes] == [0, 10, 10]
    assert passes[1] != passes[2]


def test_what_drop_last_left_out_stays_out():
    samplers = replicas(10, 4, drop_last=True)
    for sampler in samplers:
        list(sampler)
    states = [sampler.state_dict() for sampler in samplers]
    assert {state["position"] for state in states} == {10}


def test_looking_into_a_resumed_epoch_does_not_use_it_up():
    (sampler,) = replicas(10, 1)
    sampler.load_state_dict(sampler.state_dict() | {"position": 6})
    seen = next(iter(sampler))
    rest = list(sampler)
    assert len(rest) == 4
    assert rest[0] == seen
    assert len(sampler) == 10


def test_state_before_an_iteration_is_where_it_will_start():
    (sampler,) = replicas(10, 1)
    assert sampler.state_dict()["position"] == 0
    sampler.load_state_dict(sampler.state_dict() | {"position": 6})
    assert sampler.state_dict(consumed=0)["position"] == 6
    sampler.set_epoch(1)
    assert sampler.state_dict()["position"] == 0


def test_forgotten_set_epoch_is_said_once(caplog):
    (sampler,) = replicas(10, 1)
    with caplog.at_level(logging.WARNING, "paceline.data"):
        first = list(sampler)
        assert not caplog.records
        assert list(sampler) == first
        list(sampler)
    assert [record.getMessage() for record in caplog.records] == [
        "DistributedSampler: iterated again without set_epoch, so epoch 0's order comes again; call "
        "sampler.set_epoch(epoch) before each epoch"
    ]


def test_no_warning_where_nothing_was_forgotten(caplog):
    (shuffled,) = replicas(10, 1)
    (in_order,) = replicas(10, 1, shuffle=False)
    (empty,) = replicas(0, 1)
    with caplog.at_level(logging.WARNING, "paceline.data"):
        for epoch in range(3):
            shuffled.set_epoch(epoch)
            list(shuffled)
            list(in_order)
            list(empty)
        shuffled.set_epoch(2)
        list(shuffled)
    assert not caplog.records


def test_no_warning_where_the_first_batch_is_looked_at_before_set_epoch(caplog):
    """As in torch's own tutorial: len(next(iter(loader))[0]), then set_epoch, then the epoch."""
    (sampler,) = replicas(10, 1)
    with caplog.at_level(logging.WARNING, "paceline.data"):
        for epoch in range(3):
            next(iter(sampler))
            sampler.set_epoch(epoch)
            assert len(list(sampler)) == 10
    assert not caplog.records


def test_set_epoch_that_was_called_once_and_then_forgotten_is_said(caplog):
    (sampler,) = replicas(10, 1)
    with caplog.at_level(logging.WARNING, "paceline.data"):
        sampler.set_epoch(0)
        for _ in range(3):
            list(sampler)
    assert "iterated again without set_epoch" in caplog.text


def test_a_state_that_set_epoch_drops_is_said(caplog):
    (sampler,) = replicas(10, 1)
    state = sampler.state_dict() | {"epoch": 3, "position": 6}
    with caplog.at_level(logging.WARNING, "paceline.data"):
        sampler.load_state_dict(state)
        sampler.set_epoch(0)
    assert "the loaded state is in epoch 3 at sample 6 of 10 and is dropped" in caplog.text
    assert len(sampler) == 10


def test_iterations_at_the_same_time_do_not_disturb_each_other():
    (sampler,) = replicas(10, 1, shuffle=False)
    one, other = iter(sampler), iter(sampler)
    assert [next(one), next(one), next(other)] == [0, 1, 0]
    assert sampler.state_dict()["position"] == 1
    assert list(one) == list(range(2, 10))
    assert sampler.state_dict()["position"] == 1


def own_share(ctx: DistributedContext) -> list[int]:
    return list(DistributedSampler(range(11)))


def test_the_process_group_says_who_is_who():
    shares = paceline.spawn(own_share, workers=2, threads=1)
    assert [len(share) for share in shares] == [6, 5]
    assert sorted(chain(*shares)) == list(range(11))


def test_torchs_process_group_says_who_is_who(tmp_path):
    address = f"file://{tmp_path}/store"
    torch.distributed.init_process_group("gloo", init_method=address, rank=0, world_size=1)
    try:
        sampler = DistributedSampler(range(3))
    finally:
        torch.distributed.destroy_process_group()
    assert (sampler.num_replicas, sampler.rank) == (1, 0)


def test_numpy_numbers_are_welcome():
    sampler = DistributedSampler(range(4), np.int64(2), np.int64(1))  # type: ignore[arg-type]
    assert len(sampler) == 2


@pytest.mark.parametrize(
    ("arguments", "options", "said"),
    [
        ((range(4),), {}, "this process belongs to no group"),
        ((range(4), 2), {}, "this process belongs to no group"),
        ((range(4), 0, 0), {}, "num_replicas=0"),
        ((range(4), 2, 2), {}, "rank=2.*from 0 to 1"),
        ((range(4), 2, -1), {}, "rank=-1"),
        ((range(4), 2, 1.0), {}, "rank=1.0"),
        ((range(4), 2, 0), {"seed": -1}, "seed=-1"),
        ((range(4), 2, 0), {"pad": True, "drop_last": True}, "one adds samples, the other drops them"),
        ((iter([1]), 2, 0), {}, "has no length"),
    ],
)
def test_bad_samplers_are_refused(arguments, options, said):
    with pytest.raises(UsageError, match=rf"(?s){said}.*try: |{said}"):
        DistributedSampler(*arguments, **options)


def test_bad_epochs_are_refused():
    (sampler,) = replicas(4, 1)
    for epoch in (-1, 0.5, None):
        with pytest.raises(UsageError, match="epoch is a whole number from 0"):
            sampler.set_epoch(epoch)  # type: ignore[arg-type]


def test_bad_counts_of_consumed_samples_are_refused():
    sampler = replicas(40, 2)[0]
    with pytest.raises(UsageError, match="before an iteration has started"):
        sampler.state_dict(consumed=4)
    samples = iter(sampler)
    for _ in range(8):
        next(samples)
    for wrong in (9, 16):
        with pytest.raises(UsageError, match="replica 0 of 2 was handed 8 of its 20 samples"):
            sampler.state_dict(consumed=wrong)
    for unusable in (-1, 2.0, "all"):
        with pytest.raises(UsageError, match="consumed is a whole number from 0"):
            sampler.state_dict(consumed=unusable)  # type: ignore[arg-type]
    list(samples)
    with pytest.raises(UsageError, match="was handed 20 of its 20 samples"):
        sampler.state_dict(consumed=21)


def test_a_replica_with_a_shorter_share_may_count_as_the_longest_does():
    longer, shorter = replicas(11, 2)
    list(longer)
    list(shorter)
    assert longer.state_dict()["position"] == 11
    assert shorter.state_dict(consumed=6)["position"] == 11


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"size": 11}, "saved with size=11, this sampler has 10"),
        ({"seed": 1}, "saved with seed=1, this sampler has 0"),
        ({"shuffle": False}, "saved with shuffle=False, this sampler has True"),
        ({"position": 11}, "position=11"),
        ({"position": 2.5}, "position=2.5"),
        ({"position": None}, "position=None"),
        ({"epoch": -1}, "epoch=-1"),
        ({"format": 2}, "is not a state of this sampler"),
        ({"more": 1}, "is not a state of this sampler"),
    ],
)
def test_foreign_states_are_refused_and_change_nothing(change, said):
    (sampler,) = replicas(10, 1)
    before = sampler.state_dict()
    with pytest.raises(UsageError, match=rf"(?s){said}.*try: "):
        sampler.load_state_dict(before | {"epoch": 2} | change)
    assert sampler.state_dict() == before


@pytest.mark.parametrize("state", [None, {}, [], "position"])
def test_what_is_no_state_is_refused(state):
    with pytest.raises(UsageError, match="is not a state of this sampler"):
        replicas(10, 1)[0].load_state_dict(state)
