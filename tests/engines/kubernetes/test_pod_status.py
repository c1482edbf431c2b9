"""What a pod's status says about its agent, and what a Job needs for a number of pods."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.engines.kubernetes import pod_status
from paceline.engines.kubernetes.job_progress import completed_indexes, completions_for


def pod(phase: str = "Running", state: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    container = {"state": state or {"running": {}}, "restartCount": changes.pop("restarts", 0)}
    container |= changes.pop("container", {})
    metadata = {"uid": "u", "name": "train-0-abcde", **changes.pop("metadata", {})}
    return {
        "metadata": metadata,
        "spec": {"nodeName": "n1", "containers": [{"image": "here/train"}]},
        "status": {"phase": phase, "containerStatuses": [container], **changes},
    }


def waiting(reason: str, message: str = "") -> dict[str, Any]:
    return pod("Pending", {"waiting": {"reason": reason, "message": message}})


DISRUPTED = {"type": "DisruptionTarget", "status": "True", "reason": "DeletionByTaintManager"}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (pod(), ("running", None, "")),
        (pod("Succeeded", {"terminated": {"exitCode": 0, "reason": "Completed"}}), ("ended", 0, "")),
        (pod("Failed", {"terminated": {"exitCode": 76, "reason": "Error"}}), ("ended", 76, "")),
        (
            pod("Failed", {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}),
            ("ended", 137, "OOMKilled"),
        ),
        (pod("Unknown"), ("lost", None, "the node does not answer")),
        (
            pod(conditions=[DISRUPTED], metadata={"deletionTimestamp": "now"}),
            ("lost", None, "the node does not answer"),
        ),
        (waiting("ContainerCreating"), ("pending", None, "")),
        (waiting("ErrImagePull", "not found"), ("pending", None, "ErrImagePull: not found")),
        (
            {**pod("Pending"), "status": {"phase": "Failed", "reason": "Evicted", "message": "disk"}},
            ("ended", None, "Evicted disk"),
        ),
    ],
)
def test_states(given: dict[str, Any], expected: tuple[str, int | None, str]) -> None:
    found = pod_status.read_pod(given)
    assert (found.state, found.code, found.reason) == expected


def test_a_container_that_was_restarted_had_an_earlier_life() -> None:
    ended = {"terminated": {"exitCode": 76, "reason": "Error"}}
    again = pod(restarts=2, container={"lastState": ended}, metadata={"name": "train-3"})
    earlier = pod_status.read_earlier_life(again)
    assert earlier is not None
    assert (earlier.key, earlier.state, earlier.code, earlier.index) == (("u", 1), "ended", 76, 3)
    assert pod_status.read_earlier_life(pod()) is None


def test_pods_that_will_never_run_are_named() -> None:
    error = pod_status.hopeless([pod(), waiting("ImagePullBackOff", "manifest unknown")])
    assert "'here/train' cannot be pulled" in str(error)
    assert (
        pod_status.hopeless([pod(), waiting("ErrImagePull")]) is None
    )  # it may be a hiccup: the next is not
    assert "cannot be started" in str(pod_status.hopeless([waiting("CreateContainerConfigError")]))


@pytest.mark.parametrize(
    ("pods", "done", "needed"), [(3, "", 3), (3, "1", 4), (2, "0,2-3", 5), (1, "5", 1), (0, "", 0)]
)
def test_an_index_that_is_done_gets_no_other_pod(pods: int, done: str, needed: int) -> None:
    assert completions_for(pods, {"status": {"completedIndexes": done}}) == needed


def test_lists_of_indexes() -> None:
    assert completed_indexes("1,3-5,8") == {1, 3, 4, 5, 8}
