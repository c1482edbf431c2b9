"""Evaluation and prediction after a `fit` on an engine: on this machine, with the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.train import small_run

import paceline
from paceline.comm.context import DistributedContext
from paceline.core.available_resources import cores
from paceline.frontends import fit_drivers, overrides
from paceline.frontends.overrides import Overrides
from paceline.frontends.spawn import spawn
from paceline.testing.process_engine import ProcessEngine


def evaluated(context: DistributedContext, trainer: paceline.Trainer) -> dict[str, float]:
    return trainer.evaluate(small_run.data())


def test_after_a_fit_on_more_nodes_than_the_script_has_workers(tmp_path: Path) -> None:
    """The engine is that of the command line, and the script has its own workers. Fewer ranks evaluate, too:
    those that are left of an mpirun which had all of them as nodes."""
    local = small_run.trainer(small_run.settings(tmp_path / "local", 2, epochs=1))
    alone = local.fit(small_run.data())
    expected = local.evaluate(small_run.data())
    trainer = small_run.trainer(small_run.settings(tmp_path / "engine", 2, epochs=1))
    with overrides.in_force(Overrides({"engine": ProcessEngine(nodes=3), "workers": 3})):
        history = trainer.fit(small_run.data())
        assert history.state_hash == alone.state_hash
        assert trainer.evaluate(small_run.data()) == expected
        rows, _ = small_run.data()
        assert torch.equal(trainer.predict(rows), local.predict(rows))
    assert spawn(evaluated, trainer, workers=2, threads=1, timeout=60) == [expected, expected]


def test_no_more_workers_than_this_machine_has_cores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    jobs: list[Any] = []
    monkeypatch.setattr(fit_drivers, "spawn_ranks", lambda function, job: jobs.append(job))
    engine = ProcessEngine(nodes=64, workers_per_node=8)
    for shards in (512, 1):
        config = small_run.settings(tmp_path, 1, engine=engine, shards=shards, global_batch=512)
        small_run.trainer(config).evaluate(small_run.data())
    assert [job.config.workers for job in jobs] == [cores(), 1]
    assert all(job.config.engine is None for job in jobs)
    assert all(isinstance(job.config, paceline.TrainConfig) for job in jobs)
