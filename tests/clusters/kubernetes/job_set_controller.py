"""The controller of JobSets (jobset.x-k8s.io), as its documentation describes it.

A JobSet has a Job for each replica of its parts, named after the JobSet, the part and the replica, and a
headless Service for their pods' names. Its success policy says which parts have to succeed; one failed Job
fails it. What is left out: restarts (`maxRestarts` above 0), suspension, start-up order, exclusive placement,
TTL.
"""

from __future__ import annotations

import copy

from tests.clusters.kubernetes.object_store import JsonObject, ObjectStore

JOB_SETS = ("jobset.x-k8s.io", "v1alpha2", "jobsets")
_PREFIX = "jobset.sigs.k8s.io"


class JobSets:
    """Makes the Jobs and the Service that JobSets ask for."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    def turn(self) -> None:
        for owner in self._store.every("JobSet"):
            self._turn(owner)

    def _turn(self, owner: JsonObject) -> None:
        if owner["status"].get("conditions"):
            return
        owned = self._store.owned_by(owner["metadata"]["uid"])
        jobs = {one["metadata"]["name"]: one for one in owned if one["kind"] == "Job"}
        if failed := [name for name, job in jobs.items() if _condition(job) == "Failed"]:
            self._end(
                owner, jobs, "Failed", "FailedJobs", f"jobset failed due to one or more job failures {failed}"
            )
        elif jobs and self._succeeded(owner, jobs):
            self._end(owner, jobs, "Completed", "AllJobsCompleted", "jobset completed successfully")
        else:
            self._make(owner, owned)

    def _make(self, owner: JsonObject, owned: list[JsonObject]) -> None:
        there = {(one["kind"], one["metadata"]["name"]) for one in owned}
        namespace, subdomain = owner["metadata"]["namespace"], _subdomain(owner)
        if ("Service", subdomain) not in there:
            selector = {f"{_PREFIX}/jobset-name": owner["metadata"]["name"]}
            spec = {"clusterIP": "None", "selector": selector, "publishNotReadyAddresses": True}
            self._store.add(_owned(owner, "v1", "Service", subdomain, {}, spec), namespace)
        for part in owner["spec"]["replicatedJobs"]:
            for number in range(part["replicas"]):
                if ("Job", _job_name(owner, part, number)) not in there:
                    self._store.add(_job(owner, part, number), namespace)

    def _succeeded(self, owner: JsonObject, jobs: dict[str, JsonObject]) -> bool:
        policy = owner["spec"].get("successPolicy", {"operator": "All"})
        chosen = policy.get("targetReplicatedJobs") or [
            part["name"] for part in owner["spec"]["replicatedJobs"]
        ]
        complete = [
            _condition(job) == "Complete"
            for job in jobs.values()
            if job["metadata"]["labels"][f"{_PREFIX}/replicatedjob-name"] in chosen
        ]
        return any(complete) if policy["operator"] == "Any" else all(complete)

    def _end(
        self, owner: JsonObject, jobs: dict[str, JsonObject], kind: str, reason: str, message: str
    ) -> None:
        condition = {"type": kind, "status": "True", "reason": reason, "message": message}

        def change(one: JsonObject) -> None:
            one["status"].update(conditions=[condition], terminalState=kind)

        self._store.update(owner, change)
        for job in jobs.values():
            if not job["status"]["conditions"]:
                self._store.remove(job)  # those that still run are deleted, the others stay to be looked at


def _job(owner: JsonObject, part: JsonObject, number: int) -> JsonObject:
    name = _job_name(owner, part, number)
    labels = {
        f"{_PREFIX}/jobset-name": owner["metadata"]["name"],
        f"{_PREFIX}/replicatedjob-name": part["name"],
        f"{_PREFIX}/job-index": str(number),
    }
    spec = copy.deepcopy(part["template"]["spec"])
    spec["template"].setdefault("metadata", {}).setdefault("labels", {}).update(labels)
    if owner["spec"].get("network", {}).get("enableDNSHostnames", True):
        spec["template"]["spec"]["subdomain"] = _subdomain(owner)
    return {**_owned(owner, "batch/v1", "Job", name, labels, spec), "status": {"conditions": []}}


def _owned(
    owner: JsonObject, version: str, kind: str, name: str, labels: dict[str, str], spec: JsonObject
) -> JsonObject:
    reference = {"kind": "JobSet", "name": owner["metadata"]["name"], "uid": owner["metadata"]["uid"]}
    reference["apiVersion"] = owner["apiVersion"]
    metadata = {"name": name, "labels": labels, "ownerReferences": [reference]}
    return {"apiVersion": version, "kind": kind, "metadata": metadata, "spec": spec}


def _job_name(owner: JsonObject, part: JsonObject, number: int) -> str:
    return f"{owner['metadata']['name']}-{part['name']}-{number}"


def _subdomain(owner: JsonObject) -> str:
    return str(owner["spec"].get("network", {}).get("subdomain") or owner["metadata"]["name"])


def _condition(job: JsonObject) -> str:
    return next((one["type"] for one in job["status"]["conditions"]), "")
