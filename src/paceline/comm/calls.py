"""What a rank is doing: the call it is in, whom it waits for, and the judgement when ranks do not fit
together.

`Call` is one collective call as this rank made it. `Status` is what a waiting rank lets its peers read.
`judge` looks at everybody's status and says whether waiting on is pointless and why. Pure: reads no clock,
no memory, no socket.
"""

from __future__ import annotations

import enum
import os
import sys
import threading
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from types import FrameType
from typing import Any

import torch

from paceline.core.errors import (
    CommTimeoutError,
    CorruptDataError,
    DisagreementError,
    GroupInterruptedError,
    PacelineError,
    PeerLostError,
    UsageError,
)

_AGREE = "every rank has to make the same collective calls in the same order, with the same shapes and dtypes"
_LATE = "look at the line where the late rank is; if it is only slow, give a larger timeout"
_BECAUSE_OF_OTHERS = ("PeerLostError", "GroupInterruptedError")
_caller = threading.local()
_NOT_THE_USERS = tuple(
    os.path.dirname(os.path.abspath(path)) + os.sep for path in (os.path.dirname(__file__), torch.__file__)
)


@dataclass(slots=True)
class Call:
    """One collective call: its place in this rank's sequence, what was called, and a number that must be
    equal on all ranks.

    Never changed once made; not frozen only because making one is on the fast path.
    """

    sequence: int
    text: str
    signature: int
    line: str = ""
    in_background: bool = False  # the rank's own thread may be at work meanwhile

    def where(self) -> str:
        return self.line or call_site()

    def status(self, waits_for: Iterable[int]) -> Status:
        """What this rank lets its peers read while it waits in this call."""
        waits = tuple(sorted(waits_for))
        return Status(
            self.text, self.where(), waits, self.sequence, self.signature, ends_alone=self.in_background
        )


@lru_cache(maxsize=4096)
def signature_of(text: str) -> int:
    """A 64-bit number for a call's text; not Python's hash, which differs between processes."""
    data = text.encode()
    return zlib.crc32(data) | zlib.crc32(data, 0x9E3779B9) << 32


def call_site() -> str:
    """`file:line` of the innermost frame that is neither Paceline's own nor torch's (which calls back)."""
    line: str | None = getattr(_caller, "line", None)
    if line is not None:
        return line
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_THE_USERS):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else "unknown line"


@contextmanager
def on_behalf_of(line: str) -> Iterator[None]:
    """What this thread does is asked for at `line`, where another thread was."""
    _caller.line = line
    try:
        yield
    finally:
        _caller.line = None


class RankState(enum.Enum):
    ABSENT = 0
    RUNNING = 1
    LEFT = 2
    FAILED = 3
    DEAD = 4


@dataclass(frozen=True, slots=True)
class Status:
    """A rank that waits: in which call, for whom, and whether only they can end the wait."""

    text: str
    line: str
    waits_for: tuple[int, ...]
    sequence: int = -1  # -1: point to point, not part of the order of collectives
    signature: int = 0
    any_of: bool = False  # one of `waits_for` is enough
    ends_alone: bool = False  # has a deadline of its own, or another thread of the rank is at work

    def to_plain(self) -> list[Any]:
        return [
            self.text,
            self.line,
            list(self.waits_for),
            self.sequence,
            self.signature,
            self.any_of,
            self.ends_alone,
        ]

    @classmethod
    def from_plain(cls, plain: list[Any]) -> Status:
        return cls(plain[0], plain[1], tuple(plain[2]), *plain[3:])

    def __str__(self) -> str:
        return f"{self.text} at {self.line}"


@dataclass(frozen=True, slots=True)
class Peer:
    """What is known of one rank."""

    state: RankState
    status: Status | None = None
    failure: Mapping[str, Any] | None = None  # for FAILED and DEAD: what happened there, see `failure_from`
    pid: int = 0

    @property
    def reason(self) -> str:
        return str(self.failure["text"]) if self.failure else ""


def judge(me: int, peers: Mapping[int, Peer], stable: bool) -> PacelineError | None:
    """Whether this rank's wait can still end well; the reason if not. `stable`: nobody's status changed
    for a while."""
    mine = peers[me].status
    if peers[me].state in (RankState.LEFT, RankState.FAILED):
        return UsageError(
            f"the context of rank {me} was closed by another thread while this one waited",
            remedy="wait for what is under way before closing",
        )
    if mine is None:
        return None
    dead = tuple(sorted(rank for rank, peer in peers.items() if peer.state is RankState.DEAD))
    if dead:
        return peer_lost(me, dead, peers, mine)
    failed = [rank for rank, peer in peers.items() if peer.state is RankState.FAILED and rank != me]
    if failed:
        # Who failed by itself comes before who failed because of somebody.
        first = min(
            failed, key=lambda rank: ((peers[rank].failure or {}).get("kind") in _BECAUSE_OF_OTHERS, rank)
        )
        return failure_of(first, peers[first], mine)
    if mine.sequence >= 0:
        others = {rank: peer.status for rank, peer in peers.items() if peer.status is not None}
        differing = [
            rank
            for rank, status in others.items()
            if status.sequence == mine.sequence and status.signature != mine.signature
        ]
        if differing:
            return disagreement(me, peers, "ranks made different calls")
    gone = [rank for rank in mine.waits_for if peers[rank].state is RankState.LEFT]
    if gone and (not mine.any_of or len(gone) == len(mine.waits_for)):
        return disagreement(me, peers, f"{ranks_text(gone)} finished without taking part")
    if stable and me in _blocked(peers):
        return disagreement(me, peers, "ranks wait for each other in a circle")
    return None


def _blocked(peers: Mapping[int, Peer]) -> set[int]:
    """The largest set of ranks in which nobody can go on: each waits for members of the set only (or for
    one it cannot do without)."""
    gone = {rank for rank, peer in peers.items() if peer.state is RankState.LEFT}
    blocked = {
        rank
        for rank, peer in peers.items()
        if peer.status is not None and not peer.status.ends_alone and rank not in gone
    }
    while True:
        stuck = blocked | gone
        free = set()
        for rank in blocked:
            status = peers[rank].status
            assert status is not None
            waits = set(status.waits_for)
            hopeless = waits <= stuck if status.any_of else bool(waits & stuck)
            if not hopeless:
                free.add(rank)
        if not free:
            return blocked
        blocked -= free


def ranks_text(ranks: object) -> str:
    numbers = sorted(int(rank) for rank in ranks)  # type: ignore[attr-defined]
    return f"rank {numbers[0]}" if len(numbers) == 1 else "ranks " + ", ".join(map(str, numbers))


def peer_lost(me: int, dead: tuple[int, ...], peers: Mapping[int, Peer], mine: Status) -> PeerLostError:
    details = "; ".join(f"rank {rank}: {peers[rank].reason or 'gone'}" for rank in dead)
    return PeerLostError(
        f"{ranks_text(dead)} was lost ({details}) while rank {me} was in {mine}",
        ranks=dead,
        remedy="look at that rank's own log; a SIGKILL without a message is often the kernel's "
        "out-of-memory killer",
    )


def failure_from(error: BaseException) -> dict[str, Any]:
    """What a failing rank leaves for its peers to read."""
    failure: dict[str, Any] = {"kind": type(error).__name__, "text": f"{type(error).__name__}: {error}"}
    if isinstance(error, PeerLostError):
        failure["text"] = error.message
        failure["ranks"] = list(error.ranks)
    if isinstance(error, CommTimeoutError):
        failure["text"] = error.message
        failure["waiting_for"] = list(error.waiting_for)
    if isinstance(error, GroupInterruptedError):
        failure["text"] = error.message
    if isinstance(error, CorruptDataError):
        failure["text"] = error.message
        failure["rank"] = error.rank
    if isinstance(error, DisagreementError):
        failure["text"] = error.message
        failure["calls"] = {str(rank): text for rank, text in error.calls.items()}
    return failure


def failure_of(rank: int, peer: Peer, mine: Status) -> PacelineError:
    """The error of a rank whose peer failed: the peer's finding if it concerns all, else the loss of that
    peer."""
    failure = peer.failure or {}
    if failure.get("kind") == "DisagreementError":
        calls = {int(key): str(text) for key, text in failure.get("calls", {}).items()}
        return DisagreementError(str(failure["text"]), calls=calls, remedy=_AGREE)
    if failure.get("kind") == "PeerLostError" and failure.get("ranks"):
        lost = tuple(int(lost) for lost in failure["ranks"])
        return PeerLostError(
            f"{ranks_text(lost)} was lost while this rank was in {mine}; rank {rank} found: {peer.reason}",
            ranks=lost,
            remedy="look at that rank's own log",
        )
    if failure.get("kind") == "CorruptDataError":
        return CorruptDataError(f"rank {rank} found: {peer.reason}", rank=int(failure["rank"]))
    if failure.get("kind") == "CommTimeoutError":
        late = tuple(int(late) for late in failure.get("waiting_for", ()))
        return CommTimeoutError(f"rank {rank} gave up: {failure['text']}", waiting_for=late, remedy=_LATE)
    return PeerLostError(
        f"rank {rank} failed ({peer.reason}) while this rank was in {mine}",
        ranks=(rank,),
        remedy=f"the cause is the error of rank {rank}; fix that one",
    )


def disagreement(me: int, peers: Mapping[int, Peer], headline: str) -> DisagreementError:
    return DisagreementError(
        f"{headline}, as rank {me} sees it:",
        calls={rank: describe(peer) for rank, peer in peers.items()},
        remedy=_AGREE,
    )


def describe(peer: Peer) -> str:
    if peer.status is not None:
        return str(peer.status)
    return {
        RankState.ABSENT: "has not joined the group",
        RankState.RUNNING: "has not made this call; it is busy elsewhere"
        + (f" ({peer.reason})" if peer.reason else ""),
        RankState.LEFT: "has finished and left the group",
        RankState.FAILED: f"failed: {peer.reason}",
        RankState.DEAD: f"was lost: {peer.reason}",
    }[peer.state]


def timed_out(me: int, peers: Mapping[int, Peer], mine: Status, seconds: float) -> CommTimeoutError:
    late = (
        tuple(rank for rank in mine.waits_for if peers[rank].status is None or peers[rank].status != mine)
        or mine.waits_for
    )
    listing = "".join(f"\n  rank {rank}: {describe(peers[rank])}" for rank in sorted(peers) if rank != me)
    return CommTimeoutError(
        f"rank {me} waited {seconds:.1f} s in {mine} for {ranks_text(late)}:{listing}",
        waiting_for=late,
        remedy=_LATE,
    )
