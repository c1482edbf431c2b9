"""What the tests of several hosts share: the hash of the run that they disturb."""

from __future__ import annotations

import pytest
from tests.network import joined_run

import paceline


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Train in one process, without a supervisor; return the hash."""
    folder = tmp_path_factory.mktemp("undisturbed")
    (folder / "open").touch()
    config = joined_run.config_of(folder / "run", 1, paceline.FaultTolerance(enabled=False))
    return joined_run.fit(config, folder / "open")
