"""Agents in pods, with an API server that fails now and then."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from tests.engines.kubernetes.scripted_api import ScriptedApi
from tests.virtual_clock import VirtualClock

import paceline
from paceline.core.errors import ResourceError, UnavailableError, UsageError
from paceline.engines.engine import AgentSpec
from paceline.engines.kubernetes import batch_job
from paceline.engines.kubernetes.agents_job import AgentsJob
from paceline.engines.kubernetes.pod_status import INDEX_ANNOTATION

JOBS = "/apis/batch/v1/namespaces/ml/jobs"
PODS, EVENTS = "/api/v1/namespaces/ml/pods", "/api/v1/namespaces/ml/events"
SPEC = AgentSpec(run="train", address=("10.0.0.9", 41000), nodes=3, workers_per_node=1)


def submitted(api: ScriptedApi) -> tuple[AgentsJob, VirtualClock]:
    clock = VirtualClock(autojump=True)
    request = paceline.Kubernetes(image="i", nodes=3).request(SPEC)
    return AgentsJob.submit(api.client(), "ml", request, b"secret", clock), clock


def put_pods(api: ScriptedApi, *states: dict[str, Any]) -> None:
    for number, state in enumerate(states):
        phase = "Running" if "running" in state else "Pending"
        pod: dict[str, Any] = {
            "metadata": {"name": f"train-{number}"},
            "spec": {"containers": [{"image": "i"}]},
            "status": {"phase": phase, "containerStatuses": [{"state": state}]},
        }
        api.put(PODS, pod)
        api.logs[f"train-{number}"] = [f"2026-01-02T03:04:05.1Z hello from {number}"]


@pytest.mark.parametrize("fault", [500, "drop"])
def test_a_pod_on_a_lost_node_costs_no_line_of_the_others(api: ScriptedApi, fault: int | str) -> None:
    job, clock = submitted(api)
    put_pods(api, *[{"running": {}}] * 3)
    job.poll()
    lost = f"{PODS}/train-1/log"
    api.fault = lambda method, path: fault if path == lost else None
    said: list[str] = []
    for _ in range(5):
        clock.advance(2.0)
        said += [line.text for line in job.logs()]
    assert said == ["hello from 0", "hello from 2"]
    # A request to a node that does not answer takes long: it is not made with every look.
    assert api.requests.count(("GET", lost)) == 1
    api.fault = lambda method, path: None
    clock.advance(40.0)
    assert [line.text for line in job.logs()] == ["hello from 1"]
    job.stop()


def test_the_last_lines_of_a_run_are_those_of_all_pods_that_answer(api: ScriptedApi) -> None:
    put_pods(api, *[{"running": {}}] * 3)
    for one in api.objects.values():
        one["metadata"]["annotations"] = {INDEX_ANNOTATION: one["metadata"]["name"][-1]}
    api.fault = lambda method, path: 500 if path == f"{PODS}/train-1/log" else None
    fresh = batch_job.logs(api.client(), "ml", "job/train")
    assert list(fresh(False)) == ["hello from 0"]
    missing, last = fresh(True)
    assert missing.startswith("[train-1] (its last lines cannot be had: the Kubernetes API server")
    assert last == "[train-2] hello from 2"
    assert list(fresh(True)) == []


def test_what_a_container_wrote_before_it_was_started_again_is_read(api: ScriptedApi) -> None:
    """A StatefulSet does so. Agents of a run in the foreground, and a run that is handed over."""
    job, clock = submitted(api)
    fresh = batch_job.logs(api.client(), "ml", "statefulset/train")
    put_pods(api, {"running": {}})
    job.poll()
    assert ([line.text for line in job.logs()], fresh(False)) == (["hello from 0"], ["hello from 0"])
    (status,) = api.objects[f"{PODS}/train-0"]["status"]["containerStatuses"]
    status.update(restartCount=1, lastState={"terminated": {"exitCode": 0}})
    api.earlier_logs["train-0"] = [*api.logs["train-0"], "2026-01-02T03:04:06Z done"]
    api.logs["train-0"] = ["2026-01-02T03:04:07Z hello again"]
    assert [*fresh(True), *fresh(True)] == ["done", "hello again"]
    said: list[str] = []
    for _ in range(2):
        clock.advance(2.0)
        job.poll()
        said += [line.text for line in job.logs()]
    assert said == ["done", "hello again"]
    job.stop()


def test_the_end_of_the_agents_is_asked_for_until_the_server_answers(
    api: ScriptedApi, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, "paceline.engines")
    job, clock = submitted(api)
    ready_at = clock.now() + 20.0
    api.fault = lambda method, path: None if clock.now() >= ready_at else 503
    job.stop()
    assert (api.left("Job"), api.left("Secret")) == ([], [])


def test_what_a_stop_that_fails_leaves_is_named(api: ScriptedApi, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "paceline.engines")
    job, _ = submitted(api)
    api.fault = lambda method, path: 503
    with pytest.raises(UnavailableError) as told:
        job.stop()
    assert told.value.__notes__ == [f"still there: job/{job.name} in namespace ml"]
    assert told.value.remedy == f"kubectl -n ml delete job/{job.name}"
    api.fault = lambda method, path: None
    job.stop()
    assert api.objects == {}


REFUSALS = [
    ("forbidden: exceeded quota: team, requested: pods=1, used: pods=2, limited: pods=2", ResourceError),
    ("forbidden: failed quota: team: must specify limits.cpu", ResourceError),
    ('serviceaccount "trainer" not found', UsageError),
    ('violates PodSecurity "restricted:latest"', UsageError),
]


@pytest.mark.parametrize(("told", "kind"), REFUSALS)
def test_agents_that_no_pod_is_made_for_are_given_up(
    api: ScriptedApi, told: str, kind: type[Exception]
) -> None:
    job, clock = submitted(api)
    (owner,) = [one for one in api.objects.values() if one["kind"] == "Job"]
    about = {"involvedObject": {"uid": owner["metadata"]["uid"]}, "reason": "FailedCreate"}
    api.put(EVENTS, {"metadata": {"name": "e"}, "message": told, **about})
    assert {status.reason for status in job.poll()} == {told}
    clock.advance(25.0)
    with pytest.raises(kind, match=r"lets no pod be made|does not allow it") as error:
        job.poll()
    assert told in str(error.value)
    job.stop()


def test_pods_that_are_there_are_waited_for_where_a_quota_admits_no_more(api: ScriptedApi) -> None:
    """Their image may take minutes."""
    job, clock = submitted(api)
    (owner,) = [one for one in api.objects.values() if one["kind"] == "Job"]
    about = {"involvedObject": {"uid": owner["metadata"]["uid"]}, "reason": "FailedCreate"}
    api.put(EVENTS, {"metadata": {"name": "e"}, "message": REFUSALS[0][0], **about})
    put_pods(api, *[{"waiting": {"reason": "ContainerCreating"}}] * 2)
    for _ in range(3):
        clock.advance(25.0)
        assert [status.reason for status in job.poll()][2:] == [REFUSALS[0][0]]
    job.stop()


def test_agents_whose_start_was_not_answered_are_deleted(
    api: ScriptedApi, caplog: pytest.LogCaptureFixture
) -> None:
    """The server goes away behind the creation of a Job, before it is the Secret's owner."""
    caplog.set_level(logging.CRITICAL, "paceline.engines")
    job, _ = submitted(api)
    api.objects.pop(f"{JOBS}/{job.name}")  # by someone else
    away: list[str] = []

    def fault(method: str, path: str) -> str | None:
        if method == "PATCH":
            away.append(path)
        return "drop" if away else None

    api.fault = fault
    job.scale(3)
    assert len(api.left("Job")) == 1
    api.fault = lambda method, path: None
    job.scale(3)
    assert api.left("Job") == [job.name]
    job.stop()
    assert (api.left("Job"), api.left("Secret")) == ([], [])
