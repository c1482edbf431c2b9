"""Meshes of several ranks in this process."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from paceline.comm.transport.tcp.mesh import Mesh
from paceline.comm.transport.tcp.mesh_handshake import connect_all
from paceline.core.listen_address import ListenAddress

SECRET = b"s" * 32


@contextmanager
def meshes(size: int, labels: Sequence[int] | None = None) -> Iterator[list[Mesh]]:
    """Meshes of `size` ranks in this process; `labels` are the numbers by which texts name them."""
    found: dict[int, Mesh] = {}
    listeners = [ListenAddress().open("127.0.0.1") for _ in range(size)]
    endpoints = {rank: ("127.0.0.1", listener.getsockname()[1]) for rank, listener in enumerate(listeners)}
    names = {rank: f"process {rank}" for rank in range(size)}

    def build(rank: int) -> None:
        others = {peer: endpoint for peer, endpoint in endpoints.items() if peer != rank}
        connected = connect_all(rank, listeners[rank], others, SECRET, time.monotonic() + 10)
        control = {peer: pair.control for peer, pair in connected.items()}
        found[rank] = Mesh(rank, control, names, labels)
        for pair in connected.values():
            pair.bulk.sock.close()

    threads = [threading.Thread(target=build, args=(rank,)) for rank in range(size)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        yield [found[rank] for rank in range(size)]
    finally:
        closing = [threading.Thread(target=mesh.close) for mesh in found.values()]
        for thread in closing:
            thread.start()
        for thread in closing:
            thread.join()
        for listener in listeners:
            listener.close()
