"""Errors say whose fault it is and what to try, and survive the way between processes."""

from __future__ import annotations

import inspect
import pickle
import threading

import pytest

from paceline.core import errors
from paceline.core.errors import (
    CommTimeoutError,
    ConfigError,
    DisagreementError,
    InternalError,
    PacelineError,
    PeerLostError,
    RankFailedError,
    UsageError,
)

ALL = [
    cls
    for _, cls in inspect.getmembers(errors, inspect.isclass)
    if issubclass(cls, PacelineError) and cls is not PacelineError
]


class NotLoadableError(Exception):
    """Pickles, but cannot be loaded: its __init__ wants more than its args."""

    def __init__(self, first, second):
        super().__init__(f"{first} and {second}")


def travelled(error):
    return pickle.loads(pickle.dumps(error))


@pytest.mark.parametrize("cls", ALL, ids=lambda cls: cls.__name__)
def test_every_error_has_a_fault_and_travels(cls):
    error = cls("it broke", remedy="mend it", count=3, names=["a"])
    error.add_note("seen at noon")
    copy = travelled(error)
    assert type(copy) is cls
    assert str(copy) == str(error) == "it broke\n  try: mend it"
    assert copy.fault in ("user", "ours", "peer", "platform")
    assert copy.facts == {"count": 3, "names": ["a"]}
    assert copy.__notes__ == ["seen at noon"]
    assert copy.args == ("it broke",)


def test_the_drawn_tree_names_every_class():
    assert errors.__doc__ is not None
    assert all(f"{cls.__name__} " in errors.__doc__ for cls in ALL)


def test_faults_follow_the_tree():
    assert ConfigError("x").fault == "user"
    assert InternalError("x").fault == "ours"
    assert PeerLostError("x").fault == "peer"
    assert CommTimeoutError("x").fault == "platform"


def test_errors_are_caught_by_their_python_kin():
    assert issubclass(UsageError, ValueError)
    with pytest.raises(TimeoutError, match="waited"):
        raise CommTimeoutError("waited")


def test_without_a_remedy_the_class_has_one_or_none_is_shown():
    assert str(UsageError("no")) == "no"
    assert "report it" in str(InternalError("no"))


def test_lost_ranks_are_named_once_and_in_order():
    error = travelled(PeerLostError("gone", rank=3, ranks=[1, 3]))
    assert (error.rank, error.ranks) == (1, (1, 3))
    assert PeerLostError("gone").rank is None


def test_a_disagreement_shows_every_call():
    error = travelled(
        DisagreementError("ranks disagree", calls={1: "barrier at b.py:2", 0: "gather at a.py:1"})
    )
    assert str(error).splitlines()[:3] == [
        "ranks disagree",
        "  rank 0: gather at a.py:1",
        "  rank 1: barrier at b.py:2",
    ]


def test_a_failed_rank_shows_its_traceback():
    error = travelled(
        RankFailedError("rank 2 failed", rank=2, traceback_text="Traceback...\nKeyError: 'x'\n")
    )
    assert error.rank == 2
    assert "KeyError: 'x'" in str(error)


def test_a_timeout_says_whom_it_waited_for():
    assert travelled(CommTimeoutError("late", waiting_for={2, 1})).waiting_for == (1, 2)


def test_the_cause_travels_when_it_can():
    error = UsageError("outer")
    error.__cause__ = PeerLostError("inner", rank=1)
    cause = travelled(error).__cause__
    assert isinstance(cause, PeerLostError)
    assert cause.ranks == (1,)


def test_a_cause_or_fact_that_cannot_travel_becomes_text():
    error = UsageError("outer", lock=threading.Lock())
    error.__cause__ = NotLoadableError("this", "that")
    copy = travelled(error)
    assert copy.__cause__ is None
    assert copy.__notes__ == [f"caused by: {NotLoadableError.__module__}.NotLoadableError: this and that"]
    assert "lock" in copy.facts["lock"]
    assert not hasattr(error, "__notes__")
