"""Requests to a Kubernetes API server, and its refusals as one clear error each."""

from __future__ import annotations

import http.client
import json
import ssl
import urllib.parse
from collections.abc import Mapping
from typing import Any, Final, final

from paceline.core.errors import PacelineError, PlatformError, UnavailableError
from paceline.core.untrusted import printable
from paceline.engines.kubernetes.api_connection import ApiAnswer, exchange
from paceline.engines.kubernetes.kubeconfig import ClusterAccess
from paceline.engines.kubernetes.quotas import is_quota, quota_error

_MERGE_PATCH: Final = "application/merge-patch+json"
_REMEDY_OF_ACCESS: Final = (
    "`kubectl auth can-i create jobs` must answer yes: ask the cluster's administrator for a role, or give "
    "another context or namespace"
)

JsonObject = dict[str, Any]


@final
class ApiError(PlatformError):
    """The API server refused a request, and would refuse it again; `status` is HTTP's number, `reason`
    Kubernetes' own word. UnavailableError instead: it could not answer now."""

    def __init__(self, message: str, *, status: int = 0, reason: str = "", remedy: str = "") -> None:
        super().__init__(message, remedy=remedy, status=status, reason=reason)
        self.status, self.reason = status, reason


@final
class ApiClient:
    """One user at one API server. Every method makes one request and returns within 15 seconds."""

    def __init__(self, access: ClusterAccess) -> None:
        self.access = access
        self._tls: ssl.SSLContext | None = None
        self._tls_is_for: Mapping[str, str] | None = None

    def get(self, path: str, **query: str) -> JsonObject:
        return self._json("GET", path, query)

    def create(self, path: str, body: Mapping[str, Any]) -> JsonObject:
        return self._json("POST", path, {}, body)

    def patch(self, path: str, body: Mapping[str, Any]) -> JsonObject:
        """Change the fields that are named and no others."""
        return self._json("PATCH", path, {}, body, _MERGE_PATCH)

    def delete(self, path: str, *, grace_seconds: int | None = None, uid: str = "") -> bool:
        """Delete an object and what it owns; False where it is gone already, or, with `uid`, where another
        object has its name now."""
        options: JsonObject = {"kind": "DeleteOptions", "apiVersion": "v1", "propagationPolicy": "Background"}
        if grace_seconds is not None:
            options["gracePeriodSeconds"] = grace_seconds
        if uid:
            options["preconditions"] = {"uid": uid}
        gone = (http.HTTPStatus.NOT_FOUND, *((http.HTTPStatus.CONFLICT,) if uid else ()))
        try:
            self._json("DELETE", path, {}, options)
        except ApiError as error:
            if error.status not in gone:
                raise
            return False
        return True

    def find(self, path: str) -> JsonObject | None:
        """Return an object, or None where there is none."""
        try:
            return self.get(path)
        except ApiError as error:
            if error.status != http.HTTPStatus.NOT_FOUND:
                raise
            return None

    def text(self, path: str, **query: str) -> str:
        return self._request("GET", path, query, None, "").decode("utf-8", "replace")

    def _json(
        self,
        method: str,
        path: str,
        query: Mapping[str, str],
        body: Mapping[str, Any] | None = None,
        content: str = "application/json",
    ) -> JsonObject:
        data = None if body is None else json.dumps(body).encode()
        answer = self._request(method, path, query, data, content)
        try:
            found = json.loads(answer)
            if not isinstance(found, dict):
                raise ValueError("not an object")
        except ValueError as error:
            raise UnavailableError(
                f"{self.access.server} does not answer as a Kubernetes API server: {error}",
                remedy=f"check the server's address in {self.access.source}",
            ) from error
        return found

    def _request(
        self, method: str, path: str, query: Mapping[str, str], data: bytes | None, content: str
    ) -> bytes:
        try:
            return self._answer(method, path, query, data, content)
        except ApiError as error:
            # A plugin's token may be withdrawn before it expires. Who is not known changed nothing.
            if error.status != http.HTTPStatus.UNAUTHORIZED or not self.access.forget():
                raise
        return self._answer(method, path, query, data, content)

    def _answer(
        self, method: str, path: str, query: Mapping[str, str], data: bytes | None, content: str
    ) -> bytes:
        target = path + ("?" + urllib.parse.urlencode(query) if query else "")
        own = {"Accept": "application/json", **({} if data is None else {"Content-Type": content})}
        headers = [*own.items(), *self.access.headers().items(), *self.access.impersonation()]
        tls = self._context()
        try:
            answer = exchange(self.access, tls, method, target, headers, data)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise UnavailableError(
                f"the Kubernetes API server {self.access.server} cannot be reached: {error}",
                remedy=f"it is the server of {self.access.source}: `kubectl cluster-info` must work here "
                "(is a VPN or a proxy missing, is the cluster switched off?)",
            ) from error
        if answer.status >= http.HTTPStatus.MULTIPLE_CHOICES:
            raise _refusal(method, path, answer, self.access)
        return answer.body

    def _context(self) -> ssl.SSLContext | None:
        """Return the connection's settings; a plugin's new answer may have another certificate."""
        answer = self.access.from_plugin()
        if self._tls_is_for is None or answer is not self._tls_is_for:
            self._tls, self._tls_is_for = self.access.tls(), answer
        return self._tls


def _refusal(method: str, path: str, answer: ApiAnswer, access: ClusterAccess) -> PacelineError:
    code = answer.status
    if code < http.HTTPStatus.BAD_REQUEST:
        return _redirection(answer, access)
    try:
        status = json.loads(answer.body)
        told, reason = str(status["message"]), str(status.get("reason", ""))
    except (ValueError, KeyError, TypeError):
        told, reason = answer.body[:500].decode("utf-8", "replace").strip(), ""
    told = printable(told)
    if code >= http.HTTPStatus.INTERNAL_SERVER_ERROR or code == http.HTTPStatus.TOO_MANY_REQUESTS:
        return UnavailableError(
            f"the Kubernetes API server {access.server} cannot answer now: {method} {path}: {code} {told}",
            remedy="try again; if it stays so, `kubectl get --raw /readyz?verbose` says what is wrong there",
        )
    if code == http.HTTPStatus.UNAUTHORIZED:
        return ApiError(
            f"{access.server} does not accept the credentials of {access.source} (401 {told})",
            status=code,
            reason=reason,
            remedy="log in to the cluster again (its token may have expired); `kubectl get pods` must work",
        )
    if code == http.HTTPStatus.FORBIDDEN and is_quota(told):
        return quota_error(told, status=code)
    if code == http.HTTPStatus.FORBIDDEN:
        return ApiError(f"this user may not: {told}", status=code, reason=reason, remedy=_REMEDY_OF_ACCESS)
    if code == http.HTTPStatus.CONFLICT and reason == "AlreadyExists":
        return ApiError(
            f"the name is taken: {told}",
            status=code,
            reason=reason,
            remedy="choose another --name, or delete that one if it is no longer needed",
        )
    if code in (http.HTTPStatus.UNPROCESSABLE_ENTITY, http.HTTPStatus.BAD_REQUEST):
        return ApiError(
            f"the API server refuses this request as invalid: {told}",
            status=code,
            reason=reason,
            remedy="look at it with --dry-run; Kubernetes 1.31 or later is needed",
        )
    return ApiError(f"{method} {path}: {code} {told}", status=code, reason=reason)


def _redirection(answer: ApiAnswer, access: ClusterAccess) -> ApiError:
    """Return the error of a server that sends its callers elsewhere, as portals with a login do."""
    try:
        host = urllib.parse.urlsplit(answer.location).hostname
    except ValueError:  # no address
        host = None
    return ApiError(
        f"{access.server} is no API server: it redirects to {printable(host or 'another page')} "
        f"({answer.status}), and no credentials are sent there",
        status=answer.status,
        remedy=f"log in to the cluster again, or correct the server's address in {access.source}",
    )
