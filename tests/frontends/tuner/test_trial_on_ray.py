"""A trial in its Ray worker, with a Ray that only says what a worker asks of it: folders of nodes that lack
the search's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.frontends.tuner.trial_engine import TrialStart
from paceline.frontends.tuner.trial_on_ray import folders_below

# In /proc no folder can be made, by root neither.
NOT_HERE = "/proc/alice/project"
RAY = "class get_runtime_context:\n    runtime_env = {env}\n"
WORKER = """
import json, os, sys
import paceline.tune
from paceline.frontends.tuner.trial_engine import TrialCall, TrialStart
from paceline.frontends.tuner.trial_on_ray import run_on_ray

def train(params):
    print("in", os.getcwd())
    return len(os.listdir(paceline.tune.folder()))

searched_in, folder = sys.argv[1:]
start = TrialStart(7, 0, {}, folder)
print(json.dumps(run_on_ray(TrialCall(train, None, dict), start, 1, None, searched_in)))
"""


def run_trial(node: Path, searched_in: str, folder: str, env: str = "{}") -> dict[str, Any]:
    """Run a trial in a worker that Ray has started in the folder `node`."""
    modules = node.with_name("modules")
    modules.mkdir()
    (modules / "ray.py").write_text(RAY.format(env=env))
    path = os.pathsep.join([str(modules), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", WORKER, searched_in, folder],
        cwd=node,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture
def node(tmp_path: Path) -> Path:
    folder = tmp_path / "node"
    folder.mkdir()
    return folder


def test_a_node_without_the_searchs_folder_has_the_trials_below_its_own(node: Path) -> None:
    assert run_trial(node, NOT_HERE, f"{NOT_HERE}/studies/s/trials/0007") == {"value": 1.0}
    assert (node / "studies/s/trials/0007/output.log").read_text() == f"in {node}\n"


@pytest.mark.parametrize(("env", "is_copy"), [("{}", False), ("{'working_dir': 'gcs://1.zip'}", True)])
def test_a_node_with_the_searchs_folder_has_the_trials_there(
    node: Path, tmp_path: Path, env: str, is_copy: bool
) -> None:
    place = tmp_path / "project"
    place.mkdir()
    assert run_trial(node, str(place), f"{place}/studies/s/trials/0007", env) == {"value": 1.0}
    printed = (place / "studies/s/trials/0007/output.log").read_text()
    assert printed == f"in {node if is_copy else place}\n"


def test_a_folder_that_a_node_cannot_make_ends_the_search(node: Path) -> None:
    found = run_trial(node, NOT_HERE, "/proc/shared/s/trials/0007")
    assert found["kind"] == "TrialSetupError"
    assert "trial 7 cannot have the folder /proc/shared/s/trials/0007 on " in found["ends_search"]
    assert "all nodes can write" in found["remedy"]


@pytest.mark.parametrize(
    ("folder", "expected"),
    [
        ("/a/b/s/trials/0001", "/node/s/trials/0001"),
        ("/a/b/../b/s", "/node/s"),
        ("/a/b/../c/s", "/a/b/../c/s"),
        ("/a/bc/s", "/a/bc/s"),
        ("/a/b/..s", "/node/..s"),
        ("/shared/s", "/shared/s"),
        ("", ""),
    ],
)
def test_folders_below_another_one(folder: str, expected: str) -> None:
    found = folders_below(Path("/node"), TrialStart(1, 0, {}, folder, folder), "/a/b")
    assert (found.folder, found.parent_folder) == (expected, expected)
