"""Control between the ranks of a group that does not share memory: small messages, who does what, who is
gone.

One thread reads all connections, so questions are answered and endings are noticed also while the rank's
own code is busy. A connection that ends after a BYE is a rank that left; after a FAILURE, one that failed;
without a word, one that died. Statuses are pushed when they change; a rank that has none is asked at which
line it is. Knows frames and statuses, not collectives.
"""

from __future__ import annotations

import copy
import json
import logging
import os
import selectors
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from paceline.comm.calls import Peer, RankState, Status, failure_from
from paceline.comm.transport.base import ANY_SOURCE, Message
from paceline.comm.transport.link import Frame, Kind, Link
from paceline.core.entrance import Proven
from paceline.core.errors import GroupInterruptedError, InternalError, PacelineError, UsageError

_log = logging.getLogger("paceline.comm")

_FAREWELL_SECONDS = 1.0
_FAILURE_SECONDS = 0.3
# Who is told to go waits for nobody: the peers were told before, and somebody tells them otherwise.
_INTERRUPTED_SECONDS = 0.005
# Longer than a judgement needs statuses to stand still, so that answers about lines do not disturb it.
_ASK_SECONDS = 2.5
_PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep


class Mesh:
    """This rank's connections to all others. `names[rank]` says which process that is, for messages."""

    def __init__(self, rank: int, connections: Mapping[int, Proven], names: Mapping[int, str]) -> None:
        self.rank = rank
        self.world_size = len(connections) + 1
        self.on_change: Callable[[], None] = lambda: None
        self._names = dict(names)
        self._links = {peer: Link(proven) for peer, proven in connections.items()}
        self._changed = threading.Condition()
        self._version = 0
        self._peers = {peer: Peer(RankState.RUNNING) for peer in self._links}
        self._mine: Status | None = None
        self._asked: dict[int, float] = {}
        self._data: dict[int, deque[Frame]] = {peer: deque() for peer in self._links}
        self._told: set[tuple[Kind, int, int]] = set()
        self._mailbox: deque[Message] = deque()
        self._heard: set[int] = set()
        self.notes: dict[str, bytes] = {}
        """What the ranks told each other by `note`."""
        self._over: PacelineError | None = None
        self._ended = False
        self._closing = threading.Lock()
        self.departures = 0
        """Grows whenever a peer is gone, in good order or not."""
        self._stop = False
        self._dirty: deque[int] = deque()
        self._selector = selectors.DefaultSelector()
        self._wake_in, self._wake_out = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._selector.register(self._wake_in, selectors.EVENT_READ)
        self._open = set(self._links)
        for peer, link in self._links.items():
            self._selector.register(link.sock, selectors.EVENT_READ, peer)
        self._thread = threading.Thread(target=self._run, name=f"paceline-mesh-{rank}", daemon=True)
        self._thread.start()

    # sending

    def send(self, peer: int, kind: Kind, pieces: Sequence[memoryview] = (), **fields: int) -> int:
        """Puts a frame on its way; its memory is free when `sent(peer, mark)` holds for the returned mark."""
        link = self._links[peer]
        mark = link.put(kind, pieces, **fields)
        if link.waiting:
            self._dirty.append(peer)
            self._wake()
        return mark

    def sent(self, peer: int, mark: int) -> bool:
        return self._links[peer].sent_bytes >= mark

    def settle(self, peer: int) -> None:
        """What still waits to be sent to `peer` no longer needs its senders' memory."""
        self._links[peer].settle()

    def note(self, key: str, value: bytes) -> None:
        """Shows a value to all ranks under a key, once: in `notes`."""
        self.notes[key] = value
        for peer in self._running():
            self.send(peer, Kind.NOTE, [memoryview(key.encode() + b"\0" + value)])

    # waiting

    @property
    def version(self) -> int:
        """Grows with everything that arrives or completes."""
        return self._version

    def wait(self, seen: int, seconds: float) -> None:
        """Returns when something has happened since `version` was `seen`, or after `seconds`."""
        with self._changed:
            if self._version == seen:
                self._changed.wait(seconds)

    def notify(self) -> None:
        with self._changed:
            self._version += 1
            self._changed.notify_all()
        self.on_change()

    def check_open(self) -> None:
        if self._over is not None:
            raise copy.copy(self._over)

    # what arrived

    def next_data(self, peer: int) -> Frame | None:
        """The oldest frame of a collective from `peer` that nobody has taken."""
        queue = self._data[peer]
        return queue.popleft() if queue else None

    def told(self, kind: Kind, peer: int, number: int) -> bool:
        """Whether `peer` has said ACCEPT or DONE of a bulk message; asked until it has, then no more."""
        with self._changed:
            found = (kind, peer, number) in self._told
            self._told.discard((kind, peer, number))
        return found

    def next_message(self, source: int, tag: int | None) -> Message | None:
        with self._changed:
            for index, message in enumerate(self._mailbox):
                if source in (ANY_SOURCE, message.source) and tag in (None, message.tag):
                    del self._mailbox[index]
                    return message
        return None

    # the outlook of watch.Watch

    def post(self, status: Status | None) -> None:
        if status == self._mine:
            return
        self._mine = status
        body = b"" if status is None else json.dumps(status.to_plain()).encode()
        for peer in self._running():
            self.send(peer, Kind.STATUS, [memoryview(body)])

    def posted(self) -> Status | None:
        """What this rank itself has posted; None while it does not wait."""
        self.check_open()
        return self._mine

    def peers(self) -> dict[int, Peer]:
        self.check_open()
        with self._changed:
            found = dict(self._peers)
        now = time.monotonic()
        for peer, known in found.items():
            silent = known.state is RankState.RUNNING and known.status is None
            if silent and now - self._asked.get(peer, -_ASK_SECONDS) >= _ASK_SECONDS:
                self._asked[peer] = now
                self.send(peer, Kind.WHERE)
        found[self.rank] = Peer(RankState.RUNNING, self._mine, None, os.getpid())
        return found

    def _running(self) -> list[int]:
        return [peer for peer, known in self._peers.items() if known.state is RankState.RUNNING]

    # life

    @property
    def interrupted(self) -> bool:
        return isinstance(self._over, GroupInterruptedError)

    def interrupt(self, error: GroupInterruptedError) -> None:
        """Ends all waits on the mesh with `error` and tells the peers that this rank goes; `close` is still
        due."""
        with self._closing:
            if self._over is None:
                self._over = error
                self._tell_all(error)
        self.notify()

    def close(self, error: BaseException | None = None) -> None:
        """Says goodbye, or why this rank fails, and gives the others a moment to hear what came before."""
        with self._closing:
            if self._ended:
                return
            self._ended = True
            if self.interrupted:
                patience = _INTERRUPTED_SECONDS
            else:
                patience = _FAREWELL_SECONDS if error is None else _FAILURE_SECONDS
                self._over = UsageError("this group is closed", remedy="make a new DistributedContext")
                self._tell_all(error)
        self.notify()
        end = time.monotonic() + patience
        while set(self._running()) - self._heard and (left := end - time.monotonic()) > 0:
            seen = self._version
            if set(self._running()) - self._heard:
                self.wait(seen, min(left, 0.05))
        self._stop = True
        self._wake()
        self._thread.join()
        for link in self._links.values():
            link.close()
        self._selector.close()
        os.close(self._wake_in)
        os.close(self._wake_out)

    def _tell_all(self, error: BaseException | None) -> None:
        note = b"" if error is None else json.dumps(failure_from(error)).encode()
        for peer in self._running():
            self.settle(peer)
            self.send(peer, Kind.BYE if error is None else Kind.FAILURE, [memoryview(note)] if note else ())

    # the reading thread

    def _wake(self) -> None:
        try:
            os.write(self._wake_out, b"\0")
        except BlockingIOError:
            return  # full of wake-ups already

    def _run(self) -> None:
        try:
            while not self._stop:
                self._turn()
        except BaseException as error:
            _log.exception("rank %d: the reading thread failed", self.rank)
            self._over = InternalError(f"the thread that reads the other ranks' messages failed: {error!r}")
            self.notify()

    def _turn(self) -> None:
        happened = False
        for key, events in self._selector.select():
            if key.data is None:
                self._drain_wake()
                continue
            peer = key.data
            if events & selectors.EVENT_WRITE:
                self._links[peer].flush()
                self._want_write(peer)
                happened = True
            if events & selectors.EVENT_READ:
                happened = True
                self._read(peer)
        if happened:
            self.notify()

    def _drain_wake(self) -> None:
        os.read(self._wake_in, 4096)
        while self._dirty:
            self._want_write(self._dirty.popleft())

    def _want_write(self, peer: int) -> None:
        link = self._links[peer]
        if peer in self._open:
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if link.waiting else 0)
            self._selector.modify(link.sock, wanted, peer)

    def _read(self, peer: int) -> None:
        link = self._links[peer]
        try:
            frames, ended = link.read()
            for frame in frames:
                self._handle(peer, frame)
        except Exception as error:
            # Of whatever kind (a frame can be too large for the memory): it is about this peer alone.
            self._lost(peer, f"{self._names[peer]} sent what is not a message of Paceline: {error}")
            ended = True
        if ended:
            self._open.discard(peer)
            self._selector.unregister(link.sock)
            self._lost(peer, f"the connection to {self._names[peer]} ended")
            link.close()

    def _lost(self, peer: int, reason: str) -> None:
        with self._changed:
            if self._peers[peer].state is RankState.RUNNING:
                self._peers[peer] = Peer(RankState.DEAD, None, {"kind": "", "text": reason})
                self.departures += 1

    def _handle(self, peer: int, frame: Frame) -> None:
        match frame.kind:
            case Kind.DATA | Kind.BULK:
                self._data[peer].append(frame)
            case Kind.ACCEPT | Kind.DONE:
                with self._changed:
                    self._told.add((frame.kind, peer, frame.number))
            case Kind.MESSAGE:
                with self._changed:
                    self._mailbox.append(Message(peer, frame.sequence, memoryview(frame.body)))
            case Kind.STATUS:
                self._set(
                    peer,
                    Peer(
                        RankState.RUNNING, Status.from_plain(json.loads(frame.body)) if frame.body else None
                    ),
                )
            case Kind.WHERE:
                self.send(peer, Kind.HERE, [memoryview(_main_line().encode())])
            case Kind.HERE:
                with self._changed:
                    known = self._peers[peer]
                    if known.state is RankState.RUNNING and known.status is None:
                        text = frame.body.decode(errors="replace")
                        self._peers[peer] = Peer(RankState.RUNNING, None, {"kind": "", "text": text})
            case Kind.FAILURE:
                self._set(peer, Peer(RankState.FAILED, None, _checked_failure(json.loads(frame.body))))
                self.send(peer, Kind.HEARD)
            case Kind.BYE:
                self._set(peer, Peer(RankState.LEFT))
                self.send(peer, Kind.HEARD)
            case Kind.HEARD:
                self._heard.add(peer)
            case Kind.NOTE:
                key, _, value = bytes(frame.body).partition(b"\0")
                with self._changed:
                    self.notes[key.decode()] = value

    def _set(self, peer: int, known: Peer) -> None:
        with self._changed:
            if self._peers[peer].state is RankState.RUNNING:
                self._peers[peer] = known
                self.departures += known.state is not RankState.RUNNING


def _checked_failure(plain: Any) -> dict[str, Any]:
    if not isinstance(plain, dict) or not isinstance(plain.get("text"), str):
        raise ValueError("a failure notice without a text")
    return plain


def _main_line() -> str:
    """Where this process's main thread is: its innermost line outside Paceline."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    return "at an unknown line" if frame is None else f"at {frame.f_code.co_filename}:{frame.f_lineno}"
