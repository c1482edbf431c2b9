"""The answering end of `paceline doctor --hosts`: proves the secret to each that asks, and answers it in a
thread of its connection. Strangers are handled as at every port (`core.authenticated_listener`)."""

from __future__ import annotations

import logging
import os
import selectors
import socket
import threading
from typing import Final, final

from paceline.core.authenticated_listener import AuthenticatedListener, AuthenticatedSocket
from paceline.core.clock import MonotonicClock
from paceline.core.errors import PacelineError
from paceline.core.handshake import DOCTOR
from paceline.core.host import host_name
from paceline.monitor.doctor.link_probe import ProbeConnection, answer

_log = logging.getLogger(__name__)
_MOST_AT_ONCE: Final = 32
_END_SECONDS: Final = 2.0


@final
class LinkServer:
    """Serves at a listening socket until `stop`, which any thread may call."""

    def __init__(self, listener: socket.socket, secret: bytes) -> None:
        self._listener, self._secret = listener, secret
        self._open: dict[socket.socket, threading.Thread] = {}
        self._lock = threading.Lock()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC)

    def stop(self) -> None:
        os.eventfd_write(self._wake, 1)

    def run(self, seconds: float) -> None:
        """Serve for at most so long."""
        clock = MonotonicClock()
        until = clock.now() + seconds
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(self._wake, selectors.EVENT_READ)
                port = AuthenticatedListener(self._listener, DOCTOR, self._secret, selector, self._begin)
                stopped = False
                while not stopped and (left := until - clock.now()) > 0:
                    ready = selector.select(max(0.0, min(left, port.due - clock.now())))
                    for key, mask in ready:
                        if key.data is None:
                            stopped = True
                        else:
                            key.data(mask, clock.now())
                    port.tick(clock.now())
                port.close()
        finally:
            self._end_all()
            os.close(self._wake)

    def _begin(self, context: bytes, proven: AuthenticatedSocket) -> None:
        with self._lock:
            if len(self._open) >= _MOST_AT_ONCE:
                raise ConnectionRefusedError("too many ask at once")
            thread = threading.Thread(target=self._serve, args=(proven,), name="doctor", daemon=True)
            self._open[proven.sock] = thread
        thread.start()

    def _serve(self, proven: AuthenticatedSocket) -> None:
        try:
            proven.sock.setblocking(True)
            connection = ProbeConnection(proven.sock, proven.session)
            while True:
                answer(connection, self._secret, host_name())
        except (OSError, ValueError, PacelineError) as error:
            # The other end has what it wanted and closed, or speaks nonsense: only this connection ends.
            _log.debug("a connection from %s ended: %r", proven.host, error)
        finally:
            with self._lock:
                self._open.pop(proven.sock, None)
            proven.sock.close()

    def _end_all(self) -> None:
        with self._lock:
            left = dict(self._open)
        for sock, thread in left.items():
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError as error:
                _log.debug("a connection was closed already: %r", error)
            thread.join(_END_SECONDS)  # one that measures another host for its peer ends later, by itself
