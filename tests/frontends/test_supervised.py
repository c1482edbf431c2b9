"""A supervised run: whatever happens to its workers, the bits are those of the undisturbed run."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
import torch
from tests.frontends.supervised_runs import behind_gate, check_exactly_once, of, supervised
from tests.train import small_run
from tests.train.small_run import STEPS, fit, journal_of, settings
from tests.waiting import wait_for
from typer.testing import CliRunner

import paceline
from paceline.cli.main import app
from paceline.core import events
from paceline.elastic.supervisor.supervisor_recovery import SnapshotFile
from paceline.monitor.audit import audit
from paceline.train.callbacks import Modifier, Observer
from paceline.train.settings.train_config import CheckpointConfig, GradientCompression

QUICK = paceline.FaultTolerance(max_worker_failures=100)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The hash of the run without a supervisor, in one process."""
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    off = paceline.FaultTolerance(enabled=False)
    return fit(settings(folder, 1, fault_tolerance=off)).state_hash


def test_nothing_happens(tmp_path, undisturbed):
    folder = tmp_path / "run"
    history = fit(supervised(folder))
    assert history.state_hash == undisturbed
    assert [record.step for record in history.steps] == list(range(1, STEPS + 1))
    assert len(history.epochs) == small_run.EPOCHS
    assert not of(events.WorkerFailed, folder)
    (view,) = of(events.ViewChanged, folder)
    assert view.members == [0, 1, 2]
    assert sorted(shard for block in view.shards for shard in block) == list(range(small_run.SHARDS))
    check_exactly_once(folder)


@pytest.mark.parametrize(
    ("chaos", "ranks"),
    [
        ("kill rank=1 step=7 phase=data", [1]),
        ("kill rank=1 step=7 phase=backward", [1]),
        ("kill rank=2 step=7 phase=collective", [2]),
        ("kill rank=0 step=7 phase=optimizer", [0]),
        ("kill rank=0 step=10 phase=evaluation", [0]),
        ("kill rank=1 step=12 phase=checkpoint", [1]),
        ("exit rank=1 step=3 code=3", [1]),
        ("raise rank=2 step=5 phase=data", [2]),
        ("kill rank=0 step=6; kill rank=1 step=6", [0, 1]),
        ("kill rank=0 step=6; kill rank=1 step=6; kill rank=2 step=6", [0, 1, 2]),
        ("kill rank=0 step=1", [0]),
        ("kill rank=1 step=30 phase=optimizer", [1]),
        ("corrupt rank=0 step=9", [0]),
        ("corrupt rank=1 step=9", [1]),
        ("corrupt rank=2 step=9", [2]),
        ("corrupt rank=1 step=9; kill rank=2 step=9 phase=backward", [2]),
    ],
)
def test_lost_workers_leave_no_trace(chaos, ranks, tmp_path, undisturbed):
    folder = tmp_path / "run"
    history = fit(supervised(folder, chaos=chaos))
    assert history.state_hash == undisturbed
    assert sorted({event.rank for event in of(events.WorkerFailed, folder)}) == ranks
    named = [word.partition("=")[2] for word in chaos.split() if word.startswith("phase=")]
    if named:
        assert of(events.WorkerFailed, folder)[0].phase == named[0]
    check_exactly_once(folder)


def test_who_is_well_is_not_restarted(tmp_path, undisturbed):
    folder = tmp_path / "run"
    history = fit(supervised(folder, 4, "kill rank=3 step=9"))
    assert history.state_hash == undisturbed
    first, *_, last = of(events.ViewChanged, folder)
    assert first.pids[:3] == last.pids[:3]
    assert first.behind == []
    assert last.behind == [3]
    assert of(events.Repaired, folder)[0].lost == [3]


def test_down_to_one_survivor(tmp_path, undisturbed):
    """With no replacements allowed, training goes on smaller."""
    folder = tmp_path / "run"
    history = fit(
        supervised(folder, chaos="kill rank=0 step=5; kill rank=2 step=9", care={"max_worker_failures": 0})
    )
    assert history.state_hash == undisturbed
    assert of(events.ViewChanged, folder)[-1].members == [1]
    check_exactly_once(folder)


def test_fewer_than_wanted_is_the_end_with_a_verdict(tmp_path):
    folder = tmp_path / "run"
    config = supervised(folder, 2, "kill rank=1 step=5", care={"max_worker_failures": 0, "min_workers": 2})
    with pytest.raises(paceline.PeerLostError, match="1 worker is left, at least 2 are required"):
        fit(config)
    assert of(events.Verdict, folder)
    (failed,) = of(events.RunFailed, folder)
    assert "1 worker is left, at least 2 are required" in failed.reason
    assert failed.step == small_run.steps_of(folder)[-1]
    assert f"the run failed: {failed.reason}" in audit(journal_of(folder)).notes


def generation_of(folder: Path) -> int:
    """The newest one that the supervisor has decided on; its members may not have heard of it yet."""
    known = SnapshotFile(folder).load()
    return 0 if known is None else known.began.generation


def test_scaled_while_it_trains(tmp_path):
    """Long enough for the newcomers to be gathered: they are let in together, at one step."""
    folder = tmp_path / "run"
    clean = fit(
        settings(tmp_path / "clean", 1, epochs=80, fault_tolerance=paceline.FaultTolerance(enabled=False))
    )

    def more() -> None:
        done = CliRunner().invoke(app, ["scale", str(folder), "--workers", "4"])
        assert done.exit_code == 0, done.output
        wait_for(lambda: len(of(events.WorkerStarted, folder)) >= 4)

    history = behind_gate(supervised(folder, 2, epochs=80), tmp_path / "gate", more)
    assert history.state_hash == clean.state_hash
    assert max(len(view.members) for view in of(events.ViewChanged, folder)) == 4
    check_exactly_once(folder)


def test_a_worker_that_is_asked_to_go_hands_over_at_a_step(tmp_path, undisturbed):
    folder = tmp_path / "run"

    def leave() -> None:
        before = generation_of(folder)
        os.kill(small_run.workers_of(folder)[1], signal.SIGTERM)
        # It says so with its next heartbeat, and the run must not be over by then.
        wait_for(lambda: generation_of(folder) > before)

    history = behind_gate(supervised(folder, 3), tmp_path / "gate", leave)
    assert history.state_hash == undisturbed
    (failed,) = of(events.WorkerFailed, folder)
    assert (failed.rank, failed.cause) == (1, "preempted")
    check_exactly_once(folder)


def test_the_supervisor_is_killed(tmp_path, undisturbed):
    folder = tmp_path / "run"

    def kill() -> None:
        pid = json.loads((folder / "control.json").read_text())["pid"]
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: len(of(events.SupervisorStarted, folder)) >= 2)

    before = small_run.workers_of
    history = behind_gate(supervised(folder, 3), tmp_path / "gate", kill)
    assert history.state_hash == undisturbed
    assert sorted(before(folder)) == [0, 1, 2]
    assert not of(events.WorkerFailed, folder)
    check_exactly_once(folder)


@pytest.mark.parametrize("left", [None, 0.0, 0.5])
def test_the_supervisor_is_killed_and_its_snapshot_is_gone(tmp_path, undisturbed, left):
    """Removed, emptied or halved: it is said, no worker is restarted, and the audit holds."""
    folder = tmp_path / "run"

    def kill() -> None:
        pid = json.loads((folder / "control.json").read_text())["pid"]
        os.kill(pid, signal.SIGSTOP)
        snapshot = folder / "supervisor.json"
        whole = snapshot.read_bytes()
        snapshot.unlink()
        if left is not None:
            snapshot.write_bytes(whole[: int(len(whole) * left)])
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: len(of(events.SupervisorStarted, folder)) >= 2)

    history = behind_gate(supervised(folder, 3), tmp_path / "gate", kill)
    assert history.state_hash == undisturbed
    assert not of(events.WorkerFailed, folder)
    assert any("is lost" in note.text and "supervisor.json" in note.text for note in of(events.Note, folder))
    check_exactly_once(folder)


def test_a_dissenting_worker_is_named_and_its_steps_are_done_again(tmp_path):
    """Silent corruption of one worker's weights: audited, expelled, and gone back before it."""
    folder = tmp_path / "run"
    clean = fit(supervised(tmp_path / "clean", 3, audit_every=5))
    history = fit(supervised(folder, 3, audit_every=5), [FlipsAWeight(tmp_path / "flipped", 13)])
    assert history.state_hash == clean.state_hash
    assert "dissent" in [event.cause for event in of(events.WorkerFailed, folder)]
    assert any(event.rank == 1 for event in of(events.Verdict, folder))


class FlipsAWeight(Modifier):
    """Once, on rank 1: what a broken memory would do."""

    def __init__(self, mark: Path, step: int) -> None:
        self._mark, self._step, self._seen = mark, step, 0

    def change_gradients(self, parameters):
        self._seen += 1
        if self._seen == self._step and os.environ["RANK"] == "1" and not self._mark.exists():
            self._mark.touch()
            with torch.no_grad():
                next(iter(parameters.values())).view(-1)[0] += 1.0


@pytest.mark.parametrize(
    "changes",
    [
        {"compression": GradientCompression(kind="int8")},
        {"mode": "fast", "shards": None},
        {"precision": "fp16"},
        {"evaluate_every": 3},
    ],
    ids=["compressed", "fast", "fp16", "evaluated"],
)
def test_other_ways_to_train_survive_too(changes, tmp_path):
    clean = fit(supervised(tmp_path / "clean", 3, **changes))
    history = fit(
        supervised(tmp_path / "run", 3, "kill rank=1 step=7; kill rank=0 step=14 phase=collective", **changes)
    )
    assert len(history.steps) == STEPS
    if changes.get("mode") != "fast":
        assert history.state_hash == clean.state_hash
    check_exactly_once(tmp_path / "run")


def test_without_checkpoints_all_workers_lost_begin_anew(tmp_path, undisturbed):
    folder = tmp_path / "run"
    chaos = "kill rank=0 step=6; kill rank=1 step=6"
    config = supervised(folder, 2, chaos, checkpoint=CheckpointConfig(enabled=False))
    assert fit(config).state_hash == undisturbed


class Counts(Observer):
    def __init__(self) -> None:
        self.steps: list[int] = []
        self.ended = False

    def on_step(self, record):
        self.steps.append(record.step)

    def on_end(self, history):
        self.ended = True


def test_observers_live_in_the_callers_process(tmp_path):
    """What they keep is there afterwards, whichever workers were lost."""
    counts = Counts()
    fit(supervised(tmp_path / "run", 2, "kill rank=0 step=11"), [counts])
    assert counts.steps == list(range(1, STEPS + 1))
    assert counts.ended


def test_the_same_mistake_twice_ends_the_run_with_its_traceback(tmp_path):
    def broken(model, batch):
        raise ArithmeticError("does not add up")

    with pytest.raises(paceline.RankFailedError, match="ArithmeticError: does not add up") as caught:
        fit(supervised(tmp_path / "run", 3), objective=broken)
    assert "in broken" in caught.value.traceback_text


def test_slow_workers_get_fewer_shards(tmp_path, undisturbed):
    folder = tmp_path / "run"
    history = fit(supervised(folder, 2, "slow rank=0 factor=20", epochs=40))
    assert len(history.steps) == 40 * small_run.STEPS_OF_EPOCH
    blocks = [view.shards for view in of(events.ViewChanged, folder)]
    assert blocks[0] == [[0, 1], [2, 3]]
    assert any(len(block[0]) < len(block[1]) for block in blocks)


def test_backups_compute_what_slow_workers_lack(tmp_path, undisturbed):
    folder = tmp_path / "run"
    history = fit(supervised(folder, 2, "slow rank=0 factor=30", care={"stragglers": "backup"}))
    assert history.state_hash == undisturbed
    computed = [event for event in of(events.StepsReceived, folder) if event.rank == 1]
    assert any(len(event.shards) > 2 for event in computed)
    check_exactly_once(folder)
