"""HorovodTrainer under the real horovodrun: training, resume, elastic repair after kill -9, and bad input."""

from __future__ import annotations

import json
import math
import os
import signal
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.clusters.framework_jobs import BIN, at_gate, events_of, finished, started
from torch import nn

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


def elastic(tmp_path: Path, ranks: int, *hosts: str) -> list[str]:
    """Return the command that starts elastic ranks on these hosts, one each."""
    write_hosts(tmp_path, *hosts)
    several = ("--min-np", "1", "--max-np", "2", "--host-discovery-script", str(tmp_path / "hosts.sh"))
    return [*horovodrun("-np", str(ranks), *several), SCRIPT]


def write_hosts(tmp_path: Path, *hosts: str) -> None:
    script = tmp_path / "hosts.new"
    script.write_text("#!/bin/sh\n" + "".join(f"echo {host}:1\n" for host in hosts))
    script.chmod(0o755)
    script.rename(tmp_path / "hosts.sh")


# Call 2: in the second step, before the ranks have kept a copy of any. Call 22: 8 steps, 8 batches of their
# evaluation, 6 more steps, of which the last 2 are done again.
@pytest.mark.parametrize(("victim", "call", "kept"), [("0", 2, 0), ("1", 2, 0), ("0", 22, 12)])
def test_a_killed_rank_leaves_the_others_training(tmp_path: Path, victim: str, call: int, kept: int) -> None:
    """The chief, too: another rank takes the record over."""
    folder, gate, log = tmp_path / "run", tmp_path / "gate", tmp_path / "log"
    settings = {"folder": str(folder), "gate": str(gate), "victim": victim, "call": call, "epochs": 3}
    settings["config"] = {"checkpoint_frequency": 1}
    command = elastic(tmp_path, 2, "localhost", "127.0.0.1")
    with started([*command, json.dumps(settings)], log) as job:
        pid = at_gate(gate, job, log, SECONDS)
        os.kill(pid, signal.SIGKILL)
        (found,) = ranks_in(finished(job, log, SECONDS))
    assert (found["size"], found["workers"]) == (1, 1)
    assert found["steps"] == list(range(1, len(found["steps"]) + 1))
    assert found["epoch_samples"] == [128, 128, 128]
    assert found["rates"] == [0.1 if kept else 0.05, 0.05]
    assert found["hash"] == found["own_hash"]
    assert events_of(folder, events.RunResumed)[0].step == kept
    verdict = events_of(folder, events.Verdict)[0]
    assert (verdict.rank, verdict.pid) == (int(victim), pid)
    assert "Horovod goes on with the ranks that are left" in verdict.action
    assert events_of(folder, events.Repaired)[0].lost == [int(victim)]
    assert len(events_of(folder, events.RunStarted)) == 1
    store = CheckpointStore(folder / "checkpoints")
    assert store.verify() == []
    versions = [one.version for one in store.manifests()]
    assert versions == sorted(set(versions))
    assert store.open().state["position"]["step"] == found["steps"][-1]


def test_a_rank_that_joins_trains_with_the_others(tmp_path: Path) -> None:
    """With what the trainer chooses by itself: AdamW, whose state Horovod makes with a step of its own."""
    folder, gate, log = tmp_path / "run", tmp_path / "gate", tmp_path / "log"
    settings = {"folder": str(folder), "gate": str(gate), "joins": True, "chosen": True, "verbose": True}
    command = elastic(tmp_path, 1, "localhost")
    with started([*command, json.dumps(settings)], log) as job:
        at_gate(gate, job, log, SECONDS)
        write_hosts(tmp_path, "localhost", "127.0.0.1")
        first, second = ranks_in(finished(job, log, SECONDS))
    assert (first["size"], second["size"], first["workers"]) == (2, 2, 2)
    assert first["hash"] == first["own_hash"] == second["hash"] == second["own_hash"]
    assert first["steps"] == list(range(1, len(first["steps"]) + 1))
    assert first["epoch_samples"] == [128, 128]
    assert first["rates"][1] == 2 * first["rates"][0]
    assert events_of(folder, events.Verdict) == events_of(folder, events.Repaired) == []
    assert [one.rank for one in events_of(folder, events.WorkerStarted)] == [0, 1]
    assert CheckpointStore(folder / "checkpoints").verify() == []


def in_one_process(steps: list[int], rate: float, clipping: float, *, thawed: bool = False) -> list[float]:
    """Return the weights after two trainings with these steps, each given by the end of its samples.
    `thawed`: the first layer is not trained in the first training."""
    torch.manual_seed(0)
    inputs = torch.randn(128, 8)
    targets = (inputs.sum(1) > 0).long()
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    for trains_all in (not thawed, True):
        model[0].requires_grad_(trains_all)
        for first, end in pairwise([0, *steps]):
            optimizer.zero_grad()
            nn.CrossEntropyLoss()(model(inputs[first:end]), targets[first:end]).backward()
            nn.utils.clip_grad_norm_(model.parameters(), clipping)
            optimizer.step()
    return [value for one in model.parameters() for value in one.flatten().tolist()]


def test_accumulation_clipping_and_a_second_training(tmp_path: Path) -> None:
    """A step of two ranks with two passes of 8 samples is one of 32 samples."""
    config = {"gradient_accumulation_steps": 2, "gradient_clipping": 0.05, "tensorboard": True}
    chosen: dict[str, Any] = {"lr_rule": "sqrt", "compression": "none", "verbose": True, "shuffle": False}
    found = trained(tmp_path, 2, epochs=1, again="fit", config=config, **chosen)
    rate = 0.05 * 2**0.5
    expected = in_one_process([32, 64, 96, 128], rate, 0.05)
    for one in found:
        assert one["weights"] == pytest.approx(expected, rel=1e-4, abs=1e-6)
        assert one["rates"] == pytest.approx([rate, rate])
        assert one["steps"] == [1, 2, 3, 4]
    assert len(list(tmp_path.glob("runs/*/tensorboard/events.*"))) == 2


@pytest.mark.parametrize("again", ["thawed", "trainer"])
def test_a_second_training_of_other_weights_or_by_another_trainer(tmp_path: Path, again: str) -> None:
    """Every gradient is summed once: also of weights that were not trained before, and by one optimizer where
    two trainers have had the model."""
    first, second = trained(tmp_path, 2, epochs=1, again=again, shuffle=False)
    expected = in_one_process([*range(16, 129, 16)], 0.1, math.inf, thawed=again == "thawed")
    assert first["own_hash"] == second["own_hash"]
    assert first["weights"] == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert first["rates"] == [0.1, 0.1]  # the optimizer that both trainers have is scaled once


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
        pid = at_gate(gate, job, log, SECONDS)
        if whole_job:
            job.send_signal(signal.SIGTERM)
        else:
            os.kill(pid, signal.SIGUSR1)
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
    # A script that leaves the choice to its settings, and one that does not.
    found = trained(tmp_path, ranks, program=train, epochs=5, compression="fp16", made=ranks is not None)
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
        (2, {"other_validation": True}, "validation data is 'given' on rank 0 and 'none' on rank 1"),
        (2, {"other_passes": True}, "gradient_accumulation_steps is 1 on rank 0 and 2 on rank 1"),
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
