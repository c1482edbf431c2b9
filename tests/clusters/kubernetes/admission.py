"""What the API server refuses: objects that no schema allows, that contradict themselves, that a quota or the
rules of the namespace ("restricted" of the Pod Security Standards) forbid."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import kubernetes_validate
from kubeflow_trainer_api import models
from tests.clusters.kubernetes.object_store import JsonObject, ObjectStore

_NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
SCHEMA = "1.33"


class RefusalError(Exception):
    """An answer of the API server that is not 2xx."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.code, self.reason, self.message = code, reason, message


class Quota(NamedTuple):
    """A ResourceQuota: at most these pods, and these Jobs."""

    name: str
    pods: int
    jobs: int = 1000


def check_new(store: ObjectStore, one: JsonObject, namespace: str, quota: Quota | None) -> None:
    """Refuse an object that cannot be created."""
    kind, name = one["kind"], str(one.get("metadata", {}).get("name", ""))
    if len(name) > 253 or not _NAME.fullmatch(name):
        raise RefusalError(
            422, "Invalid", f'{kind} "{name}" is invalid: metadata.name: Invalid value: "{name}"'
        )
    try:
        if kind == "JobSet":
            _check_job_set(one)
        else:
            kubernetes_validate.validate(one, SCHEMA, strict=True)
    except kubernetes_validate.ValidationError as error:
        raise RefusalError(400, "BadRequest", f"{kind} in version: {error.message}") from error
    if store.find(kind, namespace, name) is not None:
        raise RefusalError(409, "AlreadyExists", f'{kind.lower()}s "{name}" already exists')
    if kind == "Job":
        _check_job(one)
        if quota is not None and len(store.every("Job", namespace)) >= quota.jobs:
            raise _exceeded(quota, "jobs.batch", name, "count/jobs.batch=1", f"count/jobs.batch={quota.jobs}")
    if kind in ("Job", "StatefulSet"):
        _check_restricted(one, one["spec"]["template"]["spec"])


def check_pod_quota(store: ObjectStore, namespace: str, name: str, quota: Quota | None) -> None:
    """Refuse a pod that is one too many."""
    live = [pod for pod in store.every("Pod", namespace) if pod["status"]["phase"] in ("Pending", "Running")]
    if quota is not None and len(live) >= quota.pods:
        raise _exceeded(quota, "pods", name, "pods=1", f"pods={quota.pods}", len(live))


def check_service_account(namespace: str, pod: JsonObject) -> None:
    """Refuse a pod of an account that does not exist: here none but "default" does."""
    name, account = pod["metadata"]["name"], pod["spec"].get("serviceAccountName", "default")
    if account != "default":
        told = f'pods "{name}" is forbidden: error looking up service account {namespace}/{account}: '
        raise RefusalError(403, "Forbidden", f'{told}serviceaccount "{account}" not found')


def check_change(before: JsonObject, after: JsonObject) -> None:
    """Refuse changes of what cannot be changed."""
    if before["kind"] == "Job":
        old, new = before["spec"], after["spec"]
        if old["template"] != new["template"]:
            raise RefusalError(422, "Invalid", "spec.template: Invalid value: field is immutable")
        if old["completions"] != new["completions"] and new["completions"] != new["parallelism"]:
            raise RefusalError(422, "Invalid", "spec.completions: Invalid value: field is immutable")
    elif before["kind"] == "Secret" and before.get("immutable") and before.get("data") != after.get("data"):
        raise RefusalError(422, "Invalid", "data: Forbidden: field is immutable when `immutable` is set")


def _check_job(job: JsonObject) -> None:
    spec = job["spec"]
    pod = spec["template"]["spec"]
    wrong = ""
    if pod.get("restartPolicy") not in ("Never", "OnFailure"):
        wrong = 'spec.template.spec.restartPolicy: Required value: valid values: "OnFailure", "Never"'
    elif spec.get("completionMode") == "Indexed" and "completions" not in spec:
        wrong = "spec.completions: Required value: when completion mode is Indexed"
    elif "podFailurePolicy" in spec and pod["restartPolicy"] != "Never":
        wrong = "spec.template.spec.restartPolicy: only Never is supported with podFailurePolicy"
    elif "podFailurePolicy" in spec and spec.get("podReplacementPolicy", "Failed") != "Failed":
        wrong = "spec.podReplacementPolicy: only Failed is supported with podFailurePolicy"
    elif "successPolicy" in spec and spec.get("completionMode") != "Indexed":
        wrong = "spec.successPolicy: only supported with Indexed"
    elif len(job["metadata"]["name"]) + len(f"-{spec.get('completions', 1) - 1}") > 63:
        wrong = "metadata.name: Invalid value: the hostnames of its pods would be too long"
    if wrong:
        raise RefusalError(422, "Invalid", f'Job.batch "{job["metadata"]["name"]}" is invalid: {wrong}')


def _check_job_set(one: JsonObject) -> None:
    """Refuse what JobSet's own models do not read, or its webhook does not allow; check its Jobs as Jobs."""
    models.JobsetV1alpha2JobSet.from_dict(one)
    parts = one["spec"]["replicatedJobs"]
    names = [part["name"] for part in parts]
    unknown = set(one["spec"].get("successPolicy", {}).get("targetReplicatedJobs", ())) - set(names)
    if unknown or len(set(names)) < len(names):
        told = f"invalid replicatedJob name in success policy: {unknown}" if unknown else "duplicate names"
        raise RefusalError(422, "Invalid", f'JobSet "{one["metadata"]["name"]}" is invalid: {told}')
    for part in parts:
        named: JsonObject = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": part["name"]}}
        job: JsonObject = {**named, **part["template"]}
        kubernetes_validate.validate(job, SCHEMA, strict=True)
        _check_job(job)
        _check_restricted(job, job["spec"]["template"]["spec"])


def _check_restricted(one: JsonObject, pod: JsonObject) -> None:
    """Enforce the standard "restricted"."""
    general, wrong = pod.get("securityContext", {}), []
    for container in pod["containers"]:
        own: dict[str, Any] = container.get("securityContext", {})
        if own.get("allowPrivilegeEscalation") is not False:
            wrong.append("allowPrivilegeEscalation != false")
        if "ALL" not in own.get("capabilities", {}).get("drop", ()):
            wrong.append("unrestricted capabilities")
        if not (own.get("runAsNonRoot") or general.get("runAsNonRoot")):
            wrong.append("runAsNonRoot != true")
        if own.get("seccompProfile", general.get("seccompProfile", {})).get("type") != "RuntimeDefault":
            wrong.append("seccompProfile")
    if wrong:
        name = one["metadata"]["name"]
        told = f'"{name}" is forbidden: violates PodSecurity "restricted:latest": {", ".join(wrong)}'
        raise RefusalError(403, "Forbidden", told)


def _exceeded(
    quota: Quota, kind: str, name: str, asked: str, limit: str, used: int | None = None
) -> RefusalError:
    counted = limit if used is None else f"{limit.split('=')[0]}={used}"
    return RefusalError(
        403,
        "Forbidden",
        f'{kind} "{name}" is forbidden: exceeded quota: {quota.name}, requested: {asked}, '
        f"used: {counted}, limited: {limit}",
    )
