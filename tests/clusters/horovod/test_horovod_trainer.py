"""HorovodTrainer under the real horovodrun: training, resume, elastic repair after kill -9, and bad input."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from tests.clusters.framework_jobs import BIN, events_of, finished, started
from tests.waiting import wait_for

from paceline.checkpoint.store import CheckpointStore
from paceline.core import events

SCRIPT = str(Path(__file__).with_name("horovod_script.py"))
SECONDS = 150.0

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        not (BIN / "horovodrun").exists(),
        reason="no horovodrun here: make test-engines builds it, with cmake, g++ and ninja",
    ),
]


def horovodrun(*options: str) -> list[str]:
    return [str(BIN / "horovodrun"), *options, "--gloo", "--network-interfaces", "lo", str(BIN / "python")]


def ranks_in(text: str) -> list[dict[str, Any]]:
    lines = [line.partition("FOUND ")[2] for line in text.splitlines() if "FOUND " in line]
    return sorted((json.loads(line) for line in lines), key=lambda one: one["rank"])


def trained(
    tmp_path: Path, ranks: int | None, *, program: tuple[str, ...] = (), **settings: Any
) -> list[Any]:
    settings = {"folder": str(tmp_path / "run"), **settings}
    before = [str(BIN / "python")] if ranks is None else horovodrun("-np", str(ranks))
    log = tmp_path / f"log-{len(list(tmp_path.glob('log-*')))}"
    with started([*before, *program, SCRIPT, json.dumps(settings)], log) as job:
        return ranks_in(finished(job, log, SECONDS))


def refused(tmp_path: Path, ranks: int, **settings: Any) -> str:
    log = tmp_path / "log"
    before = [str(BIN / "python")] if ranks == 1 else horovodrun("-np", str(ranks))
    command = [*before, SCRIPT, json.dumps({"folder": str(tmp_path / "run"), **settings})]
    with started(command, log) as job:
        assert job.wait(SECONDS) != 0
    return log.read_text(errors="replace")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Three epochs of two ranks."""
    found: dict[str, Any] = trained(tmp_path_factory.mktemp("undisturbed"), 2, epochs=3)[0]
    return found


def test_two_ranks_train_and_a_resumed_run_has_the_same_bits(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for folder in (whole, parts):
        folder.mkdir()
    straight = trained(whole, 2, epochs=3, timeline=str(tmp_path / "timeline.json"))
    first, second = straight
    assert first["hash"] == first["own_hash"] == second["hash"] == second["own_hash"]
    assert first["steps"] == second["steps"] == list(range(1, 25))  # 128 samples, 2 ranks of 8, 3 epochs
    assert first["epoch_samples"] == [128, 128, 128]
    assert first["rates"] == [0.1, 0.1]  # 0.05, scaled by 2 ranks
    assert first["losses"][1] < first["losses"][0]
    assert first["accuracy"] > 0.8
    assert (first["workers"], first["average"], second["average"]) == (2, 0.5, 0.5)
    assert "ALLREDUCE" in (tmp_path / "timeline.json").read_text()
    assert CheckpointStore(whole / "run" / "checkpoints").verify() == []
    assert len((whole / "run" / "metrics.csv").read_text().splitlines()) > 24
    begun = trained(parts, 2, epochs=1)
    assert begun[0]["hash"] != first["hash"]
    resumed = trained(parts, 2, epochs=3, resume=True)
    assert [one["hash"] for one in resumed] == [first["hash"]] * 2
    assert resumed[0]["steps"] == first["steps"]


@pytest.mark.parametrize("victim", ["0", "1"])
def test_a_killed_rank_leaves_the_others_training(tmp_path: Path, victim: str) -> None:
    """The chief, too: another rank takes the record over."""
    folder, gate, log = tmp_path / "run", tmp_path / "gate", tmp_path / "log"
    hosts = tmp_path / "hosts.sh"
    hosts.write_text("#!/bin/sh\necho localhost:1\necho 127.0.0.1:1\n")
    hosts.chmod(0o755)
    elastic = ("-np", "2", "--min-np", "1", "--max-np", "2", "--host-discovery-script", str(hosts))
    settings = {"folder": str(folder), "gate": str(gate), "victim": victim, "epochs": 3}
    with started([*horovodrun(*elastic), SCRIPT, json.dumps(settings)], log) as job:
        wait_for(lambda: gate.exists() and gate.read_text(), f"no rank came: {log.read_text()}", SECONDS)
        os.kill(int(gate.read_text()), signal.SIGKILL)
        (found,) = ranks_in(finished(job, log, SECONDS))
    # 8 steps of 2 ranks, then 3 more; back to the commit after step 4 of that epoch is the last one before.
    assert (found["size"], found["workers"]) == (1, 1)
    assert found["steps"] == list(range(1, len(found["steps"]) + 1))
    assert found["epoch_samples"] == [128, 128, 128]
    assert found["rates"] == [0.1, 0.05]
    assert found["hash"] == found["own_hash"]
    verdict = events_of(folder, events.Verdict)[0]
    assert (verdict.rank, verdict.pid) == (int(victim), int(gate.read_text()))
    assert "Horovod goes on with the ranks that are left" in verdict.action
    assert events_of(folder, events.Repaired)[0].lost == [int(victim)]
    assert len(events_of(folder, events.RunStarted)) == 1
    assert CheckpointStore(folder / "checkpoints").verify() == []


@pytest.mark.parametrize("whole_job", [True, False])
def test_a_signal_to_stop_saves_and_the_resumed_run_has_the_same_bits(
    tmp_path: Path, undisturbed: dict[str, Any], whole_job: bool
) -> None:
    """Signalled: horovodrun, which passes it on, or one rank, of which the other learns with its step."""
    folder, gate, log = tmp_path / "run", tmp_path / "gate", tmp_path / "log"
    # The rank waits in the evaluation after 8 steps; or in the last of them, whose evaluation is not made.
    settings = {"folder": str(folder), "gate": str(gate), "victim": "1", "epochs": 3}
    settings["call"] = 12 if whole_job else 8
    with started([*horovodrun("-np", "2"), SCRIPT, json.dumps(settings)], log) as job:
        wait_for(lambda: gate.exists() and gate.read_text(), f"no rank came: {log.read_text()}", SECONDS)
        if whole_job:
            job.send_signal(signal.SIGTERM)
        else:
            os.kill(int(gate.read_text()), signal.SIGUSR1)
        assert job.wait(SECONDS) != 0
    if not whole_job:
        assert "Exit code: 75" in log.read_text(), log.read_text()  # of the first rank that ended
    (end,) = events_of(folder, events.RunEnded)
    assert end.step == (9 if whole_job else 8)
    assert len(events_of(folder, events.Evaluated)) == (1 if whole_job else 0)
    assert end.reason in ("a signal to another rank", "SIGTERM" if whole_job else "")
    assert CheckpointStore(folder / "checkpoints").verify() == []
    resumed = trained(tmp_path, 2, epochs=3, resume=True)
    assert [one["hash"] for one in resumed] == [undisturbed["hash"]] * 2
    assert resumed[0]["steps"] == undisturbed["steps"]


@pytest.mark.parametrize("ranks", [None, 2])
def test_the_command_line_with_and_without_horovodrun(tmp_path: Path, ranks: int | None) -> None:
    train = ("-m", "paceline.cli", "train", "--backend", "horovod", "--epochs", "1", "--script")
    found = trained(tmp_path, ranks, program=train, epochs=5, compression="fp16")
    size, rate = (1, 0.05) if ranks is None else (2, 0.1)
    assert len({one["hash"] for one in found}) == 1
    for one in found:
        assert (one["size"], one["rates"], len(one["epoch_samples"])) == (size, [rate, rate], 1)


def test_compression_may_be_one_of_horovods_own(tmp_path: Path) -> None:
    by_name, by_object = tmp_path / "name", tmp_path / "object"
    for folder in (by_name, by_object):
        folder.mkdir()
    named = trained(by_name, 2, epochs=1, compression="fp16")
    given = trained(by_object, 2, epochs=1, compression="hvd.Compression.fp16")
    assert [one["hash"] for one in given] == [one["hash"] for one in named]


@pytest.mark.parametrize(
    ("ranks", "settings", "said"),
    [
        (2, {"other_length": True}, "samples is 128 on rank 0 and 32 on rank 1"),
        (2, {"other_model": True}, "model is '4 parameters"),
        (1, {"samples": 0}, "the training data has no batch on this rank"),
        (1, {"compression": "zip"}, "compression='zip' is unknown"),
    ],
)
def test_bad_input_is_one_message_on_all_ranks(
    tmp_path: Path, ranks: int, settings: dict[str, Any], said: str
) -> None:
    text = refused(tmp_path, ranks, **settings)
    assert said in text
    assert not (tmp_path / "run").exists()


def test_ranks_of_another_launcher_are_refused(tmp_path: Path) -> None:
    log = tmp_path / "log"
    command = [str(BIN / "python"), SCRIPT, json.dumps({"folder": str(tmp_path / "run")})]
    variables = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29599"}
    with started(command, log, variables) as job:
        assert job.wait(SECONDS) == 1
    assert "this process is rank 0 of 2" in log.read_text()
    assert "horovodrun -np 2" in log.read_text()
