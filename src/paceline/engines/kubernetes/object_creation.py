"""Create the objects of a run: all of them, or none."""

from __future__ import annotations

import base64
import http
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

from paceline.core.errors import PacelineError, UnavailableError
from paceline.engines.kubernetes.api_client import ApiClient, ApiError, JsonObject
from paceline.engines.kubernetes.manifests import RUN_LABEL, TOKEN_KEY, secret_name

PATHS: Final = {
    "Job": "/apis/batch/v1/namespaces/{}/jobs",
    "StatefulSet": "/apis/apps/v1/namespaces/{}/statefulsets",
    "JobSet": "/apis/jobset.x-k8s.io/v1alpha2/namespaces/{}/jobsets",
    "Service": "/api/v1/namespaces/{}/services",
    "Secret": "/api/v1/namespaces/{}/secrets",
    "Pod": "/api/v1/namespaces/{}/pods",
    "Event": "/api/v1/namespaces/{}/events",
}
_START: Final = "paceline/start"  # annotation: which call of `create_all` made an object


def create_all(
    client: ApiClient,
    namespace: str,
    owner: Mapping[str, Any],
    others: Sequence[Mapping[str, Any]],
    secret: bytes,
) -> JsonObject:
    """Create the Secret, the other objects and the owner of the pods; return the owner. Deleting the owner
    deletes all of them. What was created is deleted again where this raises."""
    first = [_secret_object(owner, secret), *others]
    start = secrets.token_hex(8)
    created: list[str] = []
    try:
        made: JsonObject = {}
        for one in (*first, owner):
            made = _create(client, namespace, one, start)
            created.append(object_path(namespace, one))
        reference = {
            "apiVersion": owner["apiVersion"],
            "kind": owner["kind"],
            "name": owner["metadata"]["name"],
            "uid": made["metadata"]["uid"],
        }
        for one in first:
            client.patch(object_path(namespace, one), {"metadata": {"ownerReferences": [reference]}})
    except BaseException as error:
        for path in reversed(created):
            # The first error says what is wrong.
            try:
                client.delete(path)
            except PacelineError:
                error.add_note(f"still there, delete it: kubectl delete --raw {path}")
        raise
    # An answer of the API server does not always repeat these.
    return {"apiVersion": owner["apiVersion"], "kind": owner["kind"], **made}


def _create(client: ApiClient, namespace: str, one: Mapping[str, Any], start: str) -> JsonObject:
    """Create an object; where the answer does not come, delete what may have been made."""
    metadata = one["metadata"]
    marked = {
        **one,
        "metadata": {**metadata, "annotations": {**metadata.get("annotations", {}), _START: start}},
    }
    try:
        return client.create(PATHS[one["kind"]].format(namespace), marked)
    except (UnavailableError, KeyboardInterrupt) as error:
        if not _is_gone(client, object_path(namespace, one), start):
            what = f"{one['kind'].lower()}/{metadata['name']}"
            error.add_note(f"whether it was made is not known: kubectl -n {namespace} get {what}")
        raise


def _is_gone(client: ApiClient, path: str, start: str) -> bool:
    """Delete an object that `start` made; another run's of the same name stays. False: it is not known."""
    with suppress(PacelineError):
        try:
            # Changes nothing and returns the object: who makes Secrets need not be allowed to read them.
            found = client.patch(path, {})["metadata"]
        except ApiError as error:
            return error.status == http.HTTPStatus.NOT_FOUND
        if found.get("annotations", {}).get(_START) == start:
            client.delete(path, uid=found["uid"])
        return True
    return False


def object_path(namespace: str, one: Mapping[str, Any]) -> str:
    return f"{PATHS[one['kind']].format(namespace)}/{one['metadata']['name']}"


def _secret_object(owner: Mapping[str, Any], secret: bytes) -> JsonObject:
    """Return the Secret: the token as `paceline join --token-file` reads it, in base64."""
    metadata = owner["metadata"]
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {
            "name": secret_name(metadata["name"]),
            "labels": {RUN_LABEL: metadata["labels"][RUN_LABEL]},
        },
        "type": "Opaque",
        "immutable": True,
        "data": {TOKEN_KEY: base64.b64encode(secret.hex().encode() + b"\n").decode()},
    }
