"""A worker's end of the control connection: one thread that beats, hears, and reconnects.

What the worker says is numbered and kept until the supervisor has heard it, so nothing is lost when a
connection is cut or a supervisor is replaced: after each reconnect comes the Hello, then what was not heard.
Heartbeats are not kept. Must not know what messages mean to the worker.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final, final

from paceline.core.control import channel
from paceline.core.control.channel import Channel
from paceline.core.control.messages import Beat, Dial, Dismissed, Heard, Hello, Message, Welcome
from paceline.core.errors import PacelineError, RendezvousError
from paceline.core.last_resort import LastResort
from paceline.core.tls import Tls

_log = logging.getLogger(__name__)

Address = tuple[str, int]

KEPT_BYTES: Final = 32 << 20
_CONNECT_SECONDS: Final = 3.0
_PAUSES: Final = (0.02, 0.05, 0.1, 0.2)
_DROPPED_DOUBLINGS: Final = 8  # up to 5 s
_CLOSE_SECONDS: Final = 2.0
_SAVE_SECONDS: Final = 600.0  # for a worker that leaves because no supervisor is there
_FIRST_HEARTBEAT: Final = 0.25


@final
class MemberLink:
    """The connection of one worker to its supervisor.

    hello    asked at each connection: who this is and how far it is
    beat     asked at each heartbeat, in the link's thread
    urgent   called in the link's thread with each message as it arrives, before `receive` gives it out
    lookup   asked before each reconnect: where the supervisor is now; None: where it was
    unheard  called in the link's thread after each attempt that found no supervisor
    runs     called in the link's thread at least once in a heartbeat, while it has the interpreter
    """

    def __init__(
        self,
        address: Address,
        secret: bytes,
        hello: Callable[[], Hello],
        beat: Callable[[], Beat],
        urgent: Callable[[Message], None],
        *,
        tls: Tls | None = None,
        lookup: Callable[[], Address | None] | None = None,
        unheard: Callable[[], None] = lambda: None,
        runs: Callable[[], None] = lambda: None,
    ) -> None:
        self._address = address
        self._secret = secret
        self._hello = hello
        self._beat = beat
        self._urgent = urgent
        self._tls = tls.client() if tls is not None else None
        self._lookup = lookup
        self._unheard = unheard
        self._runs = runs
        self._lock = threading.Lock()
        self._was_heard = threading.Condition(self._lock)
        self._channel: Channel | None = None
        self._dialing: socket.socket | None = None
        self._kept: deque[tuple[int, bytes]] = deque()
        self._kept_bytes = 0
        self._number = 0
        self._sent = 0
        self._heard = 0
        self.heard_at = 0.0  # when the supervisor last said that it had
        self._heartbeat = _FIRST_HEARTBEAT
        self._patience = 0.0  # of a worker without a supervisor; told by the first
        self._last_resort = LastResort()
        self._next_beat = 0.0
        self._cut_at = time.monotonic()
        self._muted_until = 0.0
        self._inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[Welcome | Dismissed] = queue.SimpleQueue()
        self._trouble = "nobody answered"
        self._dismissed = False
        self._spoken_to = False
        self._closing = False
        self._wake = -1
        self._thread = threading.Thread(target=self._run, name="paceline-control", daemon=True)

    def start(self, timeout: float) -> Welcome:
        """Connect, prove, say hello, and wait for the Welcome."""
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread.start()
        try:
            answer = self._answers.get(timeout=timeout)
        except queue.Empty:
            trouble = self._trouble
            self.close()
            raise RendezvousError(
                f"the supervisor at {self._address[0]}:{self._address[1]} did not take this worker in within "
                f"{timeout:g} seconds: {trouble}",
                remedy="check that the supervisor runs and can be reached from this machine",
            ) from None
        if isinstance(answer, Dismissed):
            self.close()
            raise RendezvousError(
                f"this worker was not let in: {answer.reason}",
                remedy="start it on a machine and with packages like those of the other workers",
            )
        return answer

    def send(self, message: Message) -> None:
        """Never blocks. Kept until it was heard; without a connection it is sent after the next Hello.

        From any thread, but not from a signal handler, which may interrupt this very function.
        """
        self._send(message)

    def deliver(self, message: Message, seconds: float) -> bool:
        """Send, and wait for at most so long until it was heard and is in the journal: whether it was."""
        number = self._send(message)
        with self._was_heard:
            return self._was_heard.wait_for(lambda: self._heard >= number, seconds)

    def _send(self, message: Message) -> int:
        with self._lock:
            number = self._number + 1
            data = channel.frame(message, number)
            self._number = number
            self._kept.append((number, data))
            self._kept_bytes += len(data)
            while self._kept_bytes > KEPT_BYTES:
                first, oldest = self._kept.popleft()
                self._kept_bytes -= len(oldest)
                _log.warning("message %d to the supervisor is given up: too many wait for it", first)
            waits = self._push()
        if waits:
            self._poke()
        return number

    def receive(self, timeout: float | None) -> Message | None:
        """The next message for the main thread; None when there was none in time."""
        try:
            return self._inbox.get(timeout=timeout)
        except queue.Empty:
            return None

    def stop_looking(self, reason: str) -> None:
        """In `unheard`: no supervisor will ever let this worker in; `start` says so."""
        self._dismissed = True
        self._answers.put(Dismissed(reason=reason))

    @property
    def away(self) -> float:
        """Seconds without a supervisor; 0.0 while connected."""
        now = time.monotonic()
        with self._lock:
            if self._channel is not None and now >= self._muted_until:
                return 0.0
            return max(0.0, now - self._cut_at)

    def mute(self, seconds: float) -> None:
        """Fault injection: neither send nor hear for so long."""
        with self._lock:
            now = time.monotonic()
            if self._channel is not None and now >= self._muted_until:
                self._cut_at = now
            self._muted_until = max(self._muted_until, now + seconds)
        self._poke()

    def close(self) -> None:
        """Send what waits, as far as there is a connection, and end."""
        if self._wake < 0:
            return
        self._closing = True
        with self._lock:
            if self._dialing is not None:
                # A supervisor that does not answer is not waited for.
                with contextlib.suppress(OSError):
                    self._dialing.shutdown(socket.SHUT_RDWR)
        self._poke()
        self._thread.join()
        self._last_resort.close()
        os.close(self._wake)
        self._wake = -1

    def undelivered(self) -> list[Message]:
        """What was sent, and the supervisor never said that it heard it."""
        with self._lock:
            return [channel.unframed(data) for _, data in self._kept]

    # below: in the link's thread, but for _push and _poke

    def _run(self) -> None:
        failures = unheard = 0
        while not self._closing and not self._dismissed:
            self._wait_out_mute()
            self._runs()
            try:
                opened = self._connect()
            except (OSError, PacelineError) as error:
                self._trouble = str(error) or type(error).__name__
                self._unheard()
                self._wait(_PAUSES[min(failures, len(_PAUSES) - 1)])
                failures += 1
                self._find_again()
                continue
            failures = 0
            self._serve(opened)
            # Who is taken in and dropped without a word comes back ever more slowly.
            unheard = 0 if self._spoken_to else min(unheard + 1, _DROPPED_DOUBLINGS)
            if unheard and not self._closing:
                self._wait(_PAUSES[0] * 2.0**unheard)

    def _connect(self) -> Channel:
        sock = channel.dial(self._address, _CONNECT_SECONDS)
        with self._lock:
            self._dialing = sock
        try:
            if self._tls is not None:
                sock = self._tls.wrap(sock)
                with self._lock:
                    self._dialing = sock
            opened = Channel(sock, channel.prove(sock, self._secret, _CONNECT_SECONDS, self._tls))
        except BaseException:
            sock.close()
            raise
        finally:
            with self._lock:
                self._dialing = None
        self._spoken_to = False
        opened.send(self._hello())
        self._last_resort.disarm()
        with self._lock:
            self._channel = opened
            self._sent = 0
            self._push()
        self._next_beat = time.monotonic()
        return opened

    def _serve(self, opened: Channel) -> None:
        limit = float("inf")
        while not opened.closed and time.monotonic() < limit:
            if self._closing:
                limit = min(limit, time.monotonic() + _CLOSE_SECONDS)
                if not opened.wants_write or time.monotonic() < self._muted_until:
                    break
            self._turn(opened)
        with self._lock:
            self._channel = None
            if time.monotonic() >= self._muted_until:
                self._cut_at = time.monotonic()
            self._trouble = opened.closed
        opened.close()
        if self._patience and not self._dismissed and not self._closing:
            # It leaves by itself when its patience is over. Should it hang, nobody may be left to end it: not
            # the supervisor, nor its caller, nor the fork server.
            self._last_resort.arm(self._patience + _SAVE_SECONDS)

    def _turn(self, opened: Channel) -> None:
        self._runs()
        now = time.monotonic()
        if now < self._muted_until:
            self._wait(min(self._muted_until - now, self._heartbeat))
            return
        if now >= self._next_beat:
            # At multiples of it: the members of a machine beat together, and who hears them wakes once. After
            # a pause there is one beat, not all that were missed.
            self._next_beat = (now // self._heartbeat + 1) * self._heartbeat
            beat = channel.frame(self._beat())
            with self._lock:
                opened.send_frame(beat)
        with self._lock:
            # What was said while the link was mute, too.
            self._push()
            waits = opened.wants_write
        poll = select.poll()
        poll.register(opened, select.POLLIN | (select.POLLOUT if waits else 0))
        poll.register(self._wake, select.POLLIN)
        ready = dict(poll.poll(max(0.0, self._next_beat - time.monotonic()) * 1000))
        if self._wake in ready:
            self._drain()
        events = ready.get(opened.fileno(), 0)
        if not events or time.monotonic() < self._muted_until:
            return
        with self._lock:
            opened.flush()
            heard = opened.receive()
        for _, message in heard:
            self._take(message)

    def _take(self, message: Message) -> None:
        self._spoken_to = True
        match message:
            case Heard(number=number):
                self.heard_at = time.monotonic()
                with self._lock:
                    while self._kept and self._kept[0][0] <= number:
                        self._kept_bytes -= len(self._kept.popleft()[1])
                    self._heard = max(self._heard, number)
                    self._was_heard.notify_all()
                return
            case Welcome():
                self._heartbeat, self._patience = message.heartbeat, message.patience
                self._answers.put(message)
            case Dismissed():
                self._dismissed = True
                self._answers.put(message)
        self._urgent(message)
        if not isinstance(message, Dial):
            self._inbox.put(message)

    def _push(self) -> bool:
        """With the lock held: send what was not sent on this connection; True when some of it waits."""
        opened = self._channel
        if opened is None or time.monotonic() < self._muted_until:
            return False
        if self._sent < self._number:
            behind = self._number - self._sent
            newest = [self._kept[-1]] if behind == 1 and self._kept else list(self._kept)
            for number, data in newest:
                if number > self._sent:
                    opened.send_frame(data)
            self._sent = self._number
        return opened.wants_write

    def _find_again(self) -> None:
        if self._lookup is None:
            return
        try:
            self._address = self._lookup() or self._address
        except (OSError, PacelineError) as error:
            self._trouble = str(error)

    def _wait_out_mute(self) -> None:
        while not self._closing and (left := self._muted_until - time.monotonic()) > 0:
            self._runs()
            self._wait(min(left, self._heartbeat))

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
