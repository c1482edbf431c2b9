"""How each contender is started, and whether it is installed.

Peers may live in an environment of their own, so that their dependencies do not meet Paceline's: the folder
in PACELINE_BENCH_PEERS, else `.venv-peers` beside the sources (`make bench-peers` makes it), else the
environment of this process.
"""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bench.recovery import workload
from bench.recovery.kill_one import Reader, Start
from bench.recovery.processes import ROOT, Family
from bench.recovery.run_journal import JournalReader
from bench.recovery.step_log import StepReader
from bench.recovery.supervised_run import RunSettings

HEARTBEAT_TIMEOUT_MS = 1000
# Of Horovod's own collectives: how long a survivor waits whom Gloo does not tell of the loss. 30 by default.
GLOO_SECONDS = 1

_ONE_THREAD = {"OMP_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Contender:
    """`start` begins a run of so many steps in a folder; the command that was started first ends with it."""

    name: str
    module: str
    start: Start
    note: str
    reader: Callable[[Path], Reader] = StepReader


def interpreter() -> str:
    """The Python that has the peers."""
    given = os.environ.get("PACELINE_BENCH_PEERS")
    folder = Path(given) if given else ROOT / ".venv-peers"
    python = folder / "bin" / "python"
    return str(python) if python.exists() else sys.executable


def installed(contender: Contender) -> bool:
    """Whether the peers' Python can import it; asked in a process of its own."""
    if contender.module in ("paceline", "torch"):
        return True
    question = f"import {contender.module}"
    done = subprocess.run([interpreter(), "-c", question], capture_output=True, check=False, timeout=120)
    return done.returncode == 0


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def _script(name: str, folder: Path, steps: int) -> list[str]:
    return ["-m", f"bench.recovery.peers.{name}_script", str(folder), str(steps)]


def _torchrun(processes: int) -> list[str]:
    return [
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={processes}",
        "--max-restarts=3",
    ]


def _start_torchrun(family: Family, folder: Path, steps: int) -> None:
    command = [sys.executable, *_torchrun(workload.WORKERS), *_script("torchrun", folder, steps)]
    # With the shared store, a group that torchrun 2.13 starts again over Gloo finds the addresses of the old
    # one in it and never comes together.
    family.start(command, {**_ONE_THREAD, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})


def _start_torchft(family: Family, folder: Path, steps: int) -> None:
    python, port = interpreter(), free_port()
    environment = {
        **_ONE_THREAD,
        "TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{port}",
        "NUM_REPLICA_GROUPS": str(workload.WORKERS),
    }
    for replica in range(workload.WORKERS):
        command = [python, *_torchrun(1), *_script("torchft", folder, steps)]
        family.start(command, {**environment, "REPLICA_GROUP_ID": str(replica)})
    # A run that begins without all replicas is another run: the first quorum waits for all.
    lighthouse = [
        str(Path(python).with_name("torchft_lighthouse")),
        f"--bind=127.0.0.1:{port}",
        "--min_replicas=1",
        "--join_timeout_ms=30000",
        f"--heartbeat_timeout_ms={HEARTBEAT_TIMEOUT_MS}",
    ]
    family.start(lighthouse)


RAY_ENVIRONMENT = {
    **_ONE_THREAD,
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
    # Which interpreter the workers get must not depend on how this process was started.
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
}


def _start_ray(family: Family, folder: Path, steps: int) -> None:
    family.start([interpreter(), *_script("ray", folder, steps)], RAY_ENVIRONMENT)


def start_elastic_ray(family: Family, folder: Path, steps: int, address: str, fewest: int) -> None:
    """Start Ray Train's elastic mode on a cluster."""
    command = [interpreter(), *_script("ray", folder, steps), address, str(fewest)]
    family.start(command, RAY_ENVIRONMENT)


def _start_horovod(family: Family, folder: Path, steps: int) -> None:
    python = interpreter()
    command = [
        str(Path(python).with_name("horovodrun")),
        f"-np={workload.WORKERS}",
        "--min-np=1",
        f"--max-np={workload.WORKERS}",
        "--gloo",
        "--network-interfaces=lo",
        f"--gloo-timeout-seconds={GLOO_SECONDS}",
        f"--host-discovery-script={_discovery(folder)}",
        shlex.quote(python),
        *_script("horovod", folder, steps),
    ]
    family.start(command, _ONE_THREAD)


def _discovery(folder: Path) -> Path:
    """A host for each worker, since Horovod gives up the whole host of a lost one: names of the loopback."""
    names = ("localhost", "127.0.0.1", "127.0.1", "127.1")
    script = folder / "hosts.sh"
    script.write_text("#!/bin/sh\n" + "".join(f"echo {name}:1\n" for name in names))
    script.chmod(0o755)
    return script


def _start_paceline(family: Family, folder: Path, steps: int) -> None:
    every = workload.CHECKPOINT_EVERY
    family.start(RunSettings(str(folder / "run"), steps, checkpoint_every=every).command())


def start_paceline_on_ray(
    family: Family, folder: Path, steps: int, address: str = "", nodes: int = 2
) -> None:
    """Start Paceline on a Ray cluster, or on a local one that it starts itself."""
    engine = {"name": "ray", "nodes": nodes, "workers_per_node": workload.WORKERS // nodes}
    if address:
        engine["address"] = address
    every = workload.CHECKPOINT_EVERY
    settings = RunSettings(str(folder / "run"), steps, checkpoint_every=every, engine=engine)
    family.start(settings.command(), RAY_ENVIRONMENT)


PACELINE = Contender(
    "Paceline",
    "paceline",
    _start_paceline,
    f"checkpoint every {workload.CHECKPOINT_EVERY} steps",
    JournalReader,
)
TORCHRUN = Contender(
    "torchrun", "torch", _start_torchrun, f"checkpoint every {workload.CHECKPOINT_EVERY} steps"
)
TORCHFT = Contender(
    "torchft",
    "torchft",
    _start_torchft,
    f"4 replica groups, heartbeat timeout {HEARTBEAT_TIMEOUT_MS} ms, collectives 1 s",
)
HOROVOD = Contender(
    "Horovod elastic",
    "horovod.torch",
    _start_horovod,
    f"commit every {workload.CHECKPOINT_EVERY} steps, collectives {GLOO_SECONDS} s",
)
RAY = Contender(
    "Ray Train",
    "ray.train.torch",
    _start_ray,
    f"checkpoint every {workload.CHECKPOINT_EVERY} steps, health check every 0.2 s",
)
PACELINE_ON_RAY = Contender(
    "Paceline on Ray",
    "ray",
    start_paceline_on_ray,
    f"two agents with two workers each, checkpoint every {workload.CHECKPOINT_EVERY} steps",
    JournalReader,
)
PEERS = (TORCHRUN, TORCHFT, HOROVOD, RAY)
