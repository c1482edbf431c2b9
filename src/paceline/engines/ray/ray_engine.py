"""`paceline.Ray`: the settings of a run on a Ray cluster, which are the engine."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, final

from paceline.core.errors import ConfigError
from paceline.engines.batch import BatchSpec, BatchStatus
from paceline.engines.engine import AgentSpec, EngineJob, EngineRequest
from paceline.engines.ray import requests

LOCAL: Final = "local"
LOOPBACK: Final = "127.0.0.1"


@final
@dataclass(frozen=True, kw_only=True)
class Ray:
    """Agents on the nodes of a Ray cluster.

    address           "ray://head:10001" (Ray client), "head:6379" or "auto" (on a node of the cluster);
                      None: RAY_ADDRESS where that is set, else a local cluster that ends with the run. A
                      process that is connected to Ray already, as a Tune trial is, stays connected to that
    nodes             agents to begin with, one per node
    max_nodes         agents at most: nodes that are added to the cluster are taken up until then
    workers_per_node  workers of one agent
    gpus_per_node     GPUs of one agent
    cpus_per_worker   what Ray counts for one worker
    resources         further resources of one agent, as Ray names them: {"memory": 2**30, "fast_disk": 1}
    runtime_env       Ray's runtime environment of the agents: {"working_dir": ".", "env_vars": {...}}
    share_nodes       several agents may run on one node; a local cluster, which has one node, always shares
    autoscales        an autoscaler adds nodes: what no present node could hold is waited for, not refused
    dashboard         "http://head:8265" for `paceline submit`; empty: port 8265 of the head
    python            of the head, for `paceline submit`; empty: the path of the one that submits
    """

    name: Literal["ray"] = "ray"
    address: str | None = None
    nodes: int = 1
    max_nodes: int | None = None
    workers_per_node: int = 1
    gpus_per_node: int = 0
    cpus_per_worker: float = 1.0
    resources: Mapping[str, float] = field(default_factory=dict)
    runtime_env: Mapping[str, Any] = field(default_factory=dict)
    share_nodes: bool = False
    autoscales: bool = False
    dashboard: str = ""
    python: str = ""

    def __post_init__(self) -> None:
        _check_count("nodes", self.nodes, 1)
        _check_count("workers_per_node", self.workers_per_node, 1)
        _check_count("gpus_per_node", self.gpus_per_node, 0)
        if self.max_nodes is not None:
            _check_count("max_nodes", self.max_nodes, self.nodes)
        _check_amount("cpus_per_worker", self.cpus_per_worker)
        for name, amount in self.resources.items():
            if name in ("CPU", "GPU"):
                remedy = "CPUs are cpus_per_worker, GPUs are gpus_per_node"
                raise ConfigError(f"resources has {name!r}", remedy=remedy, key="resources")
            _check_amount(f"resources[{name!r}]", amount)
        _check_address(self.address)

    @property
    def bundle(self) -> dict[str, float]:
        """What Ray reserves for one agent."""
        return requests.bundle_of(self)

    def check(self) -> None:
        from paceline.engines.ray import connection

        # A local cluster is started with the run, not before.
        if not connection.starts_cluster(self):
            connection.connect(self)

    def address_for_nodes(self) -> str:
        from paceline.engines.ray import connection

        if connection.starts_cluster(self):
            return LOOPBACK
        return connection.connect(self).address_for_nodes()

    def request(self, agents: AgentSpec) -> EngineRequest:
        return requests.agents_request(self, agents)

    def submit(self, request: EngineRequest, secret: bytes) -> EngineJob:
        from paceline.engines.ray.ray_job import submit

        return submit(self, request, secret)

    def trial_resources(self, cpus: float = 1.0) -> Any:
        """Return what a Ray Tune trial needs that trains with this engine: `cpus` for the trial's own process
        and a bundle for each agent. For `ray.tune.with_resources(function, engine.trial_resources())`."""
        from paceline.engines.ray import connection

        ray_tune = connection.import_ray("ray.tune")
        return ray_tune.PlacementGroupFactory([{"CPU": cpus}, *[self.bundle] * self.nodes])

    def batch_text(self, job: BatchSpec) -> str:
        return requests.as_text(requests.batch_request(self, job))

    def submit_batch(self, job: BatchSpec) -> str:
        from paceline.engines.ray import job_submission

        return job_submission.submit(self, requests.batch_request(self, job))

    def batch_status(self, identifier: str) -> BatchStatus:
        from paceline.engines.ray import job_submission

        return job_submission.status(self, identifier)

    def batch_logs(self, identifier: str) -> Iterable[str]:
        from paceline.engines.ray import job_submission

        return job_submission.logs(self, identifier)

    def stop_batch(self, identifier: str) -> None:
        from paceline.engines.ray import job_submission

        job_submission.stop(self, identifier)


def _check_count(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        remedy = f"give a whole number, {least} or more"
        raise ConfigError(f"{name}={value!r} of the engine Ray", remedy=remedy, key=name)


def _check_amount(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        remedy = "give a number that is more than 0"
        raise ConfigError(f"{name}={value!r} of the engine Ray", remedy=remedy, key=name)


def _check_address(address: str | None) -> None:
    if address is None or address in ("auto", LOCAL):
        return
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or "/" in host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(
            f"address={address!r} is not the address of a Ray cluster",
            remedy='write "ray://HEAD:10001" (Ray client), "HEAD:6379" or "auto" (on a node of the cluster)',
            key="address",
        )
