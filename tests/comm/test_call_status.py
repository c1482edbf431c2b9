"""The judgement over waiting ranks, as a pure function."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.comm.call_status import (
    CollectiveCall,
    PeerState,
    RankState,
    Status,
    call_site,
    describe,
    failure_from,
    failure_of,
    judge,
    signature_of,
    timed_out,
)
from paceline.core.errors import DisagreementError, PacelineError, PeerLostError, UsageError

BARRIER = Status("barrier()", "a.py:1", (1, 2), 5, 111)
GATHER = Status("gather()", "b.py:2", (0,), 5, 222)
RECEIVE = Status("receive(source_rank=0)", "c.py:3", (0,))
ANY_OF_TWO = Status("receive(source_rank=any)", "d.py:4", (1, 2), any_of=True)

BUSY = PeerState(RankState.RUNNING)
LEFT = PeerState(RankState.LEFT)
DEAD = PeerState(RankState.DEAD, None, {"text": "process 7 is gone"})
FAILED = PeerState(RankState.FAILED, None, {"kind": "ValueError", "text": "ValueError: no"})


def at(status: Status) -> PeerState:
    return PeerState(RankState.RUNNING, status)


def waits(status: Status, *ranks: int) -> PeerState:
    return at(replace(status, waits_for=ranks))


# name: (peers by rank as rank 0 sees them, nothing changed for a while, kind of error or None, words in it)
TABLE: dict[str, tuple[list[PeerState], bool, type[PacelineError] | None, list[str]]] = {
    "I do not wait": ([BUSY, DEAD], True, None, []),
    "the others are busy": ([at(BARRIER), BUSY, BUSY], True, None, []),
    "the others have not joined yet": ([at(BARRIER), PeerState(RankState.ABSENT), BUSY], True, None, []),
    "same call": ([at(BARRIER), waits(BARRIER, 2), BUSY], True, None, []),
    "a dead rank": (
        [at(BARRIER), DEAD, BUSY],
        False,
        PeerLostError,
        ["rank 1", "process 7", "barrier() at a.py:1"],
    ),
    "a dead rank I do not wait for": ([waits(BARRIER, 2), DEAD, BUSY], False, PeerLostError, ["rank 1"]),
    "two dead ranks": ([at(BARRIER), DEAD, DEAD], False, PeerLostError, ["ranks 1 and 2"]),
    "death comes before disagreement": ([at(BARRIER), DEAD, at(GATHER)], False, PeerLostError, ["rank 1"]),
    "a failed rank": ([at(BARRIER), BUSY, FAILED], False, PeerLostError, ["rank 2 failed", "ValueError: no"]),
    "closed while I wait": (
        [PeerState(RankState.LEFT), BUSY, BUSY],
        False,
        UsageError,
        ["rank 0 was closed by another thread"],
    ),
    "another call": (
        [at(BARRIER), at(GATHER), BUSY],
        False,
        DisagreementError,
        ["different calls", "b.py:2"],
    ),
    "an earlier call of a peer": ([at(BARRIER), at(replace(GATHER, sequence=4)), BUSY], False, None, []),
    "a message is no other call": ([at(BARRIER), at(RECEIVE), BUSY], False, None, []),
    "left without taking part": ([at(BARRIER), LEFT, BUSY], False, DisagreementError, ["rank 1 finished"]),
    "left, but not needed any more": ([waits(BARRIER, 2), LEFT, BUSY], True, None, []),
    "one of many has left": ([at(ANY_OF_TWO), LEFT, BUSY], True, None, []),
    "all of many have left": (
        [at(ANY_OF_TWO), LEFT, LEFT],
        False,
        DisagreementError,
        ["ranks 1 and 2 finished"],
    ),
    "a circle of two": (
        [waits(BARRIER, 1), at(RECEIVE), BUSY],
        True,
        DisagreementError,
        ["circle", "c.py:3"],
    ),
    "a circle needs time to be sure": ([waits(BARRIER, 1), at(RECEIVE), BUSY], False, None, []),
    "a circle of three": (
        [waits(RECEIVE, 1), waits(RECEIVE, 2), waits(RECEIVE, 0)],
        True,
        DisagreementError,
        ["circle", "rank 0", "rank 1", "rank 2"],
    ),
    "waiting for a circle of others": (
        [waits(RECEIVE, 1), waits(RECEIVE, 2), waits(RECEIVE, 1)],
        True,
        DisagreementError,
        ["circle"],
    ),
    "a chain with a free end": ([waits(RECEIVE, 1), waits(RECEIVE, 2), BUSY], True, None, []),
    "a chain whose end has a deadline": (
        [waits(RECEIVE, 1), waits(RECEIVE, 2), waits(replace(RECEIVE, ends_alone=True), 0)],
        True,
        None,
        [],
    ),
    "I have a deadline of my own": (
        [waits(replace(RECEIVE, ends_alone=True), 1), waits(RECEIVE, 0), BUSY],
        True,
        None,
        [],
    ),
    "any of two, and one of them is free": ([at(ANY_OF_TWO), waits(RECEIVE, 0), BUSY], True, None, []),
    "any of two, and all of them wait for me": (
        [at(ANY_OF_TWO), waits(RECEIVE, 0), waits(RECEIVE, 0)],
        True,
        DisagreementError,
        ["circle"],
    ),
    "any of two, one left and one waits for me": (
        [at(ANY_OF_TWO), LEFT, waits(RECEIVE, 0)],
        True,
        DisagreementError,
        ["circle"],
    ),
    "a collective that the slowest still computes for": (
        [waits(BARRIER, 2), waits(BARRIER, 2), BUSY],
        True,
        None,
        [],
    ),
}


@pytest.mark.parametrize(
    ("dead", "words"),
    [
        ((1,), "rank 1 was lost"),
        ((1, 2), "ranks 1 and 2 were lost"),
        ((1, 2, 3), "ranks 1, 2 and 3 were lost"),
    ],
)
def test_the_number_of_lost_ranks_agrees_with_the_verb(dead: tuple[int, ...], words: str) -> None:
    peers = {0: at(BARRIER), **dict.fromkeys(range(1, 5), BUSY), **dict.fromkeys(dead, DEAD)}
    found = judge(0, peers, stable=False)
    assert isinstance(found, PeerLostError)
    assert found.message.startswith(words)
    passed_on = failure_of(4, PeerState(RankState.FAILED, None, failure_from(found)), BARRIER)
    assert passed_on.message.startswith(words)


@pytest.mark.parametrize("name", list(TABLE))
def test_judgement(name):
    peers, stable, kind, words = TABLE[name]
    error = judge(0, dict(enumerate(peers)), stable)
    if kind is None:
        assert error is None
        return
    assert type(error) is kind
    assert all(word in str(error) for word in words)
    assert error.remedy


def test_lost_ranks_are_named_in_the_error():
    error = judge(0, {0: at(BARRIER), 1: DEAD, 2: DEAD}, False)
    assert isinstance(error, PeerLostError)
    assert error.ranks == (1, 2)


def test_every_rank_comes_to_the_same_judgement():
    peers = {0: waits(BARRIER, 1, 2), 1: at(GATHER), 2: waits(BARRIER, 1)}
    errors = [judge(rank, peers, False) for rank in peers]
    assert all(isinstance(error, DisagreementError) for error in errors)
    calls = [error.calls for error in errors if isinstance(error, DisagreementError)]
    assert (
        calls[0]
        == calls[1]
        == calls[2]
        == {
            0: "barrier() at a.py:1",
            1: "gather() at b.py:2",
            2: "barrier() at a.py:1",
        }
    )


def test_a_disagreement_is_passed_on_as_it_was_found():
    found = DisagreementError("ranks made different calls", calls={0: "barrier() at a.py:1", 1: "x at y:1"})
    passed = failure_of(1, PeerState(RankState.FAILED, None, failure_from(found)), BARRIER)
    assert isinstance(passed, DisagreementError)
    assert passed.calls == found.calls
    assert found.message in passed.message


def test_a_loss_is_passed_on_with_the_rank_that_was_lost():
    found = PeerLostError("gone", rank=3)
    passed = failure_of(1, PeerState(RankState.FAILED, None, failure_from(found)), BARRIER)
    assert isinstance(passed, PeerLostError)
    assert passed.ranks == (3,)
    assert "rank 1 found" in str(passed)


@pytest.mark.parametrize(
    ("peer", "words"),
    [
        (at(BARRIER), "barrier() at a.py:1"),
        (BUSY, "busy elsewhere"),
        (LEFT, "finished and left"),
        (DEAD, "was lost: process 7 is gone"),
        (FAILED, "failed: ValueError: no"),
        (PeerState(RankState.ABSENT), "has not joined"),
    ],
)
def test_descriptions(peer, words):
    assert words in describe(peer)


def test_a_timeout_names_the_late_and_what_every_rank_does():
    error = timed_out(0, {0: at(BARRIER), 1: waits(BARRIER, 2), 2: BUSY}, BARRIER, 1.25)
    assert "waited 1.2 s" in str(error)
    assert "rank 1: barrier()" in str(error)
    assert "rank 2: has not made this call" in str(error)
    assert 2 in error.waiting_for


def test_statuses_survive_the_way_to_a_peer():
    for status in (BARRIER, GATHER, RECEIVE, replace(ANY_OF_TWO, ends_alone=True)):
        assert Status.from_plain(status.to_plain()) == status


def test_signatures_tell_calls_apart_and_do_not_depend_on_the_process():
    texts = [f"all_reduce(SUM, float32[{size}], ring)" for size in range(2000)]
    assert len({signature_of(text) for text in texts}) == 2000
    assert signature_of("barrier()") == 8714737985318348948


def test_lines():
    assert call_site().endswith("test_call_status.py:" + str(test_lines.__code__.co_firstlineno + 1))
    assert CollectiveCall(0, "x", 1, "given.py:1").status([]).line == "given.py:1"
    assert CollectiveCall(0, "x", 1).status([]).line.rpartition(":")[0].endswith("test_call_status.py")
