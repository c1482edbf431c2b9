"""Refusals of a ResourceQuota: which pods fit into it once others are gone."""

from __future__ import annotations

import pytest

from paceline.engines.kubernetes.quotas import never_fits


@pytest.mark.parametrize(
    ("requested", "limited", "never"),
    [
        ("memory=64Gi", "memory=33554432Ki", True),
        ("memory=32Gi", "memory=33554432Ki", False),
        ("memory=64Gi", "memory=32e9", True),
        ("memory=64Gi", "memory=1E11", False),
        ("memory=2E", "memory=1Ei", True),
        ("memory=2G", "memory=1e3M", True),
        ("cpu=2", "cpu=1500m", True),
        ("cpu=700m", "cpu=700e-3", False),
        ("cpu=700m", "cpu=700000u", False),
        ("cpu=700m", "cpu=1n", True),
        ("cpu=much", "cpu=1", False),
    ],
)
def test_a_pod_that_alone_is_larger_than_the_quota_never_fits(
    requested: str, limited: str, never: bool
) -> None:
    told = f"exceeded quota: team, requested: pods=1,{requested}, used: pods=0, limited: pods=2,{limited}"
    assert never_fits(told) is never
