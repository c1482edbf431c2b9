"""Read what pods wrote since the last look.

The API server gives lines with their times and takes a time to begin at, in whole seconds: lines of that
second come again and are left out here. A node writes times in its own zone; here they are in UTC.

A container that is started again has a new log, beside which the node keeps the one before.
"""

from __future__ import annotations

import http
import re
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Final, final

from paceline.core.clock import Clock, MonotonicClock
from paceline.core.errors import PacelineError, UnavailableError
from paceline.engines.kubernetes.api_client import ApiClient, ApiError
from paceline.engines.kubernetes.manifests import CONTAINER

_MOST_BYTES: Final = 4 << 20
_LARGEST_ANSWER: Final = 32 << 20  # of one second, or of one line; what is more is left out
_TIME: Final = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(\.\d+)?(Z|[+-]\d\d:\d\d)")  # RFC 3339
_LAST_FRACTION: Final = ".999999999Z"
_TROUBLE_SECONDS: Final = 30.0  # until a pod whose log could not be had is asked for it again


@final
class PodLogs:
    """Lines of the pods of one namespace, each once."""

    def __init__(self, client: ApiClient, namespace: str, clock: Clock | None = None) -> None:
        self._client, self._namespace = client, namespace
        self._clock = clock or MonotonicClock()
        self._seen: dict[str, str] = {}  # pod -> time of its last line
        self._restarts: dict[str, int] = {}  # pod -> restarts of its container before the log that is read
        self._ask_at: dict[str, float] = {}  # pods whose logs could not be had
        self._named: set[str] = set()  # pods whose last lines were said to be missing

    def of_all(self, pods: Mapping[str, int], *, at_once: bool = False) -> list[tuple[str, str]]:
        """Return the new lines of pods, of which the restarts are given, each line with its pod. A pod whose
        node does not answer has none, and is asked again after a while; one such pod ends the call, which
        may take as long as its request. `at_once`: all are asked, for what they wrote last, and a pod that
        does not answer is named."""
        found: list[tuple[str, str]] = []
        for pod, restarts in pods.items():
            if self._clock.now() < self._ask_at.get(pod, float("-inf")) and not at_once:
                continue
            try:
                found += [(pod, line) for line in self.new_lines(pod, restarts)]
            except UnavailableError as error:
                # What was read of the others is noted as read: it is given. The API server asks the pod's
                # node, and may be away itself.
                self._ask_at[pod] = self._clock.now() + _TROUBLE_SECONDS
                if not at_once:
                    break
                if pod not in self._named:
                    self._named.add(pod)
                    found.append((pod, f"(its last lines cannot be had: {error.message})"))
        return found

    def new_lines(self, pod: str, restarts: int = 0) -> list[str]:
        """Return the lines of a pod since the last call, some 4 MiB of them at most; none while it has not
        begun, or once it is gone. Where its container was started again since then, the rest of what that
        wrote before comes first, and what it writes now with the next call."""
        if restarts > self._restarts.get(pod, 0) and (rest := self._next_lines(pod, of_previous=True)):
            return rest
        self._restarts[pod] = restarts
        return self._next_lines(pod)

    def _next_lines(self, pod: str, *, of_previous: bool = False) -> list[str]:
        limit = _MOST_BYTES
        while True:
            text, is_cut = self._answer(pod, limit, of_previous)
            lines = self._unseen(pod, text, is_cut)
            if lines or not is_cut:
                return lines
            # What is new begins behind the end: so much was written in the second that comes again.
            if limit >= _LARGEST_ANSWER:
                unfinished = _utc(text.rpartition("\n")[2].partition(" ")[0])
                if second := unfinished or self._seen.get(pod, ""):
                    self._seen[pod] = _end_of_second(second)
                return [f"(more than {limit >> 20} MiB of one second are left out here)"]
            limit *= 2

    def _answer(self, pod: str, limit: int, of_previous: bool) -> tuple[str, bool]:
        """Return a log from the second of the last line that was seen, and whether it was cut off."""
        query = {"container": CONTAINER, "timestamps": "true", "limitBytes": str(limit)}
        if of_previous:
            query["previous"] = "true"
        if last := self._seen.get(pod, ""):
            query["sinceTime"] = _first_second(last)
        try:
            text = self._client.text(f"/api/v1/namespaces/{self._namespace}/pods/{pod}/log", **query)
        except ApiError as error:
            # 400: the container waits to start, maybe in a new life of a pod that has written before, or the
            # log of the life before is gone.
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
            word, _, line = entry.partition(" ")
            time = _utc(word)
            if time and _ordered(time) > _ordered(last):
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


def _utc(text: str) -> str:
    """Return a time of a line in UTC, with its fraction; empty where the text is no time."""
    match = _TIME.fullmatch(text)
    if match is None:
        return ""
    second = datetime.fromisoformat(match[1] + match[3]).astimezone(UTC)
    return f"{second:%Y-%m-%dT%H:%M:%S}{match[2] or ''}Z"


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
