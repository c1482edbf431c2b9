"""MLflow against a real server on this machine, with SQLite."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from tests.train import small_run
from tests.waiting import wait_for

import paceline
from paceline.train.callbacks import RunInfo, SavedCheckpoint
from paceline.train.history import StepRecord
from paceline.train.settings.train_config import TrainConfig

mlflow = pytest.importorskip("mlflow")

# The package's own warnings are not ours.
pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("mlflow")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--backend-store-uri", f"sqlite:///{folder}/mlflow.db", "--workers", "1"]
    command += ["--artifacts-destination", str(folder / "artifacts")]
    url = f"http://127.0.0.1:{port}"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHONPATH")}
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            command, cwd=folder, stdout=log, stderr=log, env=environment, start_new_session=True
        )
    try:
        wait_for(lambda: process.poll() is not None or _answers(url), "MLflow did not start", 200)
        assert process.poll() is None, (folder / "log").read_text()
        yield url
    finally:
        os.killpg(process.pid, 15)
        process.wait(60)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


@pytest.fixture
def client(server: str) -> Any:
    return mlflow.tracking.MlflowClient(server)


def metric(client: Any, run: str, name: str) -> list[tuple[int, float]]:
    return [(one.step, one.value) for one in client.get_metric_history(run, name)]


def only_run(client: Any, experiment: str) -> Any:
    found = client.get_experiment_by_name(experiment)
    (run,) = client.search_runs([found.experiment_id])
    return run


@pytest.mark.leaky("MLflow keeps connections")
def test_a_supervised_run_with_parameters_metrics_figures_and_checkpoints(server, client, tmp_path):
    tracker = paceline.MLflow("digits", server, every=1)
    history = small_run.fit(small_run.settings(tmp_path / "run"), [tracker])
    assert (tracker.dropped, tracker.failed) == (0, 0)
    run = only_run(client, "digits")
    assert run.info.status == "FINISHED"
    assert run.info.run_name == "run"
    parameters = run.data.params
    assert (parameters["workers"], parameters["global_batch"], parameters["checkpoint.every_steps"]) == (
        "2",
        "12",
        "4",
    )
    assert metric(client, run.info.run_id, "train/loss") == [(one.step, one.loss) for one in history.steps]
    for name in (
        *("samples_per_second", "learning_rate", "grad_norm"),
        *("communication_share", "comm_time", "data_time", "compute_efficiency"),
    ):
        assert len(metric(client, run.info.run_id, f"train/{name}")) == small_run.STEPS
    assert metric(client, run.info.run_id, "validation/loss") == [
        (e.step, e.loss) for e in history.evaluations
    ]
    figures = run.data.metrics
    assert history.compute_efficiency is not None
    assert figures["samples_per_second"] == pytest.approx(history.samples_per_second)
    assert figures["speedup_estimate"] == pytest.approx(2 * history.compute_efficiency)
    versions = client.list_artifacts(run.info.run_id, "checkpoints")
    assert len(versions) > 1
    (newest,) = [
        one.path
        for one in client.list_artifacts(run.info.run_id, versions[-1].path)
        if "manifest" in one.path
    ]
    fetched = Path(client.download_artifacts(run.info.run_id, newest, str(tmp_path)))
    assert fetched.read_bytes() == (tmp_path / "run" / newest).read_bytes()


@pytest.mark.leaky("MLflow keeps connections")
def test_inside_an_active_run_that_run(server, client, tmp_path):
    mlflow.set_tracking_uri(server)
    mlflow.set_experiment("callers")
    tracker = paceline.MLflow(every=1, checkpoints="none")
    with mlflow.start_run() as active:
        history = small_run.fit(small_run.settings(tmp_path / "run", epochs=1), [tracker])
        assert client.get_run(active.info.run_id).info.status == "RUNNING"
    run = only_run(client, "callers")
    assert run.info.run_id == active.info.run_id
    assert metric(client, run.info.run_id, "train/loss") == [(one.step, one.loss) for one in history.steps]
    assert client.list_artifacts(run.info.run_id) == []
    # Without a supervisor the first rank writes, in another process.
    with mlflow.start_run() as active:
        config = small_run.settings(tmp_path / "spawned", epochs=1, fault_tolerance=small_run.UNATTENDED)
        history = small_run.fit(config, [tracker])
    assert metric(client, active.info.run_id, "train/loss") == [(one.step, one.loss) for one in history.steps]


@pytest.mark.leaky("MLflow keeps connections")
def test_a_resumed_run_continues_its_own(server, client, tmp_path):
    short = small_run.settings(tmp_path / "run", max_steps=6, epochs=None)
    small_run.fit(short, [paceline.MLflow("resumed", server, every=1, checkpoints="last")])
    longer = small_run.settings(tmp_path / "run", max_steps=9, epochs=None, resume="auto")
    small_run.fit(longer, [paceline.MLflow("resumed", server, every=1, checkpoints="last")])
    run = only_run(client, "resumed")
    assert [step for step, _ in metric(client, run.info.run_id, "train/loss")] == list(range(1, 10))
    assert run.info.status == "FINISHED"


@pytest.mark.leaky("MLflow keeps connections")
def test_a_run_that_resumes_inside_an_active_run_has_its_parameters_there(server, client, tmp_path):
    mlflow.set_tracking_uri(server)
    mlflow.set_experiment("resumed in another")
    for first_step in (0, 4):
        tracker = paceline.MLflow("begun alone", every=1, flush_seconds=200)
        info = RunInfo(config=TrainConfig(), workers=3, run_dir=str(tmp_path), first_step=first_step)
        with mlflow.start_run() if first_step else nullcontext():
            tracker.on_start(info)
            tracker.on_failure(None)
        assert tracker.failed == 0
    assert only_run(client, "begun alone").data.params["workers"] == "3"
    assert only_run(client, "resumed in another").data.params["workers"] == "3"


@pytest.mark.leaky("MLflow keeps connections")
def test_a_failed_run_is_marked_as_failed(server, client, tmp_path):
    tracker = paceline.MLflow("failed", server)
    tracker.on_start(RunInfo(config=TrainConfig(), workers=1, run_dir=str(tmp_path)))
    tracker.on_checkpoint(SavedCheckpoint(version=1, step=1, epoch=0, url=str(tmp_path / "gone")))
    tracker.on_failure(RuntimeError("the objective raised"))
    assert tracker.failed == 0
    assert only_run(client, "failed").info.status == "FAILED"


@pytest.mark.leaky("a connection that is not answered")
def test_a_server_that_does_not_answer_is_abandoned(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "5")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        tracker = paceline.MLflow(
            tracking_uri=f"http://127.0.0.1:{silent.getsockname()[1]}", flush_seconds=0.2
        )
        tracker.on_start(RunInfo(config=TrainConfig(), workers=1))
        begun = time.monotonic()
        tracker.on_step(StepRecord(step=1, epoch=0, loss=1.0, samples=1))
        assert time.monotonic() - begun < 1.0
        tracker.on_failure(None)
        assert time.monotonic() - begun < 4.0
        assert "MLflow does not answer and is abandoned" in caplog.text
