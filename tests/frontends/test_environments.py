"""Runs where the system gives less than usual: each works, or says within seconds what is missing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.frontends import sandbox


def run(
    folder: Path, workers: int, *limits: str, before: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*before, sys.executable, "-m", "tests.frontends.sandbox", str(folder), str(workers), *limits],
        capture_output=True,
        text=True,
        timeout=110,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The hash of the run where nothing is missing."""
    done = run(tmp_path_factory.mktemp("usual") / "run", 1)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("workers", [1, 2])
def test_a_limit_on_address_space(tmp_path: Path, usual: str, workers: int) -> None:
    done = run(tmp_path / "run", workers, f"address-space={6 << 30}")
    assert done.returncode == 0, done.stderr
    assert done.stdout == usual


def test_without_memfd_create(tmp_path: Path, usual: str) -> None:
    done = run(tmp_path / "run", 2, "no-memfd_create")
    assert done.returncode == 0, done.stderr
    assert done.stdout == usual


def test_without_pidfd_open(tmp_path: Path) -> None:
    done = run(tmp_path / "run", 2, "no-pidfd_open")
    assert done.returncode == 1
    assert "the system call pidfd_open is not allowed here (Operation not permitted)" in done.stderr
    assert "seccomp" in done.stderr
    assert done.stderr.count("Traceback") <= 2  # the error and its cause; none of another process


def in_namespace(*what: str) -> tuple[str, ...]:
    tool = shutil.which("unshare")
    if tool is None or subprocess.run([tool, *what, "true"], capture_output=True).returncode:
        pytest.skip("no namespace of that kind can be made here")
    return (tool, *what)


def test_without_a_loopback_interface(tmp_path: Path) -> None:
    done = run(tmp_path / "run", 2, before=in_namespace("-n"))
    assert done.returncode == 1
    assert "this machine cannot reach itself at 127.0.0.1 (Network is unreachable)" in done.stderr
    assert "ip link set lo up" in done.stderr


LOADER = """
import sys
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
import paceline

class Data(Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        return torch.full((int(sys.argv[2]),), float(index)), torch.zeros(1)

def own(samples):
    # Outside of shared memory: it is only needed on the way to the reader.
    return [torch.stack([one.clone() for one in part]) for part in zip(*samples)]

model = nn.Linear(1, 1)
loader = DataLoader(Data(), batch_size=4, num_workers=1, collate_fn=own if sys.argv[3] == "own" else None)
config = paceline.TrainConfig(shards=1, global_batch=4, threads=1, progress=False, run_dir=sys.argv[1])
with paceline.session(model, torch.optim.SGD(model.parameters(), 0.01), config) as run:
    for micro in run.microbatches(loader):
        run.backward(model(micro.x[:, :1]).mean())
"""


@pytest.mark.parametrize("collate", ["default", "own"])
@pytest.mark.parametrize(("size", "floats"), [("1m", 200_000), ("64m", 8_000_000)])
def test_a_small_dev_shm_with_a_loader(tmp_path: Path, size: str, floats: int, collate: str) -> None:
    mounted = f'mount -t tmpfs -o size={size} tmpfs /dev/shm && exec "$0" "$@"'
    before = (*in_namespace("-m"), "sh", "-c", mounted)
    done = subprocess.run(
        [*before, sys.executable, "-c", LOADER, str(tmp_path / "run"), str(floats), collate],
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 1
    assert f"/dev/shm ({size[:-1]} MiB) is full" in done.stderr, done.stderr
    assert "docker run --shm-size" in done.stderr
    assert "equal shapes" not in done.stderr


def test_the_filter_of_the_sandbox_works() -> None:
    """A test whose limit does nothing would prove nothing."""
    program = (
        "from tests.frontends.sandbox import forbid; import os; forbid('memfd_create'); os.memfd_create('x')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert "PermissionError" in done.stderr
    assert sandbox.forbid is not None
