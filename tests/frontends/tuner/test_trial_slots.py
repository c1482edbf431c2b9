"""Which devices and threads a trial gets."""

from __future__ import annotations

import pytest

import paceline
from paceline.frontends.tuner.trial_slots import describe_slots, gpu_share, local_slots, slots_at_once


def devices(*given) -> list[str]:
    return [slot.environment["CUDA_VISIBLE_DEVICES"] for slot in local_slots(*given)]


def test_trials_share_gpus():
    assert devices(2, 1, 8, 2, None) == ["0", "1"]
    assert devices(2, 2, 8, 2, None) == ["0", "0", "1", "1"]
    assert devices(4, 0.5, 8, 4, None) == ["0,1", "2,3"]
    assert devices(2, 1, 8, 2, "5,7") == ["5", "7"]
    assert devices(2, 1, 8, 2, "GPU-a, GPU-b") == ["GPU-a", "GPU-b"]
    assert devices(3, 1, 8, 2, None) == ["0", "1", "0"]


def test_the_share_of_a_trial():
    assert [gpu_share(number) for number in (4, 2, 1, 0.5, 1 / 3)] == [0.25, 0.5, 1, 2, 3]


def test_without_a_gpu_they_share_cores():
    slots = local_slots(3, 2, 13, 0, None)
    assert [(slot.environment, slot.threads) for slot in slots] == [({}, 2)] * 6
    assert describe_slots(3, 6, 0) == "no GPU here: 6 trials at once on the CPU"
    assert describe_slots(2, 2, 2) == ""
    assert "share" in describe_slots(3, 3, 2)


@pytest.mark.parametrize(
    ("num_gpus", "trials_per_gpu", "said"),
    [
        (0, 1, "num_gpus=0"),
        (1.5, 1, r"num_gpus=1\.5"),
        (True, 1, "num_gpus=True"),
        (1, 0, "trials_per_gpu=0"),
        (1, 1.5, r"trials_per_gpu=1\.5"),
        (4, 0.4, "no whole number of GPUs per trial"),
        (1, 0.5, "a trial needs 2 GPUs"),
        (1, "2", "trials_per_gpu='2'"),
    ],
)
def test_no_share(num_gpus, trials_per_gpu, said):
    with pytest.raises(paceline.ConfigError, match=said):
        slots_at_once(num_gpus, trials_per_gpu)
