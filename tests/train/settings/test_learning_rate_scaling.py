"""`scale_learning_rate`: the two rules, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

import paceline
from paceline.core.errors import ConfigError


def test_the_rules() -> None:
    assert paceline.scale_learning_rate(0.1, 256, 1024) == pytest.approx(0.2)
    assert paceline.scale_learning_rate(0.1, 256, 1024, rule="sqrt") == pytest.approx(0.2)
    assert paceline.scale_learning_rate(0.1, 256, 1024, rule="linear") == pytest.approx(0.4)
    assert paceline.scale_learning_rate(0.1, 256, 64, rule="linear") == pytest.approx(0.025)
    assert paceline.scale_learning_rate(0.1, 256, 256) == 0.1


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"base_lr": 0.0}, "base_lr=0.0 is not a positive number"),
        ({"base_batch": 0}, "base_batch=0 is not"),
        ({"batch": float("nan")}, "batch=nan is not"),
        ({"batch": True}, "batch=True is not"),
        ({"rule": "cubic"}, "rule='cubic' is no rule"),
    ],
)
def test_refusals(given: dict[str, Any], said: str) -> None:
    arguments: dict[str, Any] = {"base_lr": 0.1, "base_batch": 32, "batch": 64, **given}
    with pytest.raises(ConfigError, match=said):
        paceline.scale_learning_rate(**arguments)
