"""An API server for fast tests: it keeps objects and has no controllers, so that a test says what there is.
The fake of tests/clusters has controllers and pods."""

from __future__ import annotations

import http.server
import json
import ssl
import threading
import urllib.parse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from paceline.engines.kubernetes.api_client import ApiClient
from paceline.engines.kubernetes.kubeconfig import ClusterAccess

Objects = dict[str, dict[str, Any]]


class ScriptedApi:
    """Objects by their paths. `fault` may be set by a test: a function of method and path that returns None,
    or what goes wrong: a number of HTTP; "cut": the request is carried out and not answered; "drop": neither;
    an address: a redirect to it. It answers as a proxy too.
    """

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self.objects: Objects = {}
        self.logs: dict[str, list[str]] = {}
        self.earlier_logs: dict[str, list[str]] = {}  # before a restart
        self.requests: list[tuple[str, str]] = []
        self.tokens: list[str] = []
        self.headers: list[list[tuple[str, str]]] = []
        self.fault: Callable[[str, str], int | str | None] = lambda method, path: None
        self._uids = iter(range(1, 10**6))
        api = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def log_message(self, format: str, *args: object) -> None:
                """Say nothing."""

            def __getattr__(self, name: str) -> Any:
                if name.startswith("do_"):
                    return lambda: api.handle(self)
                raise AttributeError(name)

        self._http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = False
        if tls is not None:
            self._http.socket = tls.wrap_socket(self._http.socket, server_side=True)
        self.address = f"{'https' if tls else 'http'}://127.0.0.1:{self._http.server_port}"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.01,))

    def client(
        self, user: dict[str, Any] | None = None, cluster: dict[str, Any] | None = None, server: str = ""
    ) -> ApiClient:
        address = server or self.address
        return ApiClient(ClusterAccess(address, "ml", "the test", cluster or {}, user or {}, Path()))

    @contextmanager
    def serving(self) -> Iterator[ScriptedApi]:
        self._thread.start()
        try:
            yield self
        finally:
            self._http.shutdown()
            self._thread.join()
            self._http.server_close()

    def put(self, path: str, one: dict[str, Any]) -> dict[str, Any]:
        """Have an object in a collection, as it is after it was made."""
        made = {"creationTimestamp": "2026-01-02T03:04:05Z", "uid": f"u{next(self._uids)}"}
        metadata = {**made, **one["metadata"]}
        self.objects[f"{path}/{metadata['name']}"] = {**one, "metadata": metadata}
        return self.objects[f"{path}/{metadata['name']}"]

    def left(self, kind: str) -> list[str]:
        return [one["metadata"]["name"] for one in self.objects.values() if one.get("kind") == kind]

    def handle(self, request: http.server.BaseHTTPRequestHandler) -> None:
        url = urllib.parse.urlsplit(request.path)
        body = request.rfile.read(int(request.headers.get("Content-Length") or 0))
        method, path = request.command, url.path
        self.requests.append((method, path))
        self.tokens.append(request.headers.get("Authorization", ""))
        self.headers.append(request.headers.items())
        fault = self.fault(method, path)
        if fault == "drop":
            request.close_connection = True
            return
        if isinstance(fault, int):
            code, answer = fault, {"message": f"refused by the test: {fault}", "reason": "Test"}
        else:
            code, answer = self._carry_out(method, path, dict(urllib.parse.parse_qsl(url.query)), body)
        if fault == "cut":
            request.close_connection = True
            return
        to = fault if isinstance(fault, str) else ""
        self._send(request, 302 if to else code, answer, to)

    def _carry_out(self, method: str, path: str, query: dict[str, str], body: bytes) -> tuple[int, Any]:
        given = json.loads(body) if body else {}
        if method == "POST" and path.endswith("/selfsubjectaccessreviews"):
            return 201, {"status": {"allowed": True}}
        if method == "POST":
            if f"{path}/{given['metadata']['name']}" in self.objects:
                return 409, {"message": "already exists", "reason": "AlreadyExists"}
            return 201, self.put(path, given)
        if path.endswith("/log"):
            logs = self.earlier_logs if query.get("previous") == "true" else self.logs
            return 200, "".join(f"{line}\n" for line in logs.get(path.split("/")[-2], ()))
        if path in self.objects:
            found = self.objects[path]
            uid = given.get("preconditions", {}).get("uid", found["metadata"]["uid"])
            if method == "DELETE" and uid != found["metadata"]["uid"]:
                return 409, {"message": "another object has this name"}
            if method == "DELETE":
                del self.objects[path]
            elif method == "PATCH":
                found["metadata"].update(given.get("metadata", {}))
                found.setdefault("spec", {}).update(given.get("spec", {}))
            return 200, found
        if method == "GET" and path.rpartition("/")[2] in ("pods", "events"):
            items = [one for at, one in self.objects.items() if at.rpartition("/")[0] == path]
            return 200, {"items": [one for one in items if _selects(query, one)]}
        return 404, {"message": f"{path} not found", "reason": "NotFound"}

    @staticmethod
    def _send(request: http.server.BaseHTTPRequestHandler, code: int, answer: Any, to: str = "") -> None:
        data = (answer if isinstance(answer, str) else json.dumps(answer)).encode()
        request.send_response(code)
        if to:
            request.send_header("Location", to)
        request.send_header("Content-Length", str(len(data)))
        request.end_headers()
        request.wfile.write(data)


def _selects(query: dict[str, str], one: dict[str, Any]) -> bool:
    for pair in filter(None, query.get("fieldSelector", "").split(",")):
        name, _, value = pair.partition("=")
        found: Any = one
        for part in name.split("."):
            found = found.get(part, {})
        if found != value:
            return False
    return True
