"""The agents of a run that is supervised from here: an Indexed Job or a StatefulSet of pods.

Kubernetes replaces a failed pod by itself, under its index. What is left to do here: to notice (poll), to
change the number, to take the pods of a lost node out of the way of their replacements, and to remove all.

The API server is asked at most once a second, and while it does not answer the last known state counts:
training does not need it.
"""

from __future__ import annotations

import dataclasses
import logging
import secrets
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, TypeVar, final

from paceline.core.clock import Clock, MonotonicClock
from paceline.core.errors import UnavailableError
from paceline.engines.engine import EngineRequest, LogLine, NodeStatus
from paceline.engines.kubernetes import pod_status
from paceline.engines.kubernetes.api_client import ApiClient, ApiError, JsonObject
from paceline.engines.kubernetes.job_progress import completions_for, is_over
from paceline.engines.kubernetes.manifests import renamed, secret_name
from paceline.engines.kubernetes.object_creation import PATHS, create_all
from paceline.engines.kubernetes.pod_logs import PodLogs
from paceline.engines.kubernetes.pod_queries import (
    REFUSAL_SECONDS,
    pods_of_run,
    refusal_error,
    refusal_of_pods,
)

_log = logging.getLogger("paceline.engines")

_LOOK_SECONDS: Final = 1.0
_REMOVE_SECONDS: Final = 30.0
_REMOVE_PAUSE_SECONDS: Final = 2.0
_END_GRACE: Final = 5
_END_SECONDS: Final = 10.0
_END_POLL_SECONDS: Final = 0.2
_DELETED: Final = "its pod was deleted"
_T = TypeVar("_T")


@final
class AgentsJob:
    """Pods of one run; see `EngineJob`."""

    def __init__(
        self,
        client: ApiClient,
        namespace: str,
        request: EngineRequest,
        secret: bytes,
        clock: Clock | None = None,
    ) -> None:
        self._client, self._namespace = client, namespace
        self._request, self._secret = request, secret
        self._clock = clock or MonotonicClock()
        self._logs = PodLogs(client, namespace, self._clock)
        self._owner: JsonObject = {}
        self._begun: list[str] = []  # names under which objects were created, or may have been
        self._numbers: dict[tuple[str, int], int] = {}
        self._states: dict[int, pod_status.PodState] = {}
        self._expected: deque[int] = deque()
        self._next = self._indexes = 0
        self._looked_at = self._read_at = float("-inf")
        self._began_at = self._clock.now()
        self._ran = self._stopped = self._complained = False
        self._waits_for = ""
        self._kept: list[LogLine] = []

    @classmethod
    def submit(
        cls,
        client: ApiClient,
        namespace: str,
        request: EngineRequest,
        secret: bytes,
        clock: Clock | None = None,
    ) -> AgentsJob:
        """Create the Secret and the pods' owner."""
        job = cls(client, namespace or client.access.namespace, request, secret, clock)
        spec = request["objects"][0]["spec"]
        nodes = int(spec["replicas"] if "replicas" in spec else spec["parallelism"])
        job._begin(nodes)
        job._expect(nodes)
        return job

    @property
    def name(self) -> str:
        return str(self._owner["metadata"]["name"])

    def poll(self) -> Sequence[NodeStatus]:
        """Return the state of every agent; raise where none can ever run."""
        if self._clock.now() - self._looked_at >= _LOOK_SECONDS and not self._stopped:
            self._guarded(lambda: self._check_hopeless(self._look()))
            self._looked_at = self._clock.now()
        known = [
            NodeStatus(number, state.state, state.host, state.code, state.reason)
            for number, state in sorted(self._states.items())
        ]
        return [*known, *(NodeStatus(number, "pending", reason=self._waits_for) for number in self._expected)]

    def scale(self, nodes: int) -> None:
        """Have this many pods; make way for the replacements of those on lost nodes."""
        self._guarded(lambda: self._scale(nodes))

    def logs(self) -> Iterable[LogLine]:
        """Return lines that pods wrote since the last call."""
        kept, self._kept = self._kept, []
        if self._stopped or self._clock.now() - self._read_at < _LOOK_SECONDS:
            return kept
        self._read_at = self._clock.now()
        return [*kept, *(self._guarded(self._new_lines) or ())]

    def stop(self) -> None:
        """Delete everything; what the pods wrote until now can be read afterwards."""
        if self._stopped:
            return
        with suppress(ApiError):  # what cannot be read must not keep anything from being deleted
            self._kept += self._guarded(self._new_lines) or []
        self._remove_in_time()
        self._stopped = True
        with suppress(ApiError, UnavailableError):  # the pods are being deleted in any case
            self._see_pods_off()

    def _remove_in_time(self) -> None:
        """Delete everything; an API server that does not answer is asked again for a while: without this
        request the pods would run on."""
        deadline = self._clock.now() + _REMOVE_SECONDS
        while True:
            try:
                return self._remove()
            except UnavailableError:
                if self._clock.now() >= deadline:
                    raise
            self._clock.sleep(_REMOVE_PAUSE_SECONDS)

    def _remove(self) -> None:
        kind = self._owner["kind"]
        for name in list(self._begun):
            try:
                self._client.delete(f"{PATHS[kind].format(self._namespace)}/{name}")
                # Its owner is gone, so that Kubernetes removes it too; now is better than soon.
                self._client.delete(f"{PATHS['Secret'].format(self._namespace)}/{secret_name(name)}")
            except (ApiError, UnavailableError) as error:
                error.add_note(f"still there: {kind.lower()}/{name} in namespace {self._namespace}")
                error.remedy = f"kubectl -n {self._namespace} delete {kind.lower()}/{name}"
                raise
            self._begun.remove(name)

    def _see_pods_off(self) -> None:
        """Wait until the pods are gone, for some seconds. The run is over, so that an agent has nothing to
        save; one that is just starting, as process 1, does not hear the SIGTERM, and gets a short grace."""
        deadline = self._clock.now() + _END_SECONDS
        asked: set[str] = set()
        while (pods := self._pods()) and self._clock.now() < deadline:
            for name in {str(pod["metadata"]["name"]) for pod in pods} - asked:
                self._client.delete(
                    f"{PATHS['Pod'].format(self._namespace)}/{name}", grace_seconds=_END_GRACE
                )
                asked.add(name)
            self._clock.sleep(_END_POLL_SECONDS)

    def _guarded(self, call: Callable[[], _T]) -> _T | None:
        """Make requests; an API server that does not answer is tried again with the next call."""
        try:
            found = call()
        except UnavailableError as error:
            if not self._complained:
                _log.warning("%s; training goes on, and agents are looked for again", error.message)
                self._complained = True
            return None
        self._complained = False
        return found

    def _pods(self) -> list[JsonObject]:
        return pods_of_run(self._client, self._namespace, self.name)

    def _look(self) -> list[JsonObject]:
        pods = self._pods()
        present = set()
        for pod in pods:
            for state in filter(None, (pod_status.read_earlier_life(pod), pod_status.read_pod(pod))):
                number = self._number(state.key)
                self._states[number] = state
                present.add(number)
                self._ran |= state.state == "running"
        for number, state in self._states.items():
            if number not in present and state.state in ("pending", "running"):
                self._states[number] = self._vanished(state)
        return pods

    def _vanished(self, state: pod_status.PodState) -> pod_status.PodState:
        """Return the end of an agent whose pod is gone: dismissed by `scale`, or deleted by someone."""
        if state.index >= self._indexes:
            return dataclasses.replace(state, state="ended", code=0, reason=_DELETED)
        return dataclasses.replace(state, state="lost", reason=_DELETED)

    def _number(self, key: tuple[str, int]) -> int:
        """Return the number of an agent; a pod that is new takes one that was asked for."""
        if key not in self._numbers:
            if self._expected:
                self._numbers[key] = self._expected.popleft()
            else:
                self._numbers[key] = self._next
                self._next += 1
        return self._numbers[key]

    def _check_hopeless(self, pods: Sequence[Mapping[str, Any]]) -> None:
        self._waits_for = ""
        if self._expected:
            refusal = refusal_of_pods(self._client, self._namespace, self._owner)
            self._waits_for = refusal.message
            waited = self._clock.now() - self._began_at
            # Where pods were made, training begins with those.
            is_rule = bool(refusal.message) and not refusal.passes
            if is_rule and not self._numbers and waited > REFUSAL_SECONDS:
                raise refusal_error(refusal.message)
        if not self._ran and (error := pod_status.hopeless(pods)):
            raise error

    def _scale(self, nodes: int) -> None:
        self._look()
        for state in self._states.values():
            if state.state == "lost" and state.reason != _DELETED:
                # The node cannot confirm that the pod ended, so that no other one would get its index. Its
                # successor in a StatefulSet has its name.
                path = f"{PATHS['Pod'].format(self._namespace)}/{state.name}"
                self._client.delete(path, grace_seconds=0, uid=state.uid)
        path = f"{PATHS[self._owner['kind']].format(self._namespace)}/{self.name}"
        current = self._client.find(path)
        if current is None or is_over(current):
            # Deleted by someone, or given up: no pod of it comes again.
            self._remove()
            self._begin(nodes)
        elif self._owner["kind"] == "StatefulSet":
            self._indexes = nodes
            self._patch(path, current, {"replicas": nodes})
        else:
            count = self._indexes = completions_for(nodes, current)
            self._patch(path, current, {"completions": count, "parallelism": count})
        self._expect(nodes)
        self._looked_at = float("-inf")

    def _patch(self, path: str, current: Mapping[str, Any], spec: Mapping[str, int]) -> None:
        if any(current["spec"].get(name) != value for name, value in spec.items()):
            self._owner = {**self._owner, **self._client.patch(path, {"spec": spec})}

    def _begin(self, nodes: int) -> None:
        """Create the objects under a name that no other start of the run has."""
        name = f"{self._request['name']}-{secrets.token_hex(3)}"
        owner = renamed(self._request["objects"][0], name)
        counts = ("replicas",) if owner["kind"] == "StatefulSet" else ("completions", "parallelism")
        owner["spec"].update(dict.fromkeys(counts, nodes))
        self._indexes = nodes
        self._begun.append(name)
        self._owner = create_all(self._client, self._namespace, owner, [], self._secret)

    def _expect(self, nodes: int) -> None:
        """Number the pods that are asked for and not there yet."""
        active = sum(state.state in ("pending", "running") for state in self._states.values())
        while active + len(self._expected) < nodes:
            self._expected.append(self._next)
            self._next += 1
        while self._expected and active + len(self._expected) > nodes:
            self._expected.pop()

    def _new_lines(self) -> list[LogLine]:
        if not self._states and not self._stopped:
            self._look()
        begun = {
            state.name: (number, state.restarts)
            for number, state in sorted(self._states.items())
            if state.state != "pending" and state.reason != _DELETED
        }
        restarts = {pod: count for pod, (_, count) in begun.items()}
        return [LogLine(begun[pod][0], line) for pod, line in self._logs.of_all(restarts)]
