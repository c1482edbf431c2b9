"""What is asked beforehand, of users with few rights."""

from __future__ import annotations

import pytest
from tests.engines.kubernetes.scripted_api import ScriptedApi

from paceline.core.errors import UsageError
from paceline.engines.kubernetes.access_check import check
from paceline.engines.kubernetes.api_client import ApiError

VERSION = {"metadata": {"name": "version"}, "major": "1", "minor": "33"}
NAMESPACE = "/api/v1/namespaces/ml"


def test_a_role_inside_a_namespace_is_enough(api: ScriptedApi) -> None:
    """Its users may not read the Namespace itself."""
    api.put("", VERSION)
    with pytest.raises(UsageError, match="no namespace 'ml'") as told:
        check(api.client(), "ml", "job")
    assert "--engine-set namespace=NAME" in told.value.remedy
    api.fault = lambda method, path: 403 if path == NAMESPACE else None
    check(api.client(), "ml", "job")
    api.fault = lambda method, path: 401 if path == NAMESPACE else None
    with pytest.raises(ApiError, match="does not accept the credentials"):
        check(api.client(), "ml", "job")
