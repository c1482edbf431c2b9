"""Ranks that serve a chief: parameter servers and their workers, from when they stand ready to its end.

Each of them keeps one connection to the chief. The chief sees by it when one is lost; they see by it when the
chief is done, or gone. TensorFlow's own servers wait for ever: here a rank ends with its chief.
"""

from __future__ import annotations

import contextlib
import hmac
import selectors
import socket
import threading
from typing import final

from paceline.core.errors import PeerLostError, RendezvousError

_READY_SECONDS = 120.0
_TOKEN_BYTES = 32
_FITTING, _FITTED = b"fitting\n", b"fitted\n"


@final
class ServedRanks:
    """The chief's end. `lost` has the ranks whose connections ended, as they come."""

    def __init__(self, listener: socket.socket, token: str, ranks: int) -> None:
        self._listener, self._token = listener, token.encode()
        self._wanted = ranks
        self._links: dict[socket.socket, int] = {}
        self._lost: list[int] = []
        self._lock = threading.Lock()
        self._stop, self._stopped = socket.socketpair()
        self._thread: threading.Thread | None = None

    def await_all(self) -> None:
        """Wait until every rank stands ready."""
        self._listener.settimeout(_READY_SECONDS)
        while len(self._links) < self._wanted:
            try:
                link, _ = self._listener.accept()
            except TimeoutError:
                raise RendezvousError(
                    f"{self._wanted - len(self._links)} of {self._wanted} ranks did not come within "
                    f"{_READY_SECONDS:g} s",
                    remedy="see the output of the ranks that are missing",
                ) from None
            link.settimeout(_READY_SECONDS)
            with contextlib.suppress(OSError, ValueError):
                proof, _, rank = _read_line(link).partition(b" ")
                if hmac.compare_digest(proof, self._token):
                    link.settimeout(None)
                    self._links[link] = int(rank)
                    continue
            link.close()
        self._listener.close()
        self._thread = threading.Thread(target=self._watch, name="paceline-served-ranks", daemon=True)
        self._thread.start()

    def take_lost(self) -> list[int]:
        """Return the ranks that were lost since the last call."""
        with self._lock:
            taken, self._lost = self._lost, []
        return taken

    def fitting(self) -> None:
        """Tell all ranks that a training begins: the end of this process is a loss from now on."""
        self._tell(_FITTING)

    def fitted(self) -> None:
        """Tell all ranks that the training is done: when this process ends, so do they, and all is well."""
        self._tell(_FITTED)

    def close(self) -> None:
        self._stop.close()
        if self._thread is not None:
            self._thread.join()
        for link in self._links:
            link.close()
        self._stopped.close()
        self._listener.close()

    def _tell(self, line: bytes) -> None:
        for link in self._links:
            with contextlib.suppress(OSError):
                link.sendall(line)

    def _watch(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._stopped, selectors.EVENT_READ)
            for link, rank in self._links.items():
                selector.register(link, selectors.EVENT_READ, rank)
            while True:
                for key, _ in selector.select():
                    if key.data is None:
                        return
                    selector.unregister(key.fileobj)  # a rank says nothing more: this is its end
                    with self._lock:
                        self._lost.append(key.data)


def serve_until_done(meeting: tuple[str, int, str], rank: int) -> None:
    """Stand ready for the chief until it ends; PeerLostError where it ends before its training did."""
    host, port, token = meeting
    with socket.create_connection((host, port), timeout=_READY_SECONDS) as link:
        link.sendall(f"{token} {rank}\n".encode())
        link.settimeout(None)
        told = b""
        with contextlib.suppress(ConnectionError):
            while chunk := link.recv(len(_FITTED)):
                told += chunk
    if not told.endswith(_FITTED):
        raise PeerLostError("the chief, rank 0, was lost before its training was done", rank=0)


def _read_line(link: socket.socket) -> bytes:
    line = b""
    while not line.endswith(b"\n"):
        byte = link.recv(1)
        if not byte or len(line) > _TOKEN_BYTES + 16:
            raise ValueError("not a rank of this job")
        line += byte
    return line.strip()
