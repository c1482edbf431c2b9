"""No trial is lost or counted twice, and the same are asked for, whatever is killed and whenever."""

from __future__ import annotations

import math
import os
import shutil
from functools import partial
from pathlib import Path

import optuna
import pytest
from hypothesis import given, settings, strategies as st
from tests.frontends.tuner.inline_trials import InlineTrials, outcome, search

import paceline.tune
from paceline.frontends.tuner.population_settings import PopulationTraining
from paceline.frontends.tuner.trial_record import TrialRecord
from paceline.frontends.tuner.trial_schedule import TrialSchedule

SPACE = {
    "x": paceline.tune.uniform(-3, 3),
    "lr": paceline.tune.loguniform(1e-4, 1.0),
    "k": paceline.tune.randint(0, 4),
    "kind": [(1, 2), (3,)],
}


def bowl(params) -> float:
    if params["k"] == 3 and params["x"] > 1.5:
        raise ZeroDivisionError("a trial that fails by itself")
    return float(params["x"] ** 2 + abs(math.log10(params["lr"]) + 2) + params["k"])


class Killed(BaseException):
    """The process would be gone here."""


@st.composite
def histories(draw):
    """What happens at each turn to one of the running trials, or to the whole process."""
    return draw(st.lists(st.tuples(st.sampled_from("eeelk"), st.integers(0, 7)), max_size=60))


@settings(max_examples=300, deadline=None)
@given(history=histories(), total=st.integers(1, 12), slots=st.integers(1, 4), window=st.integers(0, 3))
def test_schedule_starts_each_trial_until_it_is_over(history, total, slots, window):
    def needs(number: int) -> int:
        return max(0, number - window) if window else 0

    def plan(asked: int, unfinished: list[int]) -> TrialSchedule:
        return TrialSchedule(total, slots, asked, unfinished, needs, max_attempts=10**6)

    schedule, asked = plan(0, []), 0
    over: set[int] = set()
    turns = iter(history)
    while not schedule.is_done:
        while (start := schedule.start_next()) is not None:
            assert start.number not in over
            assert start.is_new == (start.number == asked)
            if start.is_new:
                assert all(number in over for number in range(needs(asked)))
                asked += 1
        running = sorted(schedule.running)
        assert len(set(schedule.running.values())) == len(running) <= slots
        assert running  # else it would wait for ever
        what, which = next(turns, ("e", 0))
        number = running[which % len(running)]
        if what == "k":
            schedule = plan(asked, sorted(set(range(asked)) - over))
        elif what == "l":
            assert schedule.lose(number)
        else:
            schedule.end(number)
            assert number not in over
            over.add(number)
    assert over == set(range(total))


def test_a_trial_that_is_lost_too_often_is_not_repeated():
    schedule = TrialSchedule(2, 1, max_attempts=3)
    for _ in range(2):
        start = schedule.start_next()
        assert start is not None
        assert start.number == 0
        assert schedule.lose(0)
    assert schedule.start_next() is not None
    assert not schedule.lose(0)
    schedule.end(0)
    start = schedule.start_next()
    assert start is not None
    assert (start.number, start.is_new) == (1, True)


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("sampler", ["tpe", "random", "qmc"])
def test_lost_trials_and_their_order_change_nothing(tmp_path, sampler, slots):
    undisturbed = search(tmp_path / "a", bowl, 16, space=SPACE, slots=slots, sampler=sampler)
    for seed in range(3):
        engine = InlineTrials(bowl, seed, loses=0.4)
        disturbed = search(
            tmp_path / str(seed), bowl, 16, space=SPACE, slots=slots, sampler=sampler, engine=engine
        )
        assert len(engine.attempts) > 16
        assert outcome(disturbed) == outcome(undisturbed)


def killed_at(write: int, share: float, patch: pytest.MonkeyPatch) -> None:
    """Have the process end at the `write`th write of the study's file, of which a share is done."""
    left = [write]
    real = os.write

    def write_or_die(descriptor: int, data: bytes) -> int:
        left[0] -= 1
        if left[0] >= 0:
            return real(descriptor, data)
        real(descriptor, bytes(data)[: int(len(data) * share)])
        raise Killed

    patch.setattr(os, "write", write_or_die)


@pytest.mark.parametrize(
    ("first_share", "slots", "pruner"), [(0, 2, None), (1, 2, None), (0, 1, "asha"), (1, 1, "median")]
)
def test_a_kill_at_any_write_changes_nothing(tmp_path, first_share, slots, pruner):
    """The searching process dies at each of its writes: before it, in the middle of it, after it. A pruner
    compares trials that run beside each other, so with one there is one at a time."""

    def searched(folder: Path) -> list[TrialRecord]:
        return search(folder, bowl, 14, space=SPACE, slots=slots, pruner=pruner)

    undisturbed = searched(tmp_path / "whole")
    assert any(trial.state == "pruned" for trial in undisturbed) == (pruner is not None)
    shares = (0.0, 0.6, 1.0)
    kills = 0
    for write in range(100):
        folder = tmp_path / f"{write}"
        with pytest.MonkeyPatch.context() as patch:
            killed_at(write, shares[(first_share + write) % 3], patch)
            try:
                searched(folder)
                break
            except Killed:
                kills += 1
        assert outcome(searched(folder)) == outcome(undisturbed)
    assert kills == 1 + 3 * 14  # the study; of a trial the sampler's state, its beginning and its end


@pytest.mark.parametrize("over", [0, 4])
@pytest.mark.parametrize("sampler", ["tpe", "random"])
def test_without_a_seed_a_resume_goes_on_with_the_generators(tmp_path, sampler, over):
    """Two resumes of one search draw the same: those of a search that was killed when this many trials were
    over, at the beginning of the next."""
    begun = tmp_path / "begun"
    with pytest.MonkeyPatch.context() as patch:
        killed_at(2 + 3 * over, 0.0, patch)
        with pytest.raises(Killed):
            search(begun, bowl, 14, space=SPACE, sampler=sampler, seed=None)
    again = shutil.copytree(begun, tmp_path / "again")
    first, second = (search(one, bowl, 14, space=SPACE, sampler=sampler, seed=None) for one in (begun, again))
    assert outcome(first) == outcome(second)


@pytest.mark.parametrize("left", ["", "[]", "{}", "old"])
def test_generators_that_a_power_cut_took_draw_no_trial_again(tmp_path, left):
    again = partial(search, tmp_path, bowl, space=SPACE, sampler="random", seed=7)
    again(2)
    state = tmp_path / "sampler.json"
    old = state.read_text()
    again(4)
    state.write_text(old if left == "old" else left)
    trials = again(8)
    assert len({str(trial.params) for trial in trials}) == 8


def test_population_goes_on_after_a_kill(tmp_path):
    settings = PopulationTraining(size=4)
    whole = search(tmp_path / "whole", bowl, 16, space=SPACE, slots=1, sampler=settings)
    for write in (3, 11, 20, 29):
        folder = tmp_path / f"{write}"
        with pytest.MonkeyPatch.context() as patch:
            killed_at(write, 0.5, patch)
            with pytest.raises(Killed):
                search(folder, bowl, 16, space=SPACE, slots=3, sampler=settings)
        assert outcome(search(folder, bowl, 16, space=SPACE, slots=3, sampler=settings)) == outcome(whole)


def test_sequential_trials_are_those_of_optuna(tmp_path):
    """With a seed, `DistributedTuner` asks for what Optuna's own loop asks for."""
    space = {"x": SPACE["x"], "k": SPACE["k"]}
    mine = search(
        tmp_path / "a", lambda one: one["x"] ** 2 + one["k"], 20, space=space, sampler="tpe", seed=5
    )
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=5))
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study.optimize(lambda one: one.suggest_float("x", -3, 3) ** 2 + one.suggest_int("k", 0, 3), n_trials=20)
    assert [(one.params, one.value) for one in mine] == [(one.params, one.value) for one in study.trials]


def test_optuna_reads_the_file(tmp_path):
    trials = search(tmp_path / "a", bowl, 6, space=SPACE)
    backend = optuna.storages.journal.JournalFileBackend(str(tmp_path / "a" / "study.log"))
    study = optuna.load_study(study_name="a", storage=optuna.storages.JournalStorage(backend))
    assert [one.value for one in study.trials] == [one.value for one in trials]
    assert study.best_trial.number == min(trials, key=lambda one: one.value or math.inf).number


def test_a_damaged_file_is_named(tmp_path):
    search(tmp_path / "a", bowl, 3, space=SPACE)
    file: Path = tmp_path / "a" / "study.log"
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join([*lines[:4], b"{broken\n", *lines[4:]]))
    with pytest.raises(paceline.PlatformError, match=r"study\.log is damaged at byte"):
        search(tmp_path / "a", bowl, 3, space=SPACE)


def test_grid_ends_with_the_last_combination(tmp_path):
    space = {"x": [1, 2, 3], "k": paceline.tune.randint(0, 2)}
    trials = search(tmp_path / "a", lambda one: float(one["x"]), 6, space=space, sampler="grid", slots=2)
    assert sorted((one.params["x"], one.params["k"]) for one in trials) == [
        (x, k) for x in (1, 2, 3) for k in (0, 1)
    ]
