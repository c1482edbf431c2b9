"""PACELINE_SECRET_FILE: which files are one, and ranks that have it, do not have it, or have another."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from tests.comm.transport.ranks import Outcome, free_port, run_processes, values

from paceline.comm.context import DistributedContext
from paceline.comm.rendezvous.environment import SECRET_VARIABLE, group_secret, mesh_secret
from paceline.core.errors import RendezvousError, UsageError


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    return written(tmp_path / "group.secret", b"0123456789abcdef0123456789abcdef\n")


def written(path: Path, content: bytes, mode: int = 0o600) -> Path:
    path.write_bytes(content)
    path.chmod(mode)
    return path


def read(path: Path) -> bytes:
    return group_secret({SECRET_VARIABLE: str(path)})


def test_a_file_that_is_a_secret(secret: Path) -> None:
    assert read(secret) == b"0123456789abcdef0123456789abcdef"
    assert group_secret({}) == group_secret({SECRET_VARIABLE: ""}) == b""


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o644])
def test_a_file_that_others_can_read_is_refused(secret: Path, mode: int) -> None:
    secret.chmod(mode)
    with pytest.raises(UsageError, match=f"{SECRET_VARIABLE}=.*other users"):
        read(secret)


@pytest.mark.parametrize("content", [b"", b"short\n", b"x" * 5000])
def test_what_is_too_short_or_too_long_is_refused(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(UsageError, match="are a secret"):
        read(written(tmp_path / "file", content))


def test_what_is_not_a_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        read(tmp_path / "missing")
    with pytest.raises(UsageError, match="regular file"):
        read(tmp_path)
    os.mkfifo(tmp_path / "fifo", 0o600)  # does not hang
    with pytest.raises(UsageError, match="regular file"):
        read(tmp_path / "fifo")


def test_the_key_of_the_connections_is_not_what_is_published_in_the_rendezvous() -> None:
    drawn = b"d" * 32
    assert mesh_secret(b"", drawn) == drawn
    assert mesh_secret(b"t" * 32, drawn) not in (drawn, b"t" * 32, mesh_secret(b"u" * 32, drawn))


def meet(rank: int, world_size: int, address: str, files: list[str], timeout: float) -> float:
    os.environ["PACELINE_HOST"] = f"host {rank}"
    if files[rank]:
        os.environ[SECRET_VARIABLE] = files[rank]
    with DistributedContext(world_size, rank, address=address, timeout=timeout) as ctx:
        return float(ctx.all_reduce(torch.ones(100_000))[5])


def met(files: list[str], timeout: float = 60.0) -> list[Outcome]:
    with free_port() as port:
        return run_processes(len(files), meet, f"127.0.0.1:{port}", files, timeout, timeout=120.0)


def test_ranks_that_all_have_it_meet(secret: Path) -> None:
    assert values(met([str(secret)] * 3)) == [3.0] * 3


@pytest.mark.parametrize("has_it", [0, 1])
def test_one_rank_without_it_is_an_error_that_names_the_variable(secret: Path, has_it: int) -> None:
    files = ["", ""]
    files[has_it] = str(secret)
    outcome = met(files, 5.0)[1]
    assert isinstance(outcome.error, RendezvousError)
    assert SECRET_VARIABLE in str(outcome.error)


def test_another_secret_is_said(secret: Path, tmp_path: Path) -> None:
    other = written(tmp_path / "other", b"x" * 32)
    outcome = met([str(secret), str(other)], 3.0)[1]
    assert isinstance(outcome.error, RendezvousError)
    assert "its secret is another" in str(outcome.error)
