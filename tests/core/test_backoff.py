"""Pauses that are doubled."""

from __future__ import annotations

from paceline.core.backoff import doubled


def test_a_pause_is_doubled_up_to_its_limit():
    assert [doubled(0.5, times, 6.0) for times in range(6)] == [0.5, 1.0, 2.0, 4.0, 6.0, 6.0]
    assert doubled(0.5, 100_000, 6.0) == 6.0
