"""Test whether two workers reach each other: connect to the endpoint that a view would use, and authenticate.

    both                          the handshake of every connection (`core.handshake`): from whom, to whom
    dialing worker -> listener    LARGE_BYTES
    listener -> dialing worker    an acknowledgement, with the tag of the session

Some links carry small packets and lose large ones (a tunnel with a smaller MTU and no ICMP): the handshake
passes there, and no gradient ever does. So the way of the data is proved with data, in the direction of the
dial; the peer proves the other one.

The listener of a worker is idle while it trains; it is used only while a view forms, and dials wait then: a
dial that meets the store of a view is repeated. One thread dials and answers, without the worker's main
thread, and ends when nothing was asked for a while: a job whose workers share a host never has one.
Peers are authenticated as everywhere (`core.authenticated_listener`).
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import selectors
import socket
import struct
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final, final

from paceline.control.messages import DialResult
from paceline.core.authenticated_listener import AuthenticatedListener, AuthenticatedSocket
from paceline.core.clock import Clock, MonotonicClock
from paceline.core.handshake import DIAL, Connector, HandshakeError, OtherProtocolError
from paceline.core.session_auth import TAG_BYTES, SessionKeys
from paceline.core.time_limits import CONNECT_SECONDS

_log = logging.getLogger(__name__)

ANSWER_SECONDS: Final = 15.0
"""Longer than connecting: the peer may be in the middle of forming a view."""
LINGER_SECONDS: Final = 60.0
LARGE_BYTES: Final = 20_000
"""More than two packets of any usual size: jumbo frames have 9,000 bytes."""
LARGE_SECONDS: Final = 3.0
"""For the large part, once the small one was answered: time for four retransmissions."""

_ACKNOWLEDGEMENT: Final = b"receipt"
_CONTEXT: Final = struct.Struct("<II")  # from, to
_AGAIN_SECONDS: Final = 0.1
_TROUBLE_LENGTH: Final = 1000  # as long as a DialResult allows: an address of another member may be longer
_LOST: Final = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)
_HOLE: Final = (
    "small packets arrive there and large ones do not; the MTU of the way may be smaller than that of the "
    "interface"
)

Peer = tuple[int, int, str, int]
"""Member, slot, host and port, as in messages.DialRequest."""


@final
@dataclass
class _Target:
    """A peer to be reached. `limit` is when it must have answered; `again_at` when to dial next."""

    peer: Peer
    limit: float
    again_at: float = 0.0
    problem: str = "it did not answer"


@final
@dataclass
class _Probe:
    """A connection under way to a target. `session` once both have proved themselves: then `unsent` goes
    there, and an acknowledgement comes back."""

    target: _Target
    sock: socket.socket
    connector: Connector
    limit: float
    connected: bool = False
    session: SessionKeys | None = None
    unsent: memoryview = field(default_factory=lambda: memoryview(b""))
    received: bytearray = field(default_factory=bytearray)


@final
@dataclass
class _AnsweredPeer:
    """A peer that connected and authenticated, and of which `left` bytes are still to come."""

    proven: AuthenticatedSocket
    limit: float
    left: int = LARGE_BYTES


@final
class ReachabilityProber:
    """Prober of the peers of one worker. `report` gets a DialResult for each requested peer, in the prober's
    thread."""

    def __init__(
        self,
        member: int,
        slot: int,
        secret: bytes,
        listener: socket.socket,
        report: Callable[[DialResult], object],
        clock: Clock | None = None,
    ) -> None:
        self._clock: Clock = clock or MonotonicClock()
        self._member = member
        self._slot = slot
        self._secret = secret
        self._listener = listener
        self._report = report
        self._lock = threading.Lock()
        self._targets: dict[int, _Target] = {}
        self._probes: dict[int, _Probe] = {}  # of the thread, by the target's member
        self._answered: dict[socket.socket, _AnsweredPeer] = {}  # of the thread
        self._selector: selectors.BaseSelector  # of the thread, which makes it
        self._until = 0.0
        self._holds = 0
        self._thread: threading.Thread | None = None  # that looks at targets
        self._latest: threading.Thread | None = None  # also while it ends: what the thread owns is still its
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def dial(self, peers: Iterable[Peer]) -> None:
        """Probe these peers, and answer probes for a while. Never blocks; a peer that is being probed is not
        probed twice."""
        now = self._clock.now()
        with self._lock:
            self._until = now + LINGER_SECONDS
            for peer in peers:
                self._targets.setdefault(peer[0], _Target(peer, now + ANSWER_SECONDS))
            self._start()
        self._wake_thread()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Release the listener while a view uses it."""
        # The thread has ended, not only paused, when this returns: two owners of one listener would accept
        # each other's connections. Targets stay, and are dialed again afterwards.
        self._stop_thread()
        try:
            yield
        finally:
            with self._lock:
                self._holds -= 1
                if self._targets or self._clock.now() < self._until:
                    self._start()

    def close(self) -> None:
        """End the thread, for good; the listener stays the caller's."""
        self._stop_thread()
        if self._wake >= 0:
            os.close(self._wake)
            self._wake = -1

    def _stop_thread(self) -> None:
        with self._lock:
            # Before the thread is woken: it sees the hold, and a `dial` from now on starts no other thread.
            self._holds += 1
            thread = self._latest
        self._wake_thread()
        if thread is not None:
            thread.join()

    def _start(self) -> None:
        """Start the thread, with the lock held."""
        if self._thread is None and not self._holds:
            self._latest = self._thread = threading.Thread(
                target=self._run, args=(self._latest,), name="paceline-dial", daemon=True
            )
            self._thread.start()

    def _wake_thread(self) -> None:
        with contextlib.suppress(OSError):
            os.eventfd_write(self._wake, 1)

    # below: in the thread

    def _run(self, before: threading.Thread | None) -> None:
        # One at a time: selector, probes and answers are the thread's, and the one before may still be
        # closing its own after `_is_needed` let it go.
        if before is not None:
            before.join()
        with selectors.DefaultSelector() as self._selector:
            listener = AuthenticatedListener(
                self._listener,
                DIAL,
                self._secret,
                self._selector,
                self._answer,
                # Another worker may listen here now, at the port of one that is gone.
                expected=lambda context: bool(_CONTEXT.unpack(context)[1] == self._member),
            )
            self._selector.register(
                self._wake, selectors.EVENT_READ, lambda mask, now: os.eventfd_read(self._wake)
            )
            try:
                while self._is_needed():
                    self._poll_once(listener)
            finally:
                listener.close()
                for probe in list(self._probes.values()):
                    self._close(probe)
                for answered in list(self._answered.values()):
                    self._close_answered(answered)

    def _is_needed(self) -> bool:
        """Return whether the thread continues. `_thread` is cleared under the same lock, so that `dial`
        either finds a thread that will look at its targets, or starts another."""
        with self._lock:
            busy = bool(self._targets) or self._clock.now() < self._until
            if self._holds or not busy:
                self._thread = None
                return False
            return True

    def _poll_once(self, listener: AuthenticatedListener) -> None:
        now = self._clock.now()
        with self._lock:
            # A copy: `dial` adds targets from the control thread, and wakes this one for them.
            targets = list(self._targets.values())
        for target in targets:
            if target.peer[0] in self._probes or now < target.again_at:
                continue
            try:
                self._dial(target, now)
            except Exception as error:
                # Also an address that is none (UnicodeError, ValueError): this peer is not reached, and the
                # thread is there for the others.
                self._done(target, f"it cannot be dialed: {error}")
        limits = [self._until, listener.due, *(probe.limit for probe in self._probes.values())]
        limits += [answered.limit for answered in self._answered.values()]
        limits += [target.again_at for target in targets if target.again_at]
        ready = self._selector.select(max(0.01, min(limits) - self._clock.now()))
        now = self._clock.now()
        # What is ready before what is over: an answer that arrived in time counts, however late it is read.
        for key, mask in ready:
            key.data(mask, now)
        listener.tick(now)
        for answered in [answered for answered in self._answered.values() if now >= answered.limit]:
            self._close_answered(answered)
        for probe in [probe for probe in self._probes.values() if now >= probe.limit]:
            self._close(probe)
            # How far a probe came says what is wrong: small packets passed and the large part did not (the
            # MTU); the peer's host accepted and the peer is busy or hangs; nothing came back at all.
            if probe.session is not None:
                self._done(probe.target, _HOLE, lossy=True)
            elif probe.connected:
                self._done(probe.target, probe.target.problem)
            else:
                self._done(probe.target, "connecting timed out", lossy=True)

    def _dial(self, target: _Target, now: float) -> None:
        if now >= target.limit:
            self._done(target, target.problem)
            return
        member, _, host, port = target.peer
        connector = Connector(DIAL, self._secret, _CONTEXT.pack(self._member, member))
        try:
            family, kind, protocol, _, at = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            sock = socket.socket(family, kind, protocol)
        except OSError as error:
            self._done(target, error.strerror or str(error))
            return
        # Never blocking: one peer behind a broken link must not delay the result about the others.
        sock.setblocking(False)
        code = sock.connect_ex(at)
        if code not in (0, errno.EINPROGRESS):
            sock.close()
            self._done(target, os.strerror(code), lossy=code in _LOST)
            return
        probe = _Probe(target, sock, connector, min(now + CONNECT_SECONDS, target.limit))
        self._probes[member] = probe
        self._selector.register(sock, selectors.EVENT_WRITE, functools.partial(self._continue, probe))

    def _continue(self, probe: _Probe, mask: int, now: float) -> None:
        """Continue a probe. A connection that cannot be made is a result, and so is a wrong proof. One that
        ends early, or speaks another protocol, may have met a listener that was busy with a view: it is
        repeated."""
        try:
            reached = self._exchange(probe, now)
        except (BlockingIOError, InterruptedError):
            return
        except Exception as error:
            # Whatever a peer or a stranger makes us stumble over, it is that connection that ends.
            self._close(probe)
            final = isinstance(error, HandshakeError) and not isinstance(error, OtherProtocolError)
            lossy = isinstance(error, OSError) and error.errno in _LOST
            reason = (error.strerror if isinstance(error, OSError) else "") or str(error) or repr(error)
            if isinstance(error, HandshakeError):
                reason = f"what answers there is no worker of this job: {error.message}"
            # A wrong proof stays wrong, and a refused connection is itself the result. Anything else may be a
            # peer between two owners of its listener (`paused`): it is dialed again until its time is over.
            if final or not probe.connected or now >= probe.target.limit:
                self._done(probe.target, reason, lossy)
            else:
                probe.target.problem, probe.target.again_at = reason, now + _AGAIN_SECONDS
            return
        if reached:
            self._close(probe)
            self._done(probe.target, "")

    def _exchange(self, probe: _Probe, now: float) -> bool:
        """Do the next part of a probe; True: the acknowledgement is here."""
        sock, connector = probe.sock, probe.connector
        proceed = functools.partial(self._continue, probe)
        if not probe.connected:
            code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                raise OSError(code, os.strerror(code))
            probe.connected, probe.limit = True, probe.target.limit
            self._selector.modify(sock, selectors.EVENT_READ, proceed)
            return False
        if probe.unsent:
            probe.unsent = probe.unsent[sock.send(probe.unsent) :]
            if not probe.unsent:
                self._selector.modify(sock, selectors.EVENT_READ, proceed)
            return False
        data = sock.recv(connector.wanted if probe.session is None else TAG_BYTES - len(probe.received))
        if not data:
            raise ConnectionResetError("the connection was closed there")
        if probe.session is not None:
            # The acknowledgement carries a tag of the session: no other host on the way can have made it.
            probe.received += data
            if len(probe.received) < TAG_BYTES:
                return False
            probe.session.incoming.check(probe.received, _ACKNOWLEDGEMENT)
            return True
        if answer := connector.feed(data):
            sock.sendall(answer)
        if connector.done:
            probe.session, probe.unsent = connector.session_keys(), memoryview(bytes(LARGE_BYTES))
            # Counted anew: the small part was answered, so the peer is awake, and what is missing is lost.
            probe.limit = now + LARGE_SECONDS
            self._selector.modify(sock, selectors.EVENT_WRITE, proceed)
        return False

    def _close(self, probe: _Probe) -> None:
        del self._probes[probe.target.peer[0]]
        self._selector.unregister(probe.sock)
        probe.sock.close()

    def _done(self, target: _Target, problem: str, lossy: bool = False) -> None:
        member, slot, host, port = target.peer
        with self._lock:
            self._targets.pop(member, None)
        if problem:
            where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            problem = f"rank {self._slot} cannot reach rank {slot} at {where}: {problem}"[:_TROUBLE_LENGTH]
        self._report(DialResult(peer=member, trouble=problem, lossy=lossy))

    # answering

    def _answer(self, context: bytes, proven: AuthenticatedSocket) -> None:
        """Expect the large part of a peer that has our proof."""
        # Twice the dialing end's time: that end gives up first, and reports why.
        answered = _AnsweredPeer(proven, self._clock.now() + 2 * LARGE_SECONDS)
        receive = functools.partial(self._receive, answered)
        self._selector.register(proven.sock, selectors.EVENT_READ, receive)
        self._answered[proven.sock] = answered

    def _receive(self, answered: _AnsweredPeer, mask: int, now: float) -> None:
        if answered.proven.sock not in self._answered:
            return  # its time was over in this turn
        try:
            data = answered.proven.sock.recv(answered.left)
            answered.left -= len(data)
            if data and answered.left:
                return
            if data:
                answered.proven.sock.sendall(answered.proven.session.outgoing.tag(_ACKNOWLEDGEMENT))
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            _log.debug("a worker that dialed from %s is gone: %r", answered.proven.host, error)
        self._close_answered(answered)

    def _close_answered(self, answered: _AnsweredPeer) -> None:
        del self._answered[answered.proven.sock]
        self._selector.unregister(answered.proven.sock)
        answered.proven.sock.close()
