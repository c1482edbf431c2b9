"""Large messages over a Gloo group, and a way out of a wait that will not end.

Gloo's transfers cannot be polled and its waits cannot be cancelled: a thread of this module waits, whoever needs the result looks at
`Transfer.done`. The way out uses what Gloo does when a wait times out: it closes every connection of the group, and with that every wait
ends. `abort` waits a millisecond for a message that nobody sends. Knows bytes and peers, not calls.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroupGloo, Store

_FOREVER = timedelta(days=1)
_NUMBERS = 1 << 24
_NOBODYS_NUMBER = _NUMBERS


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
        options = ProcessGroupGloo._Options()
        options._devices = [ProcessGroupGloo.create_device(hostname=address)]
        options._timeout = timedelta(seconds=timeout)
        options._threads = 1
        self._group: Any = ProcessGroupGloo(store, rank, world_size, options)
        self._group.set_timeout(_FOREVER)
        self._peers = [peer for peer in range(world_size) if peer != rank]
        self._notify = notify
        self._numbers = dict.fromkeys(self._peers, 0)
        self._queue: queue.SimpleQueue[Transfer | None] = queue.SimpleQueue()
        self._under_way: set[Transfer] = set()
        self._thread: threading.Thread | None = None
        self._closing = threading.Lock()

    @property
    def group(self) -> Any:
        return self._group

    def next_number(self, peer: int) -> int:
        """The number of the next message to `peer`: both ends know it, so messages cannot be mixed up."""
        number = self._numbers[peer]
        self._numbers[peer] = (number + 1) % _NUMBERS
        return number

    def send(self, body: Tensor, peer: int, number: int) -> Transfer:
        work = self._group.send([body], peer, number)
        return self.follow(peer, lambda: work.wait(_FOREVER))

    def receive(self, body: Tensor, peer: int, number: int) -> Transfer:
        work = self._group.recv([body], peer, number)
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

    def close(self) -> None:
        """Ends what is under way, the thread and the group."""
        with self._closing:
            if self._group is None:
                return
            if self._under_way:
                abort(self._group, self._peers)
            if self._thread is not None:
                self._queue.put(None)
                self._thread.join()
            self._group = None


def abort(group: Any, peers: list[int]) -> None:
    """Makes every wait on a Gloo group end with an error, here and now; the group is of no use afterwards."""
    for peer in peers:
        try:
            group.recv([torch.empty(1)], peer, _NOBODYS_NUMBER).wait(timedelta(milliseconds=1))
        except RuntimeError as error:
            # A connection that is closed already says so at once; the others need one that times out.
            if "imed out" in str(error):
                return


def _nothing() -> None:
    """What is left to do of a transfer that is over; holds no memory."""
