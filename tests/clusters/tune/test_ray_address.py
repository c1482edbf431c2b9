"""Searches that connect to Ray by themselves: heads that cannot be reached, and a cluster of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

import paceline
from paceline.engines.ray.ray_settings import RaySettings
from paceline.frontends.tuner.ray_trials import open_ray
from paceline.frontends.tuner.trial_engine import TrialCall
from paceline.testing.ray_cluster import RayCluster

ray = pytest.importorskip("ray", reason="make test-engines installs Ray")
pytest.importorskip("optuna", reason="pip install 'paceline[tune]'")

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.leaky("Ray's processes and connections end when it likes"),
    # Ray's own: it leaves sockets and files of its processes to the interpreter's end.
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),
]

NOBODY = "127.0.0.1:1"


def tuner(folder, **more) -> paceline.DistributedTuner:
    return paceline.DistributedTuner(
        lambda params: params["x"],
        {"x": paceline.tune.uniform(-3, 3)},
        num_gpus=2,
        seed=4,
        study=folder / "study",
        verbose=False,
        **more,
    )


@pytest.mark.parametrize(
    ("given", "environment", "head"),
    [
        ({"engine": "ray", "ray_address": NOBODY}, "", "a Ray head"),
        ({"engine": "ray", "ray_address": f"ray://{NOBODY}"}, "", "a Ray client server"),
        ({"engine": paceline.Ray(address=NOBODY)}, "", "a Ray head"),
        ({"engine": paceline.Ray()}, NOBODY, "a Ray head"),
    ],
)
def test_a_head_that_does_not_answer_is_named_within_seconds(tmp_path, monkeypatch, given, environment, head):
    monkeypatch.setenv("RAY_ADDRESS", environment)
    begun = time.monotonic()
    with pytest.raises(paceline.UnavailableError) as caught:
        tuner(tmp_path, **given).tune(2)
    assert time.monotonic() - begun < 20  # Ray's own attempts take most of a minute
    assert f"{head} at {NOBODY} does not answer: Connection refused" in caught.value.message
    assert "ray status" in caught.value.remedy
    assert not ray.is_initialized()


def test_without_an_address_the_cluster_is_a_local_one(tmp_path, monkeypatch):
    """Whatever RAY_ADDRESS says."""
    monkeypatch.setenv("RAY_ADDRESS", NOBODY)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([os.path.abspath("src"), os.path.abspath(".")]))
    search = tuner(tmp_path, engine="ray")
    search.tune(2)
    assert [trial.state for trial in search.trials] == ["complete"] * 2
    assert not ray.is_initialized()


def test_a_cluster_without_cpus_is_waited_for_aloud():
    said: list[str] = []
    ray.init(num_cpus=0, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    try:
        with open_ray(TrialCall(len, None, dict), RaySettings(), 2, 1, said.append) as (_, slots):
            assert slots == 2
    finally:
        ray.shutdown()
    assert "trials wait for a node to be added: each needs CPU 0.5" in said[-1]
    assert "the Ray cluster's 1 node has CPU 0, at most 0 on one" in said[-1]


@pytest.fixture
def nodes_without_paceline(tmp_path, monkeypatch) -> str:
    """Have local clusters that are started now not find Paceline; return the PYTHONPATH that has it."""
    (tmp_path / "bare" / "paceline").mkdir(parents=True)
    (tmp_path / "bare" / "paceline" / "__init__.py").write_text("raise ImportError('not on this node')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "bare"))
    return os.pathsep.join([os.path.abspath("src"), os.path.abspath(".")])


def test_the_runtime_env_brings_paceline(tmp_path, nodes_without_paceline):
    engine = paceline.Ray(address="local", runtime_env={"env_vars": {"PYTHONPATH": nodes_without_paceline}})
    search = tuner(tmp_path, engine=engine)
    search.tune(2)
    assert [trial.state for trial in search.trials] == ["complete"] * 2


@pytest.mark.usefixtures("nodes_without_paceline")
def test_nodes_without_paceline_end_the_search(tmp_path):
    search = tuner(tmp_path, engine="ray")
    with pytest.raises(
        paceline.UnavailableError, match=r"actor .* cannot begin on .*not on this node"
    ) as caught:
        search.tune(2)
    assert "install Paceline" in caught.value.remedy
    assert {trial.state for trial in search.trials} <= {"running"}


def test_the_command_line_on_a_cluster_that_was_started_elsewhere(tmp_path):
    """The script is named from where the search is, and its trials work there."""
    (tmp_path / "train.py").write_text(
        "import os, paceline\n"
        "params = paceline.tune.params()\n"
        "assert os.getcwd() == os.environ['SEARCHED_IN'], os.getcwd()\n"
        "paceline.tune.report(0, params['x'])\n"
    )
    (tmp_path / "space.toml").write_text("x = { uniform = [0.0, 1.0] }\n")
    root = Path(__file__).parents[3]
    environment = {"PYTHONPATH": f"{root / 'src'}:{root}", "SEARCHED_IN": str(tmp_path)}
    words = ["train.py", "--samples", "3", "--seed", "1", "--study", "s", "--engine", "ray", "--json"]
    with (
        tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as folder,
        RayCluster(Path(folder), environment, with_services=False, cpus=2) as cluster,
    ):
        cluster.add("a")
        done = subprocess.run(
            [sys.executable, "-m", "paceline", "tune", *words, "--address", cluster.address],
            cwd=tmp_path,
            env=cluster.environment,
            capture_output=True,
            text=True,
            timeout=200,
        )
    assert done.returncode == 0, done.stderr
    trials = json.loads(done.stdout)["trials"]
    assert [(one["state"], one["value"] == one["params"]["x"]) for one in trials] == [("complete", True)] * 3
