"""What a controller wrote down about the pods that it could not make."""

from __future__ import annotations

import http
from collections.abc import Mapping
from typing import Any

from paceline.engines.kubernetes.api_client import ApiClient, ApiError
from paceline.engines.kubernetes.object_creation import PATHS


def refusal_of_pods(client: ApiClient, namespace: str, owner: Mapping[str, Any]) -> str:
    """Return why the controller of `owner` made no pod, from its events; empty where it gave no reason, and
    where this user may not read events: a reason that is not known ends no run."""
    selector = f"involvedObject.uid={owner['metadata']['uid']},reason=FailedCreate"
    try:
        events = client.get(PATHS["Event"].format(namespace), fieldSelector=selector)["items"]
    except ApiError as error:
        if error.status != http.HTTPStatus.FORBIDDEN:
            raise
        return ""
    return str(events[-1].get("message", "")) if events else ""
