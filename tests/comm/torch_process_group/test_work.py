"""Asynchronous work, timeouts, futures, and the errors that a group raises."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.comm.torch_process_group.torch_ranks import failure_of, torch_ranks
from tests.waiting import wait_for
from torch.distributed import ReduceOp

from paceline.core.errors import PacelineError

LARGE = 2_000_000


def several_under_way(rank: int) -> list[Any]:
    tensors = [torch.full((LARGE,), float(rank + number)) for number in range(4)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    # The chain of a DDP hook: a future of the last one, with a callback in the background.
    halved = works[-1].get_future().then(lambda future: future.value()[0] / 2)
    last = torch.ones(3)
    dist.all_reduce(last)  # waits for its turn
    ended = [work.is_completed() for work in works]
    for work in works:
        assert work.wait()
    assert works[0].is_success()
    assert works[0].exception() is None
    assert works[0].result()[0] is tensors[0]
    with torch.inference_mode():
        inner = torch.ones(3)
        dist.all_reduce(inner, async_op=True).wait()
    return [
        ended,
        [tensor[0].item() for tensor in tensors],
        halved.wait()[0].item(),
        last[0].item(),
        inner[0].item(),
    ]


def test_operations_under_way_complete_in_order():
    for outcome in torch_ranks(several_under_way):
        assert outcome == [[True] * 4, [1.0, 3.0, 5.0, 7.0], 3.5, 2.0, 2.0]


def different_calls(rank: int) -> Any:
    tensor = torch.ones(3 + rank)
    first = failure_of(lambda: dist.all_reduce(tensor))
    again = failure_of(lambda: dist.barrier()), failure_of(lambda: dist.monitored_barrier())
    return first, again


def test_different_calls_name_the_rank_and_the_line():
    for (kinds, text, for_torch), again in torch_ranks(different_calls):
        assert kinds == "GroupError from DisagreementError"
        assert for_torch
        for rank, count in ((0, 3), (1, 4)):
            assert re.search(
                rf"rank {rank}: all_reduce\(SUM, float32\[{count}\], direct\) at \S+test_work.py:\d+", text
            )
        assert [kinds for kinds, _, _ in again] == ["GroupError from DisagreementError"] * 2


def killed_peer(rank: int, told: Path) -> None:
    tensor = torch.ones(LARGE)
    dist.all_reduce(tensor)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    work = dist.all_reduce(tensor, async_op=True)
    future = work.get_future()
    told.write_text("\n---\n".join(" ".join(map(str, failure_of(wait))) for wait in (work.wait, future.wait)))


def test_a_lost_rank_is_named_by_the_work_and_by_its_future(tmp_path):
    told = tmp_path / "told"
    with pytest.raises(PacelineError):
        torch_ranks(killed_peer, told)
    of_work, of_future = told.read_text().split("\n---\n")
    assert of_work.startswith("GroupError from PeerLostError")
    for text in (of_work, of_future):
        assert "rank 1 was lost" in text
        assert re.search(r"all_reduce\(SUM, float32\[2000000\], direct\) at \S+test_work.py:\d+", text)


def late_rank(rank: int) -> Any:
    together = dist.new_group(timeout=timedelta(seconds=0.5))
    told = failure_of(lambda: dist.barrier(group=together)) if rank == 0 else None
    dist.barrier()
    return told


def test_a_timeout_says_who_was_late():
    kinds, text, for_torch = torch_ranks(late_rank)[0]
    assert kinds == "GroupError from CommTimeoutError"
    assert for_torch
    assert "Timed out" in text
    assert "rank 0 waited 0.5 s in barrier() at" in text
    assert "test_work.py" in text


def late_for_large_data(rank: int) -> Any:
    group: Any = dist.new_group()
    data = torch.ones(LARGE)
    dist.broadcast(data, 0, group=group)
    told = None
    if rank == 0:
        torch.distributed.distributed_c10d._set_pg_timeout(timedelta(seconds=0.2), group)
        told = failure_of(lambda: dist.broadcast(data, 0, group=group))
    dist.barrier()
    return told


def test_the_line_is_the_scripts_also_where_memory_is_published():
    _, text, _ = torch_ranks(late_for_large_data)[0]
    assert "rank 0 waited 0.2 s" in text
    assert re.search(r"in broadcast\(float32\[2000000\], src=0\) at \S+test_work.py:\d+", text), text


def waited_twice(rank: int) -> Any:
    tensor = torch.ones(2)
    if rank == 1:
        dist.monitored_barrier()  # rank 0 comes to it when it has given up once
        dist.all_reduce(tensor)
        return None
    work = dist.all_reduce(tensor, async_op=True)
    first = failure_of(lambda: work.wait(timedelta(seconds=0.05)))
    dist.monitored_barrier()
    return first, work.wait(timedelta(seconds=30)), tensor.tolist()


def test_a_wait_that_timed_out_can_be_repeated():
    (kinds, text, for_torch), again, summed = torch_ranks(waited_twice)[0]
    assert kinds == "GroupError from CommTimeoutError"
    assert for_torch
    assert "all_reduce(SUM, float32[2], direct) was still under way after 0.05 s" in text
    assert again
    assert summed == [2.0, 2.0]


def called_in_turn(rank: int, call: Callable[[], tuple[str, str, bool]]) -> tuple[str, str, bool]:
    """Have rank 2 call, and rank 0 when rank 2 has given up: it has come in time then, by any clock."""
    mark = torch.zeros(1)
    if rank == 0:
        dist.recv(mark, 2)
    told = call()
    if rank == 2:
        dist.send(mark, 0)
    return told


def late_in_monitored_barrier(rank: int) -> Any:
    dist.monitored_barrier()
    told = None
    if rank != 1:
        seconds = timedelta(seconds=0.3)
        told = called_in_turn(
            rank, lambda: failure_of(lambda: dist.monitored_barrier(timeout=seconds, wait_all_ranks=True))
        )
    dist.barrier()  # the group is still whole
    return told


def test_the_monitored_barrier_names_late_ranks_and_breaks_nothing():
    first, _, third = torch_ranks(late_in_monitored_barrier, workers=3)
    assert first[0] == "GroupError from CommTimeoutError"
    assert first[1].startswith("Rank 1 failed to pass monitoredBarrier")
    assert third[1].startswith("Rank 2 successfully reached monitoredBarrier")


def late_again_and_again(rank: int, late: int, wait_all: bool, first_seconds: float) -> list[str]:
    """The late rank calls when the others have given up, so that its messages and theirs are left over."""
    told = []
    for seconds in (first_seconds, 0.3):
        if rank == late:
            dist.barrier()
        call = partial(
            failure_of, partial(dist.monitored_barrier, None, timedelta(seconds=seconds), wait_all)
        )
        told.append((call() if rank == late or late == 0 else called_in_turn(rank, call))[1])
        if rank != late:
            dist.barrier()
        dist.barrier()
    told.append(failure_of(lambda: dist.monitored_barrier(wait_all_ranks=wait_all))[1])
    return told


@pytest.mark.parametrize("first_seconds", [0.3, 0.0])
@pytest.mark.parametrize("wait_all", [False, True])
def test_a_monitored_barrier_after_a_late_rank_waits_for_it(wait_all, first_seconds):
    leader, *followers = torch_ranks(late_again_and_again, 1, wait_all, first_seconds, workers=3)
    assert leader[0].startswith("Rank 1 failed to pass" if first_seconds else "Rank 0 timed out in")
    assert leader[1].startswith("Rank 1 failed to pass monitoredBarrier in 300 ms")
    for rank, told in enumerate(followers, 1):
        assert all(text.startswith(f"Rank {rank} successfully reached monitoredB") for text in told[:2])
    assert [told[2] for told in (leader, *followers)] == [""] * 3


def test_a_monitored_barrier_that_rank_0_is_late_in_releases_nobody_early():
    leader, *followers = torch_ranks(late_again_and_again, 0, False, 0.3, workers=3)
    assert leader == [""] * 3  # the others have come to each of its calls, and given up
    for rank, (*told, last) in enumerate(followers, 1):
        assert all(text.startswith(f"Rank {rank} successfully reached monitoredB") for text in told)
        assert last == ""


def written_in_inference_mode(rank: int) -> list[Any]:
    with torch.inference_mode():
        tensors = [torch.full((4,), rank + 1.0) for _ in range(8)]
        strided, grid = torch.full((4,), rank + 1.0)[::2], torch.ones(2, 2).to_sparse()
    summed, later, shared, part, at_root, told, *gathered = tensors
    dist.all_reduce(summed)
    dist.all_reduce(later, async_op=True).wait()
    dist.all_reduce(strided)
    dist.all_reduce(grid)
    dist.broadcast(shared, 1)
    dist.all_gather(gathered, torch.full((4,), rank + 5.0))
    dist.reduce_scatter(part, [torch.ones(4)] * 2)
    dist.reduce(at_root, 0)
    if rank == 1:
        dist.send(torch.full((4,), 9.0), 0)
        return []
    dist.recv(told, 1)
    with torch.inference_mode():
        assert all(tensor.is_inference() for tensor in (*tensors, strided, grid))
    whole = [summed, later, shared, part, at_root, told, *gathered]
    assert all(torch.equal(tensor, tensor[:1].expand(4)) for tensor in whole)
    return [*(tensor[0].item() for tensor in whole), strided.tolist(), grid.to_dense().tolist()]


def test_tensors_of_inference_mode_are_written_outside_of_it():
    """Gloo writes them in all_reduce, reduce, broadcast and recv, and refuses them in the others."""
    found = torch_ranks(written_in_inference_mode)[0]
    assert found == [3.0, 3.0, 2.0, 2.0, 3.0, 9.0, 5.0, 6.0, [3.0, 3.0], [[2.0, 2.0], [2.0, 2.0]]]


def received_in_inference_mode(rank: int) -> list[float]:
    with torch.inference_mode():
        tensor = torch.full((4,), float(rank))
        (dist.send if rank == 1 else dist.recv)(tensor, 1 - rank)
        strided = torch.full((4,), float(rank))[::2]
        (dist.send if rank == 1 else dist.recv)(strided, 1 - rank)
        return [*tensor.tolist(), *strided.tolist()]


def test_messages_are_received_in_inference_mode():
    assert torch_ranks(received_in_inference_mode) == [[1.0] * 6] * 2


def expanded(rank: int) -> list[Any]:
    def one_place() -> torch.Tensor:
        return torch.full((1,), rank + 1.0).expand(4)

    calls = [
        lambda: dist.all_reduce(one_place()),
        lambda: dist.all_reduce(torch.ones(1, dtype=torch.int32).expand(4), ReduceOp.BAND),
        lambda: dist.all_gather([one_place(), torch.ones(4)], torch.ones(4)),
        lambda: dist.all_gather_into_tensor(one_place(), torch.ones(2)),
        lambda: dist.reduce_scatter(one_place(), [torch.ones(4)] * 2),
        lambda: dist.all_to_all_single(one_place(), torch.ones(4)),
        lambda: dist.recv(one_place(), 1 - rank),
    ]
    told = [failure_of(call)[1] for call in calls]
    # Where nothing is written into it, its values are what counts. Nothing has travelled before.
    gathered = [torch.zeros(4) for _ in range(2)]
    dist.all_gather(gathered, one_place())
    at_root = one_place() if rank else torch.ones(4)
    dist.reduce(at_root, 0)
    dist.broadcast(gathered[0] if rank == 0 else one_place().contiguous(), 0)
    return [told, *(tensor.tolist() for tensor in (*gathered, at_root))]


def test_results_with_one_place_for_several_elements_are_refused():
    told, *first, summed = torch_ranks(expanded)[0]
    for text in told:
        assert re.search(r"^\w+: several elements of \w+\[4\], .*share one place in memory", text)
    assert first == [[1.0] * 4, [2.0] * 4]
    assert summed == [3.0] * 4


def on_another_default_device(rank: int) -> list[Any]:
    """Call the group as torch's C++ does: ahead of its Python functions torch leaves the default device."""
    group: Any = dist.group.WORLD
    options = dist.AllreduceOptions()
    options.asyncOp = False
    sparse, mine = torch.eye(2).to_sparse(), torch.full((2, 3), float(rank))
    gathered = [torch.zeros(3, 2).t() for _ in range(2)]
    with torch.device("meta"):
        group.allreduce([sparse], options).wait()
        group.allgather([gathered], [mine]).wait()
    return [sparse.to_dense().tolist(), *(tensor.tolist() for tensor in gathered)]


def test_the_default_device_changes_nothing():
    gathered = [[[rank] * 3] * 2 for rank in (0.0, 1.0)]
    assert torch_ranks(on_another_default_device) == [[[[2.0, 0.0], [0.0, 2.0]], *gathered]] * 2


def bad_arguments(rank: int) -> list[Any]:
    group: Any = dist.group.WORLD  # called as torch's C++ does: its Python functions compare dtypes
    mixed = [torch.ones(2), torch.ones(2, dtype=torch.int32)]
    told = [
        failure_of(lambda: dist.all_reduce(torch.ones(2, dtype=torch.int64), ReduceOp.AVG)),
        failure_of(lambda: dist.all_reduce(torch.ones(2), ReduceOp.BAND)),
        failure_of(lambda: dist.all_gather([torch.ones(2)], torch.ones(2))),
        failure_of(lambda: dist.all_to_all_single(torch.ones(3), torch.ones(3))),
        failure_of(lambda: dist.all_reduce(torch.ones(2, device="meta"))),
        failure_of(lambda: group.allgather([mixed if rank == 0 else mixed[::-1]], [mixed[0]])),
        failure_of(lambda: group.all_to_all_single(torch.ones(2), torch.ones(2, dtype=torch.int32))),
        failure_of(lambda: group.allgather([[torch.ones(2)] * 2], [torch.ones(2, device="meta")])),
    ]
    summed = torch.ones(1)
    dist.all_reduce(summed)  # nothing had travelled
    return [*(text for _, text, _ in told), summed.item()]


def test_bad_arguments_are_refused_before_anything_travels():
    average, bitwise, too_few, uncut, elsewhere, *dtypes, mixed, summed = torch_ranks(bad_arguments)[0]
    assert "AVERAGE of int64 would truncate" in average
    assert "BAND of float32" in bitwise
    assert "1 tensor for 2 ranks" in too_few
    assert "3 rows of the input cannot be cut equally" in uncut
    assert "cpu:paceline,meta:nccl" in elsewhere
    assert "all_gather: int32[2] cannot take float32 of another rank" in dtypes[0]
    assert "all_to_all_single: int32[2] and float32[2] do not fit together" in dtypes[1]
    assert "all_gather: a tensor on meta beside tensors on the CPU" in mixed
    assert summed == 2


def gathered_in_other_sizes(rank: int) -> Any:
    sizes = [1, 4] if rank == 0 else [4, 1]
    outs = [torch.zeros(size) for size in sizes]
    return failure_of(lambda: dist.all_gather(outs, torch.ones(sizes[rank])))


def test_ranks_that_expect_other_sizes_of_each_other_find_out():
    for kinds, text, _ in torch_ranks(gathered_in_other_sizes):
        assert kinds == "GroupError from DisagreementError"
        assert "rank 0: all_gather(float32[1, 4])" in text
        assert "rank 1: all_gather(float32[4, 1])" in text


def in_place(rank: int) -> bool:
    """Two tensors of one array of NumPy's share memory, and no storage."""
    array = (torch.arange(LARGE) % 7 + rank).float().numpy()
    whole, part = torch.from_numpy(array), torch.from_numpy(array[LARGE // 4 : LARGE // 4 * 3])
    first, second = ((torch.arange(LARGE) % 7 + peer).float().chunk(2)[rank] for peer in range(2))
    dist.reduce_scatter_tensor(part, whole)
    return torch.equal(part, first + second)


def test_a_reduce_scatter_may_write_into_its_input():
    assert torch_ranks(in_place) == [True, True]


def wrong_size(rank: int) -> Any:
    if rank == 0:
        dist.send(torch.ones(3), 1)
        return None
    return failure_of(lambda: dist.recv(torch.ones(4), 0))


def test_a_message_that_does_not_fit_names_its_sender():
    kinds, text, _ = torch_ranks(wrong_size)[1]
    assert kinds == "GroupError from PeerError"
    assert "rank 0 sent 12 bytes, the tensor has 16" in text
    assert "test_work.py" in text


def aborted(rank: int) -> Any:
    group = dist.new_group()
    if rank == 0:
        work = dist.all_reduce(torch.ones(2), group=group, async_op=True)
        group.abort()
        return failure_of(work.wait), failure_of(lambda: dist.monitored_barrier(group))
    return None


def test_abort_ends_what_is_under_way():
    ended, barrier = torch_ranks(aborted)[0]
    for kinds, _, for_torch in (ended, barrier):
        assert kinds == "GroupError from GroupInterruptedError"
        assert for_torch


def profiled(rank: int) -> list[Any]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        dist.all_reduce(torch.ones(LARGE))
    events = [event for event in profile.events() if event.name == "paceline:all_reduce"]
    return [(event.is_async, event.cpu_time > 0) for event in events]


def test_the_profiler_sees_collectives():
    assert torch_ranks(profiled) == [[(True, True)]] * 2


def polled(rank: int) -> bool:
    work = dist.all_reduce(torch.ones(LARGE), async_op=True)
    wait_for(work.is_completed, "the work completes by itself")
    return bool(work.wait())


def test_work_completes_without_a_wait():
    assert torch_ranks(polled) == [True, True]
