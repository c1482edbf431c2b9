"""Order of what callbacks call: the program's on every rank, whichever work ends first, or an error."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.comm.torch_process_group.torch_ranks import failure_of, gloo_group, torch_ranks

Call = Callable[[Any], Any]


def reduced(value: float) -> tuple[torch.Tensor, Any]:
    """Begin an all-reduce whose sum tells which one it was."""
    tensor = torch.full((4,), value)
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    return tensor, work


def attached_late(callback: Call) -> tuple[list[torch.Tensor], list[Any], Any]:
    (one, first), (two, second) = reduced(1.0), reduced(10.0)
    return [one, two], [first, second], first.get_future().then(callback)


def attached_late_to_an_older_future(callback: Call) -> tuple[list[torch.Tensor], list[Any], Any]:
    one, first = reduced(1.0)
    future = first.get_future()
    two, second = reduced(10.0)
    if dist.get_rank() == 1:
        first.wait()
    return [one, two], [first, second], future.then(callback)


def attached_late_to_a_chain(callback: Call) -> tuple[list[torch.Tensor], list[Any], Any]:
    one, first = reduced(1.0)
    future = first.get_future().then(lambda ended: ended.value())
    two, second = reduced(10.0)
    if dist.get_rank() == 1:
        future.wait()
    return [one, two], [first, second], future.then(callback)


def attached_to_both(callback: Call) -> tuple[list[torch.Tensor], list[Any], Any]:
    (one, first), (two, second) = reduced(1.0), reduced(10.0)
    both = torch.futures.collect_all([first.get_future(), second.get_future()])
    if dist.get_rank() == 1:
        both.wait()
    return [one, two], [first, second], both.then(callback)


def added(callback: Call) -> tuple[list[torch.Tensor], list[Any], Any]:
    ended: torch.futures.Future[Any] = torch.futures.Future()

    def then(future: Any) -> None:
        callback(future)
        ended.set_result(None)

    (one, first), (two, second) = reduced(1.0), reduced(10.0)
    first.get_future().add_done_callback(then)
    return [one, two], [first, second], ended


WAYS = (attached_late, attached_late_to_an_older_future, attached_late_to_a_chain, attached_to_both, added)


def in_the_programs_order(rank: int) -> list[list[float]]:
    """On rank 0 nothing has ended when the callback is attached, on rank 1 what it is of. The callback calls
    twice, the second time when the program of rank 0 has gone on; its own callback calls as well."""
    gloo = gloo_group()
    found = []
    for way in WAYS:
        tensors = [torch.full((4,), value) for value in (100.0, 1000.0, 10_000.0)]
        gone_on = threading.Event()

        def callback(_: Any, tensors: Any = tensors, gone_on: threading.Event = gone_on) -> None:
            dist.all_reduce(tensors[0])
            if rank == 0:
                assert gone_on.wait(30)
            work = dist.all_reduce(tensors[1], async_op=True)
            assert work is not None
            inner = work.get_future().then(lambda _: dist.all_reduce(tensors[2]))
            inner.wait()

        if rank == 1:
            dist.barrier(gloo)
            made, works, future = way(lambda ended: callback(ended))
        else:
            made, works, future = way(callback)
        last, work = reduced(100_000.0)
        gone_on.set()
        if rank == 0:
            dist.barrier(gloo)
        for each in (*works, work, future):
            each.wait()
        found.append([tensor[0].item() for tensor in (*made, *tensors, last)])
    return found


def test_calls_of_callbacks_come_where_the_callbacks_were_attached():
    sums = [2.0, 20.0, 200.0, 2000.0, 20_000.0, 200_000.0]
    assert torch_ranks(in_the_programs_order) == [[sums] * len(WAYS)] * 2


def waits_of_callbacks(rank: int) -> list[Any]:
    gloo = gloo_group()
    found: list[Any] = []

    def of_work(second: Any) -> Any:
        return second.wait()

    def of_future(second: Any) -> Any:
        return second.get_future().wait()[0][0].item()

    for wait in (of_work, of_future):
        if rank == 1:
            dist.barrier(gloo)
        (_, first), (_, second) = reduced(1.0), reduced(10.0)
        future = first.get_future().then(lambda _, wait=wait, second=second: wait(second))
        # One that is issued later than the callback that waits for it.
        came = threading.Event()
        kept: list[Any] = []

        def waits_for_later(_: Any, wait: Call = wait, came: Any = came, kept: list[Any] = kept) -> Any:
            assert came.wait(30)
            return wait(kept[0])

        _, third = reduced(3.0)
        later = third.get_future().then(waits_for_later) if rank == 0 else None
        kept.append(reduced(20.0)[1])
        came.set()
        if rank == 0:
            dist.barrier(gloo)
        kept[0].wait()
        found.append([future.wait(), later.wait() if later is not None else None])
        dist.barrier(gloo)
    return found


def test_callbacks_may_wait_for_what_is_under_way():
    first, second = torch_ranks(waits_of_callbacks)
    assert first == [[True, True], [20.0, 40.0]]
    assert second == [[True, None], [20.0, None]]


def waits_for_messages(rank: int) -> list[float]:
    gloo = gloo_group()
    parts = [torch.zeros(1) for _ in range(2)]
    if rank == 0:
        dist.barrier(gloo)
        for number in range(2):
            dist.send(torch.tensor([number + 1.0]), 1)
        return []
    first, second = (dist.irecv(part, 0) for part in parts)
    assert first is not None
    assert second is not None
    future = first.get_future().then(lambda _: second.wait())
    dist.barrier(gloo)
    future.wait()
    return [part.item() for part in parts]


def test_a_callback_may_wait_for_a_message_that_is_under_way():
    assert torch_ranks(waits_for_messages)[1] == [1.0, 2.0]


def of_a_message_and_a_collective(rank: int) -> Any:
    """The message comes after a barrier, which a callback that waits for it must not hold up."""
    got = torch.zeros(1)
    if rank == 1:
        summed, work = reduced(1.0)
        dist.barrier()
        dist.send(torch.ones(1), 0)
        work.wait()
        return summed[0].item()
    message = dist.irecv(got, 1)
    assert message is not None
    summed, work = reduced(1.0)
    both = torch.futures.collect_all([message.get_future(), work.get_future()])
    future = both.then(lambda _: got.item())
    dist.barrier()
    return future.wait()


def test_a_callback_of_a_message_and_a_collective_holds_no_other_call_up():
    assert torch_ranks(of_a_message_and_a_collective, timeout=20.0) == [1.0, 2.0]


def chain_of_callbacks(rank: int) -> int:
    """Each callback begins a call and attaches the next callback to it."""
    ran, ended = 0, threading.Event()

    def again(_: Any) -> None:
        nonlocal ran
        ran += 1
        if ran == 500:
            ended.set()
        else:
            reduced(1.0)[1].get_future().then(again)

    reduced(1.0)[1].get_future().then(again)
    assert ended.wait(60)
    dist.barrier()
    return ran


def test_a_chain_of_callbacks_has_no_depth():
    assert torch_ranks(chain_of_callbacks) == [500, 500]


def after_waiting_for_a_later_one(rank: int) -> Any:
    gloo = gloo_group()
    if rank == 1:
        dist.barrier(gloo)
        works = [reduced(1.0)[1], reduced(10.0)[1]]
        for work in works:
            work.wait()
        return failure_of(lambda: dist.barrier())
    came, kept = threading.Event(), list[Any]()

    def callback(_: Any) -> None:
        assert came.wait(30)
        kept[0].wait()
        dist.all_reduce(torch.ones(3))

    future = reduced(1.0)[1].get_future().then(callback)
    kept.append(reduced(10.0)[1])
    came.set()
    dist.barrier(gloo)
    return failure_of(future.wait)


def of_a_message(rank: int) -> Any:
    """A callback of a message calls a collective: while no other was issued, and after one was."""
    gloo = gloo_group()
    tensor, got = torch.ones(3), torch.zeros(1)
    if rank == 1:
        dist.send(got, 0)
        dist.all_reduce(tensor)
        dist.barrier(gloo)
        dist.all_reduce(tensor)
        dist.send(got, 0)
        assert tensor[0].item() == 4.0
        return failure_of(lambda: dist.barrier())
    work = dist.irecv(got, 1)
    assert work is not None
    work.get_future().then(lambda _: dist.all_reduce(tensor)).wait()
    work = dist.irecv(got, 1)
    assert work is not None
    future = work.get_future().then(lambda _: dist.all_reduce(tensor))
    dist.barrier(gloo)
    dist.all_reduce(tensor)
    assert tensor[0].item() == 4.0
    return failure_of(future.wait)


@pytest.mark.parametrize(
    ("program", "why"),
    [
        (after_waiting_for_a_later_one, "it has waited for one of them"),
        (of_a_message, "its future is not one of a collective of this group"),
    ],
)
def test_a_call_without_a_place_is_an_error_on_all_ranks(program, why):
    for kinds, text, for_torch in torch_ranks(program):
        assert for_torch, (kinds, text)
        assert "DisagreementError" in kinds + text
        assert "a callback calls a collective after others of its group were issued" in text
        assert f"has no place among them: {why}" in text
        assert "rank 0: all_reduce(SUM, float32[3], direct) at " in text
