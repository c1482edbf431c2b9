"""How a search begins: what is refused leaves no study that is in the way; folders, seconds, lost values."""

from __future__ import annotations

import functools
import os
import sys
import threading
from pathlib import Path

import optuna
import pytest
from tests.frontends.tuner import trial_functions
from tests.frontends.tuner.inline_trials import InlineTrials, outcome, search
from tests.virtual_clock import VirtualClock

import paceline
from paceline.frontends.tuner.population_settings import PopulationTraining
from paceline.frontends.tuner.search_space import SearchSpace
from paceline.frontends.tuner.trial_engine import Raised, Returned
from paceline.frontends.tuner.trial_value import TrialResultError, TrialSetupError
from paceline.frontends.tuner.tuning_study import TuningStudy

X = {"x": paceline.tune.uniform(-3, 3)}


def tuner(folder: Path, space=X, **more) -> paceline.DistributedTuner:
    settings = {"num_gpus": 2, "seed": 1, "study": folder / "study", "verbose": False, **more}
    return paceline.DistributedTuner(
        **{"train_fn": trial_functions.quadratic, "search_space": space, **settings}
    )


@pytest.mark.parametrize(
    "wrong",
    [
        {"sampler": "tpee"},
        {"pruner": "ahsa"},
        {"trials_per_gpu": 0.3},
        {"train_fn": functools.partial(print, threading.Lock())},
        {"engine": paceline.Ray(nodes=2)},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_a_refused_search_leaves_no_study_in_the_way(tmp_path, wrong):
    with pytest.raises(paceline.PacelineError):
        tuner(tmp_path, **{"num_gpus": None, **wrong}).tune(2)
    # Corrected, and with another space.
    right = tuner(tmp_path, {"x": [1.0, 2.0]}, sampler="grid")
    right.tune(2)
    assert sorted(trial.params["x"] for trial in right.trials) == [1.0, 2.0]


def test_generators_of_a_search_without_trials_are_for_its_resume(tmp_path):
    state = tmp_path / "sampler.json"
    state.write_text("{}")
    for resume in (True, False):
        TuningStudy(tmp_path, SearchSpace.of(X), "max", None, resume=resume).close()
        assert state.exists() == resume


def test_generators_that_are_lost_are_mentioned(tmp_path, capsys):
    tuner(tmp_path).tune(1)
    (tmp_path / "study" / "sampler.json").unlink()
    tuner(tmp_path, verbose=True).tune(2, resume=True)
    said = "sampler.json is not that of trial 1: the sampler continues with random numbers of its own"
    assert said in capsys.readouterr().err
    tuner(tmp_path, verbose=True).tune(3, resume=True)
    assert "sampler.json" not in capsys.readouterr().err


def test_a_study_of_others_stays_theirs(tmp_path):
    tuner(tmp_path).tune(2)
    again = tuner(tmp_path)
    for _ in range(2):
        with pytest.raises(paceline.UsageError, match=r"there is a study in .* already"):
            again.tune(3)
    assert again.trials == []


def _copied(folder: Path) -> None:
    source = optuna.storages.InMemoryStorage()
    optuna.create_study(storage=source, study_name="theirs").add_trial(optuna.trial.create_trial(value=1.0))
    optuna.copy_study(from_study_name="theirs", from_storage=source, to_storage=_storage(folder))


def _enqueued(folder: Path) -> None:
    optuna.create_study(storage=_storage(folder)).enqueue_trial({"x": 1.0})


def _without_trials(folder: Path) -> None:
    optuna.create_study(storage=_storage(folder)).set_user_attr("their", "own")


def _deleted(folder: Path) -> None:
    optuna.create_study(storage=_storage(folder), study_name="theirs")
    optuna.delete_study(study_name="theirs", storage=_storage(folder))


def _storage(folder: Path) -> optuna.storages.JournalStorage:
    backend = optuna.storages.journal.JournalFileBackend(str(folder / "study.log"))
    return optuna.storages.JournalStorage(backend)


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("write", [_copied, _enqueued, _without_trials, _deleted])
def test_a_study_that_optuna_wrote_is_left_as_it_is(tmp_path, write, resume):
    write(tmp_path)
    file = tmp_path / "study.log"
    before = file.read_bytes()
    with pytest.raises(paceline.UsageError, match=r"study\.log is not the study of a search of Paceline"):
        tuner(tmp_path, study=tmp_path).tune(2, resume=resume)
    assert file.read_bytes() == before


def test_a_trial_that_was_enqueued_is_no_study_to_begin_anew(tmp_path):
    TuningStudy(tmp_path, SearchSpace.of(X), "max", None, resume=False).close()
    optuna.load_study(study_name=None, storage=_storage(tmp_path)).enqueue_trial({"x": 1.0})
    before = (tmp_path / "study.log").read_bytes()
    for resume, said in ((False, "there is a study in .* already"), (True, "trial 0 .* was enqueued")):
        with pytest.raises(paceline.UsageError, match=said):
            tuner(tmp_path, study=tmp_path).tune(2, resume=resume)
    assert (tmp_path / "study.log").read_bytes() == before


@pytest.mark.parametrize(("sampler", "package"), [("cmaes", "cmaes"), ("gp", "scipy"), ("qmc", "scipy")])
def test_a_sampler_without_its_package(tmp_path, monkeypatch, sampler, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(
        paceline.UnavailableError, match=f"'{sampler}' needs the package {package}, which is not installed"
    ):
        tuner(tmp_path, sampler=sampler).tune(1)
    assert not (tmp_path / "study").exists()


def test_one_trial_without_a_value_fails_alone(tmp_path):
    def objective(params) -> float:
        if params["x"] == 0:
            raise TrialResultError("train_fn returned None and reported nothing")
        return float(params["x"])

    space = {"x": [-1, 0, 1]}
    trials = search(tmp_path / "a", objective, 12, space=space, sampler="random", seed=2)
    states = {trial.params["x"]: trial.state for trial in trials}
    assert states == {-1: "complete", 0: "failed", 1: "complete"}
    assert "reported nothing" in next(trial.error for trial in trials if trial.params["x"] == 0)
    # The first one: no trial of this function may have a value.
    with pytest.raises(TrialResultError):
        search(tmp_path / "b", objective, 4, space={"x": [0]}, sampler="random")


def test_a_place_that_can_run_no_trial_costs_none(tmp_path):
    """A node without the script, where others have it: the search ends, and goes on with that trial."""
    broken = [5]

    def objective(params) -> float:
        if len(calls.attempts) > broken[0]:
            raise TrialSetupError("the script is not on node b")
        return float(params["x"])

    calls = InlineTrials(objective)
    with pytest.raises(TrialSetupError, match="not on node b"):
        search(tmp_path, objective, 8, space=X, engine=calls, sampler="random", seed=2)
    broken[0] = 100
    trials = search(tmp_path, objective, 8, space=X, engine=calls, sampler="random", seed=2)
    whole = InlineTrials(lambda params: float(params["x"]))
    alone = search(tmp_path / "alone", objective, 8, space=X, engine=whole, sampler="random", seed=2)
    assert outcome(trials) == outcome(alone)


def test_ends_that_come_with_the_end_of_the_search_are_recorded(tmp_path):
    class Together(InlineTrials):
        def wait(self, seconds=None):
            error = TrialSetupError("no room")
            return [Raised(0, "no room", error), Returned(1, 4.0)]

    engine = Together(lambda params: 1.0)
    with pytest.raises(TrialSetupError):
        search(tmp_path, lambda params: 1.0, 2, space=X, engine=engine, slots=2, sampler="random")
    study = TuningStudy(tmp_path, SearchSpace.of(X), "min", None, resume=True)
    assert [(trial.number, trial.state, trial.value) for trial in study.records()][1] == (1, "complete", 4.0)
    assert study.unfinished == [0]
    study.close()


def test_folders_are_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    engine = InlineTrials(lambda params: 1.0)
    settings = PopulationTraining(size=2)
    search(Path("studies", "s"), lambda params: 1.0, 4, space=X, sampler=settings, engine=engine)
    trials = [str(tmp_path / "studies" / "s" / "trials" / f"000{number}") for number in range(4)]
    assert set(engine.folders) == {"", *trials}


def test_seconds_are_those_of_the_last_attempt(tmp_path):
    clock, space = VirtualClock(), SearchSpace.of(X)
    first = TuningStudy(tmp_path, space, "max", None, resume=False, clock=clock)
    first.ask(None)
    first.begin(0)
    first.close()
    clock.advance(86_400)
    study = TuningStudy(tmp_path, space, "max", None, resume=True, clock=clock)
    study.begin(0)
    clock.advance(7)
    study.forget_reports(0)
    study.begin(0)
    clock.advance(5)
    study.finish(0, 1.0)
    assert [trial.seconds for trial in study.records()] == [5.0]
    study.close()


def test_a_forked_process_is_not_the_trial(tmp_path):
    def train(params):
        child = os.fork()
        if child == 0:
            paceline.tune.report(5, 1000.0)
            os._exit(0 if paceline.tune.params() == {} else 1)
        _, status = os.waitpid(child, 0)
        paceline.tune.report(0, params["x"])
        assert status == 0

    forked = paceline.DistributedTuner(
        train, X, num_gpus=1, seed=1, study=tmp_path / "study", verbose=False, pruner="median"
    )
    forked.tune(2)
    assert [trial.reports for trial in forked.trials] == [{0: trial.params["x"]} for trial in forked.trials]
