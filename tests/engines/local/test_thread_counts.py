"""How many threads a rank gets."""

from __future__ import annotations

import pytest

from paceline.core.errors import UsageError
from paceline.engines.local import thread_counts


@pytest.mark.parametrize(
    ("asked", "environ", "cores", "workers", "expected"),
    [
        (None, {}, 16, 4, 4),
        (None, {}, 2, 4, 1),
        (None, {}, 7, 2, 3),
        (None, {"OMP_NUM_THREADS": "5"}, 16, 4, 5),
        (None, {"OMP_NUM_THREADS": "3,2"}, 16, 4, 3),
        (None, {"OMP_NUM_THREADS": ""}, 16, 4, 4),
        (2, {"OMP_NUM_THREADS": "5"}, 16, 4, 2),
    ],
)
def test_choice(asked, environ, cores, workers, expected):
    assert thread_counts.choose(asked, environ, cores, workers) == expected


@pytest.mark.parametrize("told", ["0", "-1", "many"])
def test_nonsense_in_the_environment_is_refused(told):
    with pytest.raises(UsageError, match="OMP_NUM_THREADS"):
        thread_counts.choose(None, {"OMP_NUM_THREADS": told}, 4, 2)
