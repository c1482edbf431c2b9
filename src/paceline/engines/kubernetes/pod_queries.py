"""Ask the API server about the pods of a run: which there are, and why its controller makes none."""

from __future__ import annotations

import http
import re
from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final, NamedTuple

from paceline.core.errors import PacelineError, UsageError
from paceline.engines.kubernetes.api_client import ApiClient, ApiError, JsonObject
from paceline.engines.kubernetes.batch_manifests import HEAD
from paceline.engines.kubernetes.manifests import RUN_LABEL
from paceline.engines.kubernetes.object_creation import PATHS
from paceline.engines.kubernetes.quotas import is_quota, never_fits, quota_error

REFUSAL_SECONDS: Final = 20.0
"""For which a refusal has to last: one that a controller gives as it starts passes."""
_TROUBLES: Final = re.compile(
    "internal error|failed calling webhook|status unknown for quota|etcdserver|timeout|timed out|"
    "deadline exceeded|connection refused|too many requests|unavailable",
    re.IGNORECASE,
)
"""Of refusals that are no rules of the cluster: what could not answer does so later."""


class Refusal(NamedTuple):
    """Why a controller made no pod. `seconds`: from the making of its object to the last refusal, by the
    cluster's own clock."""

    message: str = ""
    seconds: float = 0.0

    @property
    def passes(self) -> bool:
        """Whether something could not answer, which is no rule."""
        return bool(_TROUBLES.search(self.message))

    @property
    def lasts(self) -> bool:
        """Whether no pod of a run will come that has none yet. What another run takes of a quota may come
        back."""
        if is_quota(self.message):
            return never_fits(self.message)
        return not self.passes and self.seconds >= REFUSAL_SECONDS


def pods_of_run(client: ApiClient, namespace: str, name: str) -> list[JsonObject]:
    """Return the pods of a run, the oldest first."""
    found = client.get(PATHS["Pod"].format(namespace), labelSelector=f"{RUN_LABEL}={name}")["items"]
    return sorted(found, key=lambda pod: (pod["metadata"]["creationTimestamp"], pod["metadata"]["name"]))


def refusal_of_pods(client: ApiClient, namespace: str, owner: Mapping[str, Any]) -> Refusal:
    """Return why the controller of `owner` made no pod, from its events; empty where it gave no reason, and
    where this user may not read events: a reason that is not known ends no run."""
    metadata = owner["metadata"]
    about = {"uid": metadata["uid"]}
    if owner["kind"] == "JobSet":
        # Pods come from its Jobs, which a user of JobSets need not be allowed to read.
        about = {"kind": "Job", "name": f"{metadata['name']}-{HEAD}-0"}
    fields = {f"involvedObject.{name}": value for name, value in about.items()} | {"reason": "FailedCreate"}
    selector = ",".join(f"{name}={value}" for name, value in fields.items())
    try:
        events = client.get(PATHS["Event"].format(namespace), fieldSelector=selector)["items"]
    except ApiError as error:
        if error.status != http.HTTPStatus.FORBIDDEN:
            raise
        return Refusal()
    made = _moment(metadata.get("creationTimestamp"))
    # Of a name there may be events of an earlier run.
    found = [(_last_seen(event), str(event.get("message", ""))) for event in events]
    last, message = max((entry for entry in found if entry[0] >= made), default=(made, ""))
    return Refusal(message, last - made)


def refusal_error(told: str) -> PacelineError:
    """Return the error of a controller that is let make no pod."""
    if is_quota(told):
        return quota_error(told)
    return UsageError(
        f"the cluster lets no pod be made: {told}",
        remedy="it is a rule of the namespace or a setting of the pods (service_account, labels, user): "
        "change the setting, or ask the cluster's administrator",
    )


def _last_seen(event: Mapping[str, Any]) -> float:
    series = event.get("series") or {}
    times = (
        series.get("lastObservedTime"),
        event.get("lastTimestamp"),
        event.get("eventTime"),
        event["metadata"].get("creationTimestamp"),
    )
    return _moment(next(filter(None, times), None))


def _moment(text: str | None) -> float:
    return datetime.fromisoformat(text).timestamp() if text else 0.0
