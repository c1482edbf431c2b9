"""A failed collective names ranks of its view; the supervisor is told members."""

from __future__ import annotations

from paceline.control.messages import View
from paceline.core.errors import (
    CommTimeoutError,
    CorruptDataError,
    GroupInterruptedError,
    PeerLostError,
    RendezvousError,
)
from paceline.train.member.member_messages import collective_failed

VIEW = View(
    generation=7,
    members=(4, 9, 6),
    slots=(0, 1, 2),
    pids=(1, 2, 3),
    hosts=("a", "a", "b"),
    hostnames=("a", "a", "b"),
    endpoints=(("a", 1), ("a", 2), ("b", 3)),
    shards=((0,), (1,), (2,)),
)


def test_who_was_lost_could_not_be_reached():
    told = collective_failed(VIEW, PeerLostError("gone", ranks=(0, 2)))
    assert (told.generation, told.accused, told.unreachable) == (7, (), (4, 6))
    assert told.reason == "gone"


def test_who_did_not_answer_could_not_be_reached():
    assert collective_failed(VIEW, CommTimeoutError("late", waiting_for=(1,))).unreachable == (9,)


def test_whose_data_is_damaged_is_accused():
    told = collective_failed(VIEW, CorruptDataError("damaged", rank=1))
    assert (told.accused, told.unreachable) == ((9,), ())
    assert collective_failed(VIEW, CorruptDataError("damaged")).accused == ()


def test_other_errors_name_no_member():
    for error in (GroupInterruptedError("told to"), RendezvousError(""), TimeoutError()):
        told = collective_failed(VIEW, error)
        assert (told.accused, told.unreachable) == ((), ())
    assert collective_failed(VIEW, TimeoutError()).reason == "TimeoutError"


def test_a_rank_that_the_view_does_not_have_is_no_member():
    assert collective_failed(VIEW, PeerLostError("gone", rank=5)).unreachable == ()
