"""Samples of weights: what they see, how they travel, and who is odd."""

from __future__ import annotations

import ctypes
import random

import pytest
import torch
from torch import nn

import paceline
from paceline.train.step import replica_agreement
from paceline.train.step.replica_agreement import QUIET_STEPS, WeightSample, WeightWatch


def model(wide: int = 8) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(wide, wide), nn.ReLU(), nn.Linear(wide, 3))


def flip(tensor: torch.Tensor, place: int, bit: int) -> None:
    tensor.detach().view(-1).view(torch.int32)[place] ^= 1 << bit


@pytest.mark.parametrize("bit", [0, 7, 22, 30])
def test_any_bit_of_a_small_model_is_seen_in_the_next_step(bit):
    net = model()
    sample = WeightSample(net.parameters())
    assert sample.parts == 1
    for parameter in net.parameters():
        before = sample.of(4)
        flip(parameter, parameter.numel() - 1, bit)
        assert sample.of(4) != before


def test_a_large_model_is_looked_at_whole_in_a_few_steps():
    net = nn.Linear(1500, 1500)
    sample = WeightSample(net.parameters())
    assert 1 < sample.parts <= replica_agreement.MOST_PARTS
    steps = range(100, 100 + sample.parts)
    generator = random.Random(1)
    for place in (0, 1500 * 1500 - 1, *(generator.randrange(1500 * 1500) for _ in range(20))):
        before = [sample.of(step) for step in steps]
        flip(net.weight, place, 3)
        assert sum(sample.of(step) != known for step, known in zip(steps, before, strict=True)) == 1


def test_the_sample_is_of_the_memory_that_a_parameter_has_now():
    net = model()
    sample = WeightSample(net.parameters())
    before, first = sample.of(0), net[0]
    assert isinstance(first, nn.Linear)
    first.weight.data = first.weight.detach().clone() + 1
    after = sample.of(0)
    assert after != before
    first.weight.data = first.weight.detach().t().contiguous().t()  # other strides, the same numbers
    assert sample.of(0) == after


def test_a_model_without_plain_memory_has_a_sample_too():
    with torch.device("meta"):
        net = model()
    assert WeightSample(net.parameters()).of(1) == WeightSample([]).of(9)


@pytest.mark.parametrize("world", [2, 3, 17, 128, 256, 300, 1024])
def test_sums_of_single_precision_tell_whether_all_are_equal(world):
    generator = random.Random(world)
    mine = generator.getrandbits(48)

    def summed(samples: list[int]) -> list[int]:
        all_counters = torch.tensor(
            [replica_agreement.counters(one, world) for one in samples], dtype=torch.float32
        )
        return [round(number) for number in all_counters.sum(0).tolist()]

    assert replica_agreement.are_equal(summed([mine] * world))
    assert replica_agreement.are_equal(summed([mine] * (world - 1)))  # one has no shards
    for _ in range(50):
        other = generator.getrandbits(48)
        odd = [mine] * world
        odd[generator.randrange(world)] = other
        assert not replica_agreement.are_equal(summed(odd))


def test_ranks_whose_mean_is_one_of_them_are_not_equal():
    """Comparing the sum with one's own number would let rank 1 believe that all agree."""
    all_counters = [replica_agreement.counters(one, 3) for one in (1, 2, 3)]
    assert not replica_agreement.are_equal([sum(column) for column in zip(*all_counters, strict=True)])


@pytest.mark.parametrize(
    ("digests", "odd", "words"),
    [
        (["b", "a", "a"], [0], "rank 0 has other weights"),
        (["a", "b", "a", "c", "a"], [1, 3], "ranks 1 and 3 have other weights"),
        (["a", "b"], None, "2 different states, and no majority"),
        (["a", "b", "c"], None, "3 different states"),
    ],
)
def test_a_majority_names_the_odd_ones(digests, odd, words):
    assert replica_agreement.odd_ranks(digests) == odd
    error = replica_agreement.differ_error(7, digests)
    assert isinstance(error, paceline.ReplicasDifferError)
    assert words in error.message
    assert "after step 7" in error.message
    assert error.ranks == tuple(range(len(digests)) if odd is None else odd)


def test_what_is_gathered_as_on_a_device_has_the_same_hash():
    """The way that a GPU's tensors take, with the host's: one copy, of the moment when it was asked."""
    net = nn.Sequential(nn.Linear(700, 700), nn.Linear(700, 3))
    net[0].weight.data = net[0].weight.detach().t().contiguous().t()  # type: ignore[operator]
    plain, gathered = WeightSample(net.parameters()), WeightSample(net.parameters(), gathers=True)
    assert plain.parts == gathered.parts > 1
    assert (plain.at_hand, gathered.at_hand) == (True, False)
    for step in range(4):
        assert plain.of(step) == gathered.of(step)
    last = plain.parts - 1  # the part with the second layer
    before, asked = plain.of(last), gathered.start_hash(last)
    flip(net[1].weight, 5, 3)  # type: ignore[arg-type]
    assert asked.value == before
    assert gathered.of(last) == plain.of(last) != before
    looks = [gathered.start_hash(step) for step in range(5)]  # more than there are places
    assert [look.value for look in looks] == [plain.of(step) for step in range(5)]
    net[1].weight.data = torch.zeros(3, 700)
    assert gathered.of(last) == plain.of(last)


def test_a_large_model_of_a_device_is_looked_at_in_smaller_parts():
    net = nn.Linear(2300, 2300)  # 20 MiB
    assert WeightSample(net.parameters(), gathers=True).parts > replica_agreement.MOST_PARTS


class TestOwnMemory:
    def quiet(self, net: nn.Module, steps: int = QUIET_STEPS) -> tuple[WeightSample, WeightWatch]:
        sample = WeightSample(net.parameters())
        memory = WeightWatch(sample, net.parameters())
        for step in range(1, steps + 1):
            assert memory.leave(step, alone=False) is not None
            memory.agreed(step, sample.of(step))
        return sample, memory

    def test_a_bit_that_flips_is_seen_and_what_torch_writes_is_not(self):
        net = model()
        _, memory = self.quiet(net)
        memory.leave(9, alone=True)
        assert not memory.has_changed(9)
        with torch.no_grad():
            net[0].weight.add_(1.0)  # type: ignore[operator]
        assert not memory.has_changed(9)
        memory.leave(10, alone=True)
        poke(net[0].weight)  # type: ignore[arg-type]
        assert memory.has_changed(10)
        assert not memory.has_changed(11)  # of which nothing was seen
        memory.forget()
        assert not memory.has_changed(10)

    def test_nothing_is_said_before_some_steps_in_which_all_agreed(self):
        net = model()
        _, memory = self.quiet(net, QUIET_STEPS - 1)
        memory.leave(9, alone=False)
        poke(net[0].weight)  # type: ignore[arg-type]
        assert not memory.has_changed(9)
        assert memory.leave(10, alone=True) is None

    def test_writes_past_torch_on_all_ranks_end_it(self):
        net = model()
        sample, memory = self.quiet(net)
        memory.leave(9, alone=False)
        poke(net[0].weight)  # type: ignore[arg-type]
        memory.agreed(9, sample.of(9))
        assert memory.leave(10, alone=False) is not None  # for the others
        poke(net[0].weight)  # type: ignore[arg-type]
        assert not memory.has_changed(10)
        assert memory.leave(11, alone=True) is None


def poke(tensor: torch.Tensor) -> None:
    """Past torch, which counts its own writes."""
    ctypes.c_uint32.from_address(tensor.data_ptr()).value ^= 1 << 20
