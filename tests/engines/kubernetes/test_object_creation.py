"""All objects of a run, or none: also where a request is carried out and its answer does not come."""

from __future__ import annotations

from typing import Any

import pytest
from tests.engines.kubernetes.scripted_api import ScriptedApi

from paceline.core.errors import PacelineError, UnavailableError
from paceline.engines.kubernetes.manifests import RUN_LABEL
from paceline.engines.kubernetes.object_creation import create_all

JOBS, SECRETS = "/apis/batch/v1/namespaces/ml/jobs", "/api/v1/namespaces/ml/secrets"
OWNER: dict[str, Any] = {
    "apiVersion": "batch/v1",
    "kind": "Job",
    "metadata": {"name": "run", "labels": {RUN_LABEL: "run"}},
}


def create(api: ScriptedApi) -> Any:
    return create_all(api.client(), "ml", OWNER, [], b"secret")


def test_the_secret_belongs_to_the_job(api: ScriptedApi) -> None:
    job = create(api)
    (owner,) = api.objects[f"{SECRETS}/run-token"]["metadata"]["ownerReferences"]
    assert owner["uid"] == job["metadata"]["uid"]


@pytest.mark.parametrize("collection", [SECRETS, JOBS])
def test_a_request_whose_answer_does_not_come_leaves_nothing(api: ScriptedApi, collection: str) -> None:
    api.fault = lambda method, path: "cut" if (method, path) == ("POST", collection) else None
    with pytest.raises(UnavailableError, match="cannot be reached") as told:
        create(api)
    assert api.objects == {}
    assert not hasattr(told.value, "__notes__")


def test_a_server_error_after_the_deed_leaves_nothing(api: ScriptedApi) -> None:
    api.fault = lambda method, path: 504 if (method, path) == ("PATCH", f"{SECRETS}/run-token") else None
    with pytest.raises(UnavailableError, match="504"):
        create(api)
    assert api.objects == {}


def test_another_run_of_that_name_stays(api: ScriptedApi) -> None:
    api.put(JOBS, OWNER)
    api.fault = lambda method, path: "drop" if (method, path) == ("POST", JOBS) else None
    with pytest.raises(UnavailableError):
        create(api)
    assert (api.left("Job"), api.left("Secret")) == (["run"], [])
    api.fault = lambda method, path: None
    with pytest.raises(PacelineError, match="the name is taken"):
        create(api)
    assert api.left("Job") == ["run"]


def test_what_may_be_left_is_named(api: ScriptedApi) -> None:
    """The server goes away with the answer."""
    away: list[str] = []

    def fault(method: str, path: str) -> str | None:
        if (method, path) == ("POST", JOBS):
            away.append(path)
            return "cut"
        return "drop" if away else None

    api.fault = fault
    with pytest.raises(UnavailableError) as told:
        create(api)
    unknown, left = told.value.__notes__
    assert "kubectl -n ml get job/run" in unknown
    assert left == f"still there, delete it: kubectl delete --raw {SECRETS}/run-token"


def test_what_could_not_be_deleted_is_named(api: ScriptedApi) -> None:
    """The server goes away when all objects are made."""
    api.fault = lambda method, path: "drop" if method in ("PATCH", "DELETE") else None
    with pytest.raises(UnavailableError) as told:
        create(api)
    assert told.value.__notes__ == [
        f"still there, delete it: kubectl delete --raw {path}"
        for path in (f"{JOBS}/run", f"{SECRETS}/run-token")
    ]
