"""A machine that joined a job: gets the payload, starts workers when asked, tells how they end.

It ends with the job, and its workers end with it. What the supervisor sends starts code here, so it is
carried out only where it carries the tag of a session that was keyed by the job's secret: who sits on the way
and passes the proof on cannot add a Granted, a Piece or a Start. When the connection is
cut, workers train on and the agent reconnects and offers again; when the supervisor stays away for the job's
patience, workers leave by themselves, and the agent after them. Must not decide anything about the job.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import selectors
import signal
import time
from collections.abc import Callable
from typing import Any, Final, final

from paceline.core.control.channel import Channel
from paceline.core.control.host import host_identity, host_name
from paceline.core.control.messages import (
    End,
    Exited,
    Granted,
    LookAt,
    Message,
    Notice,
    Offer,
    Piece,
    Seen,
    Start,
)
from paceline.core.control.unheard import SUPERVISOR_LOST_EXIT_CODE
from paceline.core.errors import PacelineError, RendezvousError, WireError
from paceline.core.listening import ANY_PORT, Listening
from paceline.core.system_calls import memory_file
from paceline.core.tls import Tls
from paceline.elastic.shell.deaths import how_it_died
from paceline.elastic.shell.look import LOOK_SECONDS, Look
from paceline.elastic.shell.seats import is_stopped
from paceline.elastic.tools import open_channel
from paceline.engines.local import client, launch
from paceline.engines.local.memory_kill import MemoryWatch
from paceline.engines.local.worker import Worker

_CONNECT_SECONDS: Final = 10.0
_RECONNECT_SECONDS: Final = 3.0
_AWAY_SECONDS: Final = 60.0
_SAVE_SECONDS: Final = 600.0  # after which workers that do not end without a supervisor are ended
_PAUSE_SECONDS: Final = 0.2
_LONGEST_PAUSE_SECONDS: Final = 10.0
_END_SECONDS: Final = 30.0
_EXIT_SECONDS: Final = 0.5  # within which the fork server says how a process ended


@final
class Agent:
    """One machine's part in a job. `run` returns an exit code: 0 it is over or this machine left, 1 this
    machine is refused, 76 the supervisor is gone."""

    def __init__(
        self,
        address: tuple[str, int],
        secret: bytes,
        workers: int,
        tls: Tls | None = None,
        say: Callable[[str], object] = lambda text: None,
        listening: Listening = ANY_PORT,
    ) -> None:
        self._address = address
        self._secret = secret
        self._offered = workers
        self._tls = tls
        self._say = say
        self._listening = listening
        self._reached_at = ""
        self._channel: Channel | None = None
        self._cut = ""
        self._attempts = 0  # connections since the supervisor last granted anything
        self._away_since: float | None = None
        self._selector = selectors.DefaultSelector()
        self._workers: dict[int, Worker] = {}
        self._looks: dict[int, Look] = {}
        self._missed: dict[int, float] = {}  # since when a process is gone of which nobody said how it ended
        self._memory = MemoryWatch()
        self._unsent: list[Message] = []
        self._number = 0
        self._granted: Granted | None = None
        self._payload = -1
        self._complete = False
        self._waiting: list[Start] = []
        self._ended: End | None = None
        self._going = False

    def run(self) -> int:
        """Until the job is over."""
        try:
            self._connect(_CONNECT_SECONDS)
            while self._ended is None:
                if self._going and not self._workers:
                    self._tell(self._offer(0))
                    self._say("this machine has left the job")
                    return 0
                if self._channel is None and not self._reconnect():
                    self._say("the supervisor is gone and the workers have ended")
                    return SUPERVISOR_LOST_EXIT_CODE
                self._turn(1.0)
            what = "this machine is refused" if self._ended.code else "the job has ended"
            self._say(f"{what}: {self._ended.reason}")
            self._let_end()
            return self._ended.code
        finally:
            self._close()

    def _connect(self, seconds: float) -> None:
        opened = open_channel(self._address, self._secret, self._tls, seconds)
        self._attempts += 1
        opened.send(self._offer(self._offered))
        for message in self._unsent:
            opened.send(message)
        self._unsent.clear()
        self._channel = opened
        self._reached_at = self._listening.address(opened.own_host())
        self._selector.register(opened, selectors.EVENT_READ, None)

    def _offer(self, workers: int) -> Offer:
        number = self._number if self._complete else 0
        return Offer(
            workers=workers, host=host_identity(), hostname=host_name(), pid=os.getpid(), agent=number
        )

    def leave(self) -> None:
        """Have the workers leave at the next step boundary, then leave. From a signal handler, say."""
        self._going = True
        for worker in self._workers.values():
            worker.signal(signal.SIGTERM)

    def _reconnect(self) -> bool:
        """Look for the supervisor; False when it stayed away and no worker is left that could need it."""
        if self._away_since is None:
            self._away_since = time.monotonic()
            self._say(f"the connection to the supervisor is cut: {self._cut}")
        given = self._granted.options["options"] if self._granted is not None else {}
        patience = float(given.get("patience", _AWAY_SECONDS))
        # One that takes the connection and closes it again without a word is not asked 50 times a second.
        again_at = time.monotonic() + self._back_off()
        while True:
            if time.monotonic() >= again_at:
                try:
                    self._connect(_RECONNECT_SECONDS)
                    return True
                except RendezvousError:
                    again_at = time.monotonic() + _PAUSE_SECONDS
            self._turn(_PAUSE_SECONDS)
            away = time.monotonic() - self._away_since
            if not self._workers and (away > patience or self._going):
                return False
            if away > patience + _SAVE_SECONDS:
                for worker in self._workers.values():
                    worker.kill()

    def _back_off(self) -> float:
        if not self._attempts:
            return 0.0
        return min(_PAUSE_SECONDS * 2.0 ** min(self._attempts, 16), _LONGEST_PAUSE_SECONDS)

    def _turn(self, seconds: float) -> None:
        if not self._selector.get_map():
            time.sleep(seconds)
            return
        for key, _ in self._selector.select(LOOK_SECONDS if self._looks else seconds):
            if key.data is None:
                self._listen()
            else:
                self._attend(key.data)
        for member, worker in list(self._workers.items()):
            if worker.pid:
                self._memory.note(worker.pid)
            if worker.has_ended and worker.pid:
                self._miss(member)
        for member, look in list(self._looks.items()):
            if look.is_over(time.monotonic()):
                self._tell_seen(member)

    def _listen(self) -> None:
        opened = self._channel
        if opened is None:
            return
        opened.flush()
        for _, message in opened.receive():
            self._take(message)
        if opened.closed:
            self._cut = opened.closed
            self._selector.unregister(opened)
            opened.close()
            self._channel = None

    def _take(self, message: Message) -> None:
        match message:
            case Granted():
                self._grant(message)
            case Piece():
                self._piece(message)
            case Start():
                if not self._complete:
                    self._waiting.append(message)
                elif not self._going:
                    self._start(message)
            case LookAt(member=member, probe=True):
                self._probe(member)
            case Notice(text=text):
                self._say(text)
            case LookAt(member=member):
                if member in self._workers:
                    self._looks[member] = Look(self._workers[member], time.monotonic())
                    self._looks[member].wake()
            case End(member=-1):
                self._ended = message
            case End(member=member):
                if member in self._workers:
                    self._workers[member].kill()
            case _:
                raise WireError(f"the supervisor sent a {message.kind} to an agent")

    def _grant(self, granted: Granted) -> None:
        where = f"{self._address[0]}:{self._address[1]}"
        if self._granted is None:
            self._say(f"joined the job at {where}, with {self._offered} workers")
        else:
            self._say("the supervisor is back")
        self._attempts, self._away_since = 0, None
        again = self._complete and self._granted is not None and granted.digest == self._granted.digest
        self._granted, self._number = granted, granted.agent
        if again:
            return
        if self._payload >= 0:
            os.close(self._payload)
        self._payload = memory_file("paceline-payload")
        self._complete = False
        self._waiting.clear()  # of an earlier connection

    def _piece(self, piece: Piece) -> None:
        granted = self._granted
        if granted is None or self._complete or piece.offset + len(piece.data) > granted.payload_bytes:
            raise WireError("a piece of a payload that nobody announced")
        os.pwrite(self._payload, piece.data, piece.offset)
        if piece.offset + len(piece.data) < granted.payload_bytes:
            return
        if _digest(self._payload) != granted.digest:
            raise WireError("the job's payload was damaged on the way", remedy="join again")
        self._complete = True
        for start in self._waiting:
            self._start(start)
        self._waiting.clear()

    def _start(self, start: Start) -> None:
        assert self._granted is not None
        given = self._granted.options
        own: dict[str, Any] = {
            **given["options"],
            "member": start.member,
            "slot": start.slot,
            "attempt": start.attempt,
            "address": list(self._address),
            "secret": self._secret.hex(),
            "folder": "",
            "tls": [str(p) for p in vars(self._tls).values()] if self._tls is not None else None,
            # The supervisor reaches this machine at the address of the control connection: so do its members.
            "listen": self._reached_at,
            "ports": self._listening.ports or given["options"].get("ports", ""),
        }
        order = launch.order_here(given["entry"], 1, tuple(given["preload"]), given["threads"], own)
        order = dataclasses.replace(
            order, first_rank=start.slot, world_size=max(1, self._offered), outlives_server=True
        )
        try:
            worker = Worker.start(order, self._payload)
        except (PacelineError, OSError) as error:
            self._tell(Exited(member=start.member, status=1, reason=f"it could not be started: {error}"))
            return
        self._workers[start.member] = worker
        self._selector.register(worker, selectors.EVENT_READ, start.member)

    def _miss(self, member: int) -> None:
        """Its process ended: the fork server says how, unless it is gone itself."""
        since = self._missed.setdefault(member, time.monotonic())
        if time.monotonic() - since >= _EXIT_SECONDS:
            self._attend(member, gone=True)

    def _attend(self, member: int, *, gone: bool = False) -> None:
        worker = self._workers[member]
        worker.take()
        if worker.status is None and not worker.done and not gone:
            return
        self._missed.pop(member, None)
        worker.end_family()
        memory = False
        if member in self._looks:
            self._tell_seen(member)
        if worker.refusal is not None:
            reason, status = f"it could not be started: {worker.refusal.message}", 1
        else:
            status = worker.status if worker.status is not None else -9
            memory, reason = how_it_died(worker, status, self._memory)
        self._selector.unregister(worker)
        worker.close()
        del self._workers[member]
        self._tell(Exited(member=member, status=status, reason=reason, memory=memory))

    def _probe(self, member: int) -> None:
        worker = self._workers.get(member)
        stopped = is_stopped(worker.pid) if worker is not None and worker.pid else None
        if stopped is not None:
            self._tell(Seen(member=member, state="", frames=(), stopped=stopped))

    def _tell_seen(self, member: int) -> None:
        look = self._looks.pop(member)
        self._tell(Seen(member=member, state=look.state, frames=tuple(look.frames())))

    def _tell(self, message: Message) -> None:
        if self._channel is None or self._channel.closed:
            self._unsent.append(message)
        else:
            self._channel.send(message)

    def _let_end(self) -> None:
        """Workers were dismissed by the supervisor; those that do not end are ended."""
        limit = time.monotonic() + _END_SECONDS
        while self._workers and time.monotonic() < limit:
            self._turn(0.2)

    def _close(self) -> None:
        for worker in self._workers.values():
            worker.kill()
        for worker in self._workers.values():
            worker.close()
        if self._channel is not None:
            self._channel.close()
        self._selector.close()
        if self._payload >= 0:
            os.close(self._payload)
        client.shutdown()


def _digest(descriptor: int) -> str:
    digest = hashlib.sha256()
    offset = 0
    while data := os.pread(descriptor, 1 << 20, offset):
        digest.update(data)
        offset += len(data)
    return digest.hexdigest()
