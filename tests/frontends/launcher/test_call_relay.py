"""What the launcher hands to ranks of an earlier call's outcome, when they start again."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from typing import Any, NamedTuple, cast

import pytest

from paceline.core import fd_messages
from paceline.engines.local.script_ranks import ScriptRank
from paceline.frontends.launcher.call_relay import CallRelay


class Rank(NamedTuple):
    """As much of a rank as the relay knows: its number, and the socket to it."""

    rank: int
    link: Any


@pytest.fixture
def relay() -> Iterator[CallRelay]:
    with closing(CallRelay()) as made:
        yield made


def asks(relay: CallRelay, number: int, rank: int = 1) -> dict[str, Any]:
    """Have a rank make a call; return what it is told first."""
    here, there = fd_messages.pair()
    with here, there:
        relay.handle(cast(ScriptRank, Rank(rank, here)), {"kind": "call", "number": number}, ())
        told = fd_messages.receive(there)
        assert told is not None
        fd_messages.close_all(told[1])
        return dict(told[0])


def ends(relay: CallRelay, number: int, *, ok: bool, stopped: bool) -> None:
    """Have rank 0, which led a call, send its outcome."""
    result = os.open(os.devnull, os.O_RDONLY)
    message = {"kind": "outcome", "number": number, "ok": ok, "stopped": stopped}
    relay.handle(cast(ScriptRank, Rank(0, None)), message, (result,))


@pytest.mark.parametrize(
    ("ok", "stopped", "kept", "final"),
    [
        (True, False, True, False),
        (True, True, False, False),  # a history of the steps up to a signal
        (False, True, False, False),  # stopped before the first step
        (False, False, False, True),  # an error of the script's own
    ],
)
def test_ranks_that_start_again_are_handed_what_came_to_its_end(
    relay: CallRelay, ok: bool, stopped: bool, kept: bool, final: bool
) -> None:
    assert asks(relay, 1)["kind"] == "follow"
    assert relay.is_under_way
    ends(relay, 1, ok=ok, stopped=stopped)
    assert relay.has_failed is final
    relay.begin_attempt()
    assert asks(relay, 1)["kind"] == ("outcome" if kept else "follow")


def test_a_rank_that_starts_again_alone_is_handed_every_outcome(relay: CallRelay) -> None:
    asks(relay, 1)
    ends(relay, 1, ok=True, stopped=False)
    assert asks(relay, 1, rank=2) == {"kind": "outcome", "number": 1, "ok": True}
    assert not relay.is_under_way
