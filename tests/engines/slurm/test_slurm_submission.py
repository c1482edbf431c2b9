"""A run is queued, and SLURM's answer comes or does not. SLURM's commands are stand-ins here;
tests/clusters/slurm has the real ones."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests import ctrl_c

import paceline
from paceline.core.errors import PlatformError, UnavailableError, UsageError
from paceline.engines.batch import BatchSpec

# "$HERE/answer" is what sbatch does once it has queued job 17; the queue also has a job of another run.
STAND_IN = """#!/bin/sh
case "$0" in
  */sbatch)
    [ "$1" = --test-only ] && exit
    echo "$@" > "$HERE/arguments"
    for script; do :; done
    cp "$script" "$HERE/script"; echo "$script" > "$HERE/path"
    . "$HERE/answer";;
  */squeue)
    [ ! -e "$HERE/away" ] || { echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1; }
    echo "16|/home/ada/run.sh|"
    [ ! -e "$HERE/path" ] || echo "17|$(cat "$HERE/path")|";;
  */scancel) echo "$@" >> "$HERE/cancelled";;
esac
"""
LOST = "echo 'sbatch: error: Batch job submission failed: {}' >&2; exit 1"
RUN = BatchSpec(script="train.py", name="night")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("sbatch", "squeue", "scancel"):
        (tmp_path / name).write_text(STAND_IN)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("HERE", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    return tmp_path


def cancelled(here: Path) -> str:
    return (here / "cancelled").read_text() if (here / "cancelled").exists() else ""


def test_the_number_of_the_job_is_that_of_the_script_that_was_queued(here: Path) -> None:
    (here / "answer").write_text("echo '17;cluster'")
    assert paceline.Slurm().submit_batch(RUN) == "17"
    assert (here / "script").read_text() == paceline.Slurm().batch_text(RUN)
    # Else variables of the user's shell would win over the script: SBATCH_PARTITION, SBATCH_SIGNAL.
    given = (here / "arguments").read_text().split()
    assert {"--job-name=night", "--signal=B:TERM@60", "--output=night-%j.log", "--requeue"} <= {*given}
    assert (list((here / "temporary").iterdir()), cancelled(here)) == ([], "")


@pytest.mark.parametrize(
    "said",
    ["Socket timed out on send/recv operation", "Zero Bytes were transmitted or received"],
)
def test_a_job_whose_number_is_lost_is_cancelled(here: Path, said: str) -> None:
    """Else the next attempt would train beside it."""
    (here / "answer").write_text(LOST.format(said))
    with pytest.raises(UnavailableError, match="cannot reach") as told:
        paceline.Slurm().submit_batch(RUN)
    assert cancelled(here) == "17\n"
    assert told.value.__notes__ == ["job 17 was queued all the same, and is cancelled"]


def test_ctrl_c_cancels_a_job_whose_number_has_not_come(here: Path) -> None:
    (here / "answer").write_text("kill -INT $PPID; exec tail -f /dev/null")
    with (
        ctrl_c.heard(),
        pytest.raises(KeyboardInterrupt, match="job 17 was queued all the same, and is cancelled"),
    ):
        paceline.Slurm().submit_batch(RUN)
    assert cancelled(here) == "17\n"


@pytest.mark.parametrize(
    ("queue", "known"),
    [("away", "whether it is queued is not known"), ("empty", "it is not in the queue now")],
)
def test_a_job_that_cannot_be_found_is_named(here: Path, queue: str, known: str) -> None:
    touched = "touch $HERE/away; " if queue == "away" else "mv $HERE/path $HERE/hidden; "
    (here / "answer").write_text(touched + LOST.format("Socket timed out on send/recv operation"))
    with pytest.raises(UnavailableError) as told:
        paceline.Slurm().submit_batch(RUN)
    (note,) = told.value.__notes__
    path = (here / ("path" if queue == "away" else "hidden")).read_text()
    assert note.startswith(f"{known}; ")
    assert f"squeue --me --format='%i %o' | grep {Path(path).parent}`" in note
    assert cancelled(here) == ""


def test_a_refusal_is_an_answer(here: Path) -> None:
    (here / "answer").write_text(LOST.format("Requested time limit is invalid"))
    with pytest.raises(UsageError, match="more than the partition allows") as told:
        paceline.Slurm().submit_batch(RUN)
    assert not hasattr(told.value, "__notes__")
    assert cancelled(here) == ""


def test_a_script_that_cannot_be_written_is_one_message(here: Path) -> None:
    (here / "temporary").rmdir()
    with pytest.raises(PlatformError, match="the batch script cannot be written: No such file"):
        paceline.Slurm().submit_batch(RUN)
