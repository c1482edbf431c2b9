"""Ask the API server beforehand whether a run can be made: does it answer, is there such a namespace, may
this user create what is needed there."""

from __future__ import annotations

import http
import socket
import urllib.parse
from typing import Final

from paceline.core.errors import UnavailableError, UsageError
from paceline.core.wording import listed
from paceline.engines.kubernetes.api_client import ApiClient, ApiError

JOBSET_API: Final = "/apis/jobset.x-k8s.io/v1alpha2"
_OLDEST: Final = (1, 31)
_NEEDED: Final = (
    *((verb, "", "secrets", "") for verb in ("create", "patch", "delete")),
    ("list", "", "pods", ""),
    ("delete", "", "pods", ""),
    ("get", "", "pods", "log"),
)
_OWNERS: Final = {
    "job": ("batch", "jobs"),
    "statefulset": ("apps", "statefulsets"),
    "jobset": ("jobset.x-k8s.io", "jobsets"),
}


def check(client: ApiClient, namespace: str, kind: str) -> None:
    """Raise one clear error where a run could not be made in the namespace."""
    _check_version(client)
    place = namespace or client.access.namespace
    if not _may_exist(client, place):
        raise UsageError(
            f"there is no namespace {place!r} in the cluster of {client.access.source}",
            remedy=f"kubectl create namespace {place}, or name another one: --engine-set namespace=NAME",
        )
    if kind == "jobset" and client.find(JOBSET_API) is None:
        raise UnavailableError(
            "this cluster has no JobSet",
            remedy='have its controller installed (https://jobset.sigs.k8s.io), or use kind="job"',
        )
    group, resource = _OWNERS[kind]
    needed = (
        *_NEEDED,
        *((verb, group, resource, "") for verb in ("create", "get", "patch", "delete")),
    )
    refused = [
        f"{verb} {'/'.join(filter(None, (name, part)))}"
        for verb, api, name, part in needed
        if not _may(client, place, verb, api, name, part)
    ]
    if refused:
        raise UsageError(
            f"this user may not {listed(refused)} in namespace {place!r}",
            remedy="have a role with these rights bound to the user of "
            f"{client.access.source}; `kubectl auth can-i --list` shows what is allowed",
        )


def own_address(server: str) -> str:
    """Return the address of this machine on the way to the API server; nothing is sent."""
    parts = urllib.parse.urlsplit(server)
    host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
    try:
        family, kind, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise UnavailableError(
            f"no way leads from here to the API server {server}: {error}",
            remedy="give the address that pods reach this machine at: Kubernetes(address=...)",
        ) from error


def _may_exist(client: ApiClient, namespace: str) -> bool:
    """Return whether there is such a namespace, as far as this user may know."""
    try:
        return client.find(f"/api/v1/namespaces/{namespace}") is not None
    except ApiError as error:
        if error.status != http.HTTPStatus.FORBIDDEN:
            raise
        return True  # a role inside a namespace does not let its users read the namespace itself


def _check_version(client: ApiClient) -> None:
    told = client.get("/version")
    try:
        version = int(told["major"]), int(str(told["minor"]).rstrip("+"))
    except (KeyError, ValueError):
        return  # not a number of Kubernetes: a distribution's own
    if version < _OLDEST:
        raise UnavailableError(
            f"{client.access.server} is Kubernetes {version[0]}.{version[1]}, and Jobs that grow and shrink "
            f"came with {_OLDEST[0]}.{_OLDEST[1]}",
            remedy="use a newer cluster; `paceline submit --dry-run` prints manifests to adapt by hand",
        )


def _may(client: ApiClient, namespace: str, verb: str, group: str, resource: str, part: str) -> bool:
    wanted = {"namespace": namespace, "verb": verb, "group": group, "resource": resource}
    if part:
        wanted["subresource"] = part
    answer = client.create(
        "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews",
        {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": wanted},
        },
    )
    return bool(answer.get("status", {}).get("allowed"))
