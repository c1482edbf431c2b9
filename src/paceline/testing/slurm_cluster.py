"""A real SLURM cluster on one machine: slurmctld on a login host, a slurmd on each node, every host with its
own network namespace, name and /etc/hosts.

    with SlurmCluster(folder) as cluster:
        cluster.run(["sinfo"])
        process = cluster.start([sys.executable, "-m", "paceline", "train", ...], stdout=subprocess.PIPE)

Needs root, iproute2 and Debian's slurmctld, slurmd, slurm-client and munge; `why_not()` says what is missing.
All hosts see the same files, as on a cluster with a shared file system. Nothing is left when the block ends.

Partitions: `all` (the default; preempted with a grace time and requeued), `urgent` (preempts `all`) and
`short` (a minute at most, one node). Every node claims four processors and two GPUs that are none.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Self, final

from paceline.core.errors import PlatformError
from paceline.testing import leaks, netns

_PROGRAMS: Final = ("slurmctld", "slurmd", "sbatch", "munged", "nsenter", "unshare")
_REMEDY: Final = "apt-get install --no-install-recommends slurmctld slurmd slurm-client munge"
_START_SECONDS: Final = 30.0
_PAUSE_SECONDS: Final = 0.02
_CONTROLLER_PORT: Final = 16817
_STATES: Final = ("sinfo", "--noheader", "--Node", "--format=%T")

_CONFIGURATION: Final = """\
ClusterName=paceline
SlurmctldHost=login({controller})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock,cred_expire={requeue_seconds}
CredType=cred/munge
SlurmctldPort={port}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdSpoolDir={folder}/spool/%n
StateSaveLocation={folder}/state
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1,sched_min_interval=0,batch_sched_delay=0,default_queue_depth=100
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
EnforcePartLimits=ALL
ReturnToService=2
SlurmctldTimeout=5
SlurmdTimeout={node_timeout}
MessageTimeout=2
TCPTimeout=1
KillWait=5
MinJobAge=300
InactiveLimit=0
SlurmdParameters=config_overrides
GresTypes=gpu
NodeName=n[1-{nodes}] NodeAddr={addresses} CPUs=4 RealMemory=4000 Gres=gpu:2 State=UNKNOWN
PartitionName=all Nodes=n[1-{nodes}] Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=n[1-{nodes}] MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
PartitionName=short Nodes=n[1-{nodes}] MaxTime=1 MaxNodes=1 State=UP PriorityTier=1
"""


def why_not() -> str:
    """Return why this machine cannot have such a cluster; empty if it can."""
    missing = [name for name in _PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)} not found: {_REMEDY}"
    return netns.why_not()


@final
class SlurmCluster:
    """`nodes` nodes named n1, n2, ... and a host named login, which is no node. `requeue_seconds`: how long a
    requeued job waits at least; `node_timeout`: after how many seconds without its slurmd a node is down."""

    def __init__(
        self, folder: Path, nodes: int = 4, *, requeue_seconds: int = 5, node_timeout: int = 4
    ) -> None:
        self.folder, self.nodes = folder, nodes
        self._hosts = netns.Hosts(nodes + 1)
        self._processes: list[subprocess.Popen[Any]] = []
        self._timing = {"requeue_seconds": requeue_seconds, "node_timeout": node_timeout}

    @property
    def environment(self) -> dict[str, str]:
        """What a user's shell on the login host has."""
        return {**os.environ, "SLURM_CONF": str(self.folder / "slurm.conf")}

    @property
    def address(self) -> str:
        """The login host's address."""
        return self._hosts.addresses[0]

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "state").mkdir()
        self._hosts.__enter__()
        try:
            self._configure()
            self._start_daemons()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _configure(self) -> None:
        names = ["login", *(f"n{number}" for number in range(1, self.nodes + 1))]
        lines = [f"{address} {name}" for address, name in zip(self._hosts.addresses, names, strict=True)]
        (self.folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
        text = _CONFIGURATION.format(
            controller=self.address,
            folder=self.folder,
            port=_CONTROLLER_PORT,
            nodes=self.nodes,
            addresses=",".join(self._hosts.addresses[1:]),
            **self._timing,
        )
        (self.folder / "slurm.conf").write_text(text)
        # A GPU is a device file to SLURM: it sets CUDA_VISIBLE_DEVICES and never opens the file.
        devices = [
            f"NodeName=n[1-{self.nodes}] Name=gpu File={file}\n" for file in ("/dev/zero", "/dev/full")
        ]
        (self.folder / "gres.conf").write_text("".join(devices))
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        key = self.folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(128))
        self.folder.chmod(0o755)

    def _start_daemons(self) -> None:
        folder = self.folder
        munged = ["munged", "--force", f"--key-file={folder}/munge.key", f"--socket={folder}/munge.sock"]
        munged += [f"--pid-file={folder}/munged.pid", f"--log-file={folder}/munged.log"]
        self._daemon(0, [*munged, f"--seed-file={folder}/munge.seed"])
        self._daemon(0, ["slurmctld", "-c", "-f", str(folder / "slurm.conf")])
        for node in range(1, self.nodes + 1):
            self.start_slurmd(node)
        self.wait(lambda: self.run(_STATES, check=False).split() == ["idle"] * self.nodes * 3, "idle nodes")

    def start_slurmd(self, node: int) -> None:
        """Start the slurmd of a node."""
        (self.folder / "spool" / f"n{node}").mkdir(parents=True, exist_ok=True)
        self._daemon(node, ["slurmd", "-N", f"n{node}", "-f", str(self.folder / "slurm.conf")])

    def kill_slurmd(self, node: int) -> None:
        """Kill the slurmd of a node; what it had started runs on."""
        os.kill(int((self.folder / f"slurmd-n{node}.pid").read_text()), signal.SIGKILL)

    def kill_node(self, node: int) -> None:
        """Kill every process of a node, as a power cut does."""
        for pid in self.pids(node):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def pids(self, host: int) -> list[int]:
        """Return the processes of a host; host 0 is the login host."""
        return self._hosts.pids(host)

    def _inside(self, host: int, command: Sequence[str]) -> list[str]:
        # Not `ip netns exec`: it mounts another /sys, without the cgroups that slurmd wants to see.
        name = "login" if host == 0 else f"n{host}"
        prepare = f'mount --bind {self.folder}/hosts /etc/hosts && hostname {name} && exec "$@"'
        enter = ["nsenter", f"--net=/run/netns/{self._hosts.names[host]}", "unshare", "--uts", "--mount"]
        return [*enter, "sh", "-c", prepare, "sh", *command]

    def _daemon(self, host: int, command: Sequence[str]) -> None:
        # Without the mark of a test: the cluster outlives it.
        environment = {name: value for name, value in self.environment.items() if name != leaks.TOKEN}
        with open(self.folder / f"{command[0]}-{host}.out", "ab") as output:
            done = subprocess.run(
                self._inside(host, command),
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                check=False,
            )
        if done.returncode:
            said = (self.folder / f"{command[0]}-{host}.out").read_text().strip()
            raise PlatformError(
                f"{command[0]} does not start: {said}", remedy=f"see the logs in {self.folder}"
            )

    def start(
        self, command: Sequence[str], *, host: int = 0, env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[Any]:
        """Start a program on a host, the login host unless told; it is killed when the block ends."""
        environment = {**self.environment, **(env or {})}
        process = subprocess.Popen(self._inside(host, command), env=environment, **options)
        self._processes.append(process)
        return process

    def run(self, command: Sequence[str], *, host: int = 0, check: bool = True, **options: Any) -> str:
        """Run a program on a host to its end; return what it printed."""
        with self.start(
            command, host=host, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options
        ) as process:
            printed, _ = process.communicate()
        self._processes.remove(process)
        if check and process.returncode:
            raise PlatformError(f"`{' '.join(command)}` ended with {process.returncode}: {printed}")
        return str(printed)

    def wait(self, condition: Any, what: str, seconds: float = _START_SECONDS) -> None:
        """Wait until a condition is true; PlatformError with `what` is missing otherwise."""
        end = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > end:
                raise PlatformError(
                    f"the cluster has no {what} after {seconds:g} s", remedy=f"see the logs in {self.folder}"
                )
            time.sleep(_PAUSE_SECONDS)

    def wait_until_empty(self, seconds: float = _START_SECONDS) -> None:
        """Wait until no job is pending, running or ending."""
        self.wait(
            lambda: not self.run(["squeue", "--noheader"], check=False).strip(), "end of its jobs", seconds
        )

    def restore(self) -> None:
        """Cancel all jobs and bring back nodes that were lost."""
        self.run(["scancel", "--full", "--user=root"], check=False)
        self.run(["scancel", "--user=root"], check=False)
        for node in range(1, self.nodes + 1):
            pid = int((self.folder / f"slurmd-n{node}.pid").read_text() or 0)
            if pid not in self.pids(node):
                self.start_slurmd(node)
        self.wait_until_empty()
        self.wait(lambda: self.run(_STATES, check=False).split() == ["idle"] * self.nodes * 3, "idle nodes")

    def close(self) -> None:
        for process in self._processes:
            with process:
                process.kill()
        self._processes.clear()
        self._hosts.close()
