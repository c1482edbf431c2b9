"""A small key-value store for the time until a group stands: rank 0 serves it in a thread, every rank is a
client.

It does what torch's TCPStore would do here, without two of its habits: it never asks the name service
(TCPStore looks up the names of both ends of each connection, even on loopback, and waits seconds where no
name server answers), and a server that ends is an ordinary error for its clients, not pages of C++ frames
in their logs. Keys are text, values are bytes. A client that waits for keys is answered when they come:
nobody asks in turns. Where there is a secret, both ends prove that they know it before anything else is
said. Knows nothing of ranks.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import select
import selectors
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch.distributed import Store as TorchStore  # type: ignore[attr-defined]

from paceline.comm.transport.dial import LOOK_SECONDS, Look, dial, nothing_to_see
from paceline.comm.transport.link import Kind, Link
from paceline.core import wire
from paceline.core.errors import WireError

_GREETING = "paceline store 2"
_MAX_BYTES = 1 << 20
_NONCE_BYTES = 16


def _proof(secret: bytes, role: bytes, asked: bytes, answered: bytes) -> bytes:
    return hmac.new(secret, b"store" + role + asked + answered, hashlib.sha256).digest()


@dataclass(slots=True)
class _Guest:
    """One connection of the server: who it may be, and for which keys it waits."""

    link: Link
    proof: bytes = b""  # what it has to say next
    proven: bool = False
    question: int = -1
    awaited: tuple[list[str], list[str]] | None = None


class StoreServer:
    """Serves at `listener`, which it takes over, until it is closed."""

    def __init__(self, listener: socket.socket, secret: bytes = b"") -> None:
        self._listener = listener
        self._secret = secret
        self._values: dict[str, bytes] = {}
        self._guests: dict[socket.socket, _Guest] = {}
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
        for guest in self._guests.values():
            guest.link.close()
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
                elif isinstance(key.fileobj, socket.socket) and key.fileobj in self._guests:
                    self._serve(key.fileobj)

    def _welcome(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return  # the caller is gone again
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._guests[sock] = _Guest(Link(sock, max_message=_MAX_BYTES))
        self._selector.register(sock, selectors.EVENT_READ)

    def _serve(self, sock: socket.socket) -> None:
        guest = self._guests[sock]
        changed = False
        try:
            guest.link.flush()
            frames, ended = guest.link.read()
            for frame in frames:
                changed |= self._hear(guest, wire.decode(frame.body))
        except (WireError, ValueError, TypeError, KeyError, IndexError):
            ended = True  # not one of ours
        if ended:
            self._selector.unregister(sock)
            del self._guests[sock]
            guest.link.close()
        else:
            self._want(sock, guest)
        if changed:
            self._answer_waiting()

    def _want(self, sock: socket.socket, guest: _Guest) -> None:
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if guest.link.waiting else 0)
        self._selector.modify(sock, wanted)

    def _hear(self, guest: _Guest, said: Any) -> bool:
        """Answers a question, at once or later; True if it changed a value."""
        number, question = said
        guest.question, guest.awaited = int(number), None
        if not guest.proven:
            self._reply(guest, self._meet(guest, question))
            return False
        match question:
            case ["await", [*keys], [*instead]]:
                guest.awaited = ([str(key) for key in keys], [str(key) for key in instead])
                self._answer_one(guest)
                return False
            case ["set", str(key), bytes(value)]:
                self._values[key] = value
                self._reply(guest, None)
                return True
            case ["add", str(key), int(amount)]:
                total = int(self._values.get(key, b"0")) + amount
                self._values[key] = b"%d" % total
                self._reply(guest, total)
                return True
            case ["get", [*keys]]:
                self._reply(guest, [self._values.get(key) for key in keys])
                return False
            case ["has", [*keys]]:
                self._reply(guest, all(key in self._values for key in keys))
                return False
        raise ValueError(f"not a question: {question!r}")

    def _meet(self, guest: _Guest, question: Any) -> Any:
        match question:
            case ["hello", bytes(asked)] if not guest.proof and len(asked) == _NONCE_BYTES:
                answered = os.urandom(_NONCE_BYTES)
                guest.proof = _proof(self._secret, b"client", asked, answered)
                return [_GREETING, answered, _proof(self._secret, b"server", asked, answered)]
            case ["prove", bytes(proof)] if guest.proof and hmac.compare_digest(proof, guest.proof):
                guest.proven = True
                return True
        raise ValueError("a stranger")

    def _answer_waiting(self) -> None:
        for sock, guest in self._guests.items():
            if guest.awaited is not None and self._answer_one(guest):
                self._want(sock, guest)

    def _answer_one(self, guest: _Guest) -> bool:
        assert guest.awaited is not None
        keys, instead = guest.awaited
        there = all(key in self._values for key in keys)
        if not there and not any(key in self._values for key in instead):
            return False
        guest.awaited = None
        self._reply(guest, there)
        return True

    def _reply(self, guest: _Guest, answer: Any) -> None:
        guest.link.put(Kind.MESSAGE, [memoryview(b"".join(wire.encode([guest.question, answer])))])


class StoreClient:
    """One connection to a store. Raises OSError when the server is gone or does not answer; `look` is
    called while it waits."""

    def __init__(
        self, host: str, port: int, timeout: float, *, secret: bytes = b"", look: Look | None = None
    ) -> None:
        self._timeout = timeout
        self._look = look
        self._lock = threading.Lock()
        self._questions = 0
        sock = dial(host, port, time.monotonic() + timeout, look or nothing_to_see)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._link = Link(sock, max_message=_MAX_BYTES)
        try:
            self._meet(secret)
        except OSError as error:
            self.close()
            raise WireError(f"no answer of a store: {error}") from error
        except BaseException:
            self.close()
            raise

    def _meet(self, secret: bytes) -> None:
        asked = os.urandom(_NONCE_BYTES)
        match self._ask(["hello", asked]):
            case [str(greeting), bytes(answered), bytes(proof)] if greeting == _GREETING:
                if not hmac.compare_digest(proof, _proof(secret, b"server", asked, answered)):
                    raise WireError("the store does not know this group's secret")
                self._ask(["prove", _proof(secret, b"client", asked, answered)])
            case _:
                raise WireError("the answer is not a store's")

    def set(self, key: str, value: str | bytes) -> None:
        self._ask(["set", key, value.encode() if isinstance(value, str) else value])

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all the keys are there."""
        return bool(self._ask(["has", list(keys)]))

    def await_keys(self, keys: Sequence[str], seconds: float, instead: Sequence[str] = ()) -> bool:
        """Waits until all the keys are there (True), one of `instead` is, or `seconds` have passed."""
        try:
            return bool(self._ask(["await", list(keys), list(instead)], seconds))
        except TimeoutError:
            return False  # the next question makes the server forget this one

    def multi_get(self, keys: Sequence[str]) -> list[bytes | None]:
        found: list[bytes | None] = self._ask(["get", list(keys)])
        return found

    def get(self, key: str) -> bytes | None:
        return self.multi_get([key])[0]

    def add(self, key: str, amount: int) -> int:
        return int(self._ask(["add", key, amount]))

    def close(self) -> None:
        self._link.close()

    def _ask(self, question: list[Any], seconds: float | None = None) -> Any:
        with self._lock:
            self._questions += 1
            self._link.put(Kind.MESSAGE, [memoryview(b"".join(wire.encode([self._questions, question])))])
            end = time.monotonic() + (self._timeout if seconds is None else seconds)
            while True:
                frames, ended = self._link.read()
                for frame in frames:
                    number, answer = wire.decode(frame.body)
                    if number == self._questions:  # else of a question that was given up
                        return answer
                if ended:
                    raise ConnectionResetError("the store has closed")
                left = end - time.monotonic()
                if left <= 0:
                    raise TimeoutError("the store does not answer")
                if self._look is not None:
                    self._look()
                    left = min(left, LOOK_SECONDS)
                writers = [self._link.sock] if self._link.waiting else []
                select.select([self._link.sock], writers, [], left)
                self._link.flush()


class ForTorch(TorchStore):
    """What a process group of torch needs of a store to come up, over a client and under a prefix."""

    def __init__(self, client: StoreClient, prefix: str, timeout: float, instead: Sequence[str] = ()) -> None:
        super().__init__()
        self._instead = instead
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
        seconds = self._timeout if timeout is None else timeout.total_seconds()
        if not self._client.await_keys([self._prefix + key for key in keys], seconds, self._instead):
            raise TimeoutError(f"nobody set {', '.join(keys)}")
