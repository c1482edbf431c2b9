"""Population-based training: who continues whom, and with which parameters."""

from __future__ import annotations

import pytest
from optuna.distributions import FloatDistribution
from tests.frontends.tuner.inline_trials import InlineTrials, outcome, search

import paceline
from paceline.frontends.tuner.population_settings import PopulationTraining

SPACE = {"lr": paceline.tune.loguniform(1e-3, 1.0), "k": paceline.tune.randint(0, 9), "c": ["a", "b", "c"]}


def height(params) -> float:
    return float(params["lr"])


def test_the_worst_continue_the_best(tmp_path):
    settings = PopulationTraining(size=4, resample=0.0)
    trials = search(tmp_path / "a", height, 12, space=SPACE, sampler=settings, mode="max", slots=4)
    assert [one.parent for one in trials[:4]] == [None] * 4
    for generation in (1, 2):
        before = trials[generation * 4 - 4 : generation * 4]
        worst, *_, best = sorted(before, key=lambda one: one.value or 0.0)
        for one in trials[generation * 4 : generation * 4 + 4]:
            own = trials[one.number - 4]
            if own is worst:
                assert one.parent == best.number
                factor = one.params["lr"] / best.params["lr"]
                assert factor == pytest.approx(0.8) or factor == pytest.approx(1.2) or one.params["lr"] == 1.0
                assert abs("abc".index(one.params["c"]) - "abc".index(best.params["c"])) <= 1
            else:
                assert one.parent == own.number
                assert one.params == own.params


def test_steps_that_floats_miss(tmp_path):
    """0 + 3 * 0.1 is above 0.3: a member that goes on by itself would be given another value."""
    space = {"x": FloatDistribution(0.0, 0.3, step=0.1)}
    settings = PopulationTraining(size=4, resample=0.0)
    high = 0
    for seed in range(4):
        trials = search(
            tmp_path / str(seed),
            lambda one: one["x"],
            12,
            space=space,
            sampler=settings,
            mode="max",
            seed=seed,
        )
        high += sum(one.params["x"] == 0.3 for one in trials)
        continued = [one for one in trials if one.parent == one.number - 4]
        assert continued
        assert all(one.params == trials[one.number - 4].params for one in continued)
    assert high


def test_neither_slots_nor_order_nor_losses_change_it(tmp_path):
    settings = PopulationTraining(size=4)
    alone = search(tmp_path / "a", height, 16, space=SPACE, sampler=settings, slots=1)
    engine = InlineTrials(height, 7, loses=0.3)
    many = search(tmp_path / "b", height, 16, space=SPACE, sampler=settings, slots=4, engine=engine)
    assert outcome(many) == outcome(alone)


def test_a_member_that_failed_continues_another(tmp_path):
    def fails_at_first(params) -> float:
        if params["lr"] < 0.01:
            raise ZeroDivisionError
        return float(params["lr"])

    settings = PopulationTraining(size=6)
    trials = search(tmp_path / "a", fails_at_first, 12, space=SPACE, sampler=settings, mode="max")
    failed = [one.number for one in trials[:6] if one.state == "failed"]
    assert failed
    assert all(trials[number + 6].parent not in (None, number, *failed) for number in failed)


def test_all_failed_begins_anew(tmp_path):
    def fails(params) -> float:
        raise ZeroDivisionError

    trials = search(tmp_path / "a", fails, 8, space=SPACE, sampler=PopulationTraining(size=4))
    assert [one.parent for one in trials] == [None] * 8


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"size": 1}, "size=1"),
        ({"quantile": 0.7}, "quantile=0.7"),
        ({"resample": 2}, "resample=2"),
        ({"factors": ()}, "factors="),
    ],
)
def test_no_population(given, said):
    with pytest.raises(paceline.ConfigError, match=said):
        PopulationTraining(**given)
