"""Functions of the ranks in the tests of transport_contract.py.

Each function runs on every rank of a group and checks what it sees there; those about ranks that do not fit
together return what error they got, and how fast. Functions of a module, so that they can travel to other
processes by name.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress

import torch
from torch import Tensor

from paceline.comm.call_status import CollectiveCall, signature_of
from paceline.comm.context import DistributedContext
from paceline.comm.transport.base import ANY_SOURCE, HEADER_BYTES, ReportsWaits
from paceline.core.errors import CommTimeoutError, PacelineError, UsageError

PATIENCE = 20.0
NOTICED_WITHIN = 5.0
"""Seconds after which ranks that do not fit together must know it."""

Outcome = tuple[str, str, float]
"""The kind of error a rank got, its text, and the seconds it took."""


# exchange


def messages_in_order(ctx: DistributedContext) -> None:
    right, left = (ctx.rank + 1) % ctx.world_size, (ctx.rank - 1) % ctx.world_size
    sizes = [7, 0, 1000, 1, 100_000, 3, 300_001, 0, 5]
    for call in _calls(3):
        sends = [(right, _pattern(ctx.rank, index, size)) for index, size in enumerate(sizes)]
        receives = [(left, torch.zeros(size, dtype=torch.int64)) for size in sizes]
        ctx.transport.exchange(call, sends, receives, _soon())
        for index, (_, arrived) in enumerate(receives):
            assert torch.equal(arrived, _pattern(left, index, sizes[index]))


def empty_messages(ctx: DistributedContext) -> None:
    peer = 1 - ctx.rank
    nothing = torch.empty(0)
    for call in _calls(5):
        ctx.transport.exchange(call, [(peer, nothing)] * 3, [(peer, torch.empty(0))] * 3, _soon())


def large_messages(ctx: DistributedContext) -> None:
    peers = _peers(ctx)
    size = 700_001
    (call,) = _calls(1)
    arrived = {peer: torch.zeros(size, dtype=torch.int64) for peer in peers}
    sends = [(peer, _pattern(ctx.rank, peer, size)) for peer in peers]
    ctx.transport.exchange(call, sends, list(arrived.items()), _soon())
    for peer in peers:
        assert torch.equal(arrived[peer], _pattern(peer, ctx.rank, size))


def many_messages(ctx: DistributedContext) -> None:
    peers = _peers(ctx)
    (call,) = _calls(1)
    sends = [(peer, _pattern(ctx.rank, index, 50)) for index in range(200) for peer in peers]
    receives = [(peer, torch.zeros(50, dtype=torch.int64)) for _ in range(200) for peer in peers]
    ctx.transport.exchange(call, sends, receives, _soon())
    for position, (peer, arrived) in enumerate(receives):
        assert torch.equal(arrived, _pattern(peer, position // len(peers), 50))


def one_sided(ctx: DistributedContext) -> None:
    for call, size in zip(_calls(4), (1, 10_000, 200_000, 0), strict=True):
        if ctx.rank == 0:
            ctx.transport.exchange(
                call, [(peer, _pattern(0, peer, size)) for peer in _peers(ctx)], [], _soon()
            )
        else:
            arrived = torch.zeros(size, dtype=torch.int64)
            ctx.transport.exchange(call, [], [(0, arrived)], _soon())
            assert torch.equal(arrived, _pattern(0, ctx.rank, size))


def all_dtypes(ctx: DistributedContext) -> None:
    names = ["bool", "uint8", "int16", "float16", "bfloat16", "float64", "complex64"]
    for call, name in zip(_calls(len(names)), names, strict=True):
        dtype = getattr(torch, name)
        sent = torch.arange(33).to(dtype)
        arrived = torch.zeros(33, dtype=dtype)
        _swap(ctx, call, sent, arrived)
        assert torch.equal(sent, arrived)


def reused_memory(ctx: DistributedContext) -> None:
    for size in (10, 5_000, 400_000):
        out, into = torch.empty(size), torch.empty(size)
        for turn, call in enumerate(_calls(10)):
            out.fill_(float(turn * 2 + ctx.rank))
            _swap(ctx, call, out, into)
            out.fill_(-1.0)
            assert bool((into == turn * 2 + 1 - ctx.rank).all())


def counted_traffic(ctx: DistributedContext) -> None:
    traffic = ctx.transport.traffic
    for call, size in zip(_calls(2), (100, 1_000_000), strict=True):
        before = traffic.snapshot()
        out, into = torch.zeros(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
        _swap(ctx, call, out, into)
        messages, sent, received, headers, _, rounds = (
            after - then for after, then in zip(traffic.snapshot(), before, strict=True)
        )
        assert (messages, sent, received, rounds) == (1, size, size, 1)
        # A message may carry tags; a large one may be announced, cut in chunks, and its arrival confirmed.
        assert HEADER_BYTES <= headers <= 6 * HEADER_BYTES + size // 1024


# post and take


def tagged_messages(ctx: DistributedContext) -> None:
    if ctx.rank == 0:
        for tag in (1, 2, 1, 3):
            _post(ctx, 1, tag, f"{tag}".encode() * 5)
        _post(ctx, 1, 4, b"")
    else:
        taken = [_take(ctx, 0, tag) for tag in (3, 2, None, 1, 4)]
        assert taken == [b"33333", b"22222", b"11111", b"11111", b""]


def messages_from_any_source(ctx: DistributedContext) -> None:
    if ctx.rank:
        for number in range(3):
            _post(ctx, 0, 0, bytes([ctx.rank, number]))
        return
    seen: dict[int, list[int]] = {1: [], 2: []}
    for _ in range(6):
        message = ctx.transport.take(ANY_SOURCE, None, _soon(), own_deadline=False)
        sender, number = bytes(message.body)
        assert sender == message.source
        seen[sender].append(number)
    assert seen == {1: [0, 1, 2], 2: [0, 1, 2]}


def late_message(ctx: DistributedContext) -> None:
    if ctx.rank == 0:
        for _ in range(2):
            kind, text, _ = _outcome(
                lambda: ctx.transport.take(1, 7, time.monotonic() + 0.1, own_deadline=True)
            )
            assert kind == "CommTimeoutError", text
            assert "rank 1" in text, text
        _post(ctx, 1, 0, b"now")
        assert _take(ctx, 1, 7) == b"x" * 100_000
    else:
        assert _take(ctx, 0, 0) == b"now"
        _post(ctx, 0, 7, b"x" * 100_000)


def crossing_messages(ctx: DistributedContext) -> None:
    peer = 1 - ctx.rank
    body = bytes([ctx.rank]) * 5_000_000
    for _ in range(2):
        _post(ctx, peer, 0, body)
    for _ in range(2):
        assert _take(ctx, peer, 0) == bytes([peer]) * 5_000_000


def messages_between_collectives(ctx: DistributedContext) -> None:
    right = (ctx.rank + 1) % ctx.world_size
    ctx.send({"from": ctx.rank}, right)
    ctx.barrier()
    total = ctx.all_reduce(torch.ones(30_000))
    assert bool((total == ctx.world_size).all())
    left = (ctx.rank - 1) % ctx.world_size
    assert ctx.receive(left) == {"from": left}


# ranks that do not fit together


def _other_order(ctx: DistributedContext) -> None:
    if ctx.rank != 1:
        ctx.barrier()
    ctx.all_reduce(torch.ones(100))
    if ctx.rank == 1:
        ctx.barrier()


def _one_call_less(ctx: DistributedContext) -> None:
    if ctx.rank != 1:
        ctx.broadcast(3)
    ctx.all_reduce(torch.ones(100))


def _other_root(ctx: DistributedContext) -> None:
    ctx.broadcast("x", root_rank=1 if ctx.rank == 1 else 0)
    # Who only sends finds out when it next receives.
    ctx.all_gather("y")


DISAGREEMENTS: dict[str, Callable[[DistributedContext], object]] = {
    "shape": lambda ctx: ctx.all_reduce(torch.ones(4 if ctx.rank == 1 else 5)),
    "large shape": lambda ctx: ctx.all_reduce(
        torch.ones(400_000 if ctx.rank == 1 else 500_000), algorithm="ring"
    ),
    "dtype": lambda ctx: ctx.all_reduce(torch.ones(4).to(torch.float64 if ctx.rank == 1 else torch.float32)),
    "operation": lambda ctx: ctx.all_reduce(torch.ones(4), op="max" if ctx.rank == 1 else "sum"),
    "call": lambda ctx: ctx.all_gather(5) if ctx.rank == 1 else ctx.barrier(),
    "order": _other_order,
    "one call less": _one_call_less,
    "root": _other_root,
}


def disagree(ctx: DistributedContext, case: str) -> Outcome:
    ctx.barrier()
    return _outcome(lambda: DISAGREEMENTS[case](ctx))


def wait_in_a_circle(ctx: DistributedContext) -> Outcome:
    return _outcome(lambda: ctx.receive(1 - ctx.rank))


def leave_early(ctx: DistributedContext) -> Outcome | None:
    if ctx.rank == 1:
        return None
    return _outcome(ctx.barrier)


def wait_for_a_slow_rank(ctx: DistributedContext) -> None:
    """Let rank 1 come late to a gather while rank 2 is already in the next call: no rank is stuck."""
    if ctx.rank:
        # Rank 2 too is late enough for rank 0 to have posted that it waits for both.
        with suppress(CommTimeoutError):
            ctx.receive(0, timeout=2.0 if ctx.rank == 1 else 0.3)
    gathered = ctx.gather(ctx.rank)
    assert gathered == ([0, 1, 2] if ctx.rank == 0 else None)
    assert ctx.broadcast("next" if ctx.rank == 0 else None) == "next"


def fail_in_the_middle(ctx: DistributedContext) -> Outcome:
    if ctx.rank == 1:
        ctx.barrier()
        ctx.close(RuntimeError("out of beans"))
        return "", "", 0.0

    def meet_and_sum() -> None:
        ctx.barrier()  # rank 1 may fail when the others are not yet out of it
        ctx.all_reduce(torch.ones(300_000))

    kind, text, seconds = _outcome(meet_and_sum)
    again, _, _ = _outcome(ctx.barrier)
    assert again == kind, "a broken group stays broken"
    return kind, text, seconds


def wait_too_short(ctx: DistributedContext) -> Outcome:
    if ctx.rank == 0:
        return _outcome(lambda: ctx.all_reduce(torch.ones(300_000), timeout=0.3))
    return _outcome(lambda: ctx.receive(0, timeout=NOTICED_WITHIN))


# what a transport may offer besides


def watch_a_wait(ctx: DistributedContext) -> tuple[int, ...] | None:
    """Return whom another thread saw rank 0 wait for; None where the transport does not report waits."""
    if not isinstance(ctx.transport, ReportsWaits):
        return None
    if ctx.rank == 1:
        ctx.receive(0, timeout=PATIENCE)
        ctx.barrier()
        return None
    seen: list[tuple[int, ...]] = [()]

    def look() -> None:
        limit = _soon()
        while not seen[-1] and time.monotonic() < limit:
            seen.append(ctx.waiting_for())
        ctx.send(None, 1)

    watcher = threading.Thread(target=look)
    watcher.start()
    ctx.barrier()
    watcher.join()
    assert ctx.waiting_for() == ()
    return seen[-1]


# memory and life


def own_memory(ctx: DistributedContext) -> None:
    tensor = ctx.transport.empty(1000)
    assert tensor.dtype == torch.uint8
    assert tensor.numel() == 1000
    assert ctx.transport.empty(0).numel() == 0
    tensor.fill_(3)
    into = ctx.transport.empty(1000)
    _swap(ctx, _calls(1)[0], tensor, into)
    assert bool((into == 3).all())


def close_twice(ctx: DistributedContext) -> None:
    ctx.barrier()
    ctx.close()
    ctx.close()
    ctx.transport.close()
    kind, _, _ = _outcome(ctx.barrier)
    assert kind == UsageError.__name__


def _outcome(action: Callable[[], object]) -> Outcome:
    start = time.monotonic()
    try:
        action()
    except PacelineError as error:
        return type(error).__name__, str(error), time.monotonic() - start
    return "no error", "", time.monotonic() - start


def _calls(count: int) -> list[CollectiveCall]:
    """Return calls that are the same on all ranks."""
    return [CollectiveCall(1_000 + number, "contract", signature_of("contract")) for number in range(count)]


def _swap(ctx: DistributedContext, call: CollectiveCall, sent: Tensor, arrived: Tensor) -> None:
    """Exchange a tensor with the other of two ranks."""
    ctx.transport.exchange(call, [(1 - ctx.rank, sent)], [(1 - ctx.rank, arrived)], _soon())


def _pattern(rank: int, index: int, size: int) -> Tensor:
    return torch.arange(size) * 1_000 + rank * 100 + index % 100


def _peers(ctx: DistributedContext) -> list[int]:
    return [peer for peer in range(ctx.world_size) if peer != ctx.rank]


def _post(ctx: DistributedContext, dest: int, tag: int, body: bytes) -> None:
    half = len(body) // 2
    ctx.transport.post(dest, tag, [memoryview(body[:half]), memoryview(body[half:])], _soon())


def _take(ctx: DistributedContext, source: int, tag: int | None) -> bytes:
    return bytes(ctx.transport.take(source, tag, _soon(), own_deadline=False).body)


def _soon() -> float:
    return time.monotonic() + PATIENCE
