"""Rank functions on several hosts made of network namespaces: what the network benchmarks share."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle

from paceline.core.errors import RankFailedError, UnavailableError
from paceline.testing.netns import Hosts, why_not


@dataclass(frozen=True)
class Outcome:
    """Results by host and by rank in it, and what each host's interface sent while the ranks ran."""

    by_host: list[list[Any]]
    sent_bytes: list[int]


def run_on_hosts(
    function: Callable[..., Any],
    *args: Any,
    hosts: int,
    ranks_per_host: int = 1,
    rate: str | None = None,
    environment: Mapping[str, str] | None = None,
) -> Outcome:
    """Calls `function(ctx, *args)` on every rank; ranks of host 0 come first."""
    reason = why_not()
    if reason:
        raise UnavailableError(
            f"no hosts to measure between: {reason}", remedy="run as root with iproute2 installed"
        )
    world = hosts * ranks_per_host
    with tempfile.TemporaryDirectory() as folder, Hosts(hosts) as lab:
        if rate is not None:
            lab.rate(rate)
        job = Path(folder, "job")
        job.write_bytes(cloudpickle.dumps((function, args)))
        before = [lab.sent_bytes(host) for host in range(hosts)]
        processes = []
        for rank in range(world):
            variables = {
                **os.environ,
                **(environment or {}),
                "RANK": str(rank),
                "WORLD_SIZE": str(world),
                "LOCAL_RANK": str(rank % ranks_per_host),
                "MASTER_ADDR": lab.addresses[0],
                "MASTER_PORT": "29533",
                "OMP_NUM_THREADS": "1",
                "GLOO_SOCKET_IFNAME": "eth0",  # for torch's own group, measured beside ours
            }
            command = [sys.executable, "-m", "bench.hosts", str(job), str(Path(folder, str(rank)))]
            processes.append(
                lab.start(rank // ranks_per_host, command, env=variables, stderr=subprocess.PIPE, text=True)
            )
        for rank, process in enumerate(processes):
            _, errors = process.communicate(timeout=300)
            if process.returncode:
                raise RankFailedError(f"rank {rank} failed", rank=rank, traceback_text=errors)
        sent = [lab.sent_bytes(host) - before[host] for host in range(hosts)]
        results = [pickle.loads(Path(folder, str(rank)).read_bytes()) for rank in range(world)]
    split = [results[host * ranks_per_host : (host + 1) * ranks_per_host] for host in range(hosts)]
    return Outcome(split, sent)


def main() -> None:
    """One rank: reads the job that `run_on_hosts` wrote, leaves the result beside it."""
    from paceline.comm.context import DistributedContext

    function, args = pickle.loads(Path(sys.argv[1]).read_bytes())
    with DistributedContext(timeout=120) as ctx:
        result = function(ctx, *args)
        ctx.barrier()
    Path(sys.argv[2]).write_bytes(pickle.dumps(result))


if __name__ == "__main__":
    main()
