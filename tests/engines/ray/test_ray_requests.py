"""What is asked of Ray: requests as plain data, and which clusters could grant them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from paceline.core import engine_registry
from paceline.core.errors import ConfigError, UnavailableError, UsageError
from paceline.engines.batch import BatchEngine, BatchSpec, check_hand_over
from paceline.engines.engine import AgentSpec
from paceline.engines.ray import job_submission, requests
from paceline.engines.ray.job_submission import dashboard_of, status_of
from paceline.engines.ray.ray_engine import Ray

SPEC = AgentSpec(
    run="train",
    address=("10.0.0.5", 41000),
    nodes=3,
    workers_per_node=2,
    gpus_per_node=2,
    folder="/project",
    environment={"DATA": "/data"},
)


def test_request_of_agents() -> None:
    engine = Ray(
        address="ray://head:10001",
        nodes=3,
        max_nodes=5,
        workers_per_node=2,
        gpus_per_node=2,
        cpus_per_worker=3,
        resources={"memory": 2**30, "fast_disk": 1},
    )
    assert engine.request(SPEC) == {
        "engine": "ray",
        "run": "train",
        "address": "ray://head:10001",
        "nodes": 3,
        "max_nodes": 5,
        "one_per_node": True,
        "autoscales": False,
        "placement_group": {
            "bundles": [{"CPU": 6.0, "GPU": 2.0, "memory": 2.0**30, "fast_disk": 1.0}],
            "strategy": "SPREAD",
        },
        "actor": {
            "num_cpus": 6.0,
            "num_gpus": 2.0,
            "memory": 2.0**30,
            "resources": {"fast_disk": 1.0},
            "max_restarts": 0,
            "runtime_env": {},
        },
        "agent": {
            "command": [
                "$PYTHON",
                "-m",
                "paceline",
                "join",
                "10.0.0.5:41000",
                "--token-file",
                "$TOKEN",
                "--workers",
                "2",
            ],
            "folder": "/project",
            "environment": {"DATA": "/data"},
            "keeps_threads": False,
        },
    }
    json.dumps(engine.request(SPEC))  # plain data


def test_a_folder_that_ray_sends_along_is_the_agents_folder() -> None:
    sent = {"working_dir": ".", "env_vars": {"OMP_NUM_THREADS": "4"}}
    agent = Ray(runtime_env=sent).request(SPEC)["agent"]
    assert (agent["folder"], agent["keeps_threads"]) == ("", True)


def test_request_of_a_run_that_is_handed_over() -> None:
    engine = Ray(
        address="ray://head:10001", nodes=4, max_nodes=6, cpus_per_worker=2, runtime_env={"pip": ["x"]}
    )
    job = BatchSpec(
        script="/project/train me.py",
        arguments=("--lr", "0.1"),
        options=("--epochs", "3"),
        name="resnet",
        nodes=4,
        workers_per_node=2,
        gpus_per_node=1,
        time="2:00:00",
        folder="/project",
        python="/opt/venv/bin/python",
        environment={"DATA": "/data"},
    )
    assert json.loads(engine.batch_text(job)) == {
        "entrypoint": "cd /project 2>/dev/null; timeout --preserve-status --signal=TERM --kill-after=60 7200 "
        "/opt/venv/bin/python -m paceline train 'train me.py' --engine ray --address auto --nodes 4 "
        "--workers-per-node 2 --gpus-per-node 1 --engine-set max_nodes=6 --engine-set cpus_per_worker=2.0 "
        "--epochs 3 -- --lr 0.1",
        "runtime_env": {
            "pip": ["x"],
            "env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "60", "DATA": "/data"},
            "working_dir": "/project",
        },
        "metadata": {"name": "resnet", "framework": "paceline"},
    }


def test_a_run_that_saves_at_its_time_limit_ends_with_its_own_code(tmp_path: Path) -> None:
    train = tmp_path / "train"
    train.write_text("#!/bin/sh\ntrap 'exit 75' TERM\nwhile :; do sleep 60 & wait $!; done\n")
    train.chmod(0o755)
    request = requests.batch_request(Ray(), BatchSpec(script="x.py", python=str(train), time="0:01"), ())
    done = subprocess.run(request["entrypoint"], shell=True, check=False, timeout=30)
    assert done.returncode == 75


def test_capacity() -> None:
    nodes = [{"CPU": 8.0, "memory": 1e9}, {"CPU": 2.0, "GPU": 1.0}]
    requests.check_capacity({"CPU": 8.0}, nodes, "head:6379")
    with pytest.raises(UsageError, match=r"head:6379 .* needs CPU 64: the most that a node has is CPU 8 \(2"):
        requests.check_capacity({"CPU": 64.0}, nodes, "head:6379")
    # Each alone is somewhere, both together are not.
    with pytest.raises(UsageError, match="no node has all of these at once"):
        requests.check_capacity({"CPU": 4.0, "GPU": 1.0}, nodes, "head:6379")
    with pytest.raises(UsageError, match=r"CPU 0 \(0 nodes\)"):
        requests.check_capacity({"CPU": 1.0}, [], "head:6379")


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"nodes": 0}, "nodes"),
        ({"nodes": True}, "nodes"),
        ({"nodes": 4, "max_nodes": 3}, "max_nodes"),
        ({"workers_per_node": 1.5}, "workers_per_node"),
        ({"gpus_per_node": -1}, "gpus_per_node"),
        ({"cpus_per_worker": 0}, "cpus_per_worker"),
        ({"cpus_per_worker": float("inf")}, "cpus_per_worker"),
        ({"resources": {"CPU": 4}}, "resources"),
        ({"resources": {"fast": -1}}, "resources['fast']"),
        ({"address": "ray://head"}, "address"),
        ({"address": "head:99999"}, "address"),
        ({"address": "http://head:8265"}, "address"),
        ({"address": "ray://fd00::1:10001"}, "address"),
        ({"address": "fd00::1:6379"}, "address"),
        ({"address": "[fd00::1:6379"}, "address"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Ray(**settings)
    assert caught.value.facts["key"] == key
    assert caught.value.remedy


@pytest.mark.parametrize(
    "address", [None, "auto", "local", "ray://head:10001", "10.0.0.1:6379", "[::1]:6379"]
)
def test_addresses(address: str | None) -> None:
    assert Ray(address=address).address == address


def test_settings_come_back_from_a_file() -> None:
    table = {"name": "ray", "nodes": 2, "resources": {"fast": 1}, "runtime_env": {"pip": ["x"]}}
    expected = Ray(nodes=2, resources={"fast": 1.0}, runtime_env={"pip": ["x"]})
    assert engine_registry.from_plain(table) == expected


@pytest.mark.parametrize(
    ("settings", "where"),
    [
        ({"address": "ray://head:10001"}, "http://head:8265"),
        ({"address": "[fd00::1]:6379"}, "http://[fd00::1]:8265"),
        ({"address": "auto"}, "http://127.0.0.1:8265"),
        ({"dashboard": "https://ray.example"}, "https://ray.example"),
    ],
)
def test_dashboard(settings: dict[str, Any], where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    assert dashboard_of(Ray(**settings)) == where


@pytest.mark.parametrize(
    ("settings", "where"),
    [
        ({}, "http://api:8265"),
        ({"address": "auto"}, "http://api:8265"),
        ({"address": "local"}, "http://127.0.0.1:8265"),
        ({"address": "ray://dev:10001"}, "http://dev:8265"),
        ({"address": "ray://dev:10001", "dashboard": "http://dev:9000"}, "http://dev:9000"),
    ],
)
def test_an_explicit_address_precedes_those_of_the_environment(
    settings: dict[str, Any], where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray itself takes the environment's, whatever it is given."""
    variables = {"RAY_API_SERVER_ADDRESS": "http://api:8265", "RAY_ADDRESS": "ray://prod:10001"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    seen: list[tuple[str, set[str]]] = []

    def client(address: str) -> None:
        seen.append((address, set(variables) & set(os.environ)))
        raise ConnectionError("refused")

    submission = ModuleType("ray.job_submission")
    monkeypatch.setattr(submission, "JobSubmissionClient", client, raising=False)
    monkeypatch.setitem(sys.modules, "ray", ModuleType("ray"))
    monkeypatch.setitem(sys.modules, "ray.job_submission", submission)
    with pytest.raises(UnavailableError, match=f"no Ray dashboard answers at {where}"):
        job_submission.check(Ray(**settings))
    assert seen == [(where, set())]
    assert {name: os.environ[name] for name in variables} == variables


@pytest.mark.parametrize(
    ("word", "code", "state"),
    [
        ("RUNNING", None, "running"),
        ("SUCCEEDED", 0, "succeeded"),
        ("STOPPED", 143, "stopped"),
        ("FAILED", 1, "failed"),
        ("FAILED", 137, "failed"),
        # At the time limit: it has saved, and goes on where it is submitted again.
        ("FAILED", 75, "stopped"),
    ],
)
def test_what_became_of_a_job(word: str, code: int | None, state: str) -> None:
    assert status_of(word, code, "").state == state


def test_a_hand_over_needs_the_dashboard_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """RAY_ADDRESS of a dashboard is what `ray job submit` wants, and no agent could use it."""
    monkeypatch.setenv("RAY_ADDRESS", "http://head:8265")
    asked: list[str] = []
    monkeypatch.setattr(job_submission, "_client", lambda settings: asked.append(dashboard_of(settings)))
    engine = Ray(nodes=2)
    assert isinstance(engine, BatchEngine)
    check_hand_over(engine)
    assert asked == ["http://head:8265"]
