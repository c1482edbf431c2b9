"""Read what pods wrote since the last look.

The API server gives lines with their times and takes a time to begin at, in whole seconds: lines of that
second come again and are left out here.
"""

from __future__ import annotations

import http
from typing import Final, final

from paceline.core.errors import PacelineError
from paceline.engines.kubernetes.api_client import ApiClient, ApiError
from paceline.engines.kubernetes.manifests import CONTAINER

_MOST_BYTES: Final = 4 << 20


@final
class PodLogs:
    """Lines of the pods of one namespace, each once."""

    def __init__(self, client: ApiClient, namespace: str) -> None:
        self._client, self._namespace = client, namespace
        self._seen: dict[str, str] = {}  # pod -> time of its last line

    def new_lines(self, pod: str) -> list[str]:
        """Return the lines of a pod since the last call, 4 MiB of them at most; none while it has not begun,
        or once it is gone."""
        last = self._seen.get(pod, "")
        query = {"container": CONTAINER, "timestamps": "true", "limitBytes": str(_MOST_BYTES)}
        if last:
            query["sinceTime"] = last[:19] + "Z"
        try:
            text = self._client.text(f"/api/v1/namespaces/{self._namespace}/pods/{pod}/log", **query)
        except ApiError as error:
            # 400: the container waits to start.
            if error.status in (http.HTTPStatus.NOT_FOUND, http.HTTPStatus.BAD_REQUEST):
                return []
            raise
        entries = text.splitlines()
        if len(text.encode()) >= _MOST_BYTES and not text.endswith("\n"):
            entries.pop()  # it is cut off, and comes whole with the next call
        lines = []
        for entry in entries:
            time, _, line = entry.partition(" ")
            if _ordered(time) > _ordered(last):
                lines.append(line)
                self._seen[pod] = time
        return lines

    def tail(self, pod: str, lines: int) -> str:
        """Return the last lines of a pod for a message; empty where they cannot be had."""
        query = {"container": CONTAINER, "tailLines": str(lines)}
        try:
            return self._client.text(f"/api/v1/namespaces/{self._namespace}/pods/{pod}/log", **query).strip()
        except PacelineError:
            return ""


def _ordered(time: str) -> tuple[str, str]:
    """Return a time such that later ones compare greater; RFC 3339 leaves out zeros at the end."""
    second, _, fraction = time.rstrip("Z").partition(".")
    return second, fraction.ljust(9, "0")
