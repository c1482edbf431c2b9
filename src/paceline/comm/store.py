"""A small key-value store for the time until a group stands: rank 0 serves it in a thread, every rank is a
client.

It does what torch's TCPStore would do here, without two of its habits: it never asks the name service
(TCPStore looks up the names of both ends of each connection, even on loopback, and waits seconds where no
name server answers), and a server that ends is an ordinary error for its clients, not pages of C++ frames
in their logs. Keys are text, values are bytes. Knows nothing of ranks.
"""

from __future__ import annotations

import os
import select
import selectors
import socket
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch.distributed import Store as TorchStore  # type: ignore[attr-defined]

from paceline.comm.transport.link import Kind, Link
from paceline.core import wire
from paceline.core.errors import WireError

_GREETING = ["paceline store", 1]
_MAX_BYTES = 1 << 20
_PAUSE = 0.002


class StoreServer:
    """Serves at `listener`, which it takes over, until it is closed."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._values: dict[str, bytes] = {}
        self._links: dict[socket.socket, Link] = {}
        self._selector = selectors.DefaultSelector()
        self._wake_in, self._wake_out = os.pipe2(os.O_CLOEXEC)
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(self._wake_in, selectors.EVENT_READ)
        self._thread: threading.Thread | None = threading.Thread(
            target=self._run, name="paceline-store", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Ends the thread and every connection; a second call does nothing."""
        if self._thread is None:
            return
        os.write(self._wake_out, b"\0")
        self._thread.join()
        self._thread = None
        for link in self._links.values():
            link.close()
        self._listener.close()
        self._selector.close()
        os.close(self._wake_in)
        os.close(self._wake_out)

    def _run(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.fileobj == self._wake_in:
                    return
                if key.fileobj is self._listener:
                    self._welcome()
                elif isinstance(key.fileobj, socket.socket):
                    self._serve(key.fileobj)

    def _welcome(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return  # the caller is gone again
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._links[sock] = Link(sock, max_message=_MAX_BYTES)
        self._selector.register(sock, selectors.EVENT_READ)

    def _serve(self, sock: socket.socket) -> None:
        link = self._links[sock]
        try:
            link.flush()
            frames, ended = link.read()
            for frame in frames:
                answer = self._answer(wire.decode(frame.body))
                link.put(Kind.MESSAGE, [memoryview(b"".join(wire.encode(answer)))])
        except (WireError, ValueError, TypeError, KeyError, IndexError):
            ended = True  # not one of ours
        if ended:
            self._selector.unregister(sock)
            del self._links[sock]
            link.close()
            return
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if link.waiting else 0)
        self._selector.modify(sock, wanted)

    def _answer(self, question: Any) -> Any:
        match question:
            case ["hello"]:
                return _GREETING
            case ["set", str(key), bytes(value)]:
                self._values[key] = value
                return None
            case ["get", [*keys]]:
                return [self._values.get(key) for key in keys]
            case ["has", [*keys]]:
                return all(key in self._values for key in keys)
            case ["add", str(key), int(amount)]:
                total = int(self._values.get(key, b"0")) + amount
                self._values[key] = b"%d" % total
                return total
        raise ValueError(f"not a question: {question!r}")


class StoreClient:
    """One connection to a store. Raises OSError when the server is gone or does not answer."""

    def __init__(self, host: str, port: int, timeout: float) -> None:
        self._timeout = timeout
        self._lock = threading.Lock()
        sock = socket.create_connection((host, port), timeout=timeout)
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._link = Link(sock, max_message=_MAX_BYTES)
        try:
            greeted = self._ask(["hello"]) == _GREETING
        except OSError as error:
            self.close()
            raise WireError(f"no answer of a store: {error}") from error
        except BaseException:
            self.close()
            raise
        if not greeted:
            self.close()
            raise WireError("the answer is not a store's")

    def set(self, key: str, value: str | bytes) -> None:
        self._ask(["set", key, value.encode() if isinstance(value, str) else value])

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all the keys are there."""
        return bool(self._ask(["has", list(keys)]))

    def multi_get(self, keys: Sequence[str]) -> list[bytes | None]:
        found: list[bytes | None] = self._ask(["get", list(keys)])
        return found

    def get(self, key: str) -> bytes | None:
        return self.multi_get([key])[0]

    def add(self, key: str, amount: int) -> int:
        return int(self._ask(["add", key, amount]))

    def close(self) -> None:
        self._link.close()

    def _ask(self, question: list[Any]) -> Any:
        with self._lock:
            self._link.put(Kind.MESSAGE, [memoryview(b"".join(wire.encode(question)))])
            end = time.monotonic() + self._timeout
            while True:
                frames, ended = self._link.read()
                if frames:
                    return wire.decode(frames[0].body)
                if ended:
                    raise ConnectionResetError("the store has closed")
                left = end - time.monotonic()
                if left <= 0:
                    raise TimeoutError("the store does not answer")
                writers = [self._link.sock] if self._link.waiting else []
                select.select([self._link.sock], writers, [], left)
                self._link.flush()


class ForTorch(TorchStore):
    """What a process group of torch needs of a store to come up, over a client and under a prefix."""

    def __init__(self, client: StoreClient, prefix: str, timeout: float) -> None:
        super().__init__()
        self._client = client
        self._prefix = prefix
        self._timeout = timeout

    def set(self, key: str, value: str | bytes) -> None:
        self._client.set(self._prefix + key, value)

    def get(self, key: str) -> bytes:
        self.wait([key], timedelta(seconds=self._timeout))
        value = self._client.get(self._prefix + key)
        assert value is not None
        return value

    def add(self, key: str, amount: int) -> int:
        return self._client.add(self._prefix + key, amount)

    def check(self, keys: Sequence[str]) -> bool:
        return self._client.check([self._prefix + key for key in keys])

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        end = time.monotonic() + (self._timeout if timeout is None else timeout.total_seconds())
        while not self.check(keys):
            if time.monotonic() > end:
                raise TimeoutError(f"nobody set {', '.join(keys)}")
            time.sleep(_PAUSE)
