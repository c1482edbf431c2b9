"""Early stopping brings back the weights of the best evaluation: on any number of workers, also after a
resume, and a longer run continues from the last weights as if it had not."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.train.running import job, regression, seeded, train
from torch import nn

from paceline.checkpoint.store import CheckpointStore
from paceline.core import events, journal
from paceline.data.sources import as_source
from paceline.monitor import journal_index
from paceline.monitor.audit import audit
from paceline.train.loop.recompute import verify_run
from paceline.train.loop.worker_jobs import TrainJob
from paceline.train.settings.train_config import CheckpointConfig, EarlyStopping
from paceline.train.state.best_weights import BestWeights
from paceline.train.state.model_state import hash_of, load_model, model_tensors, state_hash

DATA = regression(24)
# By the highest loss: the first evaluation is the best, and then it gets worse.
FIRST = EarlyStopping(metric="loss", mode="max", patience=2)


def net() -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2)))


def given(folder: Path | None = None, **settings: Any) -> TrainJob:
    defaults: dict[str, Any] = {"validation": DATA, "early_stopping": FIRST, "epochs": 9, "shards": 4}
    return job(net(), DATA, run_dir=folder, **{**defaults, **settings})


def after_one_epoch() -> str:
    return train(given(epochs=1, early_stopping=None)).hash


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_the_best_weights_come_back_on_every_rank(workers: int) -> None:
    outcome = train(given(), workers)
    history = outcome.history
    assert history.stopped is not None
    assert (len(history.epochs), history.restored) == (3, 2)
    # Buffers too: the statistics of BatchNorm are those of the best evaluation.
    assert {state_hash(module) for module in outcome.modules} == {history.state_hash}
    assert history.state_hash == after_one_epoch()


def test_at_the_end_of_a_run_that_was_not_stopped_as_well() -> None:
    history = train(given(epochs=2)).history
    assert (history.stopped, history.restored) == (None, 2)
    assert history.state_hash == after_one_epoch()


def test_not_where_it_is_turned_off_or_the_last_weights_are_the_best() -> None:
    off = dataclasses.replace(FIRST, restore_best=False)
    left = train(given(early_stopping=off))
    assert left.history.restored is None
    assert left.hash == train(given(early_stopping=None, epochs=3)).hash
    better = train(given(early_stopping=EarlyStopping(patience=9), epochs=3))
    assert better.history.restored is None
    assert better.hash == left.hash


@pytest.mark.parametrize("mode", ["min", "max"])
def test_an_evaluation_at_the_end_that_early_stopping_does_not_count_is_seen(mode: Any) -> None:
    """The run ends between two evaluations of its plan: its last weights are better, or they are not."""
    early = EarlyStopping(mode=mode, patience=9)
    history = train(given(early_stopping=early, evaluate_every=2, max_steps=3)).history
    assert [one.step for one in history.evaluations] == [2, 3]
    assert history.evaluations[1].loss < history.evaluations[0].loss
    assert history.restored == (None if mode == "min" else 2)


def test_a_run_in_pieces_restores_the_same_and_continues_from_its_last_weights(tmp_path: Path) -> None:
    saving = CheckpointConfig(every_epochs=1)
    first = train(given(tmp_path / "run", epochs=2, checkpoint=saving), 2)
    assert first.hash == after_one_epoch()
    version = CheckpointStore(tmp_path / "run" / "checkpoints").open()
    tensors = version.tensors()
    last = net()
    load_model(last, tensors)
    assert state_hash(last) == train(given(early_stopping=None, epochs=2)).hash
    best = {name.removeprefix("best/"): one for name, one in tensors.items() if name.startswith("best/")}
    assert hash_of(best) == first.hash

    resumed = train(given(tmp_path / "run", checkpoint=saving, resume="auto"), 3).history
    whole = train(given()).history
    assert (resumed.state_hash, resumed.restored) == (whole.state_hash, whole.restored)
    assert [one.metrics for one in resumed.evaluations] == [one.metrics for one in whole.evaluations]
    # It is over: started again it returns the same.
    again = train(given(tmp_path / "run", checkpoint=saving, resume="auto"), 1).history
    assert (again.state_hash, again.restored) == (whole.state_hash, 2)
    ends = [
        one for one in journal.iterate(tmp_path / "run" / "journal.jsonl") if isinstance(one, events.RunEnded)
    ]
    assert [(end.step, end.restored, end.hash) for end in ends[1:]] == [(6, 2, whole.state_hash)] * 2


def test_an_audit_compares_the_hash_of_the_step_that_was_restored(tmp_path: Path) -> None:
    train(given(tmp_path / "run", audit_every=1), 2)
    lines = list(journal.iterate(tmp_path / "run" / "journal.jsonl"))
    assert audit(lines).wrong == ()
    ended = next(line for line in lines if isinstance(line, events.RunEnded))
    lines[lines.index(ended)] = dataclasses.replace(ended, restored=None)
    assert len(audit(lines).wrong) == 1


def test_a_verification_computes_the_end_and_the_checkpoints_again(tmp_path: Path) -> None:
    """Checkpoints hold the best weights too, which nothing evaluates again."""
    folder = tmp_path / "run"
    run = given(folder, checkpoint=CheckpointConfig(every_epochs=1))
    train(run, 2)
    record = journal_index.read(journal.iterate(folder / "journal.jsonl"))
    again = dataclasses.replace(run, model=net(), train=as_source(DATA))
    found = verify_run(again, folder, record)
    assert found.same, found.different
    assert (found.steps, found.compared["end"], found.compared["checkpoint"]) == (6, 1, 3)


def test_weights_that_are_kept_are_a_copy_on_the_host() -> None:
    module = net()
    best = BestWeights(module)
    assert best.export() == {}
    best.keep(4)
    before = hash_of(model_tensors(module))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(1.0)
    assert best.hash() == before != state_hash(module)
    other = BestWeights(module)
    other.load(4, best.export())
    other.restore()
    assert state_hash(module) == before
    other.load(None, {})
    assert (other.step, other.export()) == (None, {})
