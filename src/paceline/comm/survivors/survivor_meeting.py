"""Where the processes of a group meet again after some of them have died, without a supervisor.

    arrange    while the group stands: every process listens, and all learn where
    meet       each survivor looks who lives (process_liveness.py) and forms a group with exactly these; the
               lowest rank serves the rendezvous (view_group.py). Survivors that have seen different deaths do
               not find each other: their secrets differ. Each looks again until all have seen the same

A process that lives is waited for: it may still compute, and finds the failure at its next exchange. None is
left behind alive, so two groups of one run never train side by side. A machine that does not answer at all
may be down or cut off: the larger part of the processes continues without it, of two equal parts the one that
has the lowest rank.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Final, final

from paceline.comm.context import DistributedContext
from paceline.comm.rendezvous.environment import LOCAL_HOST
from paceline.comm.rendezvous.view_group import ViewGroup, ViewPeer, open_view
from paceline.comm.survivors.process_liveness import (
    LivenessAnswer,
    LivenessListener,
    LivingProcess,
    look,
)
from paceline.comm.transport.tcp.mesh_handshake import source_address
from paceline.core.errors import GROUP_FAILURES, PeerLostError, RendezvousError
from paceline.core.host import host_identity, host_name
from paceline.core.listen_address import ListenAddress
from paceline.core.process_state import start_time
from paceline.core.wording import ranks

SILENT_SECONDS: Final = 10.0
"""How long a process may be silent before the others decide about it."""
_AGAIN_SECONDS: Final = 0.1


def survivors(members: Sequence[int], answers: Mapping[int, LivenessAnswer], mine: int) -> tuple[int, ...]:
    """Return the ranks of the next group, from what rank `mine` has seen of the other members."""
    present = [rank for rank in members if rank == mine or answers[rank] == "alive"]
    silent = [rank for rank in members if rank != mine and answers[rank] == "silent"]
    larger = len(present) > len(silent) or (
        len(present) == len(silent) and min(present) < min(silent, default=mine)
    )
    if silent and not larger:
        raise PeerLostError(
            f"rank {mine} reaches {ranks(present, all_named=True)} and does not reach "
            f"{ranks(silent, all_named=True)}: whether these are dead or cut off cannot be seen, and two "
            "groups of one run must not train side by side",
            ranks=silent,
            remedy="see to the machines and the network between them; then start again from a checkpoint",
        )
    return tuple(present)


@final
class SurvivorMeeting:
    """One process's part in meeting again; made by `arrange`."""

    def __init__(
        self,
        processes: Sequence[LivingProcess],
        mine: int,
        secret: bytes,
        door: socket.socket,
        stack: ExitStack,
        timeout: float,
    ) -> None:
        self._processes = {process.rank: process for process in processes}
        self._mine, self._secret, self._door, self._timeout = mine, secret, door, timeout
        self._stack = stack  # closes what this process listens at
        self._first_size = len(processes)
        self._host = self._processes[mine].member.host
        self._silent_since: dict[int, float] = {}

    @classmethod
    def arrange(cls, context: DistributedContext, master: str, timeout: float) -> SurvivorMeeting:
        """Listen, and exchange with all ranks of `context` where; a collective call. `master` is an address
        by which the ranks have found each other."""
        listening = ListenAddress.from_environment(os.environ)
        address = LOCAL_HOST
        if context.transport.topology.hosts > 1:
            address = listening.address(source_address(master) or master)
        with ExitStack() as stack:
            door = stack.enter_context(listening.open(address))
            alive = stack.enter_context(listening.open(address))
            rank = context.labels[context.rank]
            me = LivingProcess(
                ViewPeer(rank, os.getpid(), host_identity(), host_name(), (address, door.getsockname()[1])),
                start_time(os.getpid()),
                alive.getsockname()[1],
            )
            gathered = context.all_gather([me.to_plain(), secrets.token_hex(32)])
            secret = bytes.fromhex(str(gathered[0][1]))
            stack.callback(LivenessListener(alive, secret, rank).close)
            return cls(
                [LivingProcess.from_plain(plain) for plain, _ in gathered],
                rank,
                secret,
                door,
                stack.pop_all(),
                timeout,
            )

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that are not known to be gone, this one among them."""
        return tuple(sorted(self._processes))

    def gone(self) -> tuple[int, ...]:
        """Return the ranks of the last group whose processes are gone now."""
        answers = self._look()
        return tuple(rank for rank, answer in sorted(answers.items()) if answer == "gone")

    def meet(self) -> DistributedContext:
        """Form a group with all who live, and return this process's context in it; `labels` are the ranks
        that they had at first. The group before must be closed."""
        begun = time.monotonic()
        while True:
            left = begun + self._timeout - time.monotonic()
            members = survivors(self.ranks, self._look(), self._mine)
            try:
                context = self._form(members, max(left, 0.001))
            except (RendezvousError, *GROUP_FAILURES) as error:
                # A process died while the group formed, or has seen another death than this one: look again.
                if left <= 0:
                    raise RendezvousError(
                        f"the processes that are left did not meet within {self._timeout:g} s: {error}",
                        remedy="every process that lives has to come here; end one that hangs "
                        f"({self._described(members)}), and try again",
                    ) from error
                time.sleep(_AGAIN_SECONDS / 10)
                continue
            self._processes = {rank: self._processes[rank] for rank in members}
            return context

    def close(self) -> None:
        """Stop listening: the others see this process as gone."""
        self._stack.close()

    def _look(self) -> dict[int, LivenessAnswer]:
        """Return what the others answer. A process that has not been silent for long counts as one that
        lives: it is waited for."""
        others = [process for rank, process in self._processes.items() if rank != self._mine]
        answers, now = look(others, self._secret, self._host), time.monotonic()
        silent = [rank for rank, answer in answers.items() if answer == "silent"]
        self._silent_since = {rank: self._silent_since.get(rank, now) for rank in silent}
        patient = [rank for rank, since in self._silent_since.items() if now - since < SILENT_SECONDS]
        return answers | dict.fromkeys(patient, "alive")

    def _form(self, members: tuple[int, ...], seconds: float) -> DistributedContext:
        view = ViewGroup(
            self._first_size - len(members),
            members.index(self._mine),
            [self._processes[rank].member for rank in members],
            hmac.new(self._secret, json.dumps(members).encode(), hashlib.sha256).digest(),
        )
        with self._watched(members) as changed:
            transport, links = open_view(view, self._door, cancelled=changed, forming_seconds=seconds)
        return DistributedContext.from_transport(transport, timeout=self._timeout, links=links)

    @contextmanager
    def _watched(self, members: tuple[int, ...]) -> Iterator[threading.Event]:
        """Yield an event that is set when one of `members` can no longer come."""
        changed, done = threading.Event(), threading.Event()

        def watch() -> None:
            while not done.wait(_AGAIN_SECONDS):
                answers = self._look()
                if any(answers.get(rank, "alive") != "alive" for rank in members):
                    changed.set()
                    return

        if len(members) == 1:
            yield changed
            return
        watcher = threading.Thread(target=watch, name="paceline-survivors", daemon=True)
        watcher.start()
        try:
            yield changed
        finally:
            done.set()
            watcher.join()

    def _described(self, members: Sequence[int]) -> str:
        others = [self._processes[rank].member for rank in members if rank != self._mine]
        return "; ".join(f"rank {one.slot} is process {one.pid} on {one.hostname}" for one in others)
