"""A run that was handed over: create its objects, look at them, read its logs, delete them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.control.supervisor_address import new_secret
from paceline.core.errors import UsageError
from paceline.engines.batch import BatchSpec, BatchStatus, NewLines
from paceline.engines.kubernetes import pod_status
from paceline.engines.kubernetes.api_client import ApiClient
from paceline.engines.kubernetes.batch_manifests import HEAD, batch_objects
from paceline.engines.kubernetes.controller_events import refusal_of_pods
from paceline.engines.kubernetes.job_progress import condition
from paceline.engines.kubernetes.manifests import RUN_LABEL, secret_name
from paceline.engines.kubernetes.object_creation import PATHS, create_all
from paceline.engines.kubernetes.pod_logs import PodLogs
from paceline.engines.kubernetes.pod_settings import PodSettings

_KINDS = {"job": "Job", "statefulset": "StatefulSet", "jobset": "JobSet"}


def submit(client: ApiClient, settings: PodSettings, job: BatchSpec) -> str:
    """Create the objects; return kind and name, as `kubectl get` takes them."""
    *others, owner = batch_objects(settings, job)
    place = settings.namespace or client.access.namespace
    create_all(client, place, owner, others, new_secret())
    return f"{settings.kind}/{owner['metadata']['name']}"


def status(client: ApiClient, namespace: str, identifier: str) -> BatchStatus:
    """Return what became of the run; pod 0, which has the supervisor, decides."""
    place = namespace or client.access.namespace
    kind, name = _parsed(identifier)
    owner = client.find(f"{PATHS[kind].format(place)}/{name}")
    if owner is None:
        return BatchStatus("stopped", reason=f"there is no {identifier} in namespace {place}")
    pods = _pods(client, place, name)
    first = next((pod for pod in reversed(pods) if _is_first(pod)), None)
    found = pod_status.read_pod(first) if first is not None else None
    if condition(owner, "Complete", "SuccessCriteriaMet", "Completed"):
        return BatchStatus("succeeded", 0)
    if failed := condition(owner, "Failed", "FailureTarget"):
        reason = ": ".join(filter(None, (failed.get("reason"), failed.get("message"))))
        return BatchStatus("failed", found.code if found is not None else None, reason)
    if first is not None and kind == "StatefulSet":
        earlier = pod_status.read_earlier_life(first)
        if earlier is not None and earlier.code == 0:
            return BatchStatus("succeeded", 0, "a StatefulSet starts it again: delete it")
    if error := pod_status.hopeless(pods):
        return BatchStatus("failed", reason=str(error))
    if found is not None and found.state == "running":
        return BatchStatus("running")
    reason = found.reason if found is not None else refusal_of_pods(client, place, owner)
    return BatchStatus("pending", reason=reason)


def logs(client: ApiClient, namespace: str, identifier: str) -> NewLines:
    """Follow all pods: the lines of pod 0 come first and bare, those of the others with the pod's name."""
    place = namespace or client.access.namespace
    _, name = _parsed(identifier)
    reader = PodLogs(client, place)

    def fresh(is_over: bool) -> list[str]:
        # The API server gives whole lines.
        found: list[str] = []
        for pod in sorted(_pods(client, place, name), key=lambda pod: not _is_first(pod)):
            prefix = "" if _is_first(pod) else f"[{pod['metadata']['name']}] "
            found += [prefix + line for line in reader.new_lines(pod["metadata"]["name"])]
        return found

    return fresh


def stop(client: ApiClient, namespace: str, identifier: str) -> None:
    """Delete the run's objects; its pods get SIGTERM, save and leave."""
    place = namespace or client.access.namespace
    kind, name = _parsed(identifier)
    client.delete(f"{PATHS[kind].format(place)}/{name}")
    # Kubernetes removes these with their owner; now is better than soon, when the name is to be used again.
    client.delete(f"{PATHS['Service'].format(place)}/{name}")
    client.delete(f"{PATHS['Secret'].format(place)}/{secret_name(name)}")


def _parsed(identifier: str) -> tuple[str, str]:
    kind, slash, name = identifier.partition("/")
    if not slash or kind not in _KINDS or not name:
        raise UsageError(
            f"{identifier!r} is no run of Kubernetes", remedy="give what `paceline submit` printed: job/NAME"
        )
    return _KINDS[kind], name


def _pods(client: ApiClient, namespace: str, name: str) -> list[Mapping[str, Any]]:
    found = client.get(PATHS["Pod"].format(namespace), labelSelector=f"{RUN_LABEL}={name}")["items"]
    return sorted(found, key=lambda pod: (pod["metadata"]["creationTimestamp"], pod["metadata"]["name"]))


def _is_first(pod: Mapping[str, Any]) -> bool:
    """Return whether the pod has the supervisor: index 0, and of a JobSet its first Job."""
    metadata = pod["metadata"]
    part = metadata.get("labels", {}).get("jobset.sigs.k8s.io/replicatedjob-name", HEAD)
    return part == HEAD and pod_status.pod_index(pod) == 0
