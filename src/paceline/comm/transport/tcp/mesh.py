"""Control connections between the ranks of a group that does not share memory: small messages, what each rank
does, which ranks are gone.

One thread reads all connections, so questions are answered and endings are noticed also while the rank's
own code is busy. A connection that ends after a BYE is a rank that left; after a FAILURE, one that failed;
without a word, one that died. Statuses are pushed when they change; a rank that has none is asked at which
line it is.
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

from paceline.comm.call_status import PeerState, RankState, Status, failure_from
from paceline.comm.transport.base import ReceivedMessage, take_first
from paceline.comm.transport.tcp.framed_socket import Frame, FramedSocket, FrameKind
from paceline.comm.transport.wait_watch import OpenWaits, StatusChannel
from paceline.core.authenticated_listener import AuthenticatedSocket
from paceline.core.errors import GroupInterruptedError, InternalError, PacelineError, UsageError

_log = logging.getLogger("paceline.comm")

_FAREWELL_SECONDS = 1.0
_FAILURE_SECONDS = 0.3
# An interrupted rank waits for no peer: they had its notice before, and the supervisor reaches them too.
_INTERRUPTED_SECONDS = 0.005
# Longer than a judgement needs statuses to stand still, so that answers about lines do not disturb it.
_ASK_SECONDS = 2.5
_PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep


class Mesh:
    """This rank's connections to all others. `names[rank]` describes its process, for errors."""

    def __init__(
        self,
        rank: int,
        connections: Mapping[int, AuthenticatedSocket],
        names: Mapping[int, str],
        labels: Sequence[int] | None = None,
    ) -> None:
        self.rank = rank
        self.world_size = len(connections) + 1
        self.labels: Sequence[int] = range(self.world_size) if labels is None else labels
        self.enclosing: StatusChannel | None = None
        self.on_change: Callable[[], None] = lambda: None
        self._names = dict(names)
        self._links = {peer: FramedSocket(proven) for peer, proven in connections.items()}
        self._changed = threading.Condition()
        self._version = 0
        self._peers = {peer: PeerState(RankState.RUNNING) for peer in self._links}
        self._mine: Status | None = None
        self._waits = OpenWaits()
        self._posting = threading.Lock()
        self._asked: dict[int, float] = {}
        self._data: dict[int, deque[Frame]] = {peer: deque() for peer in self._links}
        self._confirmed: set[tuple[FrameKind, int, int]] = set()
        self._mailbox: deque[ReceivedMessage] = deque()
        self._acked: set[int] = set()
        self.notes: dict[str, bytes] = {}
        """What the ranks published by `note`."""
        self._over: PacelineError | None = None
        self._ended = False
        self._closing = threading.Lock()
        self.departures = 0
        """Grows whenever a peer is gone, in good order or not."""
        self._stop = False
        self._dirty: deque[int] = deque()
        self._selector = selectors.DefaultSelector()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._open = set(self._links)
        for peer, link in self._links.items():
            self._selector.register(link.sock, selectors.EVENT_READ, peer)
        self._thread = threading.Thread(target=self._run, name=f"paceline-mesh-{rank}", daemon=True)
        self._thread.start()

    # sending

    def send(self, peer: int, kind: FrameKind, pieces: Sequence[memoryview] = (), **fields: int) -> int:
        """Put a frame on its way; its memory is free when `sent(peer, mark)` holds for the returned mark."""
        link = self._links[peer]
        mark = link.put(kind, pieces, **fields)
        if link.waiting:
            self._dirty.append(peer)
            os.eventfd_write(self._wake, 1)
        return mark

    def sent(self, peer: int, mark: int) -> bool:
        return self._links[peer].sent_bytes >= mark

    def settle(self, peer: int) -> None:
        """Copy what still waits to be sent to `peer`: its senders' memory is free afterwards."""
        self._links[peer].settle()

    def note(self, key: str, value: bytes) -> None:
        """Publish a value to all ranks under a key, once: it appears in their `notes`."""
        self.notes[key] = value
        for peer in self._running():
            self.send(peer, FrameKind.NOTE, [memoryview(key.encode() + b"\0" + value)])

    # waiting

    @property
    def version(self) -> int:
        """Counter of everything that arrives or completes."""
        return self._version

    def wait(self, seen: int, seconds: float) -> None:
        """Return when something has happened since `version` was `seen`, or after `seconds`."""
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
        """Take the oldest frame of a collective from `peer`; None if there is none."""
        queue = self._data[peer]
        return queue.popleft() if queue else None

    def confirmed(self, kind: FrameKind, peer: int, number: int) -> bool:
        """Return whether `peer` has sent ACCEPT or DONE of a bulk message; True only once."""
        with self._changed:
            confirmed = (kind, peer, number) in self._confirmed
            self._confirmed.discard((kind, peer, number))
        return confirmed

    def next_message(self, source: int, tag: int | None) -> ReceivedMessage | None:
        with self._changed:
            return take_first(self._mailbox, source, tag)

    # the StatusChannel of this rank

    def post(self, wait: object, status: Status | None) -> None:
        # Locked until it is sent: of two threads that post at once, the peers read the later one's last.
        with self._posting:
            shown = self._waits.put(wait, status)
            if shown == self._mine:
                return
            self._mine = shown
            body = b"" if shown is None else json.dumps(shown.to_plain()).encode()
            for peer in self._running():
                self.send(peer, FrameKind.STATUS, [memoryview(body)])

    def forget(self, wait: object) -> None:
        with self._posting:
            self._waits.drop(wait)

    def posted(self) -> Status | None:
        """Return what this rank itself has posted; None while it does not wait."""
        self.check_open()
        return self._mine

    def peers(self) -> dict[int, PeerState]:
        self.check_open()
        with self._changed:
            states = dict(self._peers)
        now = time.monotonic()
        for peer, known in states.items():
            silent = known.state is RankState.RUNNING and known.status is None
            if silent and now - self._asked.get(peer, -_ASK_SECONDS) >= _ASK_SECONDS:
                self._asked[peer] = now
                self.send(peer, FrameKind.WHERE)
        states[self.rank] = PeerState(RankState.RUNNING, self._mine, None, os.getpid())
        return states

    def _running(self) -> list[int]:
        return [peer for peer, known in self._peers.items() if known.state is RankState.RUNNING]

    # life

    @property
    def interrupted(self) -> bool:
        return isinstance(self._over, GroupInterruptedError)

    def interrupt(self, error: GroupInterruptedError) -> None:
        """End all waits on the mesh with `error` and announce that this rank goes; `close` is still due."""
        # No wait here: the caller is another thread, and a peer may be the reason for the interrupt.
        with self._closing:
            if self._over is None:
                self._over = error
                self._announce_end(error)
        self.notify()

    def close(self, error: BaseException | None = None) -> None:
        """Send a goodbye, or why this rank fails, and give the peers a moment to read what came before."""
        with self._closing:
            if self._ended:
                return
            self._ended = True
            if self.interrupted:
                patience = _INTERRUPTED_SECONDS
            else:
                patience = _FAREWELL_SECONDS if error is None else _FAILURE_SECONDS
                self._over = UsageError("this group is closed", remedy="make a new DistributedContext")
                self._announce_end(error)
        self.notify()
        end = time.monotonic() + patience
        # A socket that is closed with unread bytes resets the connection, and the peer loses what it has not
        # read: wait until each peer has acknowledged the goodbye, which was sent last.
        while set(self._running()) - self._acked and (left := end - time.monotonic()) > 0:
            seen = self._version  # taken before the second look: what comes between wakes the wait
            if set(self._running()) - self._acked:
                self.wait(seen, min(left, 0.05))
        self._stop = True
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        for link in self._links.values():
            link.close()
        self._selector.close()
        os.close(self._wake)

    def _announce_end(self, error: BaseException | None) -> None:
        note = b"" if error is None else json.dumps(failure_from(error)).encode()
        for peer in self._running():
            self.settle(peer)
            self.send(
                peer,
                FrameKind.BYE if error is None else FrameKind.FAILURE,
                [memoryview(note)] if note else (),
            )

    # the reading thread

    def _run(self) -> None:
        try:
            while not self._stop:
                self._turn()
        except BaseException as error:
            _log.exception("rank %d: the reading thread failed", self.labels[self.rank])
            self._over = InternalError(f"the thread that reads the other ranks' messages failed: {error!r}")
            self.notify()

    def _turn(self) -> None:
        happened = False
        for key, events in self._selector.select():
            if key.data is None:
                os.eventfd_read(self._wake)
                while self._dirty:
                    self._want_write(self._dirty.popleft())
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
            # Any exception concerns this peer alone (a frame may be too large for the memory): reading the
            # others continues.
            self._lost(peer, f"{self._names[peer]} sent what is not a message of Paceline: {error}")
            ended = True
        if ended:
            self._open.discard(peer)
            self._selector.unregister(link.sock)
            self._lost(peer, f"the connection to {self._names[peer]} ended")
            link.close()

    def _lost(self, peer: int, reason: str) -> None:
        self._set(peer, PeerState(RankState.DEAD, None, {"kind": "", "text": reason}))

    def _handle(self, peer: int, frame: Frame) -> None:
        # In the reading thread, in the order in which the peer sent its frames. What a frame says is stored
        # first and the waiting threads are woken afterwards, once per turn (`_turn`): a thread that wakes
        # finds it. An exception is this peer's fault and ends its connection alone (`_read`).
        match frame.kind:
            case FrameKind.DATA | FrameKind.BULK:
                # Kept in order: the peer may be in a call that this rank has not reached yet. The exchange
                # that takes the frame compares its sequence and signature with its own call. No lock: this
                # thread appends, and only the thread that runs the collective takes.
                self._data[peer].append(frame)
            case FrameKind.ACCEPT | FrameKind.DONE:
                # Kept until `confirmed` takes it out: the receiver may answer while the thread that sent is
                # still sending to other peers, and asks for the answer later.
                with self._changed:
                    self._confirmed.add((frame.kind, peer, frame.number))
            case FrameKind.MESSAGE:
                # Locked: any thread of this rank may be searching the mailbox for its source and tag.
                with self._changed:
                    self._mailbox.append(ReceivedMessage(peer, frame.sequence, memoryview(frame.body)))
            case FrameKind.STATUS:
                # Empty: the peer no longer waits. The status replaces the line of an earlier HERE.
                status = Status.from_plain(json.loads(frame.body)) if frame.body else None
                self._set(peer, PeerState(RankState.RUNNING, status))
            case FrameKind.WHERE:
                # Answered by this thread, because the main thread that is asked about may be in user code.
                self.send(peer, FrameKind.HERE, [memoryview(_main_line().encode())])
            case FrameKind.HERE:
                with self._changed:
                    # The peer may have begun to wait, or have left, since it was asked: its status says more
                    # than this line, and an ending must not be undone.
                    known = self._peers[peer]
                    if known.state is RankState.RUNNING and known.status is None:
                        text = frame.body.decode(errors="replace")
                        self._peers[peer] = PeerState(RankState.RUNNING, None, {"kind": "", "text": text})
            case FrameKind.FAILURE:
                # Checked here: what `judge` and errors read of it later runs in the rank's own threads.
                failure = json.loads(frame.body)
                if not isinstance(failure, dict) or not isinstance(failure.get("text"), str):
                    raise ValueError("a failure notice without a text")
                self._set(peer, PeerState(RankState.FAILED, None, failure))
                # ACK lets the peer close its socket (`close`). Not before everything it sent was read: a
                # connection that it closes earlier may be reset, and this notice lost with it.
                self.send(peer, FrameKind.ACK)
            case FrameKind.BYE:
                # What the peer sent before is queued already. So a rank that waits for data, sees LEFT and
                # looks once more (`Watch.look`) finds the data of a peer that left after its part.
                self._set(peer, PeerState(RankState.LEFT))
                self.send(peer, FrameKind.ACK)
            case FrameKind.ACK:
                self._acked.add(peer)
            case FrameKind.NOTE:
                key, _, value = bytes(frame.body).partition(b"\0")
                with self._changed:
                    self.notes[key.decode()] = value

    def _set(self, peer: int, known: PeerState) -> None:
        with self._changed:
            # The first ending counts: a connection always breaks after a BYE or a FAILURE.
            if self._peers[peer].state is RankState.RUNNING:
                self._peers[peer] = known
                self.departures += known.state is not RankState.RUNNING


def _main_line() -> str:
    """Return where this process's main thread is: its innermost line outside Paceline."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    return "at an unknown line" if frame is None else f"at {frame.f_code.co_filename}:{frame.f_lineno}"
