"""A worker's end of the control connection: one thread that sends heartbeats, receives, and reconnects.

Messages of the worker are numbered and kept until the supervisor acknowledges them, so nothing is lost when a
connection is cut or a supervisor is replaced: after each reconnect comes the hello, then what was not
acknowledged. Heartbeats are not kept. What messages mean is up to the handler.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import select
import socket
import threading
from collections import deque
from collections.abc import Callable
from typing import Final, Protocol, final

from paceline.control import channel
from paceline.control.channel import Channel
from paceline.control.messages import Ack, ControlMessage, Dismissed, Heartbeat, MemberAccepted, MemberHello
from paceline.core.clock import Clock, MonotonicClock
from paceline.core.errors import PacelineError, RendezvousError
from paceline.core.process_kill_timer import KernelDeadline
from paceline.core.tls import Tls

_log = logging.getLogger(__name__)

HostPort = tuple[str, int]

MAX_UNACKED_BYTES: Final = 32 << 20
_CONNECT_SECONDS: Final = 3.0
_RECONNECT_PAUSES: Final = (0.02, 0.05, 0.1, 0.2)
_MAX_PAUSE_SECONDS: Final = 5.0
_CLOSE_SECONDS: Final = 2.0
_SAVE_SECONDS: Final = 600.0  # for a worker that leaves because no supervisor is there
_FIRST_HEARTBEAT: Final = 0.25


class ControlHandler(Protocol):
    """The worker behind a control client. Its methods are called in the client's thread and do not block."""

    def hello(self) -> MemberHello:
        """Say which worker this is and how far it is; at each connection."""

    def heartbeat(self) -> Heartbeat:
        """Say what the training thread does."""

    def receive(self, message: ControlMessage) -> None:
        """Handle a message of the supervisor; called in the order of arrival."""

    def supervisor_away(self) -> None:
        """Note that an attempt to connect has found no supervisor."""


@final
class ControlClient:
    """The connection of one worker to its supervisor.

    lookup   asked before each reconnect: where the supervisor is now; None: where it was
    on_turn  called in the client's thread at least once per heartbeat, whenever it has the interpreter
    clock    of heartbeats and of absences; waits for sockets take real time
    """

    def __init__(
        self,
        address: HostPort,
        secret: bytes,
        *,
        tls: Tls | None = None,
        lookup: Callable[[], HostPort | None] | None = None,
        on_turn: Callable[[], None] = lambda: None,
        clock: Clock | None = None,
    ) -> None:
        self._clock: Clock = clock or MonotonicClock()
        self._address, self._secret = address, secret
        self._tls = tls.client() if tls is not None else None
        self._lookup, self._on_turn = lookup, on_turn
        self._lock = threading.Lock()
        self._acknowledged = threading.Condition(self._lock)
        self._channel: Channel | None = None
        self._connecting: socket.socket | None = None
        self._unacked: deque[tuple[int, bytes]] = deque()
        self._unacked_bytes = 0
        self._number = 0  # of the last message
        self._sent = 0  # the last of them that went out on this connection
        self._acked = 0
        self.acked_at = 0.0  # when the supervisor last acknowledged something
        self._heartbeat = _FIRST_HEARTBEAT
        self._patience = 0.0  # of a worker without a supervisor; the first supervisor sets it
        self._deadline = KernelDeadline()
        self._next_heartbeat = 0.0
        self._lost_at = self._clock.now()
        self._muted_until = 0.0
        self._answers: queue.SimpleQueue[MemberAccepted | Dismissed] = queue.SimpleQueue()
        self._trouble = "no process answered"
        self._dismissed = False
        self._answered = False  # whether the supervisor has sent anything on this connection
        self._closing = False
        self._wake = -1
        self._thread: threading.Thread | None = None

    def start(self, handler: ControlHandler, timeout: float) -> MemberAccepted:
        """Connect, authenticate, say hello, and wait until the supervisor accepts this worker."""
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(
            target=self._run, args=(handler,), name="paceline-control", daemon=True
        )
        self._thread.start()
        try:
            answer = self._answers.get(timeout=timeout)
        except queue.Empty:
            trouble = self._trouble
            self.close()
            raise RendezvousError(
                f"the supervisor at {self._address[0]}:{self._address[1]} did not accept this worker within "
                f"{timeout:g} seconds: {trouble}",
                remedy="check that the supervisor runs and can be reached from this host",
            ) from None
        if isinstance(answer, Dismissed):
            self.close()
            raise RendezvousError(
                f"this worker was not accepted: {answer.reason}",
                remedy="start it on a host and with packages like those of the other workers",
            )
        return answer

    def deliver(self, message: ControlMessage, seconds: float) -> bool:
        """Send, and wait until the message is acknowledged, and so in the journal; False: not in time."""
        number = self.send(message)
        with self._acknowledged:
            return self._acknowledged.wait_for(lambda: self._acked >= number, seconds)

    def send(self, message: ControlMessage) -> int:
        """Send without blocking, and return the message's number. The message is kept until it is
        acknowledged; without a connection it is sent after the next hello.

        From any thread, but not from a signal handler, which may interrupt this very function.
        """
        with self._lock:
            # Numbered, kept and pushed under one lock: messages go out in the order of their numbers, which
            # lets one Ack stand for all before it. A frame that cannot be made uses up no number.
            number = self._number + 1
            data = channel.frame(message, number)
            self._number = number
            self._unacked.append((number, data))
            self._unacked_bytes += len(data)
            while self._unacked_bytes > MAX_UNACKED_BYTES:
                first, oldest = self._unacked.popleft()
                self._unacked_bytes -= len(oldest)
                _log.warning("message %d to the supervisor is given up: too many wait for it", first)
            waits = self._push()
        if waits:
            # The rest of it did not fit into the socket's buffer; the client's thread waits until it does.
            self._poke()
        return number

    def stop_reconnecting(self, reason: str) -> None:
        """Give the supervisor up; a `start` that still waits raises RendezvousError with this reason."""
        self._dismissed = True
        self._answers.put(Dismissed(reason=reason))

    @property
    def lost_at(self) -> float | None:
        """The time at which the supervisor was lost, on the client's clock; None while connected."""
        with self._lock:
            connected = self._channel is not None and self._clock.now() >= self._muted_until
            return None if connected else self._lost_at

    @property
    def away(self) -> float:
        """Seconds without a supervisor; 0.0 while connected."""
        lost_at = self.lost_at
        return 0.0 if lost_at is None else max(0.0, self._clock.now() - lost_at)

    def mute(self, seconds: float) -> None:
        """Stop sending and receiving for this long; for fault injection."""
        with self._lock:
            now = self._clock.now()
            if self._channel is not None and now >= self._muted_until:
                self._lost_at = now
            self._muted_until = max(self._muted_until, now + seconds)
        self._poke()

    def close(self) -> None:
        """Send what waits, as far as there is a connection, and end the thread."""
        if self._thread is None:
            return
        self._closing = True
        with self._lock:
            if self._connecting is not None:
                # A supervisor that does not answer is not waited for.
                with contextlib.suppress(OSError):
                    self._connecting.shutdown(socket.SHUT_RDWR)
        self._poke()
        self._thread.join()
        self._thread = None
        self._deadline.close()
        os.close(self._wake)
        self._wake = -1

    def undelivered(self) -> list[ControlMessage]:
        """Return what was sent and not acknowledged."""
        with self._lock:
            return [channel.decode_frame(data) for _, data in self._unacked]

    # below: in the client's thread, but for _push and _poke

    def _run(self, handler: ControlHandler) -> None:
        failures = unanswered = 0
        while not self._closing and not self._dismissed:
            while not self._closing and (left := self._muted_until - self._clock.now()) > 0:
                self._on_turn()
                self._wait(min(left, self._heartbeat))
            self._on_turn()
            try:
                opened = self._connect(handler)
            except (OSError, PacelineError) as error:
                self._trouble = str(error) or type(error).__name__
                handler.supervisor_away()
                self._wait(_RECONNECT_PAUSES[min(failures, len(_RECONNECT_PAUSES) - 1)])
                failures += 1
                try:
                    # The next supervisor listens elsewhere, and writes its address to the run's folder.
                    self._address = (self._lookup() if self._lookup else None) or self._address
                except (OSError, PacelineError) as error:
                    self._trouble = str(error)
                continue
            failures = 0
            self._serve(handler, opened)
            unanswered = 0 if self._answered else unanswered + 1
            if unanswered and not self._closing:
                self._wait(channel.pause_after_drops(unanswered, _RECONNECT_PAUSES[0], _MAX_PAUSE_SECONDS))

    def _connect(self, handler: ControlHandler) -> Channel:
        sock = channel.connect(self._address, _CONNECT_SECONDS)
        with self._lock:
            # Known to `close`, which shuts it down: the handshake below blocks for up to 3 seconds.
            self._connecting = sock
        try:
            if self._tls is not None:
                sock = self._tls.wrap(sock)
                with self._lock:
                    self._connecting = sock
            keys = channel.authenticate(sock, self._secret, _CONNECT_SECONDS, self._tls)
            opened = Channel(sock, keys)
        except BaseException:
            sock.close()
            raise
        finally:
            with self._lock:
                self._connecting = None
        self._answered = False
        # The hello goes first, by itself; then, in their order, all messages without an acknowledgement. The
        # supervisor ignores those whose numbers it has seen. The channel is published to `send` only after
        # the hello was queued: a message from another thread cannot overtake it.
        opened.send(handler.hello())
        self._deadline.disarm()
        with self._lock:
            self._channel = opened
            # None of them went out on this connection. Both steps under one lock: a `send` in between would
            # find itself the newest message, and be sent before those that wait.
            self._sent = 0
            self._push()
        self._next_heartbeat = self._clock.now()
        return opened

    def _serve(self, handler: ControlHandler, opened: Channel) -> None:
        limit = float("inf")
        while not opened.closed and self._clock.now() < limit:
            if self._closing:
                limit = min(limit, self._clock.now() + _CLOSE_SECONDS)
                if not opened.wants_write or self._clock.now() < self._muted_until:
                    break
            self._turn(handler, opened)
        with self._lock:
            # From here on `send` only keeps messages; what was sent and not acknowledged is kept as well.
            self._channel = None
            if self._clock.now() >= self._muted_until:
                self._lost_at = self._clock.now()
            self._trouble = opened.closed
        opened.close()
        if self._patience and not self._dismissed and not self._closing:
            # The worker leaves by itself when its patience is over. Should it hang, no process may be left to
            # end it: neither the supervisor, nor the caller, nor the fork server.
            self._deadline.arm(self._patience + _SAVE_SECONDS)

    def _turn(self, handler: ControlHandler, opened: Channel) -> None:
        """Run one turn of the loop: send a heartbeat if it is due, send what waits, handle what has arrived.

        The lock is held for each access to the channel, because `send` writes to it from other threads, and
        never while the handler is called: the handler sends.
        """
        self._on_turn()
        now = self._clock.now()
        if now < self._muted_until:
            self._wait(min(self._muted_until - now, self._heartbeat))
            return
        if now >= self._next_heartbeat:
            # At multiples of the interval: the workers of a host send together, and the supervisor wakes
            # once. After a pause there is one heartbeat, not all that were missed.
            self._next_heartbeat = (now // self._heartbeat + 1) * self._heartbeat
            heartbeat = channel.frame(handler.heartbeat())
            with self._lock:
                opened.send_frame(heartbeat)
        with self._lock:
            self._push()  # what was sent while the client was muted, too
            waits = opened.wants_write
        poll = select.poll()
        poll.register(opened, select.POLLIN | (select.POLLOUT if waits else 0))
        # `_poke` ends the wait: another thread has something to send that did not fit into the socket's
        # buffer, or closes the client.
        poll.register(self._wake, select.POLLIN)
        ready = dict(poll.poll(max(0.0, self._next_heartbeat - self._clock.now()) * 1000))
        if self._wake in ready:
            self._drain()
        if not ready.get(opened.fileno(), 0) or self._clock.now() < self._muted_until:
            return
        with self._lock:
            opened.flush()
            received = opened.receive()
        # Without the lock, and in the order of arrival: the handler feeds the member machine, which sends.
        for _, message in received:
            self._receive(handler, message)

    def _receive(self, handler: ControlHandler, message: ControlMessage) -> None:
        self._answered = True
        match message:
            case Ack(number=number):
                # Cumulative: the supervisor acknowledges only what is in the journal, in order. Messages that
                # were given up for lack of room may be missing at the front.
                self.acked_at = self._clock.now()
                with self._lock:
                    while self._unacked and self._unacked[0][0] <= number:
                        self._unacked_bytes -= len(self._unacked.popleft()[1])
                    self._acked = max(self._acked, number)
                    self._acknowledged.notify_all()
                return
            case MemberAccepted():
                self._heartbeat, self._patience = message.heartbeat, message.patience
            case Dismissed():
                self._dismissed = True
        handler.receive(message)
        if isinstance(message, MemberAccepted | Dismissed):
            self._answers.put(message)  # after the handler: `start` returns with the message handled

    def _push(self) -> bool:
        """Send what was not sent on this connection, with the lock held; True when some of it waits."""
        opened = self._channel
        if opened is None or self._clock.now() < self._muted_until:
            return False
        if self._sent < self._number:
            # The usual case, one new message, must not copy the queue. The queue may be empty: after a
            # reconnect nothing counts as sent, also what was acknowledged before.
            behind = self._number - self._sent
            newest = [self._unacked[-1]] if behind == 1 and self._unacked else list(self._unacked)
            for number, data in newest:
                if number > self._sent:
                    opened.send_frame(data)
            self._sent = self._number
        return opened.wants_write

    def _wait(self, seconds: float) -> None:
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        if poll.poll(max(0.0, seconds) * 1000):
            self._drain()

    def _poke(self) -> None:
        with contextlib.suppress(OSError):
            os.eventfd_write(self._wake, 1)

    def _drain(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
