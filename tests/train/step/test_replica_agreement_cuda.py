"""The sample of the weights on a GPU: gathered there, one copy, compared with every step."""

from __future__ import annotations

import os

import pytest
import torch
from tests.frontends.flipped_bits import Flips, build_large, of, supervised
from tests.train.small_run import fit, settings
from torch import nn

import paceline
from paceline.checkpoint.digests import digest_of
from paceline.core import events
from paceline.train.step.replica_agreement import WeightSample

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.leaky("torch keeps its CUDA context until the process ends")
def test_the_hash_is_that_of_the_same_bytes_on_the_host():
    net = nn.Sequential(nn.Linear(70, 70), nn.Linear(70, 3))
    there = nn.Sequential(nn.Linear(70, 70), nn.Linear(70, 3)).cuda()
    there.load_state_dict(net.state_dict())
    here, sample = WeightSample(net.parameters()), WeightSample(there.parameters())
    assert not sample.at_hand
    assert digest_of(dict(there.named_parameters())) == digest_of(dict(net.named_parameters()))
    for step in range(3):
        assert sample.of(step) == here.of(step)
    with torch.no_grad():
        there[1].bias.add_(1.0)  # type: ignore[operator]
    asked = sample.start_hash(0)
    with torch.no_grad():
        there[1].bias.add_(1.0)  # type: ignore[operator]
    assert asked.value not in (here.of(0), sample.of(0))


class FlipsThere(Flips):
    """One bit of a parameter on the device."""

    def change_gradients(self, parameters):
        self.parameter = next(iter(parameters.values()))
        self.seen += 1

    def stop(self, record):
        if record.step == self.step and os.environ["RANK"] == str(self.rank) and not self.mark.exists():
            self.mark.touch()
            self.parameter.data.view(-1).view(torch.int32)[0] ^= 1 << self.bit


@pytest.mark.parametrize("workers", [2, 3])
def test_a_bit_that_flips_on_a_device_is_found_with_the_next_step(workers, tmp_path):
    unattended = paceline.FaultTolerance(enabled=False)
    alone = fit(settings(tmp_path / "one", 1, device="cuda", fault_tolerance=unattended))
    folder = tmp_path / "run"
    history = fit(supervised(folder, workers, device="cuda"), [FlipsThere(tmp_path / "mark", 13, 1, bit=22)])
    assert (tmp_path / "mark").exists()
    assert history.state_hash == alone.state_hash
    assert [(one.rank, one.cause) for one in of(events.WorkerFailed, folder)] == [(1, "dissent")]
    # In the first view only: a rank that repeats steps alone does not wait for its device to compare itself.
    commits = of(events.StepCommitted, folder)
    assert all(one.sample is not None for one in commits if one.generation == commits[0].generation)


def test_of_two_ranks_with_a_large_model_on_a_device_the_odd_one_is_named(tmp_path):
    unattended = paceline.FaultTolerance(enabled=False)
    alone = fit(
        settings(tmp_path / "one", 1, epochs=3, device="cuda", fault_tolerance=unattended), model=build_large
    )
    folder = tmp_path / "run"
    config = supervised(folder, 2, epochs=3, device="cuda")
    history = fit(config, [FlipsThere(tmp_path / "mark", 11, 1, bit=22)], model=build_large)
    assert history.state_hash == alone.state_hash
    assert [(one.rank, one.cause) for one in of(events.WorkerFailed, folder)] == [(1, "dissent")]
