"""Read what pods wrote since the last look.

The API server gives lines with their times and takes a time to begin at, in whole seconds: lines of that
second come again and are left out here.
"""

from __future__ import annotations

import http
import re
from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Final, final

from paceline.core.clock import Clock, MonotonicClock
from paceline.core.errors import PacelineError, UnavailableError
from paceline.engines.kubernetes.api_client import ApiClient, ApiError
from paceline.engines.kubernetes.manifests import CONTAINER

_MOST_BYTES: Final = 4 << 20
_LARGEST_ANSWER: Final = 32 << 20  # of one second, or of one line; what is more is left out
_TIME: Final = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z")  # RFC 3339, as the API server writes it
_LAST_FRACTION: Final = ".999999999Z"
_TROUBLE_SECONDS: Final = 30.0  # until a pod whose log could not be had is asked for it again


@final
class PodLogs:
    """Lines of the pods of one namespace, each once."""

    def __init__(self, client: ApiClient, namespace: str, clock: Clock | None = None) -> None:
        self._client, self._namespace = client, namespace
        self._clock = clock or MonotonicClock()
        self._seen: dict[str, str] = {}  # pod -> time of its last line
        self._ask_at: dict[str, float] = {}  # pods whose logs could not be had

    def of_all(self, pods: Iterable[str], *, at_once: bool = False) -> list[tuple[str, str]]:
        """Return the new lines of these pods, each with its pod. A pod whose node does not answer has none,
        and is asked again after a while; one such pod ends the call, which may take as long as its request.
        `at_once`: all are asked, for what they wrote last."""
        found: list[tuple[str, str]] = []
        for pod in pods:
            if self._clock.now() < self._ask_at.get(pod, float("-inf")) and not at_once:
                continue
            try:
                found += [(pod, line) for line in self.new_lines(pod)]
            except UnavailableError:
                # What was read of the others is noted as read: it is given. The API server asks the pod's
                # node, and may be away itself.
                self._ask_at[pod] = self._clock.now() + _TROUBLE_SECONDS
                if not at_once:
                    break
        return found

    def new_lines(self, pod: str) -> list[str]:
        """Return the lines of a pod since the last call, some 4 MiB of them at most; none while it has not
        begun, or once it is gone."""
        limit = _MOST_BYTES
        while True:
            text, is_cut = self._answer(pod, limit)
            lines = self._unseen(pod, text, is_cut)
            if lines or not is_cut:
                return lines
            # What is new begins behind the end: so much was written in the second that comes again.
            if limit >= _LARGEST_ANSWER:
                self._seen[pod] = _end_of_second(self._seen.get(pod) or text[:19])
                return [f"(more than {limit >> 20} MiB of one second are left out here)"]
            limit *= 2

    def _answer(self, pod: str, limit: int) -> tuple[str, bool]:
        """Return a log from the second of the last line that was seen, and whether it was cut off."""
        query = {"container": CONTAINER, "timestamps": "true", "limitBytes": str(limit)}
        if last := self._seen.get(pod, ""):
            query["sinceTime"] = _first_second(last)
        try:
            text = self._client.text(f"/api/v1/namespaces/{self._namespace}/pods/{pod}/log", **query)
        except ApiError as error:
            # 400: the container waits to start; it may be a new life of a pod that has written before.
            if error.status in (http.HTTPStatus.NOT_FOUND, http.HTTPStatus.BAD_REQUEST):
                return "", False
            raise
        return text, len(text.encode()) >= limit

    def _unseen(self, pod: str, text: str, is_cut: bool) -> list[str]:
        # A line may hold carriage returns, of a progress bar, and other characters that splitlines() cuts at.
        entries = text.split("\n")
        if is_cut and not text.endswith("\n"):
            entries.pop()  # it comes whole with the next call
        last, lines = self._seen.get(pod, ""), []
        for entry in entries:
            time, _, line = entry.partition(" ")
            if _TIME.fullmatch(time) and _ordered(time) > _ordered(last):
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


def _end_of_second(time: str) -> str:
    return time[:19] + _LAST_FRACTION


def _first_second(last: str) -> str:
    """Return the second that lines after `last` may be in."""
    second = datetime.fromisoformat(last[:19])
    if last.endswith(_LAST_FRACTION):
        second += timedelta(seconds=1)
    return f"{second.isoformat()}Z"


def _ordered(time: str) -> tuple[str, str]:
    """Return a time such that later ones compare greater; RFC 3339 leaves out zeros at the end."""
    second, _, fraction = time.rstrip("Z").partition(".")
    return second, fraction.ljust(9, "0")
