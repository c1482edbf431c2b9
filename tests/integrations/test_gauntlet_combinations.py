"""Ways to train that combine others, or are slow to build: disturbed, each must end with the bits of one
process. The others are in tests/testing/test_gauntlet.py."""

from __future__ import annotations

import pytest

from paceline.testing.gauntlet.attempt import Gauntlet
from paceline.testing.gauntlet.features import FEATURES


@pytest.fixture(scope="module")
def gauntlet() -> Gauntlet:
    return Gauntlet()


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("feature", [name for name, setup in FEATURES.items() if not setup.quick])
def test_a_disturbed_combination_has_the_bits_of_one_process(
    gauntlet: Gauntlet, feature: str, seed: int
) -> None:
    finding = gauntlet.attempt(feature, seed)
    assert not finding.wrong, f"{finding.wrong}\n{finding.plan}"
