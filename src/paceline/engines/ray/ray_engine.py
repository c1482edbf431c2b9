"""`paceline.Ray`: the settings of a run on a Ray cluster, which are the engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, final

from paceline.core import config as core_config
from paceline.engines.batch import BatchSpec, BatchStatus, NewLines, new_lines
from paceline.engines.engine import AgentSpec, EngineJob, EngineRequest
from paceline.engines.ray import requests
from paceline.engines.ray.ray_settings import RaySettings

LOOPBACK: Final = "127.0.0.1"


@final
@dataclass(frozen=True, kw_only=True)
class Ray(RaySettings):
    """Agents on the nodes of a Ray cluster.

    address           "ray://head:10001" (Ray client), "head:6379" or "auto" (on a node of the cluster);
                      None: RAY_ADDRESS where that is set, else a local cluster that ends with the run. A
                      process that is connected to Ray already, as a Tune trial is, stays connected to that
    nodes             agents to begin with, one per node
    max_nodes         agents at most: nodes that are added to the cluster are taken up until then by
                      themselves, and `paceline scale` gets no more; None: `nodes`, until `scale` asks for
                      more
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

    @property
    def bundle(self) -> dict[str, float]:
        """What Ray reserves for one agent."""
        return requests.bundle_of(self)

    def check(self) -> None:
        from paceline.engines.ray import ray_connection as connection

        # A local cluster is started with the run, not before.
        if not connection.starts_cluster(self):
            connection.connect(self)

    def address_for_nodes(self) -> str:
        from paceline.engines.ray import ray_connection as connection

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
        from paceline.engines.ray import ray_connection as connection

        with connection.needing_ray():
            from ray.tune import PlacementGroupFactory
        return PlacementGroupFactory([{"CPU": cpus}, *[self.bundle] * self.nodes])

    def check_batch(self) -> None:
        from paceline.engines.ray import job_submission

        job_submission.check(self)

    def batch_text(self, job: BatchSpec) -> str:
        return requests.as_text(self._batch_request(job))

    def submit_batch(self, job: BatchSpec) -> str:
        from paceline.engines.ray import job_submission

        return job_submission.submit(self, self._batch_request(job))

    def batch_status(self, identifier: str) -> BatchStatus:
        from paceline.engines.ray import job_submission

        return job_submission.status(self, identifier)

    def batch_logs(self, identifier: str) -> NewLines:
        from paceline.engines.ray import job_submission

        return new_lines(lambda: {identifier: job_submission.log(self, identifier)})

    def stop_batch(self, identifier: str) -> None:
        from paceline.engines.ray import job_submission

        job_submission.stop(self, identifier)

    def _batch_request(self, job: BatchSpec) -> EngineRequest:
        usual = Ray()
        changed = {
            name: getattr(self, name)
            for name in ("max_nodes", "cpus_per_worker", "resources", "share_nodes", "autoscales")
            if getattr(self, name) != getattr(usual, name)
        }
        further = core_config.assignments(Ray, changed) if changed else ()
        return requests.batch_request(self, job, further)
