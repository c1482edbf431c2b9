"""Which rank this process is, of how many, and where the ranks meet: from arguments first, then from what
launchers set.

torchrun, OpenMPI and SLURM are known, in this order: the innermost launcher is the one that counts, and a
torchrun or an mpirun may itself run under SLURM. Pure: reads a mapping that it is given, opens nothing,
asks nobody.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from paceline.core.errors import UsageError

LOCAL_HOST = "127.0.0.1"
LOCAL_PORT = 29577
"""Where ranks of one machine meet when nobody says where."""


# Below the range from which Linux takes ports for outgoing connections.
_DERIVED_PORTS = range(20000, 29500)


@dataclass(frozen=True)
class Address:
    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        return (
            self.host in ("localhost", "::1") or re.fullmatch(r"127(\.\d{1,3}){1,3}", self.host) is not None
        )


@dataclass(frozen=True)
class Place:
    """A rank's place in its group; `source` says where that was found, for messages."""

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


def find_place(
    environment: Mapping[str, str],
    world_size: int | None = None,
    rank: int | None = None,
    address: str | None = None,
) -> Place:
    """The place of this process. Arguments win over the environment; without either, a group of one."""
    if world_size is not None and rank is not None:
        return _explicit(environment, world_size, rank, address)
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


def parse_address(text: str, what: str = "address") -> Address:
    """`host:port`, `tcp://host:port` or `[v6::address]:port`."""
    found = re.fullmatch(
        r"(?:tcp://)?(?:\[(?P<v6>[0-9a-fA-F:.%\w]+)\]|(?P<host>[^\s:/\[\]]+)):(?P<port>\d{1,5})/?",
        text.strip(),
    )
    if found is None or not 0 < int(found["port"]) < 65536:
        raise UsageError(
            f"{what}={text!r} is not an address", remedy="write host:port, for example 10.0.0.1:29500"
        )
    return Address(found["v6"] or found["host"], int(found["port"]))


def first_host(node_list: str) -> str:
    """The first host of a SLURM node list: `n[003-012,17],gpu1` gives `n003`."""
    head = re.fullmatch(r"((?:[^,\[\]\s]|\[[^\[\]]+\])+)(?:,.*)?", node_list.strip())
    host = re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", head[1]) if head is not None else ""
    if not host or "[" in host or "]" in host:
        raise UsageError(
            f"SLURM's node list {node_list!r} cannot be read", remedy="set MASTER_ADDR and MASTER_PORT"
        )
    return host


def derived_port(job: str) -> int:
    """A port that all ranks of a job come to by themselves."""
    return _DERIVED_PORTS[zlib.crc32(job.encode()) % len(_DERIVED_PORTS)]


def _explicit(environment: Mapping[str, str], world_size: int, rank: int, address: str | None) -> Place:
    if address is None and not _has_master(environment):
        launcher = _launcher(environment)
        if launcher is not None and _matches(environment, launcher, world_size, rank):
            return _placed(environment, launcher, world_size, rank, None)
    return _at(environment, world_size, rank, _local_rank(environment, _TORCHRUN), address, "arguments")


def _matches(environment: Mapping[str, str], launcher: _Launcher, world_size: int, rank: int) -> bool:
    size = environment.get(_first_set(environment, launcher.size))
    return size == str(world_size) and environment.get(launcher.rank) == str(rank)


def _alone(
    environment: Mapping[str, str], world_size: int | None, rank: int | None, address: str | None
) -> Place:
    if world_size is None and rank is None and address is None and not _has_master(environment):
        return Place(1, 0, 0, Address(LOCAL_HOST, LOCAL_PORT), "no launcher: a group of one")
    if world_size == 1 and rank is None:
        return _at(environment, 1, 0, 0, address, "arguments")
    missing = " and ".join(
        name for name, value in (("world_size", world_size), ("rank", rank)) if value is None
    )
    if world_size is None and rank is None and address is None:
        left = " and ".join(name for name in ("MASTER_ADDR", "MASTER_PORT") if environment.get(name))
        raise UsageError(
            f"{left} is set in the environment, which says that this process is a rank of a job, and no "
            "launcher's variables say which",
            remedy=f"to run alone, or with workers that this process starts, unset {left}; as a rank, set "
            "WORLD_SIZE and RANK too, or start with torchrun, mpirun or srun",
        )
    raise UsageError(
        f"{missing} not given, and no launcher's variables are set",
        remedy="pass world_size and rank, set WORLD_SIZE and RANK, or start with torchrun, mpirun or srun",
    )


def _placed(
    environment: Mapping[str, str], launcher: _Launcher, size: int, rank: int, address: str | None
) -> Place:
    local_rank = _local_rank(environment, launcher)
    if address is not None or _has_master(environment):
        return _at(environment, size, rank, local_rank, address, launcher.name)
    if launcher is _OPENMPI and size > 1:
        return Place(size, rank, local_rank, _openmpi_address(environment, size), launcher.name)
    if launcher is _SLURM and size > 1:
        return Place(size, rank, local_rank, _slurm_address(environment), launcher.name)
    return _at(environment, size, rank, local_rank, None, launcher.name)


def _at(
    environment: Mapping[str, str],
    size: int,
    rank: int,
    local_rank: int | None,
    address: str | None,
    source: str,
) -> Place:
    if address is not None:
        return Place(size, rank, local_rank, parse_address(address), source)
    if _has_master(environment):
        name, port = environment.get("MASTER_ADDR", ""), environment.get("MASTER_PORT", "")
        if not name or not port:
            unset = "MASTER_PORT" if name else "MASTER_ADDR"
            raise UsageError(
                f"{unset} is not set although the other of the two is", remedy="set both, or pass address="
            )
        master = parse_address(
            f"[{name}]:{port}" if ":" in name else f"{name}:{port}", "MASTER_ADDR:MASTER_PORT"
        )
        agent = environment.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() in ("true", "1")
        attempt = "/".join(
            environment.get(f"TORCHELASTIC_{name}", "0") for name in ("RUN_ID", "RESTART_COUNT")
        )
        return Place(size, rank, local_rank, master, source, agent, attempt if agent else "")
    return Place(size, rank, local_rank, Address(LOCAL_HOST, LOCAL_PORT), source)


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
    for launcher in (_TORCHRUN, _OPENMPI, _SLURM):
        size_set = any(environment.get(name) for name in launcher.size)
        if size_set or environment.get(launcher.rank):
            return launcher
    return None


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
