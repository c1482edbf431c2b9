"""Figure 1 in small: the same bits for 1, 2, 3, 4 and 6 workers, over an uneven dataset, in processes."""

from __future__ import annotations

import dataclasses
import shutil
from typing import Any

import pytest
import torch
from tests.train.catalogue import CATALOGUE, DATA, small_resnet, transformer
from tests.train.running import WORKERS, job, regression, seeded, train
from torch import nn

from paceline.comm.context import DistributedContext
from paceline.core.errors import UsageError
from paceline.frontends.spawn import spawn
from paceline.train.loop import process_setup, worker_jobs

_WORKERS_FOR_DATA = (1, 2)


def run_all(context: DistributedContext) -> dict[str, Any]:
    jobs = {**CATALOGUE, **(DATA if context.world_size in _WORKERS_FOR_DATA else {})}
    found = {}
    for name, make in jobs.items():
        job = make()
        config = dataclasses.replace(job.config, workers=context.world_size)
        history = worker_jobs.train(context, dataclasses.replace(job, config=config)).history
        if history is not None:
            steps = [record.timeless() for record in history.steps]
            found[name] = (history.state_hash, steps)
    return found


@pytest.fixture(scope="module")
def outcomes() -> dict[int, dict[str, Any]]:
    with DistributedContext(1, 0) as context:
        found = {1: run_all(context)}
    for workers in WORKERS[1:]:
        found[workers] = spawn(run_all, workers=workers, threads=1, timeout=100)[0]
    return found


@pytest.mark.parametrize("name", CATALOGUE)
def test_the_number_of_workers_changes_no_bit(outcomes: dict[int, dict[str, Any]], name: str) -> None:
    expected_hash, expected_steps = outcomes[1][name]
    assert len({record.loss for record in expected_steps}) == len(expected_steps)
    for workers in WORKERS[1:]:
        assert outcomes[workers][name][1] == expected_steps
        assert outcomes[workers][name][0] == expected_hash


@pytest.mark.parametrize("name", DATA)
def test_whichever_rank_reads_draws_the_same_numbers(outcomes: dict[int, dict[str, Any]], name: str) -> None:
    assert outcomes[2][name] == outcomes[1][name]


def test_loader_workers_change_no_bit(outcomes: dict[int, dict[str, Any]]) -> None:
    assert outcomes[1]["augmented by the loader's workers"] == outcomes[1]["augmented"]


def test_different_runs_differ(outcomes: dict[int, dict[str, Any]]) -> None:
    assert outcomes[1]["mlp"][0] != outcomes[1]["mlp, accumulating"][0]


def test_recomputing_activations_changes_no_bit(outcomes: dict[int, dict[str, Any]]) -> None:
    """Though BatchNorm inside the block sees every batch twice, and dropout draws twice."""
    again = train(small_resnet(activation_checkpointing=("Residual",)))
    assert again.hash == outcomes[1]["resnet"][0]
    again = train(transformer(activation_checkpointing=("TransformerEncoderLayer",)))
    assert again.hash == outcomes[1]["transformer"][0]


class Normalised(nn.Module):
    """Sums over features and over the batch, which a compiler may order as it likes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(5, 33), nn.LayerNorm(33), nn.GELU(), nn.BatchNorm1d(33))
        self.head = nn.Linear(33, 2)

    def forward(self, x: Any) -> Any:
        hidden = self.inner(x)
        return self.head(hidden * torch.softmax(hidden, 0).sum(1, keepdim=True))


def run_compiled(context: DistributedContext) -> str | None:
    """Shards of 2, 3 and 3 samples, and of 2, 3 and 2 at the end of an epoch: each worker sees its own."""
    given = job(
        seeded(Normalised), regression(15), shards=3, global_batch=8, epochs=2, compile=True, shuffle=False
    )
    config = dataclasses.replace(given.config, workers=context.world_size)
    history = worker_jobs.train(context, dataclasses.replace(given, config=config)).history
    return None if history is None else history.state_hash


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
@pytest.mark.slow
def test_compiled_models_have_the_same_bits_over_uneven_shards() -> None:
    """One process that compiles for every shape it meets in turn, and three that meet one or two."""
    found = {spawn(run_compiled, workers=workers, threads=1, timeout=300)[0] for workers in (1, 3)}
    assert len(found) == 1


def run_many_shapes(context: DistributedContext) -> str:
    # In a process of its own, which also ends those that the compiler starts.
    process_setup._MOST_SHAPES = 1
    given = job(nn.Linear(5, 2), regression(15), shards=3, global_batch=8, compile=True)
    with pytest.raises(UsageError) as caught:
        worker_jobs.train(context, given)
    return "\n".join([str(caught.value), *caught.value.__notes__])


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
@pytest.mark.slow
def test_more_shapes_than_the_compiler_takes_are_said() -> None:
    (said,) = spawn(run_many_shapes, workers=1, threads=1, timeout=300)
    assert "the compiled model Linear met more than 1 different shapes of batches" in said
    assert "in epoch 0, step 1, shard 1" in said
