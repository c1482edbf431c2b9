"""The contract of engines on a real Ray cluster."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.clusters.ray.ray_lab import RayLab

from paceline.testing.engine_contract import check_caller_killed, check_faults, check_stop_and_resume

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.leaky("Ray starts and ends processes when it likes; the contract looks for those of runs"),
]


def test_faults(lab: RayLab, tmp_path: Path) -> None:
    check_faults(lab, tmp_path)


def test_stop_and_resume_on_another_number_of_nodes(lab: RayLab, tmp_path: Path) -> None:
    check_stop_and_resume(lab, tmp_path)


def test_caller_killed(lab: RayLab, tmp_path: Path) -> None:
    check_caller_killed(lab, tmp_path)
