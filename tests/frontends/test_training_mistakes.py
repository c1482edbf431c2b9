"""Mistakes in what a run is given: the error names what and where, nothing hangs, no process is left."""

from __future__ import annotations

import dataclasses
import os
import threading
from pathlib import Path

import pytest
import torch
from tests.train import small_run
from tests.train.small_run import fit, journal_of, settings
from torch import nn

import paceline
from paceline.core import events
from paceline.core.errors import PacelineError, RankFailedError, UsageError


@pytest.fixture
def config(tmp_path: Path):
    return settings(tmp_path / "run", 2)


def notes_of(error: BaseException) -> str:
    return "\n".join([str(error), *getattr(error, "__notes__", ())])


def test_an_objective_that_raises_says_where(config):
    def broken(model, batch):
        if batch[0][:, 0].sum() > 0:
            raise KeyError("no such thing")
        return model(batch[0]).mean()

    with pytest.raises(RankFailedError, match="KeyError: 'no such thing'") as caught:
        fit(config, objective=broken)
    assert isinstance(caught.value.original, KeyError)
    assert "in epoch 0, step " in notes_of(caught.value)
    assert "micro-batch of 3" in notes_of(caught.value)
    assert "in broken" in notes_of(caught.value)


class Torn(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 54

    def __getitem__(self, index):
        if index == 17:
            raise OSError("the file is torn")
        return torch.zeros(6), 0


def test_a_dataset_that_raises_names_the_sample(config):
    with pytest.raises(PacelineError) as caught:
        small_run.trainer(config).fit(Torn())
    text = notes_of(caught.value)
    assert "17" in text
    assert "Torn" in text
    assert "the file is torn" in text


def test_a_dataset_that_raises_in_its_own_workers(config):
    loader = torch.utils.data.DataLoader(Torn(), num_workers=1)
    with pytest.raises(PacelineError) as caught:
        small_run.trainer(config).fit(loader)
    assert "the file is torn" in notes_of(caught.value)


class WithLock(nn.Linear):
    def __init__(self) -> None:
        super().__init__(6, 3)
        self.lock = threading.Lock()


def test_what_cannot_be_sent_is_named(config):
    with pytest.raises(
        UsageError, match=r"the model, of type WithLock, cannot be sent.*_thread.lock"
    ) as caught:
        fit(config, model=WithLock())
    assert "pass a function that builds the model" in caught.value.remedy
    lock = threading.Lock()
    with pytest.raises(UsageError, match=r"the objective, of type function, cannot be sent.*_thread.lock"):
        small_run.trainer(config.__class__(run_dir=config.run_dir + "2"), objective=lambda m, b: lock).fit(
            small_run.data()
        )


def test_a_model_function_that_returns_something_else(config):
    with pytest.raises(UsageError, match="the model function returned a dict"):
        fit(config, model=dict)


@pytest.mark.parametrize(
    ("objective", "said"),
    [
        (lambda model, batch: model(batch[0]), "a tensor of shape"),
        (lambda model, batch: 1.0, "returned a float as its loss"),
        (lambda model, batch: None, "returned a NoneType as its loss"),
        (lambda model, batch: (model(batch[0]).mean(), 3), "returned a tuple of 2"),
        (lambda model, batch: torch.zeros(()), "does not depend on|does not require grad"),
    ],
)
def test_what_an_objective_must_return(config, objective, said):
    with pytest.raises(PacelineError, match=said) as caught:
        fit(config, objective=objective)
    assert "in epoch 0, step 1, shard" in notes_of(caught.value)


def test_an_objective_with_the_wrong_arguments_is_refused_before_a_worker_starts(config):
    with pytest.raises(UsageError, match="cannot be called with"):
        fit(config, objective=lambda batch: batch)
    assert not Path(config.run_dir).exists()


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (torch.zeros(54, 6), r"\(input, target\); this one is a Tensor"),
        ({"x": torch.zeros(54, 6), "y": torch.zeros(54)}, r"this one is a dict with keys \['x', 'y'\]"),
        ((torch.zeros(54, 6), torch.zeros(54), torch.zeros(54)), "this one is a (tuple|list) of 3"),
    ],
)
def test_batches_that_are_no_pairs(config, data, said):
    with pytest.raises(UsageError, match=said) as caught:
        small_run.trainer(config).fit(data)
    assert "in epoch 0, step 1, shard" in notes_of(caught.value)


@pytest.mark.parametrize("data", [None, 5, object(), "text"])
def test_data_of_no_known_kind(config, data):
    with pytest.raises(UsageError):
        small_run.trainer(config).fit(data)
    assert not Path(config.run_dir).exists()


def test_data_that_does_not_fit_the_model(config):
    with pytest.raises(RankFailedError, match="mat1 and mat2 shapes") as caught:
        small_run.trainer(config).fit((torch.zeros(54, 7), torch.zeros(54, dtype=torch.int64)))
    assert "in epoch 0, step 1, shard" in notes_of(caught.value)


def test_a_mistake_in_the_evaluation(config):
    def strict(model, batch):
        if not model.training:
            raise ValueError("only for training")
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    with pytest.raises(RankFailedError, match="only for training") as caught:
        fit(config, objective=strict)
    assert "evaluat" in notes_of(caught.value)


class Ends(paceline.Modifier):
    def change_batch(self, batch):
        if paceline.get_rank() == 1:
            os._exit(3)
        return batch


def failed(config) -> list[tuple[int, bool]]:
    found = [event for event in journal_of(Path(config.run_dir)) if isinstance(event, events.WorkerFailed)]
    return [(event.rank, "exited with code 3" in event.reason) for event in found]


def test_a_worker_that_ends_is_named(config):
    config = dataclasses.replace(config, fault_tolerance=small_run.UNATTENDED)
    with pytest.raises(PacelineError, match=r"rank 1 \(pid \d+\) exited with code 3"):
        fit(config, [Ends()])
    assert failed(config) == [(1, True)]
    # And nothing is in the way of the next try.
    assert fit(settings(Path(config.run_dir), 3, resume="auto")).stopped is None


def test_a_worker_that_always_ends_is_named_every_time_and_done_without(config):
    care = paceline.FaultTolerance(max_worker_failures=1)
    history = fit(dataclasses.replace(config, fault_tolerance=care), [Ends()])
    assert len(history.steps) == small_run.STEPS
    assert set(failed(config)) == {(1, True)}
