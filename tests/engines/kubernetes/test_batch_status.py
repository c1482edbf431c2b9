"""What is said of a run that was handed over: which troubles end it, and which pass."""

from __future__ import annotations

from typing import Any

import pytest
from tests.engines.kubernetes.scripted_api import ScriptedApi

import paceline
from paceline.engines.batch import BatchStatus
from paceline.engines.kubernetes import batch_job

JOBS, SETS, JOB_SETS = (
    "/apis/batch/v1/namespaces/ml/jobs",
    "/apis/apps/v1/namespaces/ml/statefulsets",
    "/apis/jobset.x-k8s.io/v1alpha2/namespaces/ml/jobsets",
)
PODS, EVENTS = "/api/v1/namespaces/ml/pods", "/api/v1/namespaces/ml/events"
PULLING = {"waiting": {"reason": "ImagePullBackOff", "message": "503"}}
RUNNING: dict[str, Any] = {"running": {}}


def status(api: ScriptedApi, identifier: str = "job/run") -> BatchStatus:
    return batch_job.status(api.client(), paceline.Kubernetes(image="i", retries=2), identifier)


def put_job(api: ScriptedApi, **of_status: Any) -> dict[str, Any]:
    return api.put(JOBS, {"kind": "Job", "metadata": {"name": "run"}, "status": of_status})


def put_pod(api: ScriptedApi, number: int, state: dict[str, Any], **of_container: Any) -> None:
    container = {"state": state, "restartCount": 0, **of_container}
    pod = {
        "metadata": {"name": f"run-{number}"},
        "spec": {"containers": [{"image": "i"}]},
        "status": {
            "phase": "Running" if "running" in state else "Pending",
            "containerStatuses": [container],
        },
    }
    api.put(PODS, pod)


def put_refusal(api: ScriptedApi, told: str, last: str, **about: str) -> None:
    event = {"metadata": {"name": f"e{last}"}, "reason": "FailedCreate", "message": told}
    api.put(EVENTS, {**event, "involvedObject": about, "lastTimestamp": last})


def test_a_pod_that_cannot_be_pulled_ends_no_run_that_trains(api: ScriptedApi) -> None:
    put_job(api)
    put_pod(api, 0, RUNNING)
    put_pod(api, 1, PULLING)
    assert status(api).state == "running"


def test_the_first_pod_comes_again_while_others_run(api: ScriptedApi) -> None:
    put_job(api)
    put_pod(api, 0, PULLING)
    put_pod(api, 1, RUNNING)
    assert status(api) == BatchStatus("pending", reason="ImagePullBackOff: 503")


def test_an_image_that_no_node_can_pull_ends_a_run_that_never_began(api: ScriptedApi) -> None:
    put_job(api)
    put_pod(api, 1, PULLING)
    put_pod(api, 0, {"waiting": {"reason": "ContainerCreating"}})
    assert status(api).state == "pending"  # pod 0 has it
    put_pod(api, 0, PULLING)
    found = status(api)
    assert (found.state, found.code, found.never_ran) == ("failed", None, True)
    assert "cannot be pulled" in found.reason


EXCEEDED = "is forbidden: exceeded quota: team, requested: pods=1,requests.cpu=2, used: "


@pytest.mark.parametrize(
    ("told", "last", "state"),
    [
        (f"{EXCEEDED}pods=0,requests.cpu=0, limited: pods=0,requests.cpu=9", "06", "failed"),
        (f"{EXCEEDED}pods=0,requests.cpu=0, limited: pods=4,requests.cpu=1500m", "06", "failed"),
        # Another run has it, and may end.
        (f"{EXCEEDED}pods=3,requests.cpu=8, limited: pods=3,requests.cpu=9", "59", "pending"),
        ("is forbidden: failed quota: team: must specify limits.cpu", "06", "failed"),
        ("maximum memory usage per Container is 1Gi, but limit is 2Gi", "06", "failed"),
        ('serviceaccount "trainer" not found', "06", "pending"),
        ('serviceaccount "trainer" not found', "59", "failed"),
        ("Internal error occurred: failed calling webhook: connection refused", "59", "pending"),
        ("is forbidden: status unknown for quota: team, resources: pods", "59", "pending"),
    ],
)
def test_refusals_that_pass_and_those_that_do_not(api: ScriptedApi, told: str, last: str, state: str) -> None:
    job = put_job(api)
    put_refusal(api, told, f"2026-01-02T03:04:{last}Z", uid=job["metadata"]["uid"])
    found = status(api)
    assert (found.state, told in found.reason) == (state, True)


def test_no_refusal_ends_a_run_that_has_run(api: ScriptedApi) -> None:
    """Pod 0 was drained, and a webhook is away."""
    job = put_job(api)
    put_pod(api, 1, RUNNING)
    put_refusal(api, "webhook is away", "2026-01-02T03:04:59Z", uid=job["metadata"]["uid"])
    assert status(api) == BatchStatus("pending", reason="webhook is away")


def test_the_pods_of_a_job_set_are_its_jobs(api: ScriptedApi) -> None:
    api.put(JOB_SETS, {"kind": "JobSet", "metadata": {"name": "run"}})
    about = {"kind": "Job", "name": "run-head-0", "uid": "its own"}
    put_refusal(api, "of an earlier run of this name", "2026-01-02T01:00:00Z", **about)
    assert status(api, "jobset/run") == BatchStatus("pending")
    put_refusal(api, "of this one", "2026-01-02T03:04:06Z", **about)
    assert status(api, "jobset/run") == BatchStatus("pending", reason="of this one")


def ended(code: int) -> dict[str, Any]:
    return {"terminated": {"exitCode": code}}


@pytest.mark.parametrize(
    ("code", "restarts", "state", "expected"),
    [
        (0, 1, RUNNING, ("succeeded", 0)),
        (1, 1, {"waiting": {"reason": "CrashLoopBackOff"}}, ("pending", None)),
        (1, 3, {"waiting": {"reason": "CrashLoopBackOff"}}, ("failed", 1)),
        (1, 3, RUNNING, ("running", None)),
        (75, 3, {"waiting": {"reason": "CrashLoopBackOff"}}, ("pending", None)),
        (2, 1, RUNNING, ("failed", 2)),
    ],
)
def test_a_stateful_set_that_starts_a_script_again_and_again(
    api: ScriptedApi, code: int, restarts: int, state: dict[str, Any], expected: tuple[str, int | None]
) -> None:
    """With `retries=2`: what ends a Job is the end of the run of a StatefulSet too."""
    api.put(SETS, {"kind": "StatefulSet", "metadata": {"name": "run"}})
    put_pod(api, 0, state, restartCount=restarts, lastState=ended(code))
    found = status(api, "statefulset/run")
    assert (found.state, found.code) == expected
