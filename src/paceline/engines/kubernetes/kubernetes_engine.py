"""Settings of the Kubernetes engine: `paceline.Kubernetes`, what a user writes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, final

from paceline.core.errors import UsageError
from paceline.engines.batch import BatchSpec, BatchStatus, NewLines
from paceline.engines.engine import AgentSpec, EngineRequest
from paceline.engines.kubernetes.pod_settings import PodSettings

if TYPE_CHECKING:
    from paceline.engines.kubernetes.agents_job import AgentsJob
    from paceline.engines.kubernetes.api_client import ApiClient

_FROM_CLUSTER: Final = (
    "give the address that pods reach this machine at: Kubernetes(address=...); or hand the run over with "
    "`paceline submit`, which has the supervisor in a pod"
)


@final
@dataclass(frozen=True, kw_only=True)
class Kubernetes(PodSettings):
    """Agents as pods of a Kubernetes cluster, one pod per node.

    image           the container image, with Paceline and the script's packages
    namespace       empty: the one of the kubeconfig's context
    kind            what holds the pods: an Indexed Job, a StatefulSet, or (`paceline submit` only) a JobSet
    kubeconfig      a file; empty: $KUBECONFIG, ~/.kube/config, or the pod's own service account
    context         one of its contexts; empty: the current one
    address         where pods reach the supervisor that runs on this machine (`train --engine kubernetes`)
    port            the supervisor's port in a submitted run
    cpus, memory    requests of a pod, as Kubernetes writes them ("4", "16Gi"); memory is also its limit
    shared_memory   size of /dev/shm, which counts as memory of the pod
    volumes         folder in the pod -> name of a PersistentVolumeClaim that all nodes can mount
    user            the number of the user as whom the container runs; never 0
    grace_seconds   from SIGTERM to SIGKILL: a step and a save have to fit
    environment     variables of the container
    folder, python  working folder and interpreter in the image; empty folder: the image's own
    retries         failed pods after which the Job is given up; disruptions do not count
    """

    def check(self) -> None:
        """Raise where no cluster answers, or this user may not do in the namespace what a run needs."""
        from paceline.engines.kubernetes import access_check

        self._check_image(self.image)
        access_check.check(self.client(), self.namespace, self.kind)

    def address_for_nodes(self) -> str:
        """Return the address of this machine from which the API server is reached: pods mostly reach it."""
        from paceline.core.listen_address import is_loopback, resolves_to_loopback
        from paceline.engines.kubernetes import access_check

        found = self.address or access_check.own_address(self.client().access.server)
        if is_loopback(found) or resolves_to_loopback(found):
            raise UsageError(
                f"pods cannot reach this machine at {found}, its only known address", remedy=_FROM_CLUSTER
            )
        return found

    def request(self, agents: AgentSpec) -> EngineRequest:
        """Return the manifests of the agents. The secret is an object of its own, which `submit` makes."""
        from paceline.engines.kubernetes import manifests

        self._check_image(self.image)
        return manifests.agents_request(self, agents)

    def submit(self, request: EngineRequest, secret: bytes) -> AgentsJob:
        """Create the secret and the agents' Job or StatefulSet."""
        from paceline.engines.kubernetes.agents_job import AgentsJob

        return AgentsJob.submit(self.client(), self.namespace, request, secret)

    def batch_text(self, job: BatchSpec) -> str:
        """Return the manifests of a run as YAML, for `kubectl apply -f`; without the token."""
        from paceline.engines.kubernetes import batch_manifests

        self._check_image(job.image or self.image)
        return batch_manifests.to_yaml(self, job)

    def submit_batch(self, job: BatchSpec) -> str:
        """Create the objects of a run; return what `kubectl get` takes, e.g. "job/train"."""
        from paceline.engines.kubernetes import batch_job

        self._check_image(job.image or self.image)
        return batch_job.submit(self.client(), self, job)

    def batch_status(self, identifier: str) -> BatchStatus:
        from paceline.engines.kubernetes import batch_job

        return batch_job.status(self.client(), self, identifier)

    def batch_logs(self, identifier: str) -> NewLines:
        from paceline.engines.kubernetes import batch_job

        return batch_job.logs(self.client(), self.namespace, identifier)

    def stop_batch(self, identifier: str) -> None:
        """Delete the run's objects: pods get SIGTERM, save and leave within `grace_seconds`."""
        from paceline.engines.kubernetes import batch_job

        batch_job.stop(self.client(), self.namespace, identifier)

    def client(self) -> ApiClient:
        """Return a client of the API server that the settings name."""
        from paceline.engines.kubernetes.api_client import ApiClient
        from paceline.engines.kubernetes.kubeconfig import find_cluster

        return ApiClient(find_cluster(self.kubeconfig, self.context))

    def _check_image(self, image: str) -> None:
        if not image:
            raise UsageError(
                "no container image is given, and pods run nothing else",
                remedy="give --image, or Kubernetes(image=...): an image that has Paceline (see Dockerfile)",
            )
        if re.search(r"\s", image):
            raise UsageError(f"image {image!r} is no name of an image", remedy="write REGISTRY/NAME:TAG")
