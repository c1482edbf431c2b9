"""Seconds from `sbatch` to the first step, on a real SLURM cluster of four nodes: `paceline submit`'s batch
script against torchrun under srun with a plain DDP script. The same model, in turns.

    python -m bench.slurm_start

Needs what paceline.testing.slurm_cluster needs: root and Debian's SLURM. All nodes share this machine's
processors, so that importing torch, which every process of torchrun does, weighs more than on real nodes.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path

from bench.report import Report, Target, main
from paceline import Slurm
from paceline.core import events, journal
from paceline.core.errors import UnavailableError
from paceline.engines.batch import BatchSpec
from paceline.testing import slurm_cluster
from paceline.testing.slurm_cluster import SlurmCluster

NODES = 4
ROUNDS = 5
_PATIENCE_SECONDS = 300.0
_ROOT = Path(__file__).parents[1]
_SCRIPTS = Path(__file__).parent / "slurm"
_ENVIRONMENT = {"PYTHONPATH": f"{_ROOT / 'src'}:{_ROOT}"}

TORCHRUN = f"""\
#!/bin/bash
#SBATCH --nodes={NODES}
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --output=torchrun.log
head="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
export OMP_NUM_THREADS=1
srun {sys.executable} -m torch.distributed.run --nnodes={NODES} --nproc-per-node=1 \\
  --rdzv-backend=c10d --rdzv-endpoint="$head:29500" --rdzv-id="$SLURM_JOB_ID" \\
  {_SCRIPTS / "ddp_first_step.py"} "$PWD/first"
"""


def paceline_script(folder: Path) -> str:
    """Return what `paceline submit` hands over."""
    job = BatchSpec(
        script=str(_SCRIPTS / "paceline_first_step.py"),
        options=("--run-dir", "run"),
        nodes=NODES,
        folder=str(folder),
        python=sys.executable,
    )
    return Slurm(nodes=NODES, workers_per_node=1).batch_text(job)


def first_step_of_torchrun(folder: Path) -> float | None:
    file = folder / "first"
    return float(file.read_text()) if file.exists() and file.read_text().endswith("\n") else None


def first_step_of_paceline(folder: Path) -> float | None:
    file = folder / "run" / "journal.jsonl"
    if not file.exists():
        return None
    steps = (event.time for event in journal.read(file).events if isinstance(event, events.StepCommitted))
    return next(steps, None)


def measure(cluster: SlurmCluster, name: str, folder: Path) -> float:
    """Submit one of the scripts; return the seconds to its first step."""
    folder.mkdir()
    script = folder / "job.sh"
    script.write_text(paceline_script(folder) if name == "Paceline" else TORCHRUN)
    look = first_step_of_paceline if name == "Paceline" else first_step_of_torchrun
    begun = time.time()
    cluster.run(["sbatch", f"--chdir={folder}", str(script)], env=_ENVIRONMENT)
    cluster.wait(lambda: look(folder) is not None, f"first step of {name}", _PATIENCE_SECONDS)
    first = look(folder)
    assert first is not None
    cluster.wait_until_empty(_PATIENCE_SECONDS)
    return first - begun


def run() -> Report:
    if reason := slurm_cluster.why_not():
        raise UnavailableError(f"no SLURM cluster can be started here: {reason}")
    seconds: dict[str, list[float]] = {"Paceline": [], "torchrun under srun": []}
    with tempfile.TemporaryDirectory() as place, SlurmCluster(Path(place) / "slurm", NODES) as cluster:
        for number in range(ROUNDS):
            for name, found in seconds.items():
                found.append(measure(cluster, name, Path(place) / f"{name.split()[0]}-{number}"))
    report = Report(
        "slurm_start",
        f"sbatch to the first step, {NODES} nodes with a worker each, seconds",
        ("", f"median of {ROUNDS}", "lowest", "highest"),
    )
    for name, found in seconds.items():
        middle = statistics.median(found)
        report.rows.append((name, *(f"{one:.2f}" for one in (middle, min(found), max(found)))))
    ours, theirs = (statistics.median(found) for found in seconds.values())
    report.targets.append(Target("first step, against torchrun under srun", theirs / ours, 1.0))
    report.data = seconds
    return report


if __name__ == "__main__":
    main(run)
