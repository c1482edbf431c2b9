"""Beginning and ending the default group: under launchers, inside spawn, on top of torch.distributed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

import paceline
from paceline.comm import default_group
from paceline.core.errors import UsageError
from paceline.frontends import process_group as group
from paceline.frontends.spawn import spawn

LAUNCHERS = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "SLURM_",
    "OMPI_",
    "PMIX_",
    "TORCHELASTIC_",
)
INFO_KEYS = {"available", "initialized", "backend", "world_size", "rank", "local_rank", "hosts"}


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(LAUNCHERS):
            monkeypatch.delenv(name)


def ranks(fn: Any, *args: Any, workers: int = 2) -> list[Any]:
    return spawn(fn, *args, workers=workers, threads=1, timeout=60)


def clean_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}


def test_before_there_is_a_group(monkeypatch):
    assert not group.is_initialized()
    assert (group.get_rank(), group.get_world_size()) == (0, 1)
    info = group.get_distributed_info()
    assert info.keys() >= INFO_KEYS
    assert (info["available"], info["initialized"], info["backend"]) == (True, False, None)
    assert info["hosts"] == [os.uname().nodename]
    assert "shm" in info["backends"]
    group.destroy_process_group()  # fit for a finally block


def test_the_launcher_is_believed_before_there_is_a_group(monkeypatch):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert (group.get_rank(), group.get_world_size()) == (3, 4)
    info = group.get_distributed_info()
    assert (info["initialized"], info["rank"], info["world_size"], info["local_rank"]) == (False, 3, 4, 1)


def test_a_group_of_one_needs_no_launcher():
    context = group.init_process_group(timeout=timedelta(seconds=20))
    try:
        assert group.is_initialized()
        assert default_group.current() is context
        assert paceline.all_reduce([1.0, 2.0]) == [1.0, 2.0]
        assert group.get_distributed_info()["ranks_by_host"] == [[0]]
        with pytest.raises(UsageError, match=r"already has a group(.|\n)*destroy_process_group\(\) first"):
            group.init_process_group()
    finally:
        group.destroy_process_group()
    assert not group.is_initialized()
    with pytest.raises(UsageError, match="closed"):
        context.barrier()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"backend": "tcp"}, "backend='tcp'(.|\n)*'auto', 'gloo', 'nccl', 'mpi', 'shm'"),
        ({"init_method": "file:///tmp/x"}, "init_method='file:///tmp/x'(.|\n)*'tcp://host:port'"),
        ({"init_method": None}, "init_method=None"),
        ({"init_method": "tcp://nowhere", "world_size": 2, "rank": 0}, "not an address"),
        ({"world_size": 0, "rank": 0}, "world_size=0"),
        ({"world_size": 2, "rank": 2}, "rank=2"),
        ({"world_size": 2}, "rank not given"),
        ({"timeout": -1}, "timeout=-1"),
        ({"timeout": timedelta(0)}, "timeout=0"),
    ],
)
def test_bad_input_is_refused(settings, words):
    with pytest.raises(UsageError, match=words):
        group.init_process_group(**settings)
    assert not group.is_initialized()


@pytest.mark.parametrize(
    "name", ["all_reduce", "all_gather", "broadcast", "scatter", "gather", "reduce_scatter"]
)
def test_without_a_group_functions_say_how_to_get_one(name):
    with pytest.raises(
        UsageError, match=rf"{name}: (.|\n)*paceline.init_process_group\(\) first, or (.|\n)*paceline.spawn"
    ):
        getattr(paceline, name)(torch.ones(2))
    for function in (paceline.barrier, paceline.recv, lambda: paceline.send(1, 1)):
        with pytest.raises(UsageError, match="belongs to no group"):
            function()


def _inside_spawn(ctx: Any) -> Any:
    before = group.is_initialized(), group.get_rank(), paceline.all_reduce([1.0])
    same = group.init_process_group() is ctx
    with pytest.raises(UsageError, match="already has a group"):
        group.init_process_group()
    info = group.get_distributed_info()
    group.destroy_process_group()
    with pytest.raises(UsageError, match="belongs to no group"):
        paceline.barrier()
    ctx.barrier()  # spawn's own group goes on
    again = group.init_process_group("shm", world_size=ctx.world_size, rank=ctx.rank) is ctx
    group.destroy_process_group()
    with pytest.raises(UsageError, match="inside spawn, whose group runs on 'shm'"):
        group.init_process_group("gloo")
    with pytest.raises(UsageError, match=r"is rank \d of 2"):
        group.init_process_group(world_size=5)
    return before, same, again, info


def test_inside_spawn_the_rank_has_its_group_already():
    for rank, (before, same, again, info) in enumerate(ranks(_inside_spawn)):
        assert before == (True, rank, [2.0])
        assert same
        assert again
        assert info.keys() >= INFO_KEYS
        assert (info["backend"], info["world_size"], info["rank"], info["local_rank"]) == (
            "shm",
            2,
            rank,
            rank,
        )
        assert info["ranks_by_host"] == [[0, 1]]


def _over_tcp(ctx: Any, backend: str) -> Any:
    import socket

    if ctx.is_master:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
    port = ctx.broadcast(port if ctx.is_master else None)
    context = group.init_process_group(
        backend, f"tcp://127.0.0.1:{port}", ctx.world_size, ctx.rank, timeout=30
    )
    try:
        return context is ctx, group.get_distributed_info()["backend"], paceline.all_reduce(torch.ones(3))
    finally:
        group.destroy_process_group()


@pytest.mark.parametrize(("backend", "runs_on"), [("auto", "shm"), ("gloo", "gloo")])
def test_a_group_at_an_address(backend, runs_on):
    for is_spawns, name, total in ranks(_over_tcp, backend):
        assert not is_spawns
        assert runs_on in name
        assert torch.equal(total, torch.full((3,), 2.0))


def _over_torch(ctx: Any, path: str) -> Any:
    torch.distributed.init_process_group("gloo", f"file://{path}", world_size=ctx.world_size, rank=ctx.rank)
    try:
        with pytest.raises(UsageError, match=r"torch\.distributed has a group on gloo"):
            group.init_process_group("nccl")
        context = group.init_process_group("gloo", timeout=30)
        mine = paceline.all_gather(ctx.rank)
        ddp: Any = paceline.DistributedDataParallel(torch.nn.Linear(2, 2), mode="fast")
        with paceline.no_sync():
            ddp(torch.full((1, 2), 1.0 + ctx.rank)).sum().backward()
        local = ddp.module.weight.grad.clone()
        ddp.zero_grad()
        ddp(torch.full((1, 2), 1.0 + ctx.rank)).sum().backward()
        averaged, keys = ddp.module.weight.grad.clone(), list(ddp.state_dict())
        # torch's reducer is not to outlive its group: taking it down afterwards can hang in torch.
        del ddp
        group.destroy_process_group()
        theirs = torch.ones(1)
        torch.distributed.all_reduce(theirs)  # torch's group is left alone
        return context is ctx, mine, theirs.item(), local, averaged, keys
    finally:
        torch.distributed.destroy_process_group()


def test_on_top_of_a_group_of_torch(tmp_path):
    for rank, (is_spawns, gathered, total, local, averaged, keys) in enumerate(
        ranks(_over_torch, str(tmp_path / "s"))
    ):
        assert not is_spawns
        assert gathered == [0, 1]
        assert total == 2.0
        assert torch.equal(local, torch.full((2, 2), 1.0 + rank))
        assert torch.equal(averaged, torch.full((2, 2), 1.5))
        assert keys == ["module.weight", "module.bias"]


SCRIPT = """
import json, os, sys, paceline
context = paceline.init_process_group(timeout=60)
info = paceline.get_distributed_info()
info["total"] = paceline.all_reduce([float(paceline.get_rank() + 1)])
paceline.destroy_process_group()
with open(os.path.join(sys.argv[1], str(info["rank"])), "w") as file:
    json.dump(info, file)
"""


def _check_infos(folder: Path) -> None:
    infos = [json.loads((folder / str(rank)).read_text()) for rank in range(2)]
    for rank, info in enumerate(infos):
        assert info["total"] == [3.0]
        assert (info["initialized"], info["world_size"], info["local_rank"]) == (True, 2, rank)
        assert info["ranks_by_host"] == [[0, 1]]


def test_under_torchrun_as_it_is(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    out = tmp_path / "out"
    out.mkdir()
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    subprocess.run(
        [*torchrun, str(script), str(out)],
        env=clean_environment(),
        check=True,
        timeout=90,
        capture_output=True,
    )
    _check_infos(out)


@pytest.mark.parametrize("launcher", ["slurm", "openmpi"])
def test_with_the_variables_of_other_launchers(tmp_path, launcher):
    def variables(rank: int) -> dict[str, str]:
        if launcher == "slurm":
            return {
                "SLURM_PROCID": str(rank),
                "SLURM_NTASKS": "2",
                "SLURM_LOCALID": str(rank),
                "SLURM_JOB_ID": str(os.getpid()),
                "SLURM_JOB_NODELIST": "localhost",
            }
        return {
            "OMPI_COMM_WORLD_RANK": str(rank),
            "OMPI_COMM_WORLD_SIZE": "2",
            "OMPI_COMM_WORLD_LOCAL_RANK": str(rank),
            "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
            "PMIX_NAMESPACE": f"test-{os.getpid()}",
        }

    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(tmp_path)],
            env=clean_environment() | variables(rank),
            stderr=subprocess.PIPE,
        )
        for rank in range(2)
    ]
    for process in processes:
        _, errors = process.communicate(timeout=90)
        assert process.returncode == 0, errors.decode()
    _check_infos(tmp_path)
