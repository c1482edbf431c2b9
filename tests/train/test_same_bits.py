"""Figure 1 in small: the same bits for 1, 2, 3, 4 and 6 workers, over an uneven dataset, in processes."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from tests.train.catalogue import CATALOGUE, DATA, small_resnet, transformer
from tests.train.running import WORKERS, train

from paceline.comm.context import DistributedContext
from paceline.frontends.spawn import spawn
from paceline.train import worker

_WORKERS_FOR_DATA = (1, 2)


def run_all(context: DistributedContext) -> dict[str, Any]:
    jobs = {**CATALOGUE, **(DATA if context.world_size in _WORKERS_FOR_DATA else {})}
    found = {}
    for name, make in jobs.items():
        job = make()
        config = dataclasses.replace(job.config, workers=context.world_size)
        history = worker.train(context, dataclasses.replace(job, config=config)).history
        if history is not None:
            steps = [dataclasses.replace(record, seconds=0.0) for record in history.steps]
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
def test_whoever_reads_draws_the_same_numbers(outcomes: dict[int, dict[str, Any]], name: str) -> None:
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
