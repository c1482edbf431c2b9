"""Read pods: what became of the agent in each, in the words of the engine protocol. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, final

from paceline.core.errors import PacelineError, UsageError
from paceline.engines.engine import NodeState

Pod = Mapping[str, Any]

# Kubernetes tries these again and again; another try does not mend them.
_BAD_IMAGE: Final = ("ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull")
_BAD_CONFIG: Final = ("CreateContainerConfigError", "CreateContainerError", "RunContainerError")
INDEX_ANNOTATION: Final = "batch.kubernetes.io/job-completion-index"
_LOST_NODE: Final = ("NodeLost", "NodeAffinity", "Shutdown", "Terminated")


@final
@dataclass(frozen=True)
class PodState:
    """One life of a pod's container. `restarts` tells lives of one pod apart."""

    uid: str
    name: str
    restarts: int
    state: NodeState
    host: str = ""
    code: int | None = None
    reason: str = ""
    index: int = 0

    @property
    def key(self) -> tuple[str, int]:
        return self.uid, self.restarts


def read_pod(pod: Pod) -> PodState:
    """Return the state of a pod's only container."""
    metadata, container = pod["metadata"], _container(pod)
    state, code, reason = _state(pod, container)
    return PodState(
        str(metadata["uid"]),
        str(metadata["name"]),
        int(container.get("restartCount", 0)),
        state,
        str(pod.get("spec", {}).get("nodeName", "")),
        code,
        reason,
        pod_index(pod),
    )


def pod_index(pod: Pod) -> int:
    """Return a pod's number: a Job notes it down, a StatefulSet ends the name with it."""
    noted = pod["metadata"].get("annotations", {}).get(INDEX_ANNOTATION)
    text = noted if noted is not None else str(pod["metadata"]["name"]).rpartition("-")[2]
    return int(text) if text.isdecimal() else 0


def read_earlier_life(pod: Pod) -> PodState | None:
    """Return how the container ended before its last restart; None where it was never restarted."""
    container = _container(pod)
    ended = (container.get("lastState") or {}).get("terminated")
    if not ended or not container.get("restartCount"):
        return None
    now = read_pod(pod)
    code = ended.get("exitCode")
    return PodState(now.uid, now.name, now.restarts - 1, "ended", now.host, code, _why(ended), now.index)


def _container(pod: Pod) -> Mapping[str, Any]:
    statuses: Sequence[Mapping[str, Any]] = pod.get("status", {}).get("containerStatuses") or ({},)
    return statuses[0]


def _state(pod: Pod, container: Mapping[str, Any]) -> tuple[NodeState, int | None, str]:
    status, state = pod.get("status", {}), container.get("state") or {}
    phase = status.get("phase", "Pending")
    ended = state.get("terminated")
    if is_on_lost_node(pod) and not ended:
        return "lost", None, "the node does not answer"
    if ended is not None:
        code = ended.get("exitCode")
        return "ended", code, status.get("reason") or _why(ended)
    if phase == "Failed":
        lost = status.get("reason") in _LOST_NODE
        told = " ".join(filter(None, (status.get("reason"), status.get("message"))))
        return ("lost" if lost else "ended"), None, told or "the pod failed"
    if phase == "Unknown":
        return "lost", None, "the node does not answer"
    if "running" in state:
        return "running", None, ""
    return "pending", None, waiting_reason(pod)


def is_on_lost_node(pod: Pod) -> bool:
    """Return whether the cluster has given up a pod because its node does not answer."""
    if pod.get("status", {}).get("reason") == "NodeLost":
        return True
    conditions = pod.get("status", {}).get("conditions") or ()
    return "deletionTimestamp" in pod["metadata"] and any(
        condition.get("type") == "DisruptionTarget" and condition.get("reason") == "DeletionByTaintManager"
        for condition in conditions
    )


def waiting_reason(pod: Pod) -> str:
    """Return why a pod does not run yet: Kubernetes' word and message."""
    status = pod.get("status", {})
    for container in status.get("containerStatuses") or ():
        waiting = (container.get("state") or {}).get("waiting") or {}
        if waiting.get("reason") and waiting["reason"] != "ContainerCreating":
            return ": ".join(filter(None, (waiting["reason"], waiting.get("message"))))
    for condition in status.get("conditions") or ():
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            return ": ".join(filter(None, (condition.get("reason"), condition.get("message"))))
    return ""


def hopeless(pods: Sequence[Pod]) -> PacelineError | None:
    """Return the error of a pod that will never run: its image is missing, or no container can be made."""
    for pod in pods:
        reason = waiting_reason(pod)
        word = reason.partition(":")[0]
        image = pod["spec"]["containers"][0]["image"]
        if word in _BAD_IMAGE:
            return UsageError(
                f"the image {image!r} cannot be pulled by the nodes ({reason})",
                remedy="check its name and tag, push it, and give image_pull_secret= for a private registry",
            )
        if word in _BAD_CONFIG:
            return UsageError(
                f"pod {pod['metadata']['name']} cannot be started from image {image!r} ({reason})",
                remedy=f"kubectl describe pod {pod['metadata']['name']} says more",
            )
    return None


def _why(ended: Mapping[str, Any]) -> str:
    reason = str(ended.get("reason") or "")
    if reason in ("Completed", "Error"):
        reason = ""  # says no more than the exit code
    return ": ".join(filter(None, (reason, str(ended.get("message") or ""))))
