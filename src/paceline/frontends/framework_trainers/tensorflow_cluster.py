"""The processes of a TensorFlow job and the role of this one, as TF_CONFIG says it, or a launcher's ranks.

`paceline run`, torchrun, srun and mpirun start ranks and know nothing of TensorFlow: the ranks meet once,
through Paceline's own rendezvous, tell each other a free port, and each writes its TF_CONFIG.

    multiworker        every rank is a worker; the first is the chief, which writes the run's record
    parameter_server   rank 0 is the chief, the next ones are parameter servers, the rest are workers
"""

from __future__ import annotations

import json
import os
import secrets
import socket
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, final

from paceline.comm.context import DistributedContext
from paceline.comm.rendezvous.environment import LOCAL_HOST, Address, LaunchInfo, find_launch_info
from paceline.comm.transport.tcp.mesh_handshake import source_address
from paceline.core.errors import UsageError
from paceline.core.wording import counted
from paceline.frontends.framework_trainers.framework_run import FrameworkWorker
from paceline.frontends.launcher.master_port import free_port

TaskRole = Literal["chief", "worker", "ps"]
_VARIABLE: Final = "TF_CONFIG"
_LAUNCH: Final = "start it on several ranks: paceline run SCRIPT --nproc-per-node {ranks}; or set TF_CONFIG"


@final
@dataclass(frozen=True)
class TensorFlowCluster:
    """The job. `processes`: of all ranks, where a launcher started them; `meeting`: where the chief of
    parameter servers listens for the others, and the word that they prove themselves with."""

    role: TaskRole
    index: int
    jobs: Mapping[str, tuple[str, ...]]
    processes: tuple[FrameworkWorker, ...] = ()
    meeting: tuple[str, int, str] | None = field(default=None, repr=False)
    listener: socket.socket | None = field(default=None, repr=False, compare=False)

    @property
    def workers(self) -> int:
        """The processes that train."""
        served = "ps" in self.jobs  # the chief then hands out work and does none
        return len(self.jobs.get("worker", ())) + (0 if served else len(self.jobs.get("chief", ())))

    @property
    def is_chief(self) -> bool:
        """Whether this process writes the run's record."""
        return self.rank == 0

    @property
    def rank(self) -> int:
        """This process's number among all of the job."""
        before = {"chief": (), "ps": ("chief",), "worker": ("chief", "ps")}[self.role]
        return sum(len(self.jobs.get(job, ())) for job in before) + self.index


def named_by_environment(environment: Mapping[str, str]) -> TensorFlowCluster | None:
    """Return the job that TF_CONFIG names; None where it is not set."""
    text = environment.get(_VARIABLE)
    if not text:
        return None
    try:
        found = json.loads(text)
        jobs = {str(job): tuple(map(str, hosts)) for job, hosts in found["cluster"].items()}
        role, index = str(found["task"]["type"]), int(found["task"]["index"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"TF_CONFIG cannot be understood: {type(error).__name__}: {error}",
            remedy='it looks like {"cluster": {"worker": ["host:port", ...]}, "task": {"type": "worker", '
            '"index": 0}}',
        ) from error
    return _with_task("TF_CONFIG", role, index, jobs)


def named_by_resolver(resolver: Any) -> TensorFlowCluster | None:
    """Return the job that a cluster resolver of TensorFlow names; None where it names no process, as in a
    job of one."""
    jobs = {} if resolver is None else dict(resolver.cluster_spec().as_dict())
    if not jobs:
        return None
    # A job whose tasks have gaps is a mapping from their numbers.
    hosts = {
        job: tuple(map(str, named.values() if isinstance(named, Mapping) else named))
        for job, named in jobs.items()
    }
    return _with_task(type(resolver).__name__, str(resolver.task_type), int(resolver.task_id or 0), hosts)


def _with_task(source: str, role: str, index: int, jobs: Mapping[str, tuple[str, ...]]) -> TensorFlowCluster:
    if role not in ("chief", "worker", "ps") or not 0 <= index < len(jobs.get(role, ())):
        listed = ", ".join(f"{counted(len(hosts), job)}" for job, hosts in jobs.items())
        raise UsageError(
            f"{source}: this process is {role} {index}, and the cluster has {listed}",
            remedy="give every process the same cluster, and a task of its own in it",
        )
    return TensorFlowCluster(role, index, jobs)  # type: ignore[arg-type]


def met_by_ranks(
    kind: Literal["multiworker", "parameter_server"],
    parameter_servers: int,
    environment: MutableMapping[str, str],
) -> TensorFlowCluster:
    """Have the ranks of a launcher meet and write TF_CONFIG, on each of them its own."""
    info = find_launch_info(environment)
    least = 2 + parameter_servers if kind == "parameter_server" else 2
    if info.world_size < least:
        raise UsageError(
            f'strategy="{kind}" needs {least} processes at least, and this job has {info.world_size}',
            remedy=_LAUNCH.format(ranks=least),
        )
    servers = parameter_servers if kind == "parameter_server" else 0
    return _meet(info, servers, environment)


def _meet(info: LaunchInfo, servers: int, environment: MutableMapping[str, str]) -> TensorFlowCluster:
    with DistributedContext() as context:
        host = _own_host(context, info)
        listener = token = None
        if servers and not info.rank:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            listener, token = socket.create_server((host, 0), family=family), secrets.token_hex(16)
        meeting = None if listener is None else [host, listener.getsockname()[1], token]
        mine = [host, free_port(), os.getpid(), socket.gethostname(), meeting]
        every: list[Any] = context.all_gather(mine)
    places = [str(Address(one[0], one[1])) for one in every]
    jobs: dict[str, tuple[str, ...]] = {"worker": tuple(places)}
    role: TaskRole = "worker"
    index = info.rank
    if servers:
        jobs = {
            "chief": tuple(places[:1]),
            "ps": tuple(places[1 : 1 + servers]),
            "worker": tuple(places[1 + servers :]),
        }
        role = "chief" if not info.rank else "ps" if info.rank <= servers else "worker"
        index = {"chief": 0, "ps": info.rank - 1, "worker": info.rank - 1 - servers}[role]
    environment[_VARIABLE] = json.dumps({"cluster": jobs, "task": {"type": role, "index": index}})
    processes = tuple(FrameworkWorker(rank, one[2], one[3]) for rank, one in enumerate(every))
    found = every[0][4]
    return TensorFlowCluster(
        role, index, jobs, processes, None if found is None else (found[0], found[1], found[2]), listener
    )


def _own_host(context: DistributedContext, info: LaunchInfo) -> str:
    """Return the address at which the other ranks reach this one."""
    if context.transport.topology.hosts == 1:
        return LOCAL_HOST
    return source_address(info.address.host) or socket.gethostname()
