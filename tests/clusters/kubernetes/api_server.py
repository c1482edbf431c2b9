"""The HTTP side of the fake: paths, methods and answers of the Kubernetes API, over TLS, for a token.

Serves what Paceline's engine and `kubectl` use for Jobs, StatefulSets, JobSets (where installed), Pods,
Services, Secrets and Events: create, get, list (label and field selectors), watch, merge patch, delete
with propagation and grace, logs, SelfSubjectAccessReview, discovery. The official clients are not mocked:
they talk to this over a socket.
"""

from __future__ import annotations

import contextlib
import copy
import http.server
import json
import re
import socket
import ssl
import threading
import urllib.parse
from collections.abc import Callable
from typing import Any

from tests.clusters.kubernetes.admission import RefusalError, check_change, check_new
from tests.clusters.kubernetes.job_controller import new_status
from tests.clusters.kubernetes.object_store import JsonObject, ObjectStore

KINDS = {
    ("", "v1", "pods"): "Pod",
    ("", "v1", "services"): "Service",
    ("", "v1", "secrets"): "Secret",
    ("", "v1", "events"): "Event",
    ("batch", "v1", "jobs"): "Job",
    ("apps", "v1", "statefulsets"): "StatefulSet",
}
_API_VERSIONS = {"Job": "batch/v1", "StatefulSet": "apps/v1", "JobSet": "jobset.x-k8s.io/v1alpha2"}
_PATH = re.compile(
    r"(?:/api|/apis/(?P<group>[^/]+))/(?P<version>v1|v1alpha2)/namespaces/(?P<namespace>[^/]+)"
    r"(?:/(?P<resource>[a-z]+)(?:/(?P<name>[^/]+)(?:/(?P<part>[a-z]+))?)?)?"
)


class ApiServer:
    """Answers at every listening socket that it is given. `refuse` may be set by a test: a function that gets
    verb and resource and returns whether the user may do that."""

    def __init__(self, store: ObjectStore, token: str, logs: Callable[[JsonObject, bool], list[str]]) -> None:
        self.store, self.token, self.logs = store, token, logs
        self.namespaces = {"default", "ml"}
        self.kinds = dict(KINDS)
        self.quota: Any = None
        self.may: Callable[[str, str], bool] = lambda verb, resource: True
        self.version = {"major": "1", "minor": "33", "gitVersion": "v1.33.1"}
        self.closing = threading.Event()
        self.requests: list[tuple[str, str]] = []
        self._servers: list[http.server.ThreadingHTTPServer] = []
        self._threads: list[threading.Thread] = []

    def listen(self, listening: socket.socket, tls: ssl.SSLContext) -> None:
        api = self

        class Handler(_Handler):
            server_state = api

        server = http.server.ThreadingHTTPServer(listening.getsockname(), Handler, bind_and_activate=False)
        server.socket.close()
        server.socket = tls.wrap_socket(listening, server_side=True, do_handshake_on_connect=False)
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        self._servers.append(server)
        self._threads.append(thread)

    def close(self) -> None:
        self.closing.set()
        for server, thread in zip(self._servers, self._threads, strict=True):
            server.shutdown()
            thread.join()
            server.server_close()

    def answer(
        self, method: str, path: str, query: dict[str, str], body: JsonObject | None
    ) -> JsonObject | str:
        """Carry out a request that was authenticated."""
        if path == "/version":
            return dict(self.version)
        if path.endswith("/selfsubjectaccessreviews"):
            wanted = (body or {})["spec"]["resourceAttributes"]
            return {**(body or {}), "status": {"allowed": self.may(wanted["verb"], wanted["resource"])}}
        if found := discovery(path, self.kinds):
            return found
        match = _PATH.fullmatch(path)
        if match is None:
            raise RefusalError(404, "NotFound", "the server could not find the requested resource")
        namespace, resource, name = match["namespace"], match["resource"], match["name"]
        if resource is None:
            self._check_rights(method, "namespaces", namespace)
            if namespace not in self.namespaces:
                raise RefusalError(404, "NotFound", f'namespaces "{namespace}" not found')
            return {"kind": "Namespace", "apiVersion": "v1", "metadata": {"name": namespace}}
        kind = self.kinds.get((match["group"] or "", match["version"], resource))
        if kind is None:
            raise RefusalError(404, "NotFound", "the server could not find the requested resource")
        self._check_rights(method, resource, namespace)
        if name is None:
            return self._of_all(method, kind, namespace, query, body)
        one = self.store.find(kind, namespace, name)
        if one is None:
            raise RefusalError(404, "NotFound", f'{resource} "{name}" not found')
        if match["part"] == "log":
            return self._log(one, query)
        return self._of_one(method, one, query, body)

    def _check_rights(self, method: str, resource: str, namespace: str) -> None:
        verb = {"POST": "create", "GET": "get", "PATCH": "patch", "DELETE": "delete"}[method]
        if not self.may(verb, resource):
            told = f'{resource} is forbidden: User "tester" cannot {verb} resource "{resource}" in '
            raise RefusalError(403, "Forbidden", f'{told}API group "" in the namespace "{namespace}"')

    def _of_all(
        self, method: str, kind: str, namespace: str, query: dict[str, str], body: JsonObject | None
    ) -> JsonObject:
        if method == "POST":
            assert body is not None
            if namespace not in self.namespaces:
                raise RefusalError(404, "NotFound", f'namespaces "{namespace}" not found')
            given = body.get("metadata", {}).get("namespace", namespace)
            if given != namespace:
                raise RefusalError(
                    400, "BadRequest", "the namespace of the object does not match the request's"
                )
            with self.store.lock:
                check_new(self.store, body, namespace, self.quota)
                return copy.deepcopy(self.store.add({**body, "status": new_status(kind)}, namespace))
        if method == "DELETE":
            raise RefusalError(405, "MethodNotAllowed", "collections are not deleted here")
        with self.store.lock:
            found = [one for one in self.store.every(kind, namespace) if selects(query, one)]
            version = str(self.store.history[-1][0]) if self.store.history else "0"
            return {
                "kind": f"{kind}List",
                "apiVersion": _API_VERSIONS.get(kind, "v1"),
                "metadata": {"resourceVersion": version},
                "items": copy.deepcopy(found),
            }

    def _of_one(
        self, method: str, one: JsonObject, query: dict[str, str], body: JsonObject | None
    ) -> JsonObject:
        with self.store.lock:
            if method == "PATCH":
                after = copy.deepcopy(one)
                merge(after, body or {})
                check_change(one, after)
                self.store.update(one, lambda changed: merge(changed, body or {}))
            elif method == "DELETE":
                grace = (body or {}).get("gracePeriodSeconds", query.get("gracePeriodSeconds"))
                if one["kind"] == "Pod":
                    self.store.begin_deletion(one, None if grace is None else int(grace))
                else:
                    self.store.remove(one)
            return copy.deepcopy(one)

    def _log(self, pod: JsonObject, query: dict[str, str]) -> str:
        states = pod["status"].get("containerStatuses") or [{"state": {"waiting": {}}}]
        name, of_previous = pod["metadata"]["name"], query.get("previous") == "true"
        if of_previous and not states[0].get("lastState"):
            told = f'previous terminated container "paceline" in pod "{name}" not found'
            raise RefusalError(400, "BadRequest", told)
        if not of_previous and "waiting" in states[0]["state"]:
            raise RefusalError(400, "BadRequest", f'container "paceline" in pod "{name}" is waiting to start')
        lines = self.logs(pod, of_previous)
        if since := query.get("sinceTime"):
            lines = [line for line in lines if line[:19] >= since[:19]]
        if tail := query.get("tailLines"):
            lines = lines[-int(tail) :]
        if query.get("timestamps") != "true":
            lines = [line.partition(" ")[2] for line in lines]
        return "".join(f"{line}\n" for line in lines)


class _Handler(http.server.BaseHTTPRequestHandler):
    server_state: ApiServer
    protocol_version = "HTTP/1.1"

    def setup(self) -> None:
        self.request.settimeout(10.0)
        super().setup()

    def do_GET(self) -> None:
        self._handle("GET")

    def do_POST(self) -> None:
        self._handle("POST")

    def do_PATCH(self) -> None:
        self._handle("PATCH")

    def do_DELETE(self) -> None:
        self._handle("DELETE")

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""

    def _handle(self, method: str) -> None:
        api = self.server_state
        url = urllib.parse.urlsplit(self.path)
        query = dict(urllib.parse.parse_qsl(url.query))
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        api.requests.append((method, url.path))
        try:
            if self.headers.get("Authorization") != f"Bearer {api.token}":
                raise RefusalError(401, "Unauthorized", "Unauthorized")
            if body and "json" not in self.headers.get("Content-Type", ""):
                told = "the body of the request was in an unknown format - accepted media types include: "
                raise RefusalError(415, "UnsupportedMediaType", f"{told}application/json")
            if query.get("watch") in ("true", "1"):
                return self._watch(url.path, query)
            found = api.answer(method, url.path, query, json.loads(body) if body else None)
        except RefusalError as refusal:
            status = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure"}
            facts = {**status, "message": refusal.message, "reason": refusal.reason, "code": refusal.code}
            return self._send(refusal.code, json.dumps(facts), "application/json")
        if isinstance(found, str):
            return self._send(200, found, "text/plain")
        return self._send(201 if method == "POST" else 200, json.dumps(found), "application/json")

    def _send(self, code: int, text: str, kind: str) -> None:
        data = text.encode()
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _watch(self, path: str, query: dict[str, str]) -> None:
        api, match = self.server_state, _PATH.fullmatch(path)
        assert match is not None
        kind = api.kinds[match["group"] or "", match["version"], match["resource"]]
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Connection", "close")
        self.end_headers()
        after = int(query.get("resourceVersion") or 0)
        with contextlib.suppress(OSError):
            for change in api.store.watch(kind, match["namespace"], after, api.closing.is_set):
                if selects(query, change["object"]):
                    self.wfile.write(json.dumps(change).encode() + b"\n")
        self.close_connection = True


def merge(into: JsonObject, patch: JsonObject) -> None:
    """RFC 7386."""
    for name, value in patch.items():
        if value is None:
            into.pop(name, None)
        elif isinstance(value, dict) and isinstance(into.get(name), dict):
            merge(into[name], value)
        else:
            into[name] = copy.deepcopy(value)


def selects(query: dict[str, str], one: JsonObject) -> bool:
    """Apply label and field selectors of the form a=b,c=d."""
    labels = one["metadata"].get("labels", {})
    for name, value in _pairs(query.get("labelSelector", "")):
        if labels.get(name) != value:
            return False
    for name, value in _pairs(query.get("fieldSelector", "")):
        found: Any = one
        for part in name.split("."):
            found = found.get(part, {}) if isinstance(found, dict) else {}
        if found != value:
            return False
    return True


def discovery(path: str, kinds: dict[tuple[str, str, str], str]) -> JsonObject | None:
    """Return what tells a client which resources there are."""
    versions = dict(sorted((group, version) for group, version, _ in kinds))
    if path == "/api":
        return {"kind": "APIVersions", "versions": ["v1"]}
    if path == "/apis":
        entries = []
        for group, number in versions.items():
            if group:
                version = {"groupVersion": f"{group}/{number}", "version": number}
                entries.append({"name": group, "versions": [version], "preferredVersion": version})
        return {"kind": "APIGroupList", "apiVersion": "v1", "groups": entries}
    for group, number in versions.items():
        if path == (f"/apis/{group}/{number}" if group else f"/api/{number}"):
            verbs = ["create", "delete", "get", "list", "patch", "watch"]
            resources = [
                {"name": name, "singularName": kind.lower(), "namespaced": True, "kind": kind, "verbs": verbs}
                for (its_group, _, name), kind in kinds.items()
                if its_group == group
            ]
            name = f"{group}/{number}" if group else number
            return {"kind": "APIResourceList", "groupVersion": name, "resources": resources}
    return None


def _pairs(selector: str) -> list[tuple[str, str]]:
    parts = [part.replace("==", "=").partition("=") for part in selector.split(",") if part]
    return [(name, value) for name, _, value in parts]
