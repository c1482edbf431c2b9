import pytest

from paceline.core.errors import UsageError
from paceline.engines.time_limit import seconds_of


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 5400),
        ("5:30", 330),
        ("30:00", 1800),
        ("2:00:00", 7200),
        ("1-12", 129600),
        ("1-0:30", 88200),
        ("1-00:00:00", 86400),
    ],
)
def test_time_limits_are_read_as_slurm_reads_them(text: str, seconds: int) -> None:
    assert seconds_of(text) == seconds


@pytest.mark.parametrize("text", ["", "soon", "1:2:3:4", "-5", "1h"])
def test_texts_that_are_no_times(text: str) -> None:
    with pytest.raises(UsageError, match="is not a time"):
        seconds_of(text)
