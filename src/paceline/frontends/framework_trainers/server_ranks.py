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
from collections.abc import Callable
from typing import final

from paceline.core.errors import PeerLostError, RendezvousError

_READY_SECONDS = 120.0
_TOKEN_BYTES = 32
_FITTING, _FITTED = b"fitting\n", b"fitted\n"


@final
class ServedRanks:
    """The chief's end. Ranks from 1 on are `servers`, which hold the variables, and then `workers`: training
    is over without one of the servers, and without any worker."""

    def __init__(self, listener: socket.socket, token: str, servers: int, workers: int) -> None:
        self._listener, self._token = listener, token.encode()
        self._servers, self._wanted = servers, servers + workers
        self._links: dict[socket.socket, int] = {}
        self._lost: list[int] = []
        self._workers = workers  # that are left
        self._over: PeerLostError | None = None
        self._tell_over: Callable[[PeerLostError], None] | None = None
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
        """Return the workers that were lost since the last call, and whose work the others do."""
        with self._lock:
            taken, self._lost = self._lost, []
        return taken

    def tell_when_over(self, tell: Callable[[PeerLostError], None]) -> None:
        """Call `tell`, in another thread perhaps, when a rank is lost without which no step can be made; now
        where that is so already."""
        with self._lock:
            self._tell_over, over = tell, self._over
        if over is not None:
            tell(over)

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
                    self._lose(key.data)

    def _lose(self, rank: int) -> None:
        is_server = rank <= self._servers
        with self._lock:
            self._workers -= not is_server
            if self._workers and not is_server:
                self._lost.append(rank)
                return
            self._over = over = self._over or _without(rank, is_server)
            tell = self._tell_over
        if tell is not None:
            tell(over)


def serve_until_done(meeting: tuple[str, int, str], rank: int) -> None:
    """Stand ready for the chief until it ends; PeerLostError where it ends in the middle of a training."""
    host, port, token = meeting
    with socket.create_connection((host, port), timeout=_READY_SECONDS) as link:
        link.sendall(f"{token} {rank}\n".encode())
        link.settimeout(None)
        told = b""
        with contextlib.suppress(ConnectionError):
            while chunk := link.recv(len(_FITTED)):
                told += chunk
    # A chief that only evaluates tells nothing; its own failure is its launcher's to see.
    if told.endswith(_FITTING):
        raise PeerLostError("the chief, rank 0, was lost before its training was done", rank=0)


def _without(rank: int, is_server: bool) -> PeerLostError:
    what = "a parameter server, was lost with its variables" if is_server else "the last worker, was lost"
    return PeerLostError(
        f"rank {rank}, {what}",
        rank=rank,
        remedy="start the job again with resume_from_checkpoint=True; `paceline run` does so by itself",
    )


def _read_line(link: socket.socket) -> bytes:
    line = b""
    while not line.endswith(b"\n"):
        byte = link.recv(1)
        if not byte or len(line) > _TOKEN_BYTES + 16:
            raise ValueError("not a rank of this job")
        line += byte
    return line.strip()
