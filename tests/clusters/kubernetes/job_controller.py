"""The controllers of Jobs and StatefulSets, as Kubernetes documents them.

Indexed Jobs: one pod per index that is not done; a failed pod is counted and comes again under its index
after a back-off; `podFailurePolicy`, `successPolicy`, `backoffLimit`, and `completions` that change together
with `parallelism`. What is left out: suspension, TTL, deadlines, per-index limits.
"""

from __future__ import annotations

import copy
import time
import uuid
from typing import Any

from tests.clusters.kubernetes.admission import (
    Quota,
    RefusalError,
    check_pod_quota,
    check_service_account,
)
from tests.clusters.kubernetes.object_store import JsonObject, ObjectStore, event, now

_INDEX = "batch.kubernetes.io/job-completion-index"


class Controllers:
    """Makes the pods that Jobs and StatefulSets ask for. `backoff`: seconds after the first failure, doubled
    with every further one (10 in Kubernetes)."""

    def __init__(self, store: ObjectStore, backoff: float) -> None:
        self._store = store
        self._backoff = backoff
        self._counted: set[str] = set()  # pods whose end was counted
        self._failures: dict[str, int] = {}
        self._retry_at: dict[str, float] = {}
        self.quota: Quota | None = None

    def turn(self) -> None:
        with self._store.lock:
            for job in self._store.every("Job"):
                self._job(job)
            for owner in self._store.every("StatefulSet"):
                self._stateful_set(owner)

    # Jobs

    def _job(self, job: JsonObject) -> None:
        status = job["status"]
        pods = self._store.pods_of(job)
        if not status["conditions"]:
            self._count_ends(job, pods)
        for pod in pods:
            # Those that are to go were kept until they were counted.
            if _has_ended(pod) and "deletionTimestamp" in pod["metadata"]:
                self._store.remove(pod)
        if status["conditions"]:
            return None  # it was over, or the failure policy has ended it
        done = _indexes(status.get("completedIndexes", ""))
        if _succeeded(job["spec"], done):
            return self._end(job, pods, "Complete", "", "")
        spec = job["spec"]
        if self._failures.get(job["metadata"]["uid"], 0) > spec.get("backoffLimit", 6):
            told = "Job has reached the specified backoff limit"
            return self._end(job, pods, "Failed", "BackoffLimitExceeded", told)
        taken = set()
        for pod in pods:
            index = int(pod["metadata"]["annotations"][_INDEX])
            if _has_ended(pod):
                continue
            taken.add(index)  # podReplacementPolicy Failed: a pod that terminates still has its index
            if index >= spec["completions"] and "deletionTimestamp" not in pod["metadata"]:
                self._store.begin_deletion(pod)
        if time.monotonic() >= self._retry_at.get(job["metadata"]["uid"], 0.0):
            for index in range(spec["completions"]):
                if index not in done and index not in taken and len(taken) < spec["parallelism"]:
                    taken.add(index)
                    if not self._make(job, _job_pod(job, index)):
                        break
        return None

    def _count_ends(self, job: JsonObject, pods: list[JsonObject]) -> None:
        uid, done = job["metadata"]["uid"], _indexes(job["status"].get("completedIndexes", ""))
        for pod in pods:
            if not _has_ended(pod) or pod["metadata"]["uid"] in self._counted:
                continue
            self._counted.add(pod["metadata"]["uid"])
            index = int(pod["metadata"]["annotations"][_INDEX])
            if index >= job["spec"]["completions"]:
                continue
            if pod["status"]["phase"] == "Succeeded":
                done.add(index)
                continue
            action = _policy(job["spec"], pod)
            if action == "FailJob":
                told = (
                    f"Container {pod['spec']['containers'][0]['name']} for pod failed with a listed exit code"
                )
                self._end(job, pods, "Failed", "PodFailurePolicy", told)
            elif action == "Count":
                count = self._failures[uid] = self._failures.get(uid, 0) + 1
                self._retry_at[uid] = time.monotonic() + min(self._backoff * 2 ** (count - 1), 360.0)
        text = ",".join(map(str, sorted(index for index in done if index < job["spec"]["completions"])))

        def change(one: JsonObject) -> None:
            one["status"].update(completedIndexes=text, succeeded=len(done))

        self._store.update(job, change)

    def _end(self, job: JsonObject, pods: list[JsonObject], kind: str, reason: str, message: str) -> None:
        condition = {"type": kind, "status": "True", "reason": reason, "message": message}

        def change(one: JsonObject) -> None:
            one["status"]["conditions"].append(condition)

        self._store.update(job, change)
        for pod in pods:
            if not _has_ended(pod):
                self._store.begin_deletion(pod)

    # StatefulSets

    def _stateful_set(self, owner: JsonObject) -> None:
        spec = owner["spec"]
        pods = {pod["metadata"]["name"]: pod for pod in self._store.pods_of(owner)}
        for number in range(spec["replicas"]):
            name = f"{owner['metadata']['name']}-{number}"
            if name not in pods and not self._make(owner, _pod(owner, name, name, spec["serviceName"], {})):
                break
        for name, pod in pods.items():
            if (
                int(name.rpartition("-")[2]) >= spec["replicas"]
                and "deletionTimestamp" not in pod["metadata"]
            ):
                self._store.begin_deletion(pod)

    def _make(self, owner: JsonObject, pod: JsonObject) -> bool:
        namespace, name = owner["metadata"]["namespace"], pod["metadata"]["name"]
        try:
            check_service_account(namespace, pod)
            check_pod_quota(self._store, namespace, name, self.quota)
        except RefusalError as refusal:
            event(self._store, owner, "FailedCreate", f"Error creating: {refusal.message}")
            return False
        self._store.add(pod, namespace)
        return True


def _has_ended(pod: JsonObject) -> bool:
    return pod["status"]["phase"] in ("Succeeded", "Failed")


def new_status(kind: str) -> JsonObject:
    return {"conditions": []} if kind == "Job" else {"phase": "Active"} if kind == "Namespace" else {}


def _job_pod(job: JsonObject, index: int) -> JsonObject:
    name = job["metadata"]["name"]
    subdomain = job["spec"]["template"]["spec"].get("subdomain", "")
    pod = _pod(
        job, f"{name}-{index}-{uuid.uuid4().hex[:5]}", f"{name}-{index}", subdomain, {_INDEX: str(index)}
    )
    variables = pod["spec"]["containers"][0].setdefault("env", [])
    variables.append({"name": "JOB_COMPLETION_INDEX", "value": str(index)})
    return pod


def _pod(
    owner: JsonObject, name: str, hostname: str, subdomain: str, annotations: dict[str, str]
) -> JsonObject:
    template = owner["spec"]["template"]
    spec: dict[str, Any] = copy.deepcopy(template["spec"])
    spec.update(hostname=hostname, subdomain=subdomain)
    reference = {"kind": owner["kind"], "name": owner["metadata"]["name"], "uid": owner["metadata"]["uid"]}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "labels": dict(template["metadata"]["labels"]),
            "annotations": annotations,
            "ownerReferences": [{**reference, "apiVersion": owner["apiVersion"], "controller": True}],
        },
        "spec": spec,
        "status": {"phase": "Pending", "conditions": [], "startTime": now()},
    }


def _policy(spec: JsonObject, pod: JsonObject) -> str:
    """Return what the Job's podFailurePolicy says about a failed pod."""
    for rule in spec.get("podFailurePolicy", {}).get("rules", ()):
        codes = rule.get("onExitCodes")
        statuses = pod["status"].get("containerStatuses", ())
        ended = [one["state"]["terminated"]["exitCode"] for one in statuses if "terminated" in one["state"]]
        if codes is not None and any(
            (code in codes["values"]) == (codes["operator"] == "In") for code in ended
        ):
            return str(rule["action"])
        for wanted in rule.get("onPodConditions", ()):
            if any(condition["type"] == wanted["type"] for condition in pod["status"]["conditions"]):
                return str(rule["action"])
    return "Count"


def _succeeded(spec: JsonObject, done: set[int]) -> bool:
    for rule in spec.get("successPolicy", {}).get("rules", ()):
        if _indexes(rule["succeededIndexes"]) <= done:
            return True
    return set(range(spec["completions"])) <= done


def _indexes(text: str) -> set[int]:
    found: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found
