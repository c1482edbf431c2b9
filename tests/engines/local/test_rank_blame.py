"""Who is blamed."""

from __future__ import annotations

import dataclasses
import signal
from typing import Any

import pytest

from paceline.core.errors import (
    CommTimeoutError,
    DisagreementError,
    InternalError,
    PacelineError,
    PeerLostError,
    RankFailedError,
    UsageError,
)
from paceline.engines.local.blame import RankDied, RankRaised, root_cause
from paceline.engines.local.failure_report import FailureRole, describe


def raised(rank: int, when: float, error: BaseException) -> RankRaised:
    try:
        raise error
    except BaseException as caught:
        return RankRaised(rank, 1000 + rank, when, describe(caught), error)


def test_the_first_in_time_is_blamed():
    error = root_cause([raised(0, 2.0, KeyError("late")), raised(3, 1.0, ValueError("early"))])
    assert isinstance(error, RankFailedError)
    assert error.rank == 3
    assert "early" in str(error)
    assert isinstance(error.__cause__, ValueError)
    assert "rank 0 also ended: KeyError: 'late'" in error.__notes__


@pytest.mark.parametrize(
    "echo",
    [
        PeerLostError("lost", rank=2),
        DisagreementError("others called something else"),
        CommTimeoutError("waited", waiting_for=(2,)),
    ],
)
def test_an_echo_does_not_hide_the_cause_even_if_it_was_heard_first(echo):
    error = root_cause([raised(0, 1.0, echo), raised(2, 1.5, ZeroDivisionError("root"))])
    assert isinstance(error, RankFailedError)
    assert error.rank == 2


def test_an_echo_that_the_user_wrapped_is_still_an_echo():
    wrapped = RuntimeError("training failed")
    wrapped.__cause__ = PeerLostError("lost", rank=1)
    assert raised(0, 1.0, wrapped).standing is FailureRole.LOST_A_PEER
    error = root_cause([raised(0, 1.0, wrapped), RankDied(1, 77, 1.2, -signal.SIGKILL)])
    assert isinstance(error, PeerLostError)
    assert error.rank == 1


def test_disagreement_comes_before_what_it_led_to():
    first = root_cause(
        [raised(0, 1.0, PeerLostError("lost", rank=1)), raised(1, 2.0, DisagreementError("differ"))]
    )
    assert isinstance(first, DisagreementError)


@pytest.mark.parametrize("error", [UsageError("bad op", remedy="use SUM"), PeerLostError("lost", rank=0)])
def test_an_error_of_ours_keeps_its_type_and_says_where_it_was_raised(error):
    found = root_cause([raised(1, 1.0, error)])
    assert found is error
    assert isinstance(found, PacelineError)
    assert "raised on rank 1 (pid 1001)" in found.__notes__[0]
    assert "raise error" in found.__notes__[0]


def test_equal_failures_are_told_once():
    error = root_cause([raised(rank, rank, ValueError("same")) for rank in range(4)])
    assert isinstance(error, RankFailedError)
    assert error.rank == 0
    assert error.__notes__ == ["ranks 1, 2 and 3 ended the same way"]


@pytest.mark.parametrize(
    ("status", "words", "hint"),
    [
        (-signal.SIGKILL, "was killed by signal 9 (SIGKILL)", "out-of-memory"),
        (-signal.SIGSEGV, "was killed by signal 11 (SIGSEGV)", "compiled code"),
        (-63, "was killed by signal 63", "compiled code"),
        (3, "exited with code 3", "os._exit"),
        (0, "exited with code 0", "os._exit"),
    ],
)
def test_a_death_says_who_and_how(status, words, hint):
    error = root_cause([RankDied(2, 4321, 1.0, status)])
    assert isinstance(error, PeerLostError)
    assert error.ranks == (2,)
    assert f"rank 2 (pid 4321) {words}" in str(error)
    assert hint in error.remedy


def test_sys_exit_is_told_as_such():
    error = root_cause([raised(0, 1.0, SystemExit("no data"))])
    assert isinstance(error, RankFailedError)
    assert "called sys.exit(no data)" in error.message


def test_frames_marked_as_internal_are_not_shown():
    def inner() -> Any:
        raise ValueError("x")

    def outer() -> Any:
        __tracebackhide__ = True
        return inner()

    with pytest.raises(ValueError, match="x") as caught:
        outer()
    assert caught.value.__traceback__ is not None
    # The test's own frame comes first and is not marked, so only what follows is looked at.
    caught.value.__traceback__ = caught.value.__traceback__.tb_next
    text = describe(caught.value).traceback_text
    assert "in inner" in text
    assert "in outer" not in text


@pytest.mark.parametrize(("kind", "shown"), [(UsageError, False), (InternalError, True)])
def test_an_error_that_is_raised_inside_of_paceline_shows_its_frames_only_where_it_is_a_bug(kind, shown):
    report = dataclasses.replace(
        describe(kind("no checkpoint 99")), traceback_text="File resume.py", users_lines=""
    )
    error = root_cause([RankRaised(1, 1001, 1.0, report, kind("no checkpoint 99"))])
    (note,) = error.__notes__
    assert note.startswith("raised on rank 1 (pid 1001)")
    assert ("resume.py" in note) == shown
