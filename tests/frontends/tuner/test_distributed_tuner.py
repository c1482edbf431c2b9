"""`DistributedTuner` with real processes: what it finds, what it records, what it refuses."""

from __future__ import annotations

import functools
import math
import os
import sys
import threading
from pathlib import Path
from typing import Any

import optuna
import pytest
from tests.frontends.tuner import trial_functions

import paceline
from paceline.core import events, journal
from paceline.frontends.tuner import trial_table
from paceline.frontends.tuner.trial_record import TrialRecord
from paceline.frontends.tuner.tuning_study import StoredStudy

X = {"x": paceline.tune.uniform(-3, 3)}
LOCK = threading.Lock()


def tuner(function, folder, space=X, **more) -> paceline.DistributedTuner:
    settings = {"num_gpus": 2, "seed": 1, "study": folder / "study", "verbose": False, **more}
    return paceline.DistributedTuner(function, space, **settings)


def test_the_best_is_found_and_all_is_recorded(tmp_path, capfd):
    search = tuner(trial_functions.quadratic, tmp_path, verbose=True)
    best = search.tune(num_samples=14)
    assert [trial.number for trial in search.trials] == list(range(14))
    assert all(trial.value == trial_functions.quadratic(trial.params) for trial in search.trials)
    assert search.best_value == max(trial.value or -math.inf for trial in search.trials)
    assert best == search.best_params == search.best_trial.params
    table = search.table()
    assert len([line for line in table.splitlines() if " complete " in line]) == 14
    assert table.count("best") == 1
    shown = capfd.readouterr().err
    assert "14/14 trial" in shown
    assert f"(trial {search.best_trial.number})" in shown
    assert [trial.value for trial in StoredStudy(tmp_path / "study").trials] == [
        trial.value for trial in search.trials
    ]
    # More trials of the same study.
    search.tune(num_samples=16)
    assert len(search.trials) == 16


def test_as_many_at_once_as_asked_for_each_in_its_own_session(tmp_path):
    function = functools.partial(trial_functions.meeting, folder=tmp_path, slots=4)
    search = tuner(function, tmp_path, trials_per_gpu=2)
    search.tune(4)
    assert [trial.value for trial in search.trials] == [1.0] * 4


def test_each_trial_has_its_threads_and_no_rank(tmp_path):
    def surroundings(params):
        import torch

        assert "RANK" not in os.environ
        assert "WORLD_SIZE" not in os.environ
        print("printed by the trial")
        return {"threads": torch.get_num_threads(), "other": torch.tensor(3.0)}

    search = tuner(surroundings, tmp_path, num_gpus=64, metric="threads")
    search.tune(1)
    assert search.best_value == 1.0
    assert "printed by the trial" in (tmp_path / "study" / "trials" / "0000" / "output.log").read_text()


def test_a_trial_that_raises_is_recorded_and_the_search_goes_on(tmp_path):
    def train(params):
        if params["x"] < 0:
            raise ValueError(f"x is {params['x']}")
        if params["x"] > 2:
            sys.exit(3)
        return params["x"] if params["x"] < 1 else math.nan

    search = tuner(train, tmp_path, sampler="random")
    search.tune(16)
    for trial in search.trials:
        x = trial.params["x"]
        assert trial.state == ("complete" if 0 <= x < 1 else "failed")
        if x < 0:
            assert "Traceback" in trial.error
            assert "raise ValueError(f" in trial.error
            assert trial.error.strip().endswith(f"ValueError: x is {x}")
        elif x > 2:
            assert "SystemExit: 3" in trial.error
        elif x >= 1:
            assert "the trial's value is nan" in trial.error
    assert {"ValueError", "SystemExit", "TrialValueError"} <= {
        trial.error.strip().splitlines()[-1].split(":")[0].split(".")[-1]
        for trial in search.trials
        if trial.error
    }


def test_all_failed_is_one_error(tmp_path):
    def train(params):
        raise ValueError("never works")

    search = tuner(train, tmp_path)
    with pytest.raises(
        paceline.RankFailedError, match=r"none of 3 trials has a value; trial 0 failed"
    ) as raised:
        search.tune(3)
    assert "ValueError: never works" in str(raised.value)
    assert [trial.state for trial in search.trials] == ["failed"] * 3


@pytest.mark.parametrize("pruner", ["asha", "median"])
def test_reports_prune_and_the_last_is_the_value(tmp_path, pruner):
    def train(params):
        for step in range(1, 20):
            try:
                paceline.tune.report(step, params["x"] * step)
            except Exception:  # a handler that must not stop the pruning
                return 1e9
        return None

    search = tuner(train, tmp_path, pruner=pruner, sampler="random")
    search.tune(24)
    pruned = [trial for trial in search.trials if trial.state == "pruned"]
    assert pruned
    assert all(len(trial.reports) < 19 for trial in pruned)
    complete = [trial for trial in search.trials if trial.state == "complete"]
    assert all(trial.value == trial.reports[19] == trial.params["x"] * 19 for trial in complete)
    assert search.best_value == max(trial.params["x"] * 19 for trial in complete)


def test_a_population_trains_from_checkpoints(tmp_path):
    def train(params):
        before = paceline.tune.parent_folder()
        steps = 0.0 if before is None else float((before / "state").read_text())
        steps += params["x"]
        (paceline.tune.folder() / "state").write_text(str(steps))
        return steps

    population = paceline.tune.PopulationTraining(size=4)
    search = tuner(train, tmp_path, {"x": paceline.tune.uniform(0, 1)}, sampler=population)
    search.tune(12)
    by_number = {trial.number: trial for trial in search.trials}
    for trial in search.trials:
        before = 0.0 if trial.parent is None else by_number[trial.parent].value
        assert trial.value == before + trial.params["x"]
    assert search.best_trial.number >= 8


def test_a_trial_may_train_on_several_workers_of_which_one_is_killed(tmp_path):
    def train(params):
        import torch

        torch.manual_seed(0)
        data = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
        config = paceline.TrainConfig(
            workers=2,
            epochs=2,
            global_batch=16,
            run_dir=str(paceline.tune.folder() / "run"),
            fault_tolerance=paceline.FaultTolerance(chaos=params["chaos"]),
        )
        optimizer = functools.partial(torch.optim.SGD, lr=0.1)
        model, loss = torch.nn.Linear(4, 1), torch.nn.MSELoss()
        trainer = paceline.Trainer(model, loss, optimizer=optimizer, config=config)
        return trainer.fit(data).steps[-1].loss

    space = {"chaos": [None, "kill rank=1 step=3"]}
    search = tuner(train, tmp_path, space, sampler="grid", mode="min", num_gpus=2)
    search.tune()
    values = {}
    for trial in search.trials:
        assert trial.state == "complete", trial.error
        values[trial.params["chaos"]] = trial.value
        journal_file = tmp_path / "study" / "trials" / f"{trial.number:04}" / "run" / "journal.jsonl"
        lost = [one for one in journal.iterate(journal_file) if isinstance(one, events.WorkerFailed)]
        assert [one.rank for one in lost] == ([1] if trial.params["chaos"] else [])
    assert values[None] == values["kill rank=1 step=3"]


def test_a_report_from_an_observer_prunes_a_trial_on_several_workers(tmp_path):
    class ReportEpochs(paceline.Observer):
        def on_epoch(self, record):
            paceline.tune.report(record.epoch, record.loss)

    def train(params):
        import torch

        data = torch.utils.data.TensorDataset(torch.randn(32, 4), torch.randn(32, 1))
        config = paceline.TrainConfig(workers=2, epochs=50, run_dir=str(paceline.tune.folder() / "run"))
        optimizer = functools.partial(torch.optim.SGD, lr=0.01)
        trainer = paceline.Trainer(
            torch.nn.Linear(4, 1),
            torch.nn.MSELoss(),
            optimizer=optimizer,
            config=config,
            callbacks=[ReportEpochs()],
        )
        return trainer.fit(data).steps[-1].loss

    search = tuner(train, tmp_path, mode="min", num_gpus=1, pruner=optuna.pruners.ThresholdPruner(upper=-1.0))
    with pytest.raises(paceline.RankFailedError, match="none of 1 trial has a value"):
        search.tune(1)
    (trial,) = search.trials
    assert (trial.state, len(trial.reports)) == ("pruned", 1), trial.error


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"mode": "maximum"}, "mode='maximum'"),
        ({"train_fn": 3}, "train_fn is an int"),
        ({"num_gpus": 0}, "num_gpus=0"),
        ({"seed": -1}, "seed=-1"),
        ({"metric": 3}, "metric=3"),
        ({"engine": "slurm"}, "engine='slurm'"),
        ({"max_attempts": 0}, "max_attempts=0"),
        ({"preload": "torch"}, "preload='torch'"),
    ],
)
def test_wrong_settings(given, said):
    with pytest.raises(paceline.ConfigError, match=said):
        paceline.DistributedTuner(**{"train_fn": trial_functions.quadratic, "search_space": X, **given})


@pytest.mark.parametrize(
    ("given", "samples", "said"),
    [
        ({}, 0, "num_samples=0"),
        ({}, True, "num_samples=True"),
        ({"search_space": {}}, 1, "search_space is empty"),
        ({"search_space": {"x": 3}}, 1, "is 3, which is no distribution"),
        ({"sampler": "tpee"}, 1, "sampler is 'tpee'"),
        ({"sampler": 3}, 1, "sampler is an int"),
        ({"sampler": "grid"}, 1, "cannot list the values of x"),
        ({"pruner": "ahsa"}, 1, "pruner is 'ahsa'"),
        ({"study": "sqlite:///a.db"}, 1, "is an address"),
        ({"study": ""}, 1, "study is ''"),
        ({"preload": ("no_such_module_anywhere",)}, 1, "no_such_module_anywhere"),
        ({"train_fn": functools.partial(print, LOCK)}, 1, "cannot be sent"),
    ],
)
def test_wrong_searches(tmp_path, monkeypatch, given, samples, said):
    monkeypatch.chdir(tmp_path)
    settings = {"train_fn": trial_functions.quadratic, "search_space": X, "verbose": False, **given}
    with pytest.raises(paceline.PacelineError, match=said):
        paceline.DistributedTuner(**settings).tune(samples)


@pytest.mark.parametrize(
    ("result", "metric", "said"),
    [
        (None, None, "returned None and reported nothing"),
        ({"loss": 1.0}, "accuracy", "returned no 'accuracy', only loss"),
        ({"loss": 1.0}, None, "metric= does not say which"),
        ({}, None, "returned a dict"),
        ("0.9", None, "returned str, which is not one number"),
        ([1.0, 2.0], None, "returned list, which is not one number"),
        ({"accuracy": "good"}, "accuracy", "returned as 'accuracy' str"),
    ],
)
def test_what_no_search_can_judge_ends_it(tmp_path, result, metric, said):
    search = tuner(lambda params: result, tmp_path, metric=metric)
    with pytest.raises(paceline.UsageError, match=said):
        search.tune(4)
    # Nothing is counted: with the function set right the same trials come.
    search.train_fn, search.metric = trial_functions.quadratic, metric
    search.tune(4)
    assert [trial.state for trial in search.trials] == ["complete"] * 4


def test_wrong_reports():
    wrong: list[tuple[Any, Any]] = [(-1, 1.0), (0.5, 1.0), (True, 1.0), (0, "0.9"), (0, [1.0])]
    for given in wrong:
        with pytest.raises(paceline.UsageError, match="report was given"):
            paceline.tune.report(*given)


def test_outside_of_a_trial():
    paceline.tune.report(0, 1.0)
    assert paceline.tune.params({"lr": 0.1}) == {"lr": 0.1}
    assert paceline.tune.folder() == Path()
    assert paceline.tune.parent_folder() is None


def test_a_study_that_is_there_is_not_continued_by_accident(tmp_path):
    tuner(trial_functions.quadratic, tmp_path).tune(2)
    with pytest.raises(paceline.UsageError, match="there is a study in"):
        tuner(trial_functions.quadratic, tmp_path).tune(2)
    other = {"x": paceline.tune.uniform(-3, 4), "y": [1, 2]}
    with pytest.raises(paceline.UsageError, match=r"another search space: y new; x was Float\(.*high=4"):
        tuner(trial_functions.quadratic, tmp_path, other).tune(2, resume=True)
    with pytest.raises(paceline.UsageError, match="has mode='max'"):
        tuner(trial_functions.quadratic, tmp_path, mode="min").tune(2, resume=True)


@pytest.mark.leaky("matplotlib keeps its fonts open")
@pytest.mark.parametrize(("suffix", "start"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_a_picture(tmp_path, suffix, start):
    trials = [
        TrialRecord(n, {"x": 1.0}, "complete", 1.0 / (n + 1), reports={0: 1.0, 1: 0.5}) for n in range(5)
    ]
    trials.append(TrialRecord(5, {"x": 1.0}, "pruned", 0.1, reports={0: 1.0, 1: 0.9}))
    path = trial_table.plot(trials, "min", "loss", tmp_path / "new" / f"trials.{suffix}")
    assert path.read_bytes().startswith(start)
    with pytest.raises(paceline.UsageError, match=r"the suffix '\.gif' is not one of \.png"):
        trial_table.plot(trials, "min", "loss", tmp_path / "trials.gif")


def test_before_the_first_trial(tmp_path):
    search = tuner(trial_functions.quadratic, tmp_path)
    assert search.trials == []
    with pytest.raises(paceline.UsageError, match="there are no trials yet"):
        _ = search.best_value
    with pytest.raises(paceline.UsageError, match="no trial has a value to draw"):
        search.plot(tmp_path / "a.svg")
