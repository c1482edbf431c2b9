"""How ranks in separate processes find each other, and what they say when they do not."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.comm.transport.ranks import free_port, run_contexts, run_processes, values

from paceline.comm.context import DistributedContext
from paceline.comm.rendezvous import round, topology, transport_setup
from paceline.comm.transport.shm import futex
from paceline.comm.transport.tcp import dial
from paceline.core import listen_address, shm_segment_layout
from paceline.core.errors import RendezvousError, UnavailableError, UsageError
from paceline.core.handshake import STORE, Acceptor


def total(ctx: DistributedContext) -> float:
    result: list[float] = ctx.all_reduce([float(ctx.rank + 1)])
    return result[0]


@pytest.mark.parametrize(("backend", "name"), [("auto", "shm"), ("shm", "shm"), ("gloo", "gloo")])
def test_ranks_of_one_host(backend: str, name: str) -> None:
    def main(ctx: DistributedContext) -> tuple[str, float]:
        return ctx.backend, total(ctx)

    assert values(run_contexts(3, main, backend=backend)) == [(name, 6.0)] * 3


def test_ranks_of_two_hosts() -> None:
    def main(ctx: DistributedContext) -> tuple[str, float, tuple[int, ...], tuple[str, ...]]:
        return ctx.backend, total(ctx), ctx.transport.topology.host_of, ctx.transport.topology.names

    expected = ("hybrid", 6.0, (0, 0, 1), ("host0", "host1"))
    assert values(run_contexts(3, main, hosts=2)) == [expected] * 3


@pytest.mark.parametrize("backend", ["auto", "gloo"])
def test_one_rank_needs_no_peer(backend: str) -> None:
    with DistributedContext(1, 0, backend=backend) as ctx:
        assert total(ctx) == 1.0
        assert ctx.backend == "shm"


def test_without_a_launcher_a_process_is_a_group_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with DistributedContext() as ctx:
        assert (ctx.rank, ctx.world_size) == (0, 1)


def test_shared_memory_between_hosts_is_refused() -> None:
    outcomes = run_contexts(2, total, backend="shm", hosts=2)
    for outcome in outcomes:
        assert isinstance(outcome.error, UnavailableError | RendezvousError)
        assert "share no memory" in str(outcome.error)


def test_where_memory_cannot_be_shared_auto_takes_gloo() -> None:
    def main(rank: int, world_size: int, address: str) -> tuple[str, float]:
        if rank == 1:
            # As where /proc does not let one process open another's descriptors.
            topology.open_segment = _refused  # type: ignore[assignment]
        with DistributedContext(world_size, rank, address=address, timeout=20) as ctx:
            return ctx.backend, total(ctx)

    with free_port() as port:
        assert values(run_processes(3, main, f"127.0.0.1:{port}")) == [("gloo", 6.0)] * 3


def _refused(*_: Any) -> int:
    raise PermissionError(13, "Permission denied")


def test_contexts_one_after_the_other_at_one_address() -> None:
    def main(rank: int, world_size: int, address: str) -> list[float]:
        found = []
        for backend in ("shm", "gloo", "shm", "gloo", "auto"):
            with DistributedContext(world_size, rank, address=address, backend=backend, timeout=20) as ctx:
                found.append(total(ctx))
        return found

    with free_port() as port:
        assert values(run_processes(3, main, f"127.0.0.1:{port}")) == [[6.0] * 5] * 3


def test_ranks_may_come_in_any_order() -> None:
    """Each rank starts when the one above it is already waiting."""
    pipes = [os.pipe() for _ in range(3)]

    def main(rank: int, world_size: int, address: str) -> float:
        if rank + 1 < world_size:
            os.read(pipes[rank + 1][0], 1)
        os.write(pipes[rank][1], b"!")
        with DistributedContext(world_size, rank, address=address, timeout=20) as ctx:
            return total(ctx)

    try:
        with free_port() as port:
            assert values(run_processes(3, main, f"127.0.0.1:{port}")) == [6.0] * 3
    finally:
        for pair in pipes:
            os.close(pair[0])
            os.close(pair[1])


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _join_alone(
    rank: int, world_size: int, ranks: list[int], address: str, size: int, timeout: float
) -> tuple[str, list[str]]:
    """One of a few ranks of a larger group; returns its error and what it logged."""
    dial.FIRST_NOTICE = 0.2
    handler = _Lines()
    logging.getLogger("paceline.comm").addHandler(handler)
    try:
        DistributedContext(size, ranks[rank], address=address, timeout=timeout)
    except RendezvousError as error:
        return str(error), handler.lines
    raise AssertionError("the group is not complete")


def test_a_rank_that_waits_for_rank_0_says_so() -> None:
    with free_port() as port:
        ((text, lines),) = values(run_processes(1, _join_alone, [1], f"127.0.0.1:{port}", 2, 0.6))
    expected = f"rank 1 waits for rank 0 at 127.0.0.1:{port}: nothing listens there yet"
    assert lines == [expected]
    assert expected in text


def test_rank_0_says_for_whom_it_waits() -> None:
    with free_port() as port:
        outcomes = values(run_processes(2, _join_alone, [0, 1], f"127.0.0.1:{port}", 4, 1.0))
    for rank, (text, lines) in enumerate(outcomes):
        assert f"rank {rank} waits for ranks 2 and 3" in lines[0]
        assert "waits for ranks 2 and 3" in text


def _die_or_be_told(rank: int, world_size: int, address: str) -> str:
    if rank == 1:
        # Once this rank has come: the first thing after its hello is to read rank 0's.
        read = round.RendezvousRound.read

        def read_and_die(self: round.RendezvousRound, topic: str, other: int) -> Any:
            read(self, topic, other)
            os.kill(os.getpid(), signal.SIGKILL)

        round.RendezvousRound.read = read_and_die  # type: ignore[method-assign,assignment]
    try:
        DistributedContext(3, rank, address=address, timeout=60)
    except RendezvousError as error:
        return str(error)
    return ""


def test_a_rank_that_ends_while_the_group_forms_is_named() -> None:
    with free_port() as port:
        outcomes = run_processes(2, _die_or_be_told, f"127.0.0.1:{port}")
    assert outcomes[1].signal == signal.SIGKILL
    assert "rank 1 (process" in outcomes[0].value
    assert "ended while the group was forming" in outcomes[0].value


def _expect_error(
    rank: int, world_size: int, ranks: list[int], sizes: list[int], backends: list[str], address: str
) -> str:
    try:
        ctx = DistributedContext(sizes[rank], ranks[rank], address=address, backend=backends[rank], timeout=5)
    except RendezvousError as error:
        return str(error)
    ctx.close()
    return ""


def test_a_rank_taken_twice() -> None:
    with free_port() as port:
        outcomes = values(
            run_processes(3, _expect_error, [0, 1, 1], [3, 3, 3], ["auto"] * 3, f"127.0.0.1:{port}")
        )
    assert any("rank 1 is taken" in text and "process" in text for text in outcomes)
    assert all("rank 1" in text for text in outcomes)


def test_different_world_sizes() -> None:
    with free_port() as port:
        outcomes = values(
            run_processes(3, _expect_error, [0, 1, 2], [3, 3, 4], ["auto"] * 3, f"127.0.0.1:{port}")
        )
    assert all("rank 2 expects 4 ranks, rank 0 expects 3" in text for text in outcomes)


def test_different_backends() -> None:
    with free_port() as port:
        outcomes = values(
            run_processes(2, _expect_error, [0, 1], [2, 2], ["gloo", "auto"], f"127.0.0.1:{port}")
        )
    assert all("differ in their backend" in text for text in outcomes)


def test_a_port_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(RendezvousError, match=f"cannot serve at 127.0.0.1:{port}.*in use") as caught:
            DistributedContext(2, 0, address=f"127.0.0.1:{port}", timeout=2)
    assert "another port" in caught.value.remedy


def test_something_else_at_the_address() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        answering = threading.Thread(
            target=_greet, args=(other, b"HTTP/1.1 400 Bad Request\r\n\r\n"), daemon=True
        )
        answering.start()
        with pytest.raises(RendezvousError, match="not a rendezvous"):
            DistributedContext(2, 1, address=f"127.0.0.1:{port}", timeout=1)
        other.shutdown(socket.SHUT_RDWR)
        answering.join()


def test_another_version_at_the_address_is_named_at_once_with_both_numbers() -> None:
    later = replace(STORE, number=STORE.number + 1)
    with socket.create_server(("127.0.0.1", 0)) as other:
        answering = threading.Thread(target=_greet, args=(other, Acceptor(later, b"").challenge), daemon=True)
        answering.start()
        both = f"store protocol {later.number}, this end speaks {STORE.number}"
        with pytest.raises(RendezvousError, match=f"rank 1 cannot meet rank 0 at .*: it speaks {both}"):
            # Not waited for: this rank and rank 0 will never meet.
            DistributedContext(2, 1, address=f"127.0.0.1:{other.getsockname()[1]}", timeout=3600)
        other.shutdown(socket.SHUT_RDWR)
        answering.join()


def _greet(server: socket.socket, said: bytes) -> None:
    while True:
        try:
            caller, _ = server.accept()
        except OSError:
            return
        with caller:
            caller.sendall(said)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"backend": "smoke signals"}, "smoke signals"),
        ({"backend": "gloo", "address": "nowhere"}, "nowhere"),
        ({"world_size": 2}, "rank"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    given: dict[str, Any] = {"world_size": 2, "rank": 0} | arguments
    if "world_size" in arguments:
        del given["rank"]
    with pytest.raises(UsageError, match=message):
        DistributedContext(**given)


@pytest.mark.skipif(dist.is_mpi_available(), reason="this torch has MPI")
def test_mpi_without_mpi() -> None:
    with pytest.raises(UnavailableError, match="made without MPI"):
        DistributedContext(2, 0, backend="mpi")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_nccl_without_a_gpu() -> None:
    with pytest.raises(UnavailableError, match="nccl"):
        DistributedContext(2, 0, backend="nccl")


def test_links_come_from_rank_0(tmp_path: Path) -> None:
    def main(rank: int, world_size: int, address: str) -> str:
        os.environ["PACELINE_LINKS"] = str(tmp_path / f"{rank}.json")
        if rank == 0:
            from paceline.comm.cost import LinkCosts, save_links

            save_links(LinkCosts(source="measured by rank 0"))
        with DistributedContext(world_size, rank, address=address, timeout=20) as ctx:
            return ctx.explain_all_reduce(1000).reason

    with free_port() as port:
        for reason in values(run_processes(2, main, f"127.0.0.1:{port}")):
            assert "measured by rank 0" in reason


def test_the_wrong_segment_is_refused() -> None:
    first, other = shm_segment_layout.create_segment(2), shm_segment_layout.create_segment(2)
    try:
        status = os.fstat(first)
        told = {"fd": other, "inode": status.st_ino, "device": status.st_dev}
        with pytest.raises(OSError, match="another file"):
            topology.open_segment(told, os.getpid())
    finally:
        os.close(first)
        os.close(other)


# on top of torch.distributed


def _over_group(rank: int, world_size: int, port: int, hosts: int) -> list[Any]:
    if hosts > 1:
        os.environ["PACELINE_HOST"] = f"host{rank * hosts // world_size}"
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)
    try:
        found: list[Any] = []
        for _ in range(2):
            transport, links = transport_setup.over_process_group(timeout=20)
            with DistributedContext.from_transport(transport, links=links) as ctx:
                found += [ctx.backend, total(ctx)]
                if ctx.backend != "shm":
                    found.append(ctx.all_reduce(torch.ones(3), algorithm="native").tolist())
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        return [*found, tensor.item()]
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("world_size", "hosts", "expected"),
    [(2, 1, ["shm", 3.0]), (2, 2, ["gloo", 3.0, [2.0] * 3]), (3, 2, ["hybrid", 6.0, [3.0] * 3])],
)
def test_on_top_of_an_initialised_group(world_size: int, hosts: int, expected: list[Any]) -> None:
    with free_port() as port:
        outcomes = values(run_processes(world_size, _over_group, port, hosts))
    assert outcomes == [[*expected, *expected, float(world_size)]] * world_size


def _over_files(rank: int, world_size: int, path: str, hosts: int, memory: bool) -> tuple[list[str], float]:
    """Where a rank listens that knows no address by which others reach it, as on a machine whose name is that
    of loopback in /etc/hosts."""
    opened: list[str] = []
    real = listen_address.listener

    def recorded(host: str, port: int, backlog: int = listen_address.BACKLOG) -> socket.socket:
        opened.append(host)
        return real(host, port, backlog)

    listen_address.listener = recorded
    transport_setup._host_of = lambda store: "0x7f000001"  # not known as loopback before it is resolved
    if not memory:
        futex.available = lambda: False
    if hosts > 1:
        os.environ["PACELINE_HOST"] = f"host{rank * hosts // world_size}"
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world_size)
    try:
        transport, links = transport_setup.over_process_group(timeout=20)
        with DistributedContext.from_transport(transport, links=links) as ctx:
            return opened, total(ctx)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("hosts", "memory", "expected"), [(1, True, []), (1, False, ["127.0.0.1"]), (2, True, [""])]
)
def test_ranks_of_one_host_never_listen_on_all_interfaces(
    tmp_path: Path, hosts: int, memory: bool, expected: list[str]
) -> None:
    outcomes = values(run_processes(2, _over_files, str(tmp_path / "store"), hosts, memory))
    assert outcomes == [(expected, 3.0)] * 2


def test_on_top_of_nothing() -> None:
    with pytest.raises(UsageError, match="not initialised"):
        transport_setup.over_process_group()


# launchers

_SCRIPT = """
import os
from paceline.comm.context import DistributedContext

for turn in range(2):
    with DistributedContext(timeout=30) as ctx:
        line = f"RESULT {ctx.rank} {ctx.world_size} {ctx.all_reduce([1.0])[0]}\\n"
        os.write(1, line.encode())  # whole lines, although other ranks write too
"""


def _run_script(tmp_path: Path, *command: str, environment: dict[str, str] | None = None) -> list[str]:
    script = tmp_path / "script.py"
    script.write_text(_SCRIPT)
    clean = {
        name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "MASTER_ADDR")
    }
    done = subprocess.run(
        [*command, str(script)],
        env={**clean, "OMP_NUM_THREADS": "1", **(environment or {})},
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return sorted(line for line in done.stdout.splitlines() if "RESULT" in line)


def _expected(world_size: int) -> list[str]:
    return sorted(
        f"RESULT {rank} {world_size} {float(world_size)}" for rank in range(world_size) for _ in range(2)
    )


def test_torchrun_as_it_is(tmp_path: Path) -> None:
    command = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3")
    assert _run_script(tmp_path, *command) == _expected(3)


@pytest.mark.mpi
@pytest.mark.skipif(shutil.which("mpirun") is None, reason="no mpirun: apt-get install openmpi-bin")
def test_mpirun_as_it_is(tmp_path: Path) -> None:
    command = ("mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "3", sys.executable)
    assert _run_script(tmp_path, *command) == _expected(3)


def test_slurms_variables() -> None:
    def main(rank: int, world_size: int, job: str) -> tuple[int, float]:
        for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            os.environ.pop(name, None)
        os.environ.update(
            SLURM_PROCID=str(rank),
            SLURM_NTASKS=str(world_size),
            SLURM_LOCALID=str(rank),
            SLURM_JOB_ID=job,
            SLURM_STEP_ID="0",
            SLURM_JOB_NODELIST="localhost",
        )
        with DistributedContext(timeout=20) as ctx:
            return ctx.rank, total(ctx)

    assert values(run_processes(3, main, str(os.getpid()))) == [(rank, 6.0) for rank in range(3)]
