"""What became of a job and of the tasks of an array, of which the controller forgets one after the other.
SLURM's commands are stand-ins here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import paceline
from paceline.core.errors import UnavailableError
from paceline.engines.slurm.task_history import tasks_in

STAND_IN = """#!/bin/sh
case "$0" in
  */squeue) [ -s "$HERE/queue" ] && exec cat "$HERE/queue"
    echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1;;
  */sacct) [ -e "$HERE/accounted" ] && exec cat "$HERE/accounted"
    echo 'Slurm accounting storage is disabled' >&2; exit 1;;
esac
"""
Say = Callable[..., None]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("squeue", "sacct"):
        (tmp_path / name).write_text(STAND_IN)
        (tmp_path / name).chmod(0o755)
    # Without the real ones.
    (tmp_path / "cat").symlink_to("/bin/cat")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("HERE", str(tmp_path))
    return tmp_path


@pytest.fixture
def in_queue(here: Path) -> Say:
    """Have squeue know these tasks of job 17."""

    def say(**states: str) -> None:
        statuses = {"FAILED": 3 << 8}
        lines = [f"17|{task[1:]}|{state}||None|{statuses.get(state, 0)}|\n" for task, state in states.items()]
        (here / "queue").write_text("".join(lines))

    return say


@pytest.mark.parametrize(
    ("line", "state", "code"),
    [
        ("COMPLETED|0:0", "succeeded", 0),
        ("FAILED|3:0", "failed", 3),
        ("FAILED|0:9", "failed", -9),
        ("CANCELLED by 1000|0:15", "stopped", -15),
        ("NODE_FAIL|0:0", "lost", None),
        # The accounting may be behind the controller.
        ("RUNNING|0:0", "running", None),
        ("PENDING|0:0", "pending", None),
    ],
)
def test_a_job_that_the_controller_has_forgotten_is_in_the_accounting(
    here: Path, line: str, state: str, code: int | None
) -> None:
    (here / "accounted").write_text(f"17|{line}\n")
    found = paceline.Slurm().batch_status("17")
    assert (found.state, found.code) == (state, code)


def test_a_job_that_is_known_to_none_is_lost(here: Path) -> None:
    assert paceline.Slurm().batch_status("17").state == "lost"
    (here / "sacct").unlink()
    with pytest.raises(UnavailableError, match="sacct is not installed"):
        paceline.Slurm().batch_status("17")


@pytest.mark.parametrize(
    ("lines", "state"),
    [
        ("17_0|FAILED|3:0\n17_1|COMPLETED|0:0\n", "failed"),
        ("17_1|COMPLETED|0:0\n17_0|FAILED|3:0\n", "failed"),
        ("17_0|COMPLETED|0:0\n17_1|RUNNING|0:0\n", "running"),
        ("17_[1-2%1]|PENDING|0:0\n17_0|COMPLETED|0:0\n", "pending"),
        ("17_0|COMPLETED|0:0\n17_1|COMPLETED|0:0\n", "succeeded"),
    ],
)
def test_all_tasks_of_an_array_count(here: Path, lines: str, state: str) -> None:
    (here / "accounted").write_text(lines)
    assert paceline.Slurm().batch_status("17").state == state


def test_a_task_that_the_controller_forgot_before_the_others_counts(here: Path, in_queue: Say) -> None:
    in_queue(_1="COMPLETED")
    (here / "accounted").write_text("17_0|FAILED|3:0\n17_1|RUNNING|0:0\n")
    found = paceline.Slurm().batch_status("17")
    assert (found.state, found.code) == ("failed", 3)


@pytest.mark.parametrize("is_installed", [True, False])
def test_without_accounting_the_tasks_that_were_seen_count(
    here: Path, in_queue: Say, is_installed: bool
) -> None:
    if not is_installed:
        (here / "sacct").unlink()
    engine = paceline.Slurm()
    seen = []
    for tasks in ({"_0": "FAILED", "_1": "RUNNING"}, {"_1": "RUNNING"}, {"_1": "COMPLETED"}, {}):
        in_queue(**tasks)
        seen.append(engine.batch_status("17"))
    assert [status.state for status in seen] == ["running", "running", "failed", "failed"]
    assert seen[-1].code == 3


def test_a_task_that_is_queued_again_counts_as_it_is_seen_last(here: Path, in_queue: Say) -> None:
    engine = paceline.Slurm()
    for states in (("FAILED", "COMPLETED"), ("PENDING", "COMPLETED"), ("COMPLETED", "COMPLETED")):
        in_queue(_0=states[0], _1=states[1])
        last = engine.batch_status("17")
    assert last.state == "succeeded"


def test_a_task_that_ended_unseen_is_lost(in_queue: Say) -> None:
    engine = paceline.Slurm()
    in_queue(_0="RUNNING", _1="RUNNING")
    assert engine.batch_status("17").state == "running"
    in_queue(_1="COMPLETED")
    assert engine.batch_status("17").state == "lost"


def test_jobs_are_told_apart_and_settings_stay_equal(here: Path, in_queue: Say) -> None:
    engine = paceline.Slurm()
    in_queue(_0="FAILED")
    assert engine.batch_status("17").state == "failed"
    (here / "queue").unlink()
    (here / "accounted").write_text("18_0|COMPLETED|0:0\n")
    assert engine.batch_status("18").state == "succeeded"
    assert engine == paceline.Slurm()


@pytest.mark.parametrize(
    ("text", "tasks"),
    [("", [""]), ("3", ["3"]), ("[0-2,7%2]", ["0", "1", "2", "7"]), ("[0-8:4]", ["0", "4", "8"])],
)
def test_tasks_in_a_text_of_the_accounting(text: str, tasks: list[str]) -> None:
    assert tasks_in(text) == tasks
