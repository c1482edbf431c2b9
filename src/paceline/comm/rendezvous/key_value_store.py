"""A small key-value store for the time until a group stands: rank 0 serves it in a thread, every rank is a
client.

It does what torch's TCPStore would do here, without two of its habits: it never asks the name service
(TCPStore looks up the names of both ends of each connection, even on loopback, and waits seconds where no
name server answers), and a server that ends is an ordinary error for its clients, not pages of C++ frames
in their logs. Keys are text, values are bytes. A client that waits for keys is answered when they come:
no client polls.

Both ends prove that they know the secret before any request is sent (core.handshake: bytes of a fixed
size, few strangers, 3 seconds each), and every frame afterwards carries a tag of the session. Where there
is no secret the same is done with an empty one: it keeps strangers apart that do not speak the protocol,
and no others. What an authenticated client sends is JSON of limited size and checked form; whatever goes
wrong with one client ends that client's connection and nothing else.
"""

from __future__ import annotations

import base64
import json
import logging
import math
import os
import select
import selectors
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

from paceline.comm.transport.tcp.dial import DIAL_LOOK_SECONDS, Look, dial, no_check, read_exactly
from paceline.comm.transport.tcp.framed_socket import FramedSocket, FrameKind
from paceline.core.authenticated_listener import AuthenticatedListener, AuthenticatedSocket
from paceline.core.errors import WireError
from paceline.core.handshake import STORE, Connector
from paceline.core.wording import counted

_log = logging.getLogger("paceline.comm")

_MAX_BYTES = 2 << 20
MAX_VALUE = 1 << 20
_MAX_KEY = 1024
_MAX_KEYS = 1 << 16
_MAX_STORED = 256 << 20
_MAX_ANSWER = 32 << 20
_MAX_OUTBOX = 64 << 20


@dataclass(slots=True)
class _StoreConnection:
    """An authenticated connection of the server. `request` is the number of its latest request, `awaited` the
    keys that the client waits for, and those that end the wait as well; `held`: keys that its end sets."""

    link: FramedSocket
    request: int = -1
    awaited: tuple[list[str], list[str]] | None = None
    held: list[str] = field(default_factory=list)


class StoreServer:
    """Server of the store at `listener`, which it owns, until it is closed. `max_stored`: bytes of all
    values."""

    def __init__(
        self, listener: socket.socket, secret: bytes = b"", *, max_stored: int = _MAX_STORED
    ) -> None:
        self._listener = listener
        self._max_stored = max_stored
        self._values: dict[str, bytes] = {}
        self._stored = 0
        self._clients: dict[socket.socket, _StoreConnection] = {}
        self._selector = selectors.DefaultSelector()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC)
        self._stopped = False
        self._selector.register(self._wake, selectors.EVENT_READ, lambda mask, now: None)
        self._authenticator = AuthenticatedListener(listener, STORE, secret, self._selector, self._accept)
        self._thread: threading.Thread | None = threading.Thread(
            target=self._run, name="paceline-store", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """End the thread and every connection; a second call does nothing."""
        if self._thread is None:
            return
        self._stopped = True
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        self._thread = None
        self._authenticator.close()
        for client in self._clients.values():
            client.link.close()
        self._listener.close()
        self._selector.close()
        os.close(self._wake)

    def _run(self) -> None:
        while not self._stopped:
            due = self._authenticator.due
            wait = None if due == math.inf else max(due - time.monotonic(), 0.0)
            ready = self._selector.select(wait)
            now = time.monotonic()
            for key, mask in ready:
                key.data(mask, now)
            self._authenticator.tick(now)

    def _accept(self, context: bytes, proven: AuthenticatedSocket) -> None:
        client = _StoreConnection(FramedSocket(proven, max_message=_MAX_BYTES))
        self._clients[proven.sock] = client
        self._selector.register(proven.sock, selectors.EVENT_READ, partial(self._serve, client))

    def _serve(self, client: _StoreConnection, mask: int, now: float) -> None:
        changed = False
        try:
            client.link.flush()
            frames, ended = client.link.read()
            for frame in frames:
                if frame.kind is not FrameKind.MESSAGE:
                    raise ValueError(f"a {frame.kind.name} frame")
                changed |= self._handle(client, json.loads(frame.body))
            if client.link.put_bytes - client.link.sent_bytes > _MAX_OUTBOX:
                raise ValueError("it asks and does not read the answers")
        except Exception as error:
            # Of whatever kind: this client is not believed any longer, the others are served on.
            _log.warning("a client of the store was dropped: %s: %.200s", type(error).__name__, error)
            ended = True
        if ended:
            self._selector.unregister(client.link.sock)
            del self._clients[client.link.sock]
            client.link.close()
            for key in client.held:
                self._values[key], changed = b"", True
        else:
            self._update_events(client)
        if changed:
            for waiting in self._clients.values():
                if waiting.awaited is not None and self._answer_if_present(waiting):
                    self._update_events(waiting)

    def _update_events(self, client: _StoreConnection) -> None:
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if client.link.waiting else 0)
        self._selector.modify(client.link.sock, wanted, partial(self._serve, client))

    def _handle(self, client: _StoreConnection, request: Any) -> bool:
        """Answer a request, at once or, for `await`, once the keys are there. Return whether a value
        changed."""
        match request:
            case [int(number), [str(operation), *arguments]]:
                client.request, client.awaited = number, None
            case _:
                raise ValueError("not a request")
        match operation, arguments:
            case "await", [list(keys), list(instead)]:
                client.awaited = (checked_keys(keys), checked_keys(instead))
                self._answer_if_present(client)
                return False
            case "set", [str(key), str(value)]:
                self._store(key, base64.b64decode(value, validate=True))
                _reply(client, None)
                return True
            case "add", [str(key), int(amount)]:
                total = int(self._values.get(key, b"0")) + amount
                self._store(key, b"%d" % total)
                _reply(client, total)
                return True
            case "hold", [str(key)]:
                self._store(key + "/held", b"")  # refused where the store is full
                client.held.append(key)
                _reply(client, None)
                return False
            case "get", [list(keys)]:
                values = [self._values.get(key) for key in checked_keys(keys)]
                if sum(len(value) for value in values if value is not None) > _MAX_ANSWER:
                    # The same large value a thousand times, say.
                    raise ValueError(f"the answer for {counted(len(values), 'key')} would be too long")
                _reply(client, [None if value is None else _to_base64(value) for value in values])
                return False
            case "has", [list(keys)]:
                _reply(client, all(key in self._values for key in checked_keys(keys)))
                return False
        raise ValueError("not a request")

    def _store(self, key: str, value: bytes) -> None:
        if len(key) > _MAX_KEY or len(value) > MAX_VALUE:
            size = counted(len(value), "byte")
            raise ValueError(f"a key of {counted(len(key), 'character')} with a value of {size}")
        stored = self._stored + len(value) - len(self._values.get(key, b""))
        if stored > self._max_stored or (key not in self._values and len(self._values) >= _MAX_KEYS):
            raise ValueError("the store is full")
        self._values[key], self._stored = value, stored

    def _answer_if_present(self, client: _StoreConnection) -> bool:
        assert client.awaited is not None
        keys, instead = client.awaited
        there = all(key in self._values for key in keys)
        if not there and not any(key in self._values for key in instead):
            return False
        client.awaited = None
        _reply(client, there)
        return True


def _reply(client: _StoreConnection, answer: Any) -> None:
    client.link.put(FrameKind.MESSAGE, [memoryview(json.dumps([client.request, answer]).encode())])


def checked_keys(keys: list[Any]) -> list[str]:
    if len(keys) > _MAX_KEYS or not all(isinstance(key, str) for key in keys):
        raise ValueError(f"{counted(len(keys), 'key')}, or some that are no text")
    return keys


def _to_base64(value: bytes) -> str:
    return base64.b64encode(value).decode()


class StoreClient:
    """One connection to a store. Raises OSError when the server is gone or does not answer, WireError where
    it is not a store with this secret; `look` is called while it waits."""

    def __init__(
        self, host: str, port: int, timeout: float, *, secret: bytes = b"", look: Look | None = None
    ) -> None:
        self._timeout = timeout
        self._look = look
        self._lock = threading.Lock()
        self._requests = 0
        deadline = time.monotonic() + timeout
        sock = dial(host, port, deadline, look or no_check)
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            session = Connector(STORE, secret).run(
                lambda count: read_exactly(sock, count, deadline, look or no_check), sock.sendall
            )
            self._link = FramedSocket(AuthenticatedSocket(sock, session), max_message=1 << 40)
        except (OSError, EOFError) as error:
            sock.close()
            raise WireError(f"no answer of a store: {error}") from error
        except BaseException:
            sock.close()
            raise

    def set(self, key: str, value: str | bytes) -> None:
        self._ask(["set", key, _to_base64(value.encode() if isinstance(value, str) else value)])

    def set_at_end(self, key: str) -> None:
        """Have the server set the key once this connection has ended, however it ends."""
        self._ask(["hold", key])

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all the keys are there."""
        return bool(self._ask(["has", list(keys)]))

    def await_keys(self, keys: Sequence[str], seconds: float, instead: Sequence[str] = ()) -> bool:
        """Wait until all the keys are there (True), one of `instead` is, or `seconds` have passed."""
        try:
            return bool(self._ask(["await", list(keys), list(instead)], seconds))
        except TimeoutError:
            return False  # the next request makes the server forget this one

    def multi_get(self, keys: Sequence[str]) -> list[bytes | None]:
        values = cast("list[str | None]", self._ask(["get", list(keys)]))
        return [None if value is None else base64.b64decode(value) for value in values]

    def get(self, key: str) -> bytes | None:
        return self.multi_get([key])[0]

    def add(self, key: str, amount: int) -> int:
        return int(self._ask(["add", key, amount]))

    def close(self) -> None:
        self._link.close()

    def _ask(self, request: list[Any], seconds: float | None = None) -> Any:
        with self._lock:
            self._requests += 1
            self._link.put(FrameKind.MESSAGE, [memoryview(json.dumps([self._requests, request]).encode())])
            end = time.monotonic() + (self._timeout if seconds is None else seconds)
            while True:
                frames, ended = self._link.read()
                for frame in frames:
                    number, answer = json.loads(frame.body)
                    if number == self._requests:  # else of a request that was given up
                        return answer
                if ended:
                    raise ConnectionResetError("the store has closed")
                left = end - time.monotonic()
                if left <= 0:
                    raise TimeoutError("the store does not answer")
                if self._look is not None:
                    self._look()
                    left = min(left, DIAL_LOOK_SECONDS)
                poll = select.poll()
                poll.register(self._link.sock, select.POLLIN | (select.POLLOUT if self._link.waiting else 0))
                poll.poll(left * 1000)
                self._link.flush()
