"""Large messages over a Gloo group, and a way out of a wait that will not end.

Gloo's transfers cannot be polled and its waits cannot be cancelled: a thread of this module waits, whoever
needs the result looks at `Transfer.done`. The way out uses what Gloo does when a wait times out: it closes
every connection of the group, and with that every wait for a receive ends. `abort` waits a millisecond for a
message that nobody sends. A wait for a send that has begun would go on even then, so nobody waits for sends:
the receiver says when it has everything. Knows bytes and peers, not calls.
"""

from __future__ import annotations

import queue
import struct
import threading
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroupGloo, Store  # type: ignore[attr-defined]

_FOREVER = timedelta(days=1)
_LAST_SECONDS = 2.0
_NOBODYS_TAG = 0
_TAGGED = struct.Struct("<QqQI")


@dataclass(eq=False)
class Transfer:
    """Something under way with `peer` (-1: with all)."""

    peer: int
    finish: Callable[[], Any]
    done: bool = False
    error: BaseException | None = None


class Bulk:
    """One rank's end of a Gloo group of its own. `notify` is called whenever a transfer is done."""

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        address: str,
        timeout: float,
        notify: Callable[[], None],
    ) -> None:
        options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [ProcessGroupGloo.create_device(hostname=address)]
        options._timeout = timedelta(seconds=timeout)
        options._threads = 1
        self._group: Any = ProcessGroupGloo(store, rank, world_size, options)
        self._group.set_timeout(_FOREVER)
        self._peers = [peer for peer in range(world_size) if peer != rank]
        self._notify = notify
        self._queue: queue.SimpleQueue[Transfer | None] = queue.SimpleQueue()
        self._under_way: set[Transfer] = set()
        self._thread: threading.Thread | None = None
        self._closing = threading.Lock()

    @property
    def group(self) -> Any:
        return self._group

    def send(self, body: Tensor, peer: int, tag: int) -> Callable[[], object]:
        """Starts a send; the result ends it, and must be called when the receiver has everything."""
        work = self._group.send([body], peer, tag)
        return lambda: work.wait(_FOREVER)

    def receive(self, body: Tensor, peer: int, tag: int) -> Transfer:
        work = self._group.recv([body], peer, tag)
        return self.follow(peer, lambda: work.wait(_FOREVER))

    def follow(self, peer: int, finish: Callable[[], Any]) -> Transfer:
        """Runs `finish` in the waiting thread, after what is there already."""
        transfer = Transfer(peer, finish)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="paceline-bulk", daemon=True)
            self._thread.start()
        self._under_way.add(transfer)
        self._queue.put(transfer)
        return transfer

    def _run(self) -> None:
        while (transfer := self._queue.get()) is not None:
            try:
                transfer.finish()
            except BaseException as error:
                transfer.error = error
            transfer.done = True
            transfer.finish = _nothing
            self._under_way.discard(transfer)
            self._notify()
            del transfer

    def close(self, *, in_haste: bool = False) -> None:
        """Ends what is under way, the thread and the group; in haste, the group's own threads end after the
        return."""
        with self._closing:
            if self._group is None:
                return
            if self._under_way:
                abort(self._group, self._peers)
            if self._thread is not None:
                self._queue.put(None)
                # A collective of the backend itself may take until its own deadline to end.
                self._thread.join(_LAST_SECONDS)
            holder, self._group = [self._group], None
            if in_haste:
                # Gloo takes some 20 ms to end its threads. Not a daemon: the interpreter waits for it.
                threading.Thread(target=holder.clear, name="paceline-bulk-end").start()


def tag_of(length: int, sequence: int, signature: int, number: int) -> int:
    """Gloo's tag for a message: ends that do not expect the same message never meet."""
    return max(zlib.crc32(_TAGGED.pack(length, sequence, signature, number)) & 0x7FFFFFFF, _NOBODYS_TAG + 1)


def abort(group: Any, peers: list[int]) -> None:
    """Makes every wait on a Gloo group end with an error, here and now; the group is of no use afterwards."""
    for peer in peers:
        try:
            group.recv([torch.empty(1, device="cpu")], peer, _NOBODYS_TAG).wait(timedelta(milliseconds=1))
        except RuntimeError as error:
            # A connection that is closed already says so at once; the others need one that times out.
            if "imed out" in str(error):
                return


def _nothing() -> None:
    """What is left to do of a transfer that is over; holds no memory."""
