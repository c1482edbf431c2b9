"""A run that was handed over: create its objects, look at them, read its logs, delete them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from paceline.control.spool import STOPPED_EXIT_CODE, SUPERVISOR_LOST_EXIT_CODE
from paceline.control.supervisor_address import new_secret
from paceline.core.errors import UsageError
from paceline.engines.batch import BatchSpec, BatchStatus, NewLines
from paceline.engines.kubernetes import pod_status
from paceline.engines.kubernetes.api_client import ApiClient
from paceline.engines.kubernetes.batch_manifests import HEAD, batch_objects
from paceline.engines.kubernetes.job_progress import condition
from paceline.engines.kubernetes.manifests import MISTAKE_EXIT_CODE, secret_name
from paceline.engines.kubernetes.object_creation import PATHS, create_all
from paceline.engines.kubernetes.pod_logs import PodLogs
from paceline.engines.kubernetes.pod_queries import pods_of_run, refusal_error, refusal_of_pods
from paceline.engines.kubernetes.pod_settings import PodSettings

_KINDS: Final = {"job": "Job", "statefulset": "StatefulSet", "jobset": "JobSet"}
_NO_FAILURES: Final = (0, STOPPED_EXIT_CODE, SUPERVISOR_LOST_EXIT_CODE)


def submit(client: ApiClient, settings: PodSettings, job: BatchSpec) -> str:
    """Create the objects; return kind and name, as `kubectl get` takes them."""
    *others, owner = batch_objects(settings, job)
    place = settings.namespace or client.access.namespace
    create_all(client, place, owner, others, new_secret())
    return f"{settings.kind}/{owner['metadata']['name']}"


def status(client: ApiClient, settings: PodSettings, identifier: str) -> BatchStatus:
    """Return what became of the run; pod 0, which has the supervisor, decides."""
    place = settings.namespace or client.access.namespace
    kind, name = _parsed(identifier)
    owner = client.find(f"{PATHS[kind].format(place)}/{name}")
    if owner is None:
        return BatchStatus("stopped", reason=f"there is no {identifier} in namespace {place}")
    # An answer of the API server does not always repeat the kind.
    owner = {"kind": kind, **owner}
    pods = pods_of_run(client, place, name)
    first = next((pod for pod in reversed(pods) if _is_first(pod)), None)
    if over := _ended(owner, first, settings.retries):
        return over
    if first is None:
        refusal = refusal_of_pods(client, place, owner)
        if refusal.lasts and not _has_run(pods):
            return BatchStatus("failed", reason=str(refusal_error(refusal.message)), never_ran=True)
        return BatchStatus("pending", reason=refusal.message)
    found = pod_status.read_pod(first)
    if found.state == "running":
        return BatchStatus("running")
    # An image that another pod's node cannot pull just now is that pod's trouble.
    if (error := pod_status.hopeless([first])) and not _has_run(pods):
        return BatchStatus("failed", reason=str(error), never_ran=True)
    return BatchStatus("pending", reason=found.reason)


def _ended(owner: Mapping[str, Any], first: pod_status.Pod | None, retries: int) -> BatchStatus | None:
    """Return how a run ended; None where it has not."""
    if condition(owner, "Complete", "SuccessCriteriaMet", "Completed"):
        return BatchStatus("succeeded", 0)
    if failed := condition(owner, "Failed", "FailureTarget"):
        reason = ": ".join(filter(None, (failed.get("reason"), failed.get("message"))))
        return BatchStatus("failed", None if first is None else pod_status.read_pod(first).code, reason)
    earlier = pod_status.read_earlier_life(first) if first is not None else None
    if first is None or earlier is None or owner["kind"] != "StatefulSet":
        return None
    # A StatefulSet ends nothing by itself: these are the rules of a Job.
    if earlier.code == 0:
        return BatchStatus("succeeded", 0, "a StatefulSet starts it again: delete it")
    is_down = pod_status.read_pod(first).state != "running"
    is_tried = earlier.restarts + 1 > retries and earlier.code not in _NO_FAILURES
    if earlier.code == MISTAKE_EXIT_CODE or (is_tried and is_down):
        return BatchStatus("failed", earlier.code, "a StatefulSet tries it again and again: delete it")
    return None


def _has_run(pods: Sequence[pod_status.Pod]) -> bool:
    """Return whether any container of the present pods has begun: what keeps one from beginning may pass."""
    return any(
        pod_status.read_pod(pod).state != "pending" or pod_status.read_earlier_life(pod) is not None
        for pod in pods
    )


def logs(client: ApiClient, namespace: str, identifier: str) -> NewLines:
    """Follow all pods: the lines of pod 0 come first and bare, those of the others with the pod's name."""
    place = namespace or client.access.namespace
    _, name = _parsed(identifier)
    reader = PodLogs(client, place)

    def fresh(is_over: bool) -> list[str]:
        # The API server gives whole lines.
        pods = sorted(pods_of_run(client, place, name), key=lambda pod: not _is_first(pod))
        names = [str(pod["metadata"]["name"]) for pod in pods]
        prefixes = {
            name: "" if _is_first(pod) else f"[{name}] " for name, pod in zip(names, pods, strict=True)
        }
        restarts = {name: pod_status.read_pod(pod).restarts for name, pod in zip(names, pods, strict=True)}
        return [prefixes[pod] + line for pod, line in reader.of_all(restarts, at_once=is_over)]

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


def _is_first(pod: Mapping[str, Any]) -> bool:
    """Return whether the pod has the supervisor: index 0, and of a JobSet its first Job."""
    metadata = pod["metadata"]
    part = metadata.get("labels", {}).get("jobset.sigs.k8s.io/replicatedjob-name", HEAD)
    return part == HEAD and pod_status.pod_index(pod) == 0
