"""Point-to-point messages of one rank: checked, packed, sent and received, now or in the background.

In the background sends keep their order, and so do receives from one source. Knows parcels and the
transport; the order of collectives is none of its business.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from paceline.comm.arguments import check_rank, check_timeout
from paceline.comm.calls import call_site, on_behalf_of
from paceline.comm.parcel import Parcel, pack, unpack
from paceline.comm.sequence import Handle, Sequence
from paceline.comm.transport.base import ANY_SOURCE, Message, memory_of
from paceline.core.errors import UsageError

_SENDS = -2  # the queue of sends; receives have one per source, ANY_SOURCE among them
_LENGTH_BYTES = 8


class Messenger:
    """The messages of one context."""

    def __init__(self, sequence: Sequence) -> None:
        self._sequence = sequence
        self._transport = sequence.transport
        self._queues: dict[int, ThreadPoolExecutor] = {}

    def send(self, message: Any, dest: int, tag: int, timeout: float | None, async_op: bool) -> Any:
        self._check("dest_rank", dest, tag, timeout)
        what = f"send(dest_rank={dest})"
        parcel = pack(message, what)
        if async_op:
            parcel = Parcel(parcel.head, parcel.body.clone())

        def post() -> None:
            head = memoryview(len(parcel.head).to_bytes(_LENGTH_BYTES, "little") + parcel.head)
            parts = (head, memory_of(parcel.body))
            self._counted("send", lambda: self._transport.post(dest, tag, parts, self._deadline(timeout)))

        return self._perhaps_later(post, _SENDS, what, async_op)

    def receive(self, source: int, tag: int | None, timeout: float | None, async_op: bool) -> Any:
        if source == ANY_SOURCE and self._transport.world_size == 1:
            raise UsageError(
                "receive() in a group of one rank: there is nobody to send", remedy="start more ranks"
            )
        self._check("source_rank", source, tag, timeout)
        alone = timeout is not None or async_op

        def take() -> Any:
            message: Message = self._counted(
                "receive",
                lambda: self._transport.take(source, tag, self._deadline(timeout), own_deadline=alone),
            )
            return _opened(message.body)

        return self._perhaps_later(take, source, f"receive(source_rank={source})", async_op)

    def close(self) -> None:
        """Ends the threads, after what they have in hand."""
        for queue in self._queues.values():
            queue.shutdown(wait=True)
        self._queues.clear()

    def _check(self, name: str, peer: int, tag: object, timeout: float | None) -> None:
        if peer != ANY_SOURCE or name == "dest_rank":
            check_rank(name, peer, self._transport.world_size)
        if peer == self._transport.rank:
            raise UsageError(f"{name}={peer} is this rank itself", remedy="name another rank")
        number = isinstance(tag, int) and not isinstance(tag, bool) and 0 <= tag < 1 << 31
        if tag is not None and not number:
            raise UsageError(f"tag={tag!r}", remedy="a tag is a whole number from 0 to 2147483647")
        if timeout is not None:
            check_timeout(timeout)
        self._sequence.check_open()

    def _counted(self, operation: str, action: Callable[[], Any]) -> Any:
        if not self._sequence.profiling:
            return action()
        before, start = self._transport.traffic.snapshot(), time.monotonic()
        result = action()
        after = self._transport.traffic.snapshot()
        self._sequence.stats.record(operation, "", before, after, time.monotonic() - start)
        return result

    def _perhaps_later(self, action: Callable[[], Any], key: int, what: str, async_op: bool) -> Any:
        if not async_op:
            return action()
        queue = self._queues.get(key)
        if queue is None:
            queue = self._queues[key] = ThreadPoolExecutor(1, thread_name_prefix="paceline-messages")
        line = call_site()

        def later() -> Any:
            with on_behalf_of(line):
                return action()

        return Handle(queue.submit(later), what)

    def _deadline(self, timeout: float | None) -> float:
        return time.monotonic() + (self._sequence.timeout if timeout is None else timeout)


def _opened(message: memoryview) -> Any:
    start = _LENGTH_BYTES + int.from_bytes(message[:_LENGTH_BYTES], "little")
    rest = message[start:]
    # torch refuses to look at an empty buffer.
    body = (
        torch.frombuffer(rest, dtype=torch.uint8)
        if len(rest)
        else torch.empty(0, dtype=torch.uint8, device="cpu")
    )
    return unpack(message[_LENGTH_BYTES:start], body)
