"""Scripts under the system's mpirun: one call of `fit` for all ranks, with the command line and without."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.train import small_run

ROOT = Path(__file__).parents[3]
_MPIRUN = shutil.which("mpirun")
_SCRIPT = """
import os, sys
from pathlib import Path
from tests.train import small_run
trainer = small_run.trainer(small_run.settings(Path(sys.argv[1])))
history = trainer.fit(small_run.data(), small_run.data())
weights = sum(float(value.sum()) for value in trainer.model.state_dict().values())
print("DONE", os.environ["OMPI_COMM_WORLD_RANK"], history.state_hash, weights, flush=True)
"""

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.skipif(_MPIRUN is None, reason="no mpirun: apt-get install openmpi-bin"),
]


def _mpirun(*command: str) -> subprocess.CompletedProcess[str]:
    started = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2", *command]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        started, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=110, check=False
    )


def test_the_ranks_are_the_workers_and_all_have_the_result(tmp_path: Path) -> None:
    script, config = tmp_path / "train.py", tmp_path / "config.json"
    script.write_text(_SCRIPT)
    config.write_text(json.dumps({"epochs": 2}))
    train = (sys.executable, "-m", "paceline", "train", str(script), "--config", str(config))
    done = _mpirun(*train, str(tmp_path / "run"))
    assert done.returncode == 0, done.stdout + done.stderr
    lines = sorted(line.split() for line in done.stdout.splitlines() if line.startswith("DONE"))
    alone = small_run.settings(tmp_path / "alone", 1, epochs=2, fault_tolerance=small_run.UNATTENDED)
    expected = small_run.fit(alone).state_hash
    assert [words[1:3] for words in lines] == [["0", expected], ["1", expected]]
    assert lines[0][3] == lines[1][3]  # the weights of the caller's own model
    assert "# engine mpi: 2 nodes with 1 worker each" in (tmp_path / "run" / "config.toml").read_text()


def test_what_ends_rank_0_ends_all(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").write_text("not a run's")
    (tmp_path / "run" / "journal.jsonl").write_text("")
    script = tmp_path / "train.py"
    script.write_text(_SCRIPT.replace("sys.argv[1]))", "sys.argv[1]), resume=7)"))
    done = _mpirun(sys.executable, str(script), str(tmp_path / "run"))
    assert done.returncode != 0
    assert "DONE" not in done.stdout
    errors = [line for line in done.stderr.splitlines() if line.startswith("paceline.")]
    assert len(errors) in (1, 2), done.stderr  # mpirun may end the second rank before it says so
    assert len(set(errors)) == 1, errors
