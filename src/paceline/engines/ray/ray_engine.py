"""`paceline.Ray`: the settings of a run on a Ray cluster, which are the engine."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final, final

from paceline.engines.batch import BatchSpec, BatchStatus
from paceline.engines.engine import AgentSpec, EngineJob, EngineRequest
from paceline.engines.ray import requests
from paceline.engines.ray.ray_settings import RaySettings

LOOPBACK: Final = "127.0.0.1"


@final
@dataclass(frozen=True, kw_only=True)
class Ray(RaySettings):
    """The engine; the settings are those of `RaySettings`."""

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
