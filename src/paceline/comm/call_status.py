"""Status of a rank: the call it is in, the ranks it waits for, and the judgement when the ranks' calls do not
fit together.

`CollectiveCall` is one collective call as this rank made it. `Status` is what a waiting rank lets its
peers read. `judge` takes the statuses of all ranks and decides whether to wait longer is pointless, and why.
Pure: reads no clock, no memory, no socket.
"""

from __future__ import annotations

import contextlib
import enum
import os
import sys
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import lru_cache
from types import FrameType
from typing import Any, Generic, TypeVar

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
from paceline.core.wording import ranks

T = TypeVar("T")

_AGREE = "every rank has to make the same collective calls in the same order, with the same shapes and dtypes"
_LATE = "look at the line where the late rank is; if it is only slow, give a larger timeout"
_BECAUSE_OF_OTHERS = ("PeerLostError", "GroupInterruptedError")
_caller = threading.local()
_FOLDERS = (os.path.dirname(__file__), os.path.dirname(torch.__file__))
_NOT_THE_USERS = (
    *(os.path.abspath(folder) + os.sep for folder in _FOLDERS),
    contextlib.__file__,  # its frames are those of Paceline's and torch's own context managers
)


@dataclass(slots=True)
class CollectiveCall:
    """One collective call: its number in this rank's sequence, what was called, and a number that must be
    equal on all ranks.

    Never changed once made; not frozen only because making one is on the fast path.
    """

    sequence: int
    text: str
    signature: int
    line: str = ""
    in_background: bool = False  # the rank's own thread may continue meanwhile

    def status(self, waits_for: Iterable[int]) -> Status:
        """Describe what this rank waits for in this call, for its peers to read."""
        waits, line = tuple(sorted(waits_for)), self.line or call_site()
        alone = self.in_background or in_background()
        return Status(self.text, line, waits, self.sequence, self.signature, ends_alone=alone)


@dataclass(slots=True)
class PlannedCall(Generic[T]):
    """A collective whose arguments are checked: the queue numbers it and runs `work(call, deadline)`. `text`
    must be equal on all ranks."""

    operation: str
    text: str
    work: Callable[[CollectiveCall, float], T]
    algorithm: str = ""


@lru_cache(maxsize=4096)
def signature_of(text: str) -> int:
    """Return a 64-bit number for a call's text; not Python's hash, which differs between processes."""
    data = text.encode()
    return zlib.crc32(data) | zlib.crc32(data, 0x9E3779B9) << 32


def call_site() -> str:
    """Return `file:line` of the innermost frame that is neither Paceline's nor torch's (which calls back)."""
    line: str | None = getattr(_caller, "line", None)
    if line is not None:
        return line
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_THE_USERS):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else "unknown line"


@contextlib.contextmanager
def on_behalf_of(line: str) -> Iterator[None]:
    """Attribute what this thread does to `line`, where another thread asked for it."""
    before = getattr(_caller, "line", None)
    _caller.line = line
    try:
        yield
    finally:
        _caller.line = before


def in_background() -> bool:
    """Return whether this thread works on behalf of another one, which may continue meanwhile."""
    return getattr(_caller, "line", None) is not None


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
    ends_alone: bool = False  # has its own deadline, or another thread of the rank continues

    def relabelled(self, labels: Sequence[int]) -> Status:
        """Name the ranks that are waited for by their labels."""
        return replace(self, waits_for=tuple(labels[rank] for rank in self.waits_for))

    def to_plain(self) -> list[Any]:
        return [self.text, self.line, list(self.waits_for), *astuple(self)[3:]]

    @classmethod
    def from_plain(cls, plain: list[Any]) -> Status:
        return cls(plain[0], plain[1], tuple(plain[2]), *plain[3:])

    def __str__(self) -> str:
        return f"{self.text} at {self.line}"


@dataclass(frozen=True, slots=True)
class PeerState:
    """State of one rank, as far as it is known."""

    state: RankState
    status: Status | None = None
    failure: Mapping[str, Any] | None = None  # for FAILED and DEAD: what happened there, see `failure_from`
    pid: int = 0

    @property
    def reason(self) -> str:
        return str(self.failure["text"]) if self.failure else ""


def judge(me: int, peers: Mapping[int, PeerState], stable: bool) -> PacelineError | None:
    """Return why this rank's wait cannot end well; None if it can. `stable`: no status changed lately."""
    # The order of the checks is the order of causes: one event (a rank dies) makes other ranks fail, which
    # makes others leave or wait in vain. Every rank judges for itself; ranks that see the same states report
    # the same cause.
    mine = peers[me].status
    if peers[me].state in (RankState.LEFT, RankState.FAILED):
        return UsageError(
            f"the context of rank {me} was closed by another thread while this one waited",
            remedy="wait for what is under way before closing",
        )
    if mine is None:
        return None
    # A rank that died published nothing; peers that noticed it earlier have FAILED because of it.
    dead = tuple(sorted(rank for rank, peer in peers.items() if peer.state is RankState.DEAD))
    if dead:
        details = "; ".join(f"rank {rank}: {peers[rank].reason or 'gone'}" for rank in dead)
        return PeerLostError(
            f"{ranks(dead, 'was', 'were')} lost ({details}) while rank {me} was in {mine}",
            ranks=dead,
            remedy="look at that rank's own log; a SIGKILL without a message is often the kernel's "
            "out-of-memory killer",
        )
    failed = [rank for rank, peer in peers.items() if peer.state is RankState.FAILED and rank != me]
    if failed:
        # A rank that failed by itself comes before those that failed because of another.
        first = min(
            failed, key=lambda rank: ((peers[rank].failure or {}).get("kind") in _BECAUSE_OF_OTHERS, rank)
        )
        return failure_of(first, peers[first], mine)
    # Calls are compared under one number only: a rank may be a call ahead (it only sends in this one) or
    # behind. What a rank called under a number never changes, so this needs no `stable`.
    if mine.sequence >= 0:
        posted = [peer.status for peer in peers.values() if peer.status is not None]
        if any(status.sequence == mine.sequence and status.signature != mine.signature for status in posted):
            return disagreement(me, peers, "ranks made different calls")
    # A rank that left may have done its part before, and this rank has not taken it up yet: the caller checks
    # once more before it raises this (`Watch.look`).
    gone = [rank for rank in mine.waits_for if peers[rank].state is RankState.LEFT]
    if gone and (not mine.any_of or len(gone) == len(mine.waits_for)):
        return disagreement(me, peers, f"{ranks(gone)} finished without taking part")
    # The statuses were read one after the other: only if none changes do they describe one moment. A rank
    # that computes has none and may still end any wait.
    if stable and me in _blocked(peers):
        return disagreement(me, peers, "ranks wait for each other in a circle")
    return None


def _blocked(peers: Mapping[int, PeerState]) -> set[int]:
    """Return the largest set of ranks in which no rank can continue: each waits for ranks of the set only (or
    for one it cannot do without)."""
    gone = {rank for rank, peer in peers.items() if peer.state is RankState.LEFT}
    blocked = {
        rank
        for rank, peer in peers.items()
        if peer.status is not None and not peer.status.ends_alone and rank not in gone
    }
    # Begin with all that wait, and release those whose wait a rank outside of the set can still end, until no
    # release frees another. What remains waits only for itself, or for ranks that will never come.
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


def failure_from(error: BaseException) -> dict[str, Any]:
    """Return what a failing rank leaves for its peers to read."""
    kind = type(error).__name__
    match error:
        case PeerLostError():
            facts: dict[str, Any] = {"ranks": list(error.ranks)}
        case CommTimeoutError():
            facts = {"waiting_for": list(error.waiting_for)}
        case CorruptDataError():
            facts = {"rank": error.rank}
        case DisagreementError():
            facts = {"calls": {str(rank): text for rank, text in error.calls.items()}}
        case GroupInterruptedError():
            facts = {}
        case _:
            return {"kind": kind, "text": f"{kind}: {error}"}
    return {"kind": kind, "text": error.message, **facts}


def failure_of(rank: int, peer: PeerState, mine: Status) -> PacelineError:
    """Make the error of a rank whose peer failed: the peer's finding if it concerns all, else its loss."""
    failure = peer.failure or {}
    if failure.get("kind") == "DisagreementError":
        calls = {int(key): str(text) for key, text in failure.get("calls", {}).items()}
        return DisagreementError(str(failure["text"]), calls=calls, remedy=_AGREE)
    if failure.get("kind") == "PeerLostError" and failure.get("ranks"):
        lost = tuple(int(lost) for lost in failure["ranks"])
        return PeerLostError(
            f"{ranks(lost, 'was', 'were')} lost while this rank was in {mine}; "
            f"rank {rank} found: {peer.reason}",
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


def disagreement(me: int, peers: Mapping[int, PeerState], headline: str) -> DisagreementError:
    return DisagreementError(
        f"{headline}, as rank {me} sees it:",
        calls={rank: describe(peer) for rank, peer in peers.items()},
        remedy=_AGREE,
    )


def describe(peer: PeerState) -> str:
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


def timed_out(me: int, peers: Mapping[int, PeerState], mine: Status, seconds: float) -> CommTimeoutError:
    late = tuple(rank for rank in mine.waits_for if peers[rank].status != mine) or mine.waits_for
    listing = "".join(f"\n  rank {rank}: {describe(peers[rank])}" for rank in sorted(peers) if rank != me)
    return CommTimeoutError(
        f"rank {me} waited {seconds:.1f} s in {mine} for {ranks(late)}:{listing}",
        waiting_for=late,
        remedy=_LATE,
    )
