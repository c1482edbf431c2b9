"""Launch settings of this process: its rank, the number of ranks, the address where they meet and the secret,
from arguments first, then from what launchers set.

torchrun, OpenMPI, SLURM and Kubernetes are known, in this order: the innermost launcher is the one that
counts, and a torchrun or an mpirun may itself run under SLURM. A RANK that a batch script exported for all of
its tasks is no launcher's: SLURM's own number of the task counts then.

Where no supervisor gives the ranks a secret, all of them or none have a file that PACELINE_SECRET_FILE names:
the store in which they meet asks for it, and the key of their connections is made from it and from what
rank 0 drew, so that reading the rendezvous reveals neither.
Reads a mapping that it is given; opens no file but the secret's, sends nothing.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
import stat
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from paceline.core.errors import UsageError

_log = logging.getLogger("paceline.comm")

LOCAL_HOST = "127.0.0.1"
LOCAL_PORT = 29577
"""Where ranks of one machine meet by default."""

SECRET_VARIABLE: Final = "PACELINE_SECRET_FILE"
BACKENDS: Final = ("auto", "gloo", "nccl", "mpi", "shm")
BACKEND_VARIABLE: Final = "PACELINE_BACKEND"
"""The backend of groups that ask for none; `paceline run --backend` sets it."""
_MOST_SECRET: Final = 4096
_HOW: Final = "make one with `(umask 077; openssl rand -hex 32 > FILE)` and give every rank a copy"

# Set in the tasks of srun, and not in the batch script itself.
_STEP = ("SLURM_STEP_ID", "SLURM_STEPID", "SLURM_STEP_NUM_TASKS")
_INSIDE_A_TASK = ("LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID", "OMPI_COMM_WORLD_RANK")
_contradictions: set[tuple[str, str]] = set()  # those that were logged

# Below the range from which Linux takes ports for outgoing connections.
DERIVED_PORTS = range(20000, 29500)


@dataclass(frozen=True)
class Address:
    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        return re.fullmatch(r"localhost|::1|127(\.\d{1,3}){1,3}", self.host) is not None


@dataclass(frozen=True)
class LaunchInfo:
    """Rank and group of a process; `source` is where they were found, for messages."""

    world_size: int
    rank: int
    local_rank: int | None
    address: Address
    source: str
    agent_store: bool = False
    """The address is served by torchrun's agent: every rank, 0 too, is a client."""
    attempt: str = ""
    """Tells groups apart that meet at one agent one after the other."""


@dataclass(frozen=True)
class _Launcher:
    name: str
    size: tuple[str, ...]
    rank: str
    local_rank: str
    remedy: str


_TORCHRUN = _Launcher("torchrun", ("WORLD_SIZE",), "RANK", "LOCAL_RANK", "start with torchrun, or set both")
_OPENMPI = _Launcher(
    "OpenMPI",
    ("OMPI_COMM_WORLD_SIZE",),
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "start with mpirun",
)
_SLURM = _Launcher(
    "SLURM",
    ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"),
    "SLURM_PROCID",
    "SLURM_LOCALID",
    "start the ranks with srun, or pass world_size and rank",
)


_KUBERNETES = _Launcher(
    "Kubernetes",
    ("WORLD_SIZE",),
    "JOB_COMPLETION_INDEX",
    "LOCAL_RANK",
    "give every pod WORLD_SIZE, MASTER_ADDR and MASTER_PORT in its env; use an Indexed Job or a StatefulSet",
)


def find_launch_info(
    environment: Mapping[str, str],
    world_size: int | None = None,
    rank: int | None = None,
    address: str | None = None,
) -> LaunchInfo:
    """Find which rank this process is. Arguments win over the environment; without either, a group of one."""
    if world_size is not None and rank is not None:
        return _explicit(environment, world_size, rank, address)
    environment = with_pod_index(environment)
    launcher = _launcher(environment)
    if launcher is None:
        return _alone(environment, world_size, rank, address)
    size_name = _first_set(environment, launcher.size)
    size = world_size if world_size is not None else _number(environment, size_name, launcher, at_least=1)
    number = rank if rank is not None else _number(environment, launcher.rank, launcher, at_least=0)
    if number >= size:
        raise UsageError(
            f"{launcher.rank}={number} with {size_name}={size}: ranks go from 0 to {size - 1}",
            remedy=launcher.remedy,
        )
    return _placed(environment, launcher, size, number, address)


def with_pod_index(environment: Mapping[str, str]) -> Mapping[str, str]:
    """Return the environment with the number of this pod in JOB_COMPLETION_INDEX: an Indexed Job sets it, and
    a StatefulSet ends the pod's name with it."""
    if environment.get("JOB_COMPLETION_INDEX") or not environment.get("KUBERNETES_SERVICE_HOST"):
        return environment
    number = re.search(r"-(\d{1,9})$", environment.get("HOSTNAME", ""))
    return {**environment, "JOB_COMPLETION_INDEX": number[1]} if number else environment


def chosen_backend(environment: Mapping[str, str], backend: str) -> str:
    """Return the backend of a group: the one that its caller named, else the launcher's, else "auto"."""
    return (environment.get(BACKEND_VARIABLE) or backend) if backend == "auto" else backend


def parse_address(text: str, what: str = "address") -> Address:
    """Read `host:port`, `tcp://host:port` or `[v6::address]:port`."""
    match = re.fullmatch(
        r"(?:tcp://)?(?:\[(?P<v6>[0-9a-fA-F:.%\w]+)\]|(?P<host>[^\s:/\[\]]+)):(?P<port>\d{1,5})/?",
        text.strip(),
    )
    if match is None or not 0 < int(match["port"]) < 65536:
        raise UsageError(
            f"{what}={text!r} is not an address", remedy="write host:port, for example 10.0.0.1:29500"
        )
    return Address(match["v6"] or match["host"], int(match["port"]))


def first_host(node_list: str) -> str:
    """Return the first host of a SLURM node list: `n[003-012,17],gpu1` gives `n003`."""
    head = re.fullmatch(r"((?:[^,\[\]\s]|\[[^\[\]]+\])+)(?:,.*)?", node_list.strip())
    host = re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", head[1]) if head is not None else ""
    if not host or "[" in host or "]" in host:
        raise UsageError(
            f"SLURM's node list {node_list!r} cannot be read", remedy="set MASTER_ADDR and MASTER_PORT"
        )
    return host


def derived_port(job: str) -> int:
    """Return a port that all ranks of a job come to by themselves."""
    return DERIVED_PORTS[zlib.crc32(job.encode()) % len(DERIVED_PORTS)]


def group_secret(environment: Mapping[str, str]) -> bytes:
    """Read the file that the environment names; empty where it names none."""
    path = environment.get(SECRET_VARIABLE, "")
    if not path:
        return b""
    try:
        # Not blocking: a FIFO would wait for a writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        raise UsageError(f"{SECRET_VARIABLE}={path} cannot be read: {error}", remedy=_HOW) from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise UsageError(f"{SECRET_VARIABLE}={path} is not a regular file", remedy=_HOW)
        if status.st_mode & 0o077 or status.st_uid not in (0, os.geteuid()):
            raise UsageError(
                f"{SECRET_VARIABLE}={path} can be read or written by other users (mode "
                f"{stat.S_IMODE(status.st_mode):04o}, owner {status.st_uid})",
                remedy=f"make it yours alone: chmod 600 {path}",
            )
        secret = os.read(descriptor, _MOST_SECRET + 2).strip()
    finally:
        os.close(descriptor)
    if not 16 <= len(secret) <= _MOST_SECRET:
        raise UsageError(
            f"{SECRET_VARIABLE}={path} holds {len(secret)} bytes; 16 to 4096 are a secret", remedy=_HOW
        )
    return secret


def mesh_secret(token: bytes, drawn: bytes) -> bytes:
    """Make the secret of a group's connections from what rank 0 drew and what the ranks were given."""
    return hmac.new(token, b"paceline mesh" + drawn, hashlib.sha256).digest() if token else drawn


def _explicit(environment: Mapping[str, str], world_size: int, rank: int, address: str | None) -> LaunchInfo:
    if address is None and not _has_master(environment):
        launcher = _launcher(environment)
        if (
            launcher is not None
            and environment.get(_first_set(environment, launcher.size)) == str(world_size)
            and environment.get(launcher.rank) == str(rank)
        ):
            return _placed(environment, launcher, world_size, rank, None)
    return _at(environment, world_size, rank, _local_rank(environment, _TORCHRUN), address, "arguments")


def _alone(
    environment: Mapping[str, str], world_size: int | None, rank: int | None, address: str | None
) -> LaunchInfo:
    if world_size is None and rank is None and address is None and not _has_master(environment):
        return LaunchInfo(1, 0, 0, Address(LOCAL_HOST, LOCAL_PORT), "no launcher: a group of one")
    if world_size == 1 and rank is None:
        return _at(environment, 1, 0, 0, address, "arguments")
    if world_size is None and rank is None and address is None:
        left = " and ".join(name for name in ("MASTER_ADDR", "MASTER_PORT") if environment.get(name))
        raise UsageError(
            f"{left} is set in the environment, which says that this process is a rank of a job, and no "
            "launcher's variables say which",
            remedy=f"to run alone, or with workers that this process starts, unset {left}; as a rank, set "
            "WORLD_SIZE and RANK too, or start with torchrun, mpirun or srun",
        )
    given = {"world_size": world_size, "rank": rank}
    missing = " and ".join(name for name, value in given.items() if value is None)
    raise UsageError(
        f"{missing} not given, and no launcher's variables are set",
        remedy="pass world_size and rank, set WORLD_SIZE and RANK, or start with torchrun, mpirun or srun",
    )


def _placed(
    environment: Mapping[str, str], launcher: _Launcher, size: int, rank: int, address: str | None
) -> LaunchInfo:
    local_rank = _local_rank(environment, launcher)
    if size > 1 and address is None and not _has_master(environment):
        if launcher is _OPENMPI:
            return LaunchInfo(size, rank, local_rank, _openmpi_address(environment, size), launcher.name)
        if launcher is _SLURM:
            return LaunchInfo(size, rank, local_rank, _slurm_address(environment), launcher.name)
        if launcher is _KUBERNETES:
            raise UsageError(
                f"pod {rank} of {size} does not know where pod 0 is: MASTER_ADDR is not set",
                remedy="set MASTER_ADDR to JOB-0.SERVICE, the name that a headless Service gives to pod 0, "
                "and MASTER_PORT to a port, e.g. 29500",
            )
    return _at(environment, size, rank, local_rank, address, launcher.name)


def _at(
    environment: Mapping[str, str],
    size: int,
    rank: int,
    local_rank: int | None,
    address: str | None,
    source: str,
) -> LaunchInfo:
    if address is not None:
        return LaunchInfo(size, rank, local_rank, parse_address(address), source)
    if _has_master(environment):
        name, port = environment.get("MASTER_ADDR", ""), environment.get("MASTER_PORT", "")
        if not name or not port:
            unset = "MASTER_PORT" if name else "MASTER_ADDR"
            given = "MASTER_ADDR" if name else "MASTER_PORT"
            raise UsageError(
                f"{unset} is not set although {given}={name or port} is: the ranks meet at both",
                remedy=f"set {unset} as well (export {unset}={'29500' if name else 'host of rank 0'}); unset "
                f"{given} where all ranks are on this machine; or pass address=",
            )
        master = parse_address(
            f"[{name}]:{port}" if ":" in name else f"{name}:{port}", "MASTER_ADDR:MASTER_PORT"
        )
        agent = environment.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() in ("true", "1")
        attempt = "/".join(
            environment.get(f"TORCHELASTIC_{name}", "0") for name in ("RUN_ID", "RESTART_COUNT")
        )
        return LaunchInfo(size, rank, local_rank, master, source, agent, attempt if agent else "")
    return LaunchInfo(size, rank, local_rank, Address(LOCAL_HOST, LOCAL_PORT), source)


def _openmpi_address(environment: Mapping[str, str], size: int) -> Address:
    local_size = _number(environment, "OMPI_COMM_WORLD_LOCAL_SIZE", _OPENMPI, at_least=1)
    if local_size != size:
        raise UsageError(
            f"{size} ranks, {local_size} of them on this host: OpenMPI does not say where rank 0 is",
            remedy="mpirun -x MASTER_ADDR=<host of rank 0> -x MASTER_PORT=29500 ...",
        )
    names = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_ess_jobid")
    return Address(LOCAL_HOST, derived_port(environment.get(_first_set(environment, names), "openmpi")))


def _slurm_address(environment: Mapping[str, str]) -> Address:
    name = _first_set(environment, ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"))
    job = environment.get("SLURM_JOB_ID") or environment.get("SLURM_JOBID")
    if not environment.get(name) or not job:
        unset = "SLURM_JOB_ID" if not job else "SLURM_JOB_NODELIST"
        raise UsageError(f"{unset} is not set although SLURM_PROCID is", remedy=_SLURM.remedy)
    step = environment.get("SLURM_STEP_ID", "0")
    return Address(first_host(environment[name]), derived_port(f"{job}.{step}"))


def _launcher(environment: Mapping[str, str]) -> _Launcher | None:
    known = (_TORCHRUN, _OPENMPI, _SLURM)
    present = (each for each in known if any(environment.get(name) for name in (*each.size, each.rank)))
    found = next(present, None)
    if found is _TORCHRUN and not environment.get("RANK") and environment.get(_KUBERNETES.rank):
        # WORLD_SIZE is what manifests of Kubernetes set by hand; the pod's number is the rank.
        return _KUBERNETES
    return _SLURM if found is _TORCHRUN and _slurm_contradicts(environment) else found


def _slurm_contradicts(environment: Mapping[str, str]) -> bool:
    """Return whether RANK was exported by the batch script of a SLURM job, for all its tasks alike, and SLURM
    has numbered this task otherwise; say so once."""
    rank, task = environment.get("RANK", ""), environment.get(_SLURM.rank, "")
    size, tasks = environment.get("WORLD_SIZE", ""), environment.get(_first_set(environment, _SLURM.size), "")
    # Launchers and `spawn`, which number the ranks inside a task, say how many of them share a host.
    numbered_inside = any(environment.get(name) for name in _INSIDE_A_TASK)
    # The batch script itself is task 0: processes that it starts by hand have no step.
    by_hand = task == "0" and not any(environment.get(name) for name in _STEP)
    if rank == task or not (rank and task and tasks) or numbered_inside or by_hand or size not in ("", tasks):
        return False
    if (rank, task) not in _contradictions:
        _contradictions.add((rank, task))
        _log.warning(
            "RANK=%s is exported, and SLURM_PROCID says that this is task %s of %s: SLURM's number counts; "
            "leave RANK out of the batch script",
            rank,
            task,
            tasks,
        )
    return True


def _has_master(environment: Mapping[str, str]) -> bool:
    return bool(environment.get("MASTER_ADDR") or environment.get("MASTER_PORT"))


def _first_set(environment: Mapping[str, str], names: tuple[str, ...]) -> str:
    return next((name for name in names if environment.get(name)), names[0])


def _local_rank(environment: Mapping[str, str], launcher: _Launcher) -> int | None:
    if not environment.get(launcher.local_rank):
        return None
    return _number(environment, launcher.local_rank, launcher, at_least=0)


def _number(environment: Mapping[str, str], name: str, launcher: _Launcher, *, at_least: int) -> int:
    text = environment.get(name, "")
    if not text:
        others = ", ".join(other for other in (*launcher.size, launcher.rank) if environment.get(other))
        raise UsageError(f"{name} is not set although {others} is ({launcher.name})", remedy=launcher.remedy)
    if not re.fullmatch(r"\d{1,9}", text.strip()) or int(text) < at_least:
        raise UsageError(
            f"{name}={text!r} ({launcher.name})", remedy=f"{name} is a whole number from {at_least}"
        )
    return int(text)
