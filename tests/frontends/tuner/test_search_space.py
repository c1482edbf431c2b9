"""What people write as a search space, and what is no search space."""

from __future__ import annotations

from typing import Any

import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

import paceline
from paceline.frontends.tuner.search_space import SearchSpace
from paceline.frontends.tuner.space_file import read_space

tune: Any = paceline.tune


def test_each_kind_becomes_a_distribution():
    space = SearchSpace.of(
        {
            "a": tune.uniform(0, 1),
            "b": tune.loguniform(1e-4, 1e-1),
            "c": tune.randint(1, 5),
            "d": tune.choice(["sgd", "adam"]),
            "e": [16, 32],
            "f": FloatDistribution(0, 1, step=0.25),
            "g": {"grid_search": [1, 2]},
        }
    )
    assert space.distributions == {
        "a": FloatDistribution(0, 1),
        "b": FloatDistribution(1e-4, 1e-1, log=True),
        "c": IntDistribution(1, 4),
        "d": CategoricalDistribution(["sgd", "adam"]),
        "e": CategoricalDistribution([16, 32]),
        "f": FloatDistribution(0, 1, step=0.25),
        "g": CategoricalDistribution([1, 2]),
    }
    assert space.decode({"a": 0.5, "d": "sgd"}) == {"a": 0.5, "d": "sgd"}


def test_values_without_json_come_back_as_they_were():
    def relu(x: float) -> float:
        return max(0.0, x)

    space = SearchSpace.of({"sizes": [(64, 64), (128,)], "activation": tune.choice([relu, abs])})
    sizes, activation = (space.distributions[name] for name in ("sizes", "activation"))
    assert isinstance(sizes, CategoricalDistribution)
    assert isinstance(activation, CategoricalDistribution)
    decoded = space.decode({"sizes": sizes.choices[1], "activation": activation.choices[0]})
    assert decoded == {"sizes": (128,), "activation": relu}


@pytest.mark.parametrize(
    ("space", "said"),
    [
        ({}, "search_space is empty"),
        ([1, 2], "search_space is list, not a dict"),
        ({"lr": 0.1}, r"search_space\['lr'\] is 0.1, which is no distribution"),
        ({"lr": "loguniform"}, "which is no distribution"),
        ({"lr": []}, "a list without values"),
        ({1: [1, 2]}, "search_space has the key 1"),
        ({"a": [object, type("object", (), {})]}, "look alike"),
    ],
    ids=["empty", "list", "number", "text", "no-values", "key", "alike"],
)
def test_no_search_space(space, said):
    with pytest.raises(paceline.ConfigError, match=said):
        SearchSpace.of(space)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: tune.uniform(1, 0), r"uniform\(1, 0\) is no range"),
        (lambda: tune.uniform("a", 1), "is no range"),
        (lambda: tune.uniform(0, float("nan")), "is no range"),
        (lambda: tune.loguniform(0, 1), "begins at or below 0"),
        (lambda: tune.randint(3, 3), "holds no number"),
        (lambda: tune.randint(0.5, 3), "holds no number"),
        (lambda: tune.choice([]), r"choice was given \[\]"),
        (lambda: tune.choice("adam"), "choice was given 'adam'"),
    ],
)
def test_no_distribution(make, said):
    with pytest.raises(paceline.ConfigError, match=said):
        make()


def test_a_file(tmp_path):
    file = tmp_path / "space.toml"
    file.write_text(
        'lr = { loguniform = [1e-4, 1e-1] }\nk = { randint = [1, 5] }\nopt = ["sgd", "adam"]\n'
        "m = { uniform = [0.0, 0.9] }\nn = { choice = [1, 2] }\n"
    )
    assert read_space(str(file)) == {
        "lr": tune.loguniform(1e-4, 1e-1),
        "k": tune.randint(1, 5),
        "opt": tune.choice(["sgd", "adam"]),
        "m": tune.uniform(0.0, 0.9),
        "n": tune.choice([1, 2]),
    }


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is empty"),
        ("lr = ", "is not TOML"),
        ("lr = 0.1", "lr is 0.1, which is no distribution"),
        ("lr = { lognormal = [0, 1] }", "the unknown distribution 'lognormal'"),
        ("lr = { uniform = [0, 1, 2] }", "give two numbers"),
        ("lr = { uniform = 3 }", "give two numbers"),
        ("lr = { loguniform = [0, 1] }", "begins at or below 0"),
        ("lr = []", r"choice was given \[\]"),
    ],
)
def test_a_file_that_is_none(tmp_path, text, said):
    file = tmp_path / "space.toml"
    file.write_text(text)
    with pytest.raises(paceline.ConfigError, match=said):
        read_space(str(file))


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(paceline.ConfigError, match="cannot be read: No such file"):
        read_space(str(tmp_path / "space.toml"))
