"""Searches on a Ray cluster that lose a node, or are killed: no trial is lost or counted twice, and the same
trials are asked for."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.clusters.tune.ray_search import TRIALS, outcome, search
from tests.waiting import wait_for

from paceline.testing.ray_cluster import RayCluster

pytest.importorskip("ray", reason="make test-engines installs Ray")

ROOT = Path(__file__).parents[3]
pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.leaky("Ray starts and ends processes when it likes; the trials are looked at"),
]


@pytest.fixture
def cluster() -> Iterator[RayCluster]:
    """A head without CPUs; below a short path, as Ray's sockets need it."""
    environment = {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    with (
        tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as folder,
        RayCluster(Path(folder), environment, with_services=False, cpus=1) as made,
    ):
        yield made


def _start_connected(cluster: RayCluster, folder: Path) -> subprocess.Popen[str]:
    """Start a search that is connected to the head's raylet, and then add two nodes with a CPU each: a search
    whose own raylet is killed is a killed search. Two trials wait at the gate, wherever Ray has put them."""
    process = _start(cluster, folder)
    wait_for((folder / "connected").exists, "the search is connected", 60)
    for name in "ab":
        cluster.add(name)
    wait_for(lambda: len([*folder.glob("at-*")]) == 2, "two trials are under way", 120)
    return process


def _start(cluster: RayCluster, folder: Path, *more: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.clusters.tune.ray_search", cluster.address, str(folder), *more]
    return subprocess.Popen(
        command, cwd=ROOT, env=cluster.environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def _trials(process: subprocess.Popen[str]) -> list[list[Any]]:
    printed, errors = process.communicate(timeout=200)
    assert process.returncode == 0, printed + errors[-4000:]
    (line,) = [line for line in printed.splitlines() if line.startswith("TRIALS ")]
    found: list[list[Any]] = json.loads(line.removeprefix("TRIALS "))
    return found


def _undisturbed(folder: Path) -> list[list[Any]]:
    """Return the trials of the same search on this machine."""
    folder.mkdir()
    (folder / "open").touch()
    alone = search(folder)
    alone.tune(TRIALS)
    return outcome(alone)


def test_a_lost_node_repeats_its_trial(cluster: RayCluster, tmp_path: Path) -> None:
    process = _start_connected(cluster, tmp_path)
    victim = (tmp_path / "at-2").read_text()
    cluster.kill(victim)
    cluster.add("c")
    wait_for(lambda: (tmp_path / "at-2").read_text() != victim, "the trial runs again elsewhere", 120)
    (tmp_path / "open").touch()
    assert _trials(process) == _undisturbed(tmp_path / "alone")


def test_a_killed_search_is_resumed(cluster: RayCluster, tmp_path: Path) -> None:
    process = _start_connected(cluster, tmp_path)
    process.kill()
    process.communicate()
    (tmp_path / "open").touch()
    assert _trials(_start(cluster, tmp_path, "resume")) == _undisturbed(tmp_path / "alone")
