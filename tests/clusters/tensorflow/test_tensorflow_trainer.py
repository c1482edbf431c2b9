"""TensorFlowDistributedTrainer on the real TensorFlow: three strategies, kill -9 under `paceline run`, Keras
3 and tf_keras, resume, and bad input."""

from __future__ import annotations

import json
import os
import signal
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tests.clusters.framework_jobs import BIN, at_gate, events_of, finished, started

from paceline.checkpoint.store import CheckpointStore
from paceline.core import events
from paceline.frontends.launcher.master_port import free_port

SCRIPT = str(Path(__file__).with_name("keras_script.py"))
MISTAKES = str(Path(__file__).with_name("keras_mistakes.py"))
SECONDS = 240.0

pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.skipif(
        find_spec("tensorflow") is None, reason="no TensorFlow here: make test-engines installs it"
    ),
]


def paceline_run(ranks: int) -> list[str]:
    return [str(BIN / "python"), "-m", "paceline", "run", "--nproc-per-node", str(ranks)]


def command(before: list[str], tmp_path: Path, **settings: Any) -> list[str]:
    return [*before, SCRIPT, json.dumps({"folder": str(tmp_path / "run"), **settings})]


def found_in(text: str) -> list[dict[str, Any]]:
    lines = [line.partition("FOUND ")[2] for line in text.splitlines() if "FOUND " in line]
    return sorted((json.loads(line) for line in lines), key=lambda one: one["rank"])


def alone(tmp_path: Path, *, program: tuple[str, ...] = (), **settings: Any) -> dict[str, Any]:
    tmp_path.mkdir(exist_ok=True)
    log = tmp_path / f"log-{len(list(tmp_path.glob('log-*')))}"
    with started(command([str(BIN / "python"), *program], tmp_path, **settings), log) as job:
        (found,) = found_in(finished(job, log, SECONDS))
    return found


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Two replicas in one process: what two workers of one replica compute, too."""
    folder = tmp_path_factory.mktemp("undisturbed")
    found = alone(folder, strategy="two replicas")
    assert CheckpointStore(folder / "run" / "checkpoints").verify() == []
    return found


def check_learned(found: dict[str, Any]) -> None:
    assert found["steps"] == list(range(1, 17))
    assert found["epochs"] == [[4, 64]] * 4
    assert found["losses"][1] < found["losses"][0]
    assert found["evaluated"] == pytest.approx(found["last_evaluation"], rel=1e-5)
    assert set(found["evaluated"]) == {"loss", "accuracy"}


def test_replicas_train_and_a_resumed_run_has_the_same_bits(
    tmp_path: Path, undisturbed: dict[str, Any]
) -> None:
    check_learned(undisturbed)
    assert (undisturbed["replicas"], undisturbed["workers"]) == (2, 2)
    begun = alone(tmp_path, strategy="two replicas", epochs=2)
    assert begun["hash"] != undisturbed["hash"]
    resumed = alone(tmp_path, strategy="two replicas", resume=True)
    assert (resumed["hash"], resumed["steps"]) == (undisturbed["hash"], undisturbed["steps"])


def test_a_model_of_tf_keras_on_one_device(tmp_path: Path) -> None:
    """By the command line, with a script that leaves the choice of the trainer to its settings."""
    train = ("-m", "paceline.cli", "train", "--backend", "tensorflow", "--script")
    found = alone(tmp_path, program=train, made=True, legacy=True, strategy="mirrored", tensorboard=True)
    check_learned(found)
    assert (found["replicas"], found["workers"]) == (1, 1)
    assert len(list(tmp_path.glob("run/tensorboard/events.*"))) == 1


def test_a_killed_worker_has_all_start_again_from_a_verified_version(
    tmp_path: Path, undisturbed: dict[str, Any]
) -> None:
    log, gate, folder = tmp_path / "log", tmp_path / "gate", tmp_path / "run"
    settings = {"waits": "1", "dies": True}  # strategy=None among several ranks: multiworker
    with started(command(paceline_run(2), tmp_path, **settings), log) as job:
        victim = at_gate(gate, job, log, SECONDS)
        os.kill(victim, signal.SIGKILL)
        text = finished(job, log, SECONDS)
    ranks = found_in(text)
    assert [one["hash"] for one in ranks] == [undisturbed["hash"]] * 2
    check_learned(ranks[0])
    assert "all 2 ranks start again (restart 1 of 3)" in text
    (resumed,) = events_of(folder, events.RunResumed)
    assert resumed.version >= 1
    assert resumed.step in (4, 8)
    (verdict,) = events_of(folder, events.Verdict)
    assert (verdict.rank, verdict.pid) == (1, victim)
    assert f"from version {resumed.version}, which verified" in verdict.action
    assert events_of(folder, events.Repaired)[0].lost == [1]
    assert CheckpointStore(folder / "checkpoints").verify() == []


def stopped(tmp_path: Path, ranks: int, **settings: Any) -> events.RunEnded:
    """Start a job, ask its launcher to stop when a rank waits for that; return the run's last line."""
    log, gate, folder = tmp_path / "log", tmp_path / "gate", tmp_path / "run"
    with started(command(paceline_run(ranks), tmp_path, signalled=True, **settings), log) as job:
        at_gate(gate, job, log, SECONDS)
        job.send_signal(signal.SIGTERM)
        assert job.wait(SECONDS) in (75, 143), log.read_text()
    assert CheckpointStore(folder / "checkpoints").verify() == []
    (end,) = events_of(folder, events.RunEnded)
    return end  # type: ignore[no-any-return]


def test_a_signal_to_stop_saves_and_the_resumed_run_has_the_same_bits(
    tmp_path: Path, undisturbed: dict[str, Any]
) -> None:
    """With a strategy of the caller's own, whose cluster is in no TF_CONFIG."""
    workers = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    end = stopped(tmp_path, 2, strategy="own resolver", workers=workers, waits="1")
    assert end.step == 9
    assert end.reason in ("SIGTERM", "a signal to another rank")
    resumed = alone(tmp_path, strategy="two replicas", resume=True)
    assert (resumed["hash"], resumed["steps"]) == (undisturbed["hash"], undisturbed["steps"])


def test_a_signal_to_stop_has_parameter_servers_end_with_their_chief(tmp_path: Path) -> None:
    end = stopped(tmp_path, 4, strategy="parameter_server", waits="0")
    assert (end.step, end.reason) == (9, "SIGTERM")


def test_a_killed_worker_of_parameter_servers_leaves_the_others_training(tmp_path: Path) -> None:
    log, gate, folder = tmp_path / "log", tmp_path / "gate", tmp_path / "run"
    settings = {"strategy": "parameter_server", "waits": "0"}
    with started(command(paceline_run(4), tmp_path, **settings), log) as job:
        at_gate(gate, job, log, SECONDS)
        victim = {one.rank: one.pid for one in events_of(folder, events.WorkerStarted)}[3]
        os.kill(victim, signal.SIGKILL)
        (tmp_path / "go").touch()
        text = finished(job, log, SECONDS)
    (found,) = found_in(text)
    check_learned(found)
    assert (found["replicas"], found["workers"]) == (2, 2)
    assert "start again" not in text
    assert events_of(folder, events.RunResumed) == []
    (verdict,) = events_of(folder, events.Verdict)
    assert (verdict.rank, verdict.pid) == (3, victim)
    assert CheckpointStore(folder / "checkpoints").verify() == []


@pytest.mark.parametrize("victim", ["1", "2"])
def test_a_killed_server_or_only_worker_has_all_start_again(tmp_path: Path, victim: str) -> None:
    log, gate, folder = tmp_path / "log", tmp_path / "gate", tmp_path / "run"
    settings = {"strategy": "parameter_server", "waits": "0"}
    patient = [*paceline_run(3), "--shutdown-timeout", "150"]
    with started(command(patient, tmp_path, **settings), log) as job:
        at_gate(gate, job, log, SECONDS)
        os.kill(int((tmp_path / f"pid-{victim}-0").read_text()), signal.SIGKILL)
        (tmp_path / "go").touch()
        text = finished(job, log, SECONDS)
    (found,) = found_in(text)
    check_learned(found)
    assert f"rank {victim} of 3 failed first" in text
    assert events_of(folder, events.RunResumed)[0].step in (4, 8)
    assert {one.rank for one in events_of(folder, events.Verdict)} == {int(victim)}
    assert events_of(folder, events.Repaired)[0].seconds < 75.0  # the others end before they are made to


def test_parameter_servers_serve_two_trainings(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with started(command(paceline_run(3), tmp_path, strategy="parameter_server", again=True), log) as job:
        text = finished(job, log, SECONDS)
    assert "start again" not in text
    assert found_in(text)[0]["steps"] == list(range(1, 9))
    assert len(list(tmp_path.glob("runs/*/journal.jsonl"))) == 2


def test_parameter_servers_of_a_script_that_only_evaluates_end_well(tmp_path: Path) -> None:
    log, settings = tmp_path / "log", {"strategy": "parameter_server", "only_evaluates": True}
    with started(command(paceline_run(3), tmp_path, **settings), log) as job:
        text = finished(job, log, SECONDS)
    assert "start again" not in text
    (found,) = found_in(text)
    assert (found["rank"], found["loss"] > 0) == (0, True)


def test_workers_that_do_not_all_validate_are_refused(tmp_path: Path) -> None:
    """On all of them: the others would wait for ever."""
    log = tmp_path / "log"
    once = [*paceline_run(2), "--max-restarts", "0"]
    with started(command(once, tmp_path, validates="1"), log) as job:
        assert job.wait(SECONDS) == 1, log.read_text()
    said = "the number of datasets for validation is 0 on worker 0 and 1 on worker 1"
    assert said in log.read_text()
    assert not (tmp_path / "run" / "journal.jsonl").exists()


def test_a_metric_object_is_the_accuracy_too(tmp_path: Path) -> None:
    found = alone(tmp_path, strategy="mirrored", metric_object=True, epochs=2)
    measured = found["last_evaluation"]
    assert set(measured) == {"loss", "accuracy", "sparse_categorical_accuracy"}
    assert found["accuracy"] >= measured["accuracy"] == measured["sparse_categorical_accuracy"]


def test_bad_input_is_one_message(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with started([str(BIN / "python"), MISTAKES, str(tmp_path)], log) as job:
        text = finished(job, log, SECONDS)
    said = dict(line.split(": ", 1) for line in text.splitlines() if ": " in line)
    expected = {
        "empty": "the training data is empty: it has no batch",
        "unbatched": "the training data is not batched",
        "no dataset": "the training data is a list",
        "small batch": "the training data has batches of 1 sample, and the strategy has 2 replicas",
        "not compiled": "model_fn returned a model that is not compiled",
        "no model": "model_fn returned an int",
        "a model": "model_fn is a model that is made already",
        "strategy": "strategy is an int",
        "epochs": "epochs=0",
        "other model": "model/sequential",
        "ranks": 'strategy="mirrored" in rank 0 of 2: each of them would train alone',
        "alone": 'strategy="multiworker" needs 2 processes at least, and this job has 1',
        "endless": "the training data repeats without end",
        "endless validation": "the validation data repeats without end",
        "endless evaluation": "the data repeats without end",
        "endless with max_steps": "accepted",
        "late": "accepted",
    }
    assert {name: said.get(name, "")[: len(start)] for name, start in expected.items()} == expected
    assert "has shape" in said["other model"]
