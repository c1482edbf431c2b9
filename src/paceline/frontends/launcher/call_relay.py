"""The launcher's end of the calls that its ranks make together (joint_calls.py): which rank leads, what came
of it, and which ranks still wait for that.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, final

from paceline.core import fd_messages
from paceline.engines.local import fork_server_client
from paceline.engines.local.script_ranks import ScriptRank


@final
@dataclass(eq=False)
class _JointCall:
    """One call as the launcher knows it. `folder`: where its run is. `outcome`: the file of its result, or of
    the error that it raised; -1 before. `stopped`: it ended early because its ranks were to end."""

    folder: str = ""
    outcome: int = -1
    ok: bool = False
    stopped: bool = False
    waiting: list[ScriptRank] = field(default_factory=list)


@final
class CallRelay:
    """What the launcher knows of its ranks' calls."""

    def __init__(self) -> None:
        self._calls: dict[int, _JointCall] = {}
        self._runs: dict[int, str] = {}  # folders of runs that ranks prepared outside of joint calls
        self.keeps_survivors = False
        self._needed: frozenset[int] = frozenset()  # ranks that survivors cannot go on without
        self._one_of: frozenset[int] = frozenset()  # ranks of which survivors need one
        self.losses: list[dict[str, Any]] = []  # of the start before, for the ranks of this one
        self._inside: dict[int, int] = {}

    @property
    def is_under_way(self) -> bool:
        """Return whether a rank has begun a call and has not got its result. The ranks have no group then, so
        a rank that is lost anywhere in the script can run it again alone, up to this call."""
        return bool(self._inside)

    @property
    def has_failed(self) -> bool:
        """Return whether a call raised: the script would do the same again."""
        return any(call.outcome >= 0 and not (call.ok or call.stopped) for call in self._calls.values())

    def handle(self, rank: ScriptRank, message: Mapping[str, Any], descriptors: tuple[int, ...]) -> None:
        """Answer what a rank asks."""
        match message["kind"]:
            case "call":
                self._begin(rank, int(message["number"]))
            case "folder":
                self._calls[int(message["number"])].folder = str(message["path"])
            case "outcome":
                self._inside.pop(rank.rank, None)
                call = self._calls[int(message["number"])]
                call.ok, call.stopped = bool(message["ok"]), bool(message["stopped"])
                self._end(int(message["number"]), descriptors[0])
            case "run":
                self._send(rank, {"kind": "run", "folder": self._runs.get(int(message["number"]), "")})
            case "run_folder":
                self._runs[int(message["number"])] = str(message["path"])
            case "keep_survivors":
                self.keeps_survivors, self._needed = True, frozenset(map(int, message["needed"]))
                self._one_of = frozenset(map(int, message["one_of"]))
            case "losses":
                self._send(rank, {"kind": "losses", "losses": self.losses})

    def leaves_survivors(self, failed: Iterable[int]) -> bool:
        """Return whether the other ranks go on without those that failed."""
        lost = frozenset(failed)
        too_many = bool(self._one_of) and self._one_of <= lost
        return self.keeps_survivors and not too_many and self._needed.isdisjoint(lost)

    def forget(self, rank: ScriptRank) -> None:
        """Note that a rank has ended."""
        self._inside.pop(rank.rank, None)
        for call in self._calls.values():
            call.waiting = [one for one in call.waiting if one is not rank]

    def begin_attempt(self) -> None:
        """Prepare for ranks that all start again: they count their calls anew. Results stay, for they would
        come out the same; that of a call which stopped early does not, and its run is continued."""
        self._inside.clear()
        self.keeps_survivors = False  # these ranks have not asked for it
        for call in self._calls.values():
            call.waiting = []
            if call.outcome >= 0 and (call.stopped or not call.ok):
                os.close(call.outcome)
                call.outcome = -1

    def close(self) -> None:
        for call in self._calls.values():
            if call.outcome >= 0:
                os.close(call.outcome)
        self._calls.clear()

    def _begin(self, rank: ScriptRank, number: int) -> None:
        call = self._calls.setdefault(number, _JointCall())
        self._inside[rank.rank] = number
        if call.outcome >= 0:
            self._deliver(rank, number, call)
        elif rank.rank:
            call.waiting.append(rank)
            self._send(rank, {"kind": "follow"})
        else:
            server = fork_server_client.fork_server()
            control, watch = server.lend()
            fields = {"kind": "lead", "folder": call.folder, "server": server.pid}
            self._send(rank, fields, (control, watch))
            server.lent -= 1  # the rank's end does not concern the server: it is this process's

    def _end(self, number: int, outcome: int) -> None:
        call = self._calls[number]
        call.outcome = outcome
        waiting, call.waiting = call.waiting, []
        for rank in waiting:
            self._deliver(rank, number, call)

    def _deliver(self, rank: ScriptRank, number: int, call: _JointCall) -> None:
        self._inside.pop(rank.rank, None)
        self._send(rank, {"kind": "outcome", "number": number, "ok": call.ok}, (call.outcome,))

    @staticmethod
    def _send(rank: ScriptRank, body: Mapping[str, Any], descriptors: tuple[int, ...] = ()) -> None:
        # A rank that is gone is noticed by its end.
        with contextlib.suppress(OSError):
            fd_messages.send(rank.link, body, descriptors)
