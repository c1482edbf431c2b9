"""Sub-groups, device meshes, other devices, groups made again, and the registration itself."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import weakref
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests.comm.torch_process_group.torch_ranks import failure_of, gloo_group, torch_ranks
from torch import nn
from torch.distributed import FileStore, PrefixStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

SOURCE = Path(__file__).parents[3] / "src"


def sub_groups(rank: int) -> Any:
    pair = dist.new_group([1, 2])
    told = None
    if rank > 0:
        summed = torch.tensor([float(rank)])
        dist.all_reduce(summed, group=pair)
        assert summed.item() == 3
        told = failure_of(lambda: dist.all_reduce(torch.ones(rank), group=pair))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    row, column = torch.tensor([float(rank)]), torch.tensor([float(rank)])
    dist.all_reduce(row, group=mesh.get_group("columns"))
    dist.all_reduce(column, group=mesh.get_group("rows"))
    return told, row.item(), column.item()


def test_sub_groups_name_ranks_by_their_number_in_the_job():
    outcomes = torch_ranks(sub_groups, workers=4)
    assert [outcome[1:] for outcome in outcomes] == [(1, 2), (1, 4), (5, 2), (5, 4)]
    told = outcomes[1][0]
    assert told[0] == "GroupError from DisagreementError"
    assert "rank 1: all_reduce(SUM, float32[1]" in told[1]
    assert "rank 2: all_reduce(SUM, float32[2]" in told[1]


def made_again(rank: int, store: str) -> list[Any]:
    results = []
    dist.destroy_process_group()
    shared = FileStore(store, 2)
    for _ in range(2):
        dist.init_process_group("paceline", store=shared, rank=rank, world_size=2)
        tensor = torch.ones(2)
        dist.all_reduce(tensor)
        results.append((tensor.tolist(), dist.get_backend(), dist.get_world_size()))
        dist.destroy_process_group()
    return results


def test_a_group_can_be_made_again_in_the_same_store(tmp_path):
    outcomes = torch_ranks(made_again, str(tmp_path / "again"))
    assert outcomes == [[([2.0, 2.0], "paceline", 2)] * 2] * 2


def of_other_members(rank: int, store: str) -> float:
    """torch gives the names of sub-groups again from the start: "1" is that of both pairs."""
    shared = FileStore(store, 3)
    for pair in ([0, 1], [1, 2]):
        dist.destroy_process_group()
        dist.init_process_group("paceline", store=shared, rank=rank, world_size=3)
        group = dist.new_group(pair)
        summed = torch.tensor([float(rank)])
        if rank in pair:
            dist.all_reduce(summed, group=group)
    return summed.item()


def test_a_name_may_be_given_again_to_a_group_of_other_members(tmp_path):
    assert torch_ranks(of_other_members, str(tmp_path / "shared"), workers=3) == [0.0, 3.0, 3.0]


def with_a_new_rank(rank: int, folder: str) -> float:
    """Rank 0 had a group of its own before, the other rank is new; they meet in a store that is new."""
    dist.destroy_process_group()
    if rank == 0:
        alone = FileStore(f"{folder}/alone", 1)
        dist.init_process_group("paceline", store=alone, rank=0, world_size=1)
        dist.destroy_process_group()
    together = FileStore(f"{folder}/together", 2)
    dist.init_process_group("paceline", store=together, rank=rank, world_size=2)
    summed = torch.ones(1)
    dist.all_reduce(summed)
    return summed.item()


def test_a_rank_that_had_other_groups_meets_a_new_one(tmp_path):
    assert torch_ranks(with_a_new_rank, str(tmp_path), timeout=20.0) == [2.0, 2.0]


def beside_each_other(rank: int) -> list[float]:
    """Calls of two sub-groups in another order on each rank, beside a call of all ranks and a message."""
    first, second = dist.new_group([0, 1]), dist.new_group([0, 1])
    tensors = {first: torch.full((300_000,), rank + 1.0), second: torch.full((5,), rank + 2.0)}
    got, whole = torch.zeros(3), torch.ones(3)
    order = [first, second] if rank == 0 else [second, first]
    works = []
    if rank < 2:
        works.append(dist.isend(torch.full((3,), float(rank)), 1 - rank, group=first))
        works += [dist.all_reduce(tensors[group], group=group, async_op=True) for group in order]
        works.append(dist.irecv(got, 1 - rank, group=first))
    dist.all_reduce(whole)
    for work in works:
        assert work is not None
        work.wait()
    return [tensors[first][0].item(), tensors[second][0].item(), got[0].item(), whole[0].item()]


def test_groups_are_used_side_by_side():
    outcomes = torch_ranks(beside_each_other, workers=3)
    assert outcomes[:2] == [[3.0, 5.0, 1.0, 3.0], [3.0, 5.0, 0.0, 3.0]]
    assert outcomes[2][3] == 3.0


def destroyed_in_flight(rank: int) -> list[Any]:
    """Destroying a group waits for what is under way in it."""
    group = dist.new_group()
    tensors = [torch.full((2_000_000,), rank + 1.0) for _ in range(3)]
    works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]
    dist.destroy_process_group(group)
    return [*(work.is_success() for work in works), *(tensor[-1].item() for tensor in tensors)]


def test_a_group_that_is_destroyed_ends_what_is_under_way():
    assert torch_ranks(destroyed_in_flight) == [[True] * 3 + [3.0] * 3] * 2


def forked(rank: int) -> float:
    """A child that a rank forks leaves no group when it ends: it is not the rank."""
    from paceline.comm.torch_process_group import group_creation

    if rank == 0:
        child = os.fork()
        if child == 0:
            group_creation.leave_groups()  # what Python calls at the end of a process
            os._exit(0)
        os.waitpid(child, 0)
    dist.barrier()
    summed = torch.ones(1)
    dist.all_reduce(summed)
    return summed.item()


def test_the_end_of_a_forked_child_is_not_the_end_of_its_rank():
    assert torch_ranks(forked) == [2.0, 2.0]


def destroyed(rank: int) -> bool:
    group = dist.new_group()
    dist.all_reduce(torch.ones(2), group=group)
    found = weakref.ref(group)
    gc.collect()
    gc.disable()
    dist.destroy_process_group(group)
    del group
    return found() is None


def test_a_destroyed_group_goes_away_without_the_collector():
    assert torch_ranks(destroyed) == [True, True]


def what_torch_asks(rank: int, store: str) -> list[Any]:
    from torch.testing._internal.distributed import fake_pg  # noqa: F401

    group: Any = dist.group.WORLD
    sharded: Any = nn.Linear(8, 8)
    fully_shard(sharded)
    sharded.set_allocate_memory_from_process_group_for_comm(True)
    sharded(torch.ones(2, 8)).sum().backward()
    told: list[Any] = [
        torch.distributed.distributed_c10d._get_process_group_uid(group),
        group.supports_shrinking,
    ]
    # As `init_process_group` does it with `device_id`, which has to be that of an accelerator.
    made, _ = torch.distributed.distributed_c10d._new_process_group_helper(
        2,
        rank,
        [],
        "cpu:paceline,meta:fake",
        PrefixStore("other", FileStore(store, 2)),
        "other",  # type: ignore[arg-type]
        timeout=timedelta(seconds=20),
        device_id=torch.device("meta", 0),
    )
    summed, elsewhere = torch.ones(1), torch.ones(1, device="meta")
    dist.all_reduce(summed, group=made)
    dist.all_reduce(elsewhere, group=made)
    torch.distributed.distributed_c10d._set_pg_timeout(timedelta(seconds=8), made)
    torch.distributed.distributed_c10d._abort_process_group()
    return [*told, summed.item(), dist.is_initialized()]


def test_what_torch_asks_of_backends_is_answered(tmp_path):
    assert torch_ranks(what_torch_asks, str(tmp_path / "other")) == [[-1, False, 2.0, False]] * 2


def split(_: int) -> list[Any]:
    group: Any = dist.group.WORLD
    told = [
        failure_of(lambda: group.split_group([0])),
        failure_of(lambda: group.merge_remote_group(group.get_group_store(), 2)),
    ]
    summed = torch.ones(1)
    dist.all_reduce(summed)
    return [*told, summed.item()]


def test_a_group_is_not_split_and_says_what_to_use():
    for *told, summed in torch_ranks(split):
        for name, (kinds, text, for_torch) in zip(("split_group", "merge_remote_group"), told, strict=True):
            assert kinds == "NotSupportedError from NoneType"
            assert for_torch
            assert f"ProcessGroup.{name} of the backend 'paceline'" in text
            assert "use torch.distributed.new_group" in text
        assert summed == 2.0


def device_map(rank: int, store: str) -> Any:
    from torch.testing._internal.distributed import fake_pg  # noqa: F401

    dist.destroy_process_group()
    dist.init_process_group("cpu:paceline,meta:fake", init_method=f"file://{store}", rank=rank, world_size=2)
    here, elsewhere = torch.ones(2), torch.ones(2, device="meta")
    dist.all_reduce(here)
    dist.all_reduce(elsewhere)
    return here.tolist(), str(dist.get_backend_config())


def test_tensors_of_another_device_go_to_the_backend_that_was_named_for_it(tmp_path):
    assert torch_ranks(device_map, str(tmp_path / "map")) == [([2.0, 2.0], "cpu:paceline,meta:fake")] * 2


def gradients(rank: int) -> bool:
    gloo = gloo_group()
    inputs = torch.randn(8, 32, generator=torch.Generator().manual_seed(rank))

    def trained(group: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 2000), nn.ReLU(), nn.BatchNorm1d(2000), nn.Linear(2000, 500))
        parallel = DistributedDataParallel(model, process_group=group, bucket_cap_mb=1)
        optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            parallel(inputs).square().mean().backward()
            optimizer.step()
        return [value.clone() for value in model.state_dict().values()]

    return all(torch.equal(ours, theirs) for ours, theirs in zip(trained(None), trained(gloo), strict=True))


def test_ddp_has_the_bits_of_gloo():
    assert torch_ranks(gradients) == [True, True]


def sharded(rank: int) -> bool:
    inputs = torch.randn(8, 32, generator=torch.Generator().manual_seed(rank))

    def trained(shard: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 500), nn.ReLU(), nn.Linear(500, 100))
        if shard:
            for layer in (model[0], model[2], model):
                fully_shard(layer)
        else:
            model = DistributedDataParallel(model).module
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            if not shard:
                for parameter in model.parameters():
                    dist.all_reduce(parameter.grad, dist.ReduceOp.AVG)
            optimizer.step()
        return [
            getattr(value, "full_tensor", lambda value=value: value)()
            for value in model.state_dict().values()
        ]

    return all(
        torch.allclose(ours, theirs, atol=1e-6)
        for ours, theirs in zip(trained(True), trained(False), strict=True)
    )


def test_fsdp2_trains_like_averaged_gradients():
    assert torch_ranks(sharded) == [True, True]


def test_the_entry_point_registers_the_backend_without_an_import(tmp_path):
    """torch loads the entry points of an installed package; here of one that is on the path in its place."""
    package = tmp_path / "paceline_entry-0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: paceline_entry\nVersion: 0\n")
    (package / "entry_points.txt").write_text(
        "[torch.backends]\npaceline = paceline.torch_backend:register\n"
    )
    script = (
        "import sys, torch.distributed as dist\n"
        "loaded = [name for name in sys.modules if name.startswith('paceline.comm.trans')]\n"
        f"dist.init_process_group('paceline', init_method='file://{tmp_path}/store', rank=0, world_size=1)\n"
        "print(dist.get_backend(), loaded)\n"
        "dist.destroy_process_group()\n"
    )
    path = f"{tmp_path}:{SOURCE}"
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={"PYTHONPATH": path, "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout.split() == ["paceline", "[]"], done.stderr
