"""The objects of the fake API server: versions, owners, and who wants to hear of changes."""

from __future__ import annotations

import copy
import datetime
import itertools
import threading
import uuid
from collections.abc import Callable, Iterator
from typing import Any

JsonObject = dict[str, Any]
Key = tuple[str, str, str]


class ObjectStore:
    """Objects by kind, namespace and name. One lock for all: whoever reads and then writes holds it."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self._objects: dict[Key, JsonObject] = {}
        self._versions = itertools.count(1)
        self.history: list[tuple[int, str, JsonObject]] = []

    def add(self, one: JsonObject, namespace: str) -> JsonObject:
        with self.lock:
            one = copy.deepcopy(one)
            metadata = one["metadata"]
            metadata.update(namespace=namespace, uid=str(uuid.uuid4()), creationTimestamp=now())
            self._objects[one["kind"], namespace, metadata["name"]] = one
            self._note("ADDED", one)
            return one

    def find(self, kind: str, namespace: str, name: str) -> JsonObject | None:
        with self.lock:
            return self._objects.get((kind, namespace, name))

    def every(self, kind: str, namespace: str = "") -> list[JsonObject]:
        with self.lock:
            return [
                one
                for (its_kind, its_namespace, _), one in self._objects.items()
                if its_kind == kind and namespace in ("", its_namespace)
            ]

    def update(self, one: JsonObject, change: Callable[[JsonObject], None]) -> JsonObject:
        """Change an object; nobody is told of a change that changes nothing."""
        with self.lock:
            before = copy.deepcopy(one)
            change(one)
            if one != before:
                self._note("MODIFIED", one)
            return one

    def remove(self, one: JsonObject) -> None:
        """Remove an object, and those that it owns: pods get their grace, others go at once."""
        with self.lock:
            metadata = one["metadata"]
            self._objects.pop((one["kind"], metadata["namespace"], metadata["name"]), None)
            self._note("DELETED", one)
            for owned in self.owned_by(metadata["uid"]):
                if owned["kind"] == "Pod":
                    self.begin_deletion(owned)
                else:
                    self.remove(owned)

    def owned_by(self, uid: str) -> list[JsonObject]:
        with self.lock:
            return [
                one
                for one in self._objects.values()
                if any(owner["uid"] == uid for owner in one["metadata"].get("ownerReferences", ()))
            ]

    def pods_of(self, owner: JsonObject) -> list[JsonObject]:
        return [one for one in self.owned_by(owner["metadata"]["uid"]) if one["kind"] == "Pod"]

    def is_kept(self, pod: JsonObject) -> bool:
        """Return whether a Job is there that has to count this pod once it has ended: its finalizer keeps the
        pod until then."""
        owners = {owner["uid"] for owner in pod["metadata"].get("ownerReferences", ())}
        return any(job["metadata"]["uid"] in owners for job in self.every("Job"))

    def begin_deletion(self, pod: JsonObject, grace: int | None = None) -> None:
        """Ask the kubelet to end a pod; the object is there until its container has ended, and its Job has
        counted that."""
        seconds = pod["spec"].get("terminationGracePeriodSeconds", 30) if grace is None else grace
        has_ended = pod["status"]["phase"] in ("Succeeded", "Failed")
        is_gone = has_ended and not self.is_kept(pod)
        if seconds == 0 or is_gone or not pod["spec"].get("nodeName"):
            self.remove(pod)
            return

        def change(one: JsonObject) -> None:
            one["metadata"].setdefault("deletionTimestamp", now())
            # A grace can be shortened, and not be made longer.
            given = one["metadata"].get("deletionGracePeriodSeconds", seconds)
            one["metadata"]["deletionGracePeriodSeconds"] = min(given, seconds)

        self.update(pod, change)

    def watch(self, kind: str, namespace: str, after: int, ends: Callable[[], bool]) -> Iterator[JsonObject]:
        """Yield changes of objects of a kind, until `ends`."""
        position = 0
        while not ends():
            with self.lock:
                if position >= len(self.history):
                    self.changed.wait(0.2)
                fresh, position = self.history[position:], len(self.history)
            for version, what, one in fresh:
                if version > after and one["kind"] == kind and one["metadata"]["namespace"] == namespace:
                    yield {"type": what, "object": one}

    def _note(self, what: str, one: JsonObject) -> None:
        version = next(self._versions)
        one["metadata"]["resourceVersion"] = str(version)
        self.history.append((version, what, copy.deepcopy(one)))
        self.changed.notify_all()


def now() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def event(store: ObjectStore, about: JsonObject, reason: str, message: str) -> None:
    """Write an Event about an object; equal ones are one, with the time of the last."""
    namespace = about["metadata"]["namespace"]
    for known in store.every("Event", namespace):
        if known["involvedObject"]["uid"] == about["metadata"]["uid"] and known["message"] == message:
            store.update(known, lambda one: one.update(lastTimestamp=now()))
            return
    store.add(
        {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": f"{about['metadata']['name']}.{uuid.uuid4().hex[:16]}"},
            "involvedObject": {
                "kind": about["kind"],
                "name": about["metadata"]["name"],
                "uid": about["metadata"]["uid"],
            },
            "reason": reason,
            "message": message,
            "firstTimestamp": now(),
            "lastTimestamp": now(),
            "type": "Warning",
        },
        namespace,
    )
