"""What a run leaves in its folder: the journal's events, and every worker's log."""

from __future__ import annotations

import json
import logging
import math
import os
import socket
import warnings
from pathlib import Path

import pytest
import torch
from tests.train import small_run
from tests.train.small_run import EPOCHS, STEPS, STEPS_OF_EPOCH, fit, journal_of, settings

import paceline
from paceline.core import events, journal


def of(kind: type, folder: Path) -> list:
    return [event for event in journal_of(folder) if isinstance(event, kind)]


def test_the_journal_of_a_run(tmp_path):
    folder = tmp_path / "run"
    history = fit(settings(folder, 3, audit_every=10))
    everything = journal_of(folder)
    assert [event.type for event in everything[:6]] == [
        "supervisor_started",
        *["worker_started"] * 3,
        "view_changed",
        "run_started",
    ]
    (supervisor,) = of(events.SupervisorStarted, folder)
    assert (supervisor.attempt, supervisor.address.rpartition(":")[0]) == (1, "127.0.0.1")
    started = of(events.WorkerStarted, folder)
    assert sorted(event.rank for event in started) == [0, 1, 2]
    assert len({event.pid for event in started} | {os.getpid(), supervisor.pid}) == 5
    assert {event.host for event in started} == {socket.gethostname()}
    (view,) = of(events.ViewChanged, folder)
    assert (view.generation, view.members, view.step) == (1, [0, 1, 2], 0)
    assert dict(zip(view.members, view.pids, strict=True)) == small_run.workers_of(folder)
    assert sorted(shard for block in view.shards for shard in block) == [0, 1, 2, 3]
    (run,) = of(events.RunStarted, folder)
    assert (run.workers, run.shards, run.samples) == (3, 4, 54)
    assert run.definition["global_batch"] == 12
    steps = of(events.StepCommitted, folder)
    assert [event.step for event in steps] == list(range(1, STEPS + 1))
    assert [event.epoch for event in steps] == [step // STEPS_OF_EPOCH for step in range(STEPS)]
    assert [event.samples for event in steps] == [12, 12, 12, 12, 6] * EPOCHS
    assert [event.loss for event in steps] == [record.loss for record in history.steps]
    assert [event.step for event in steps if event.hash is not None] == [10, 20, 30]
    assert steps[-1].hash == history.state_hash
    evaluated = of(events.Evaluated, folder)
    assert [event.step for event in evaluated] == list(range(5, STEPS + 1, 5))
    assert all(event.samples == 54 and set(event.metrics) == {"loss", "accuracy"} for event in evaluated)
    saved = of(events.CheckpointSaved, folder)
    assert [event.version for event in saved] == list(range(1, len(saved) + 1))
    assert saved[-1].step == STEPS
    assert all(event.bytes > 0 and 0 <= event.stall <= event.seconds for event in saved)
    (last,) = of(events.RunEnded, folder)
    after = everything[everything.index(last) + 1 :]
    assert {event.type for event in after} <= {"steps_received", "shard_hashed"}
    receipts = of(events.StepsReceived, folder)
    assert [(event.first, event.last) for event in receipts] == [(1, STEPS)] * 3
    assert {event.rank: event.shards for event in receipts} == dict(enumerate(view.shards))
    assert [event.epoch for event in of(events.EpochEnded, folder)] == list(range(EPOCHS))
    assert [event.loss for event in of(events.EpochEnded, folder)] == [one.loss for one in history.epochs]
    assert (last.step, last.epoch, last.reason) == (STEPS, EPOCHS, "finished")
    assert last.hash == history.state_hash
    assert [event.time for event in steps] == sorted(event.time for event in steps)
    # Plain JSON lines with a type and a time, for any program.
    lines = [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]
    assert all({"type", "time"} <= line.keys() for line in lines)


def test_resuming_is_in_the_journal_and_a_torn_line_is_no_obstacle(tmp_path):
    folder = tmp_path / "run"
    fit(settings(folder, 2, epochs=2))
    with open(folder / "journal.jsonl", "a") as file:
        file.write('{"type":"step_comm')  # a writer that was killed
    fit(settings(folder, 1, epochs=3, resume="auto"))
    damage: list[journal.JournalDamage] = []
    everything = list(journal.iterate(folder / "journal.jsonl", on_damage=damage.append))
    assert [item.text for item in damage] == ['{"type":"step_comm']
    (again,) = [event for event in everything if isinstance(event, events.RunResumed)]
    assert (again.step, again.epoch, again.workers) == (10, 2, 1)
    newest = [event.version for event in everything if isinstance(event, events.CheckpointSaved)]
    assert again.version in newest


class Talks:
    """An objective that logs and warns in the first step."""

    def __init__(self) -> None:
        self.said = False

    def __call__(self, model, batch):
        if not self.said:
            self.said = True
            logging.getLogger("user_code").error("an error of %d", os.getpid())
            logging.getLogger("user_code").info("a detail that was not asked for")
            warnings.warn(f"a warning of {os.getpid()}", UserWarning, stacklevel=1)
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])


def test_every_worker_has_its_log_and_the_terminal_hears_one(tmp_path, capfd):
    folder = tmp_path / "run"
    fit(settings(folder, 3), objective=Talks())
    pids = small_run.workers_of(folder)
    terminal = capfd.readouterr().err
    for rank, pid in pids.items():
        text = (folder / "logs" / f"rank-{rank}.log").read_text()
        assert f"rank {rank} of 3: pid {pid} on {socket.gethostname()}" in text
        assert text.count(f"error [rank {rank} step 1] an error of {pid}") == 1
        assert text.count(f"UserWarning: a warning of {pid}") == 1
        assert "a detail" not in text
        assert not any(str(other) in text for other in pids.values() if other != pid)
        assert terminal.count(f"an error of {pid}") == terminal.count(f"a warning of {pid}") == (rank == 0)
    # Goes on in the same files.
    fit(settings(folder, 2, resume="auto"))
    assert (folder / "logs" / "rank-0.log").read_text().count(" of 3: pid ") == 1
    assert (folder / "logs" / "rank-0.log").read_text().count(" of 2: pid ") == 1


def test_a_session_leaves_the_program_s_logging_as_it_was(tmp_path, caplog):
    root, shown = logging.getLogger(), warnings.showwarning
    before = [*root.handlers], logging.getLogger("paceline").level
    model = small_run.build()
    config = settings(tmp_path / "run", 1, epochs=1)
    with paceline.session(model, small_run.adam(model.parameters()), config) as run:
        for micro in run.microbatches(small_run.data()):
            if run.step == 2:
                logging.getLogger("user_code").warning("in step 2")
            run.backward(torch.nn.functional.cross_entropy(model(micro.x), micro.y))
    assert ([*root.handlers], logging.getLogger("paceline").level) == before
    assert warnings.showwarning is shown
    assert "warning [rank 0 step 3] in step 2" in (tmp_path / "run" / "logs" / "rank-0.log").read_text()
    # The handlers that were there heard it too, once for each shard of that step.
    assert caplog.messages.count("in step 2") == small_run.SHARDS


def test_a_failure_is_in_the_journal_and_in_the_log_of_its_worker(tmp_path):
    folder = tmp_path / "run"

    def broken(model, batch):
        if paceline.get_rank() == 1:
            raise ArithmeticError("does not add up")
        return model(batch[0]).mean()

    with pytest.raises(paceline.RankFailedError, match="ArithmeticError: does not add up"):
        fit(settings(folder, 2, fault_tolerance=small_run.UNATTENDED), objective=broken)
    check_failed(folder)


def check_failed(folder: Path) -> events.WorkerFailed:
    failed: events.WorkerFailed = of(events.WorkerFailed, folder)[0]
    assert (failed.rank, failed.reason) == (1, "ArithmeticError: does not add up")
    assert failed.pid in {event.pid for event in of(events.WorkerStarted, folder) if event.rank == 1}
    text = (folder / "logs" / "rank-1.log").read_text()
    assert "this rank failed\nTraceback" in text
    assert "in broken" in text
    return failed


def test_the_failure_of_one_worker_is_there_although_the_run_goes_on(tmp_path):
    folder, mark = tmp_path / "run", tmp_path / "mark"

    def broken(model, batch):
        if paceline.get_rank() == 1 and not mark.exists():
            mark.touch()
            raise ArithmeticError("does not add up")
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])

    history = fit(settings(folder, 2), objective=broken)
    assert len(history.steps) == STEPS
    failed = check_failed(folder)
    assert (failed.cause, failed.host) == ("raised", socket.gethostname())
    assert failed.phase in ("data", "forward")
    assert len(of(events.ViewChanged, folder)) > 1


def not_a_number(model, batch):
    return model(batch[0]).mean() * math.nan


def test_a_loss_that_is_not_a_number_is_said_once(tmp_path, capfd):
    folder = tmp_path / "run"
    history = fit(settings(folder, 2, epochs=1), objective=not_a_number)
    assert math.isnan(history.final_loss)
    assert capfd.readouterr().err.count("the loss of step 1 is nan") == 1
    assert all(math.isnan(event.loss) for event in of(events.StepCommitted, folder))
    # Saved and taken up all the same.
    assert fit(settings(folder, 1, epochs=2, resume="auto"), objective=not_a_number).steps


def test_a_failure_in_a_session_is_there_too(tmp_path):
    folder = tmp_path / "run"

    def own_loop() -> None:
        model = small_run.build()
        with paceline.session(model, small_run.adam(model.parameters()), settings(folder, 1)) as run:
            for micro in run.microbatches(small_run.data()):
                if run.step == 3:
                    raise ArithmeticError(f"in a micro-batch of {micro.count}")
                run.backward(torch.nn.functional.cross_entropy(model(micro.x), micro.y))

    with pytest.raises(ArithmeticError):
        own_loop()
    (failed,) = of(events.WorkerFailed, folder)
    assert (failed.rank, failed.pid) == (0, os.getpid())
    assert failed.reason == "ArithmeticError: in a micro-batch of 3"
    assert "this rank failed\nTraceback" in (folder / "logs" / "rank-0.log").read_text()
