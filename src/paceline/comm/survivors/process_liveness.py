"""Whether the processes of a group still live, found out without a supervisor.

Every process keeps a listener for this alone, and answers each connection with a proof that it is the process
that was meant. What a connection shows:

    alive     it was taken, and the answer came; on this host the process itself is seen to live
    gone      it was refused, or, on this host, the process has ended: certain, and for good
    silent    neither: a machine that is down and a network that is cut look the same from here
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import os
import selectors
import socket
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal, final

from paceline.comm.rendezvous.view_group import ViewPeer
from paceline.core.process_state import start_time

LivenessAnswer = Literal["alive", "gone", "silent"]

LOOK_SECONDS: Final = 2.0
"""How long a process may take to answer before it counts as silent."""
_PROOF_BYTES: Final = hashlib.sha256().digest_size
_PAUSE_SECONDS: Final = 0.1  # without a free descriptor, before the next connection is taken


@dataclass(frozen=True)
class LivingProcess:
    """A process as the others know it. `member` is what it is in a view; `started` tells it from a later
    process of the same number; `port` is that of its liveness listener, at the host of `member.endpoint`."""

    member: ViewPeer
    started: int
    port: int

    @property
    def rank(self) -> int:
        return self.member.slot

    def to_plain(self) -> list[object]:
        member = self.member
        about = [member.slot, member.pid, member.host, member.hostname, *member.endpoint]
        return [*about, self.started, self.port]

    @classmethod
    def from_plain(cls, plain: list[object]) -> LivingProcess:
        slot, pid, host, hostname, address, door, started, port = plain
        member = ViewPeer(
            int(str(slot)), int(str(pid)), str(host), str(hostname), (str(address), int(str(door)))
        )
        return cls(member, int(str(started)), int(str(port)))


@final
class LivenessListener:
    """Answers for this process until it is closed, in a thread, whatever the process computes."""

    def __init__(self, listener: socket.socket, secret: bytes, rank: int) -> None:
        self._listener, self._proof = listener, _proof(secret, rank)
        self.port: int = listener.getsockname()[1]
        self._listener.setblocking(False)
        self._wake = os.eventfd(0, os.EFD_CLOEXEC)
        self._thread: threading.Thread | None = threading.Thread(
            target=self._run, name="paceline-liveness", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Refuse further connections: from now on this process counts as gone."""
        if self._thread is None:
            return
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        self._thread = None
        os.close(self._wake)
        self._listener.close()

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake, selectors.EVENT_READ)
            selector.register(self._listener, selectors.EVENT_READ)
            while all(key.fd != self._wake for key, _ in selector.select()):
                try:
                    taken, _ = self._listener.accept()
                except (BlockingIOError, InterruptedError, ConnectionError):
                    continue  # a caller that has left already
                except OSError:
                    # No descriptor is left: the caller stays in the queue, and to accept again at once would
                    # fail again. It is answered after a moment, unless this process ends meanwhile.
                    selector.unregister(self._listener)
                    closing = selector.select(_PAUSE_SECONDS)
                    selector.register(self._listener, selectors.EVENT_READ)
                    if closing:
                        return
                    continue
                # The caller may be a stranger, and gone: the next one is answered all the same.
                with taken, contextlib.suppress(OSError):
                    taken.send(self._proof)


def look(peers: Iterable[LivingProcess], secret: bytes, host: str) -> dict[int, LivenessAnswer]:
    """Return by rank what the processes answer, asked all at once, from a process on `host`."""
    found: dict[int, LivenessAnswer] = {}
    with selectors.DefaultSelector() as selector, contextlib.ExitStack() as stack:
        for peer in peers:
            if peer.member.host == host and start_time(peer.member.pid) != peer.started:
                found[peer.rank] = "gone"
                continue
            found[peer.rank] = "silent"
            try:
                dialed = stack.enter_context(_dial(peer))
            except ConnectionRefusedError:
                found[peer.rank] = "gone"
                continue
            except OSError:
                continue  # a name that is not known now, no descriptor left: nothing is known of the peer
            selector.register(dialed, selectors.EVENT_WRITE, peer)
        deadline = time.monotonic() + LOOK_SECONDS
        while selector.get_map() and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                assert isinstance(key.fileobj, socket.socket)
                answer = _answer(key.fileobj, key.data, secret, host)
                if answer is None:
                    selector.modify(key.fileobj, selectors.EVENT_READ, key.data)
                else:
                    found[key.data.rank] = answer
                    selector.unregister(key.fileobj)
    return found


def _dial(peer: LivingProcess) -> socket.socket:
    host = peer.member.endpoint[0]
    family, _, _, _, target = socket.getaddrinfo(host, peer.port, type=socket.SOCK_STREAM)[0]
    dialed = socket.socket(family, socket.SOCK_STREAM)
    dialed.setblocking(False)
    try:
        dialed.connect(target)
    except BlockingIOError:
        return dialed  # under way
    except OSError:
        dialed.close()
        raise
    return dialed


def _answer(dialed: socket.socket, peer: LivingProcess, secret: bytes, host: str) -> LivenessAnswer | None:
    """Return what a connection on which something happened shows; None: it is taken, the proof is to come."""
    problem = dialed.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if problem:
        return "gone" if problem == errno.ECONNREFUSED else "silent"
    if peer.member.host == host:
        return "alive"
    try:
        proof = dialed.recv(_PROOF_BYTES)
    except BlockingIOError:
        return None
    except OSError:
        return "silent"
    # Another process may listen there since: it cannot know the proof.
    return "alive" if hmac.compare_digest(proof, _proof(secret, peer.rank)) else "gone"


def _proof(secret: bytes, rank: int) -> bytes:
    return hmac.new(secret, b"rank %d is alive" % rank, hashlib.sha256).digest()
