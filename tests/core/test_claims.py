"""Claims with real processes: one holder at a time, and free again once the holder is killed."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.core.claims import GPU_CLAIMS_VARIABLE, claim, claimed_gpu

WORKER = """
import sys
from paceline.core.claims import claimed_gpu
count, preferred = map(int, sys.argv[1:])
print(claimed_gpu(count, preferred), claimed_gpu(count, preferred), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def scope(tmp_path: Path) -> str:
    return str(tmp_path)


@contextlib.contextmanager
def worker(
    scope: str, count: int, preferred: int, visible: str | None = None
) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process that takes a GPU, and the number of it."""
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    environment[GPU_CLAIMS_VARIABLE] = scope
    if visible is not None:
        environment["CUDA_VISIBLE_DEVICES"] = visible
    process = subprocess.Popen(
        [sys.executable, "-c", WORKER, str(count), str(preferred)],
        env=environment,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        first, again = map(int, process.stdout.readline().split())
        assert first == again, "a process keeps what it has"
        yield process, first
    finally:
        process.kill()
        process.communicate()


def test_a_name_has_one_holder(scope: str) -> None:
    held = claim(scope)
    assert held is not None
    with held:
        assert claim(scope) is None
        other = claim(f"{scope} too")
        assert other is not None
        other.close()
    again = claim(scope)
    assert again is not None
    again.close()


def test_workers_of_two_runs_take_different_gpus_and_a_killed_ones_is_free(scope: str) -> None:
    with (
        worker(scope, 4, 0) as (_, zero),
        worker(scope, 4, 1) as (victim, one),
        worker(scope, 4, 0) as (_, two),  # the first of the second run
        worker(scope, 4, 1) as (_, three),
    ):
        assert [zero, one, two, three] == [0, 1, 2, 3]
        with worker(scope, 4, 2) as (_, shared):
            assert shared == 2, "none is free: shared as without claims"
        victim.kill()
        victim.wait()
        with worker(scope, 4, 3) as (_, replacement):
            assert replacement == 1
        with worker(f"{scope}-other", 4, 0) as (_, elsewhere):
            assert elsewhere == 0, "another queue counts by itself"


def test_gpus_are_told_apart_by_their_names_on_the_machine(scope: str) -> None:
    with worker(scope, 2, 0, visible="2, 3") as (_, first), worker(scope, 4, 2) as (_, second):
        assert first == 0  # GPU 2 of the machine
        assert second != 2
        with worker(scope, 2, 0, visible="2,3") as (_, third):
            assert third == 1


def test_without_a_queue_ranks_have_the_gpus_of_their_number() -> None:
    assert claimed_gpu(4, 3, {}) == 3
    assert claimed_gpu(4, 3, {GPU_CLAIMS_VARIABLE: ""}) == 3
