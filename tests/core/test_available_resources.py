"""Cores and memory that a process may use: real quotas where groups can be made, real texts elsewhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.core import available_resources
from paceline.train.settings.train_config import TrainConfig

HERE = len(os.sched_getaffinity(0))
CPU = Path("/sys/fs/cgroup/cpu")
# As a container of Docker with cgroup v2 shows them.
MOUNTINFO_2 = "1530 1525 0:28 / {mount} ro,nosuid,nodev,noexec,relatime - cgroup2 cgroup rw,nsdelegate\n"
MOUNTINFO_1 = (
    "35 30 0:30 {root} {mount}/cpu rw,nosuid,nodev,noexec,relatime shared:14 - cgroup cgroup rw,cpu,cpuacct\n"
    "36 30 0:31 {root} {mount}/memory rw,nosuid,nodev,noexec,relatime shared:15 - cgroup cgroup rw,memory\n"
)


def made(folder: Path, mountinfo: str, cgroup: str, files: dict[str, str]) -> Path:
    proc, mount = folder / "proc", folder / "mount"
    proc.mkdir()
    (proc / "mountinfo").write_text(
        "22 1 0:20 / /proc rw - proc proc rw\n" + mountinfo.format(mount=mount, root="/")
    )
    (proc / "cgroup").write_text(cgroup)
    for name, text in files.items():
        (mount / name).parent.mkdir(parents=True, exist_ok=True)
        (mount / name).write_text(text)
    return proc


@pytest.mark.parametrize(
    ("text", "quota"),
    [("50000 100000\n", 0.5), ("150000 100000\n", 1.5), ("max 100000\n", None), ("", None)],
)
def test_version_2(tmp_path: Path, text: str, quota: float | None) -> None:
    files = {"cpu.max": text, "memory.max": "1073741824\n"}
    proc = made(tmp_path, MOUNTINFO_2, "0::/\n", files)
    assert available_resources.cpu_quota(proc) == quota
    assert available_resources.cores(proc) == (HERE if quota is None else min(HERE, 1 if quota < 1 else 2))
    assert available_resources.memory_limit(proc) == 1 << 30


def test_the_tightest_group_counts(tmp_path: Path) -> None:
    """A pod's limit is above that of its container's own group."""
    files = {
        "cpu.max": "max 100000\n",
        "pod/cpu.max": "20000 100000\n",
        "pod/one/cpu.max": "300000 100000\n",
        "pod/memory.max": "max\n",
        "pod/one/memory.max": "max\n",
    }
    proc = made(tmp_path, MOUNTINFO_2, "0::/pod/one\n", files)
    assert available_resources.cpu_quota(proc) == 0.2
    assert available_resources.cores(proc) == 1
    assert available_resources.memory_limit(proc) is None


def test_version_1(tmp_path: Path) -> None:
    files = {
        "cpu/docker/a/cpu.cfs_quota_us": "-1\n",
        "cpu/docker/cpu.cfs_quota_us": "25000\n",
        "cpu/docker/cpu.cfs_period_us": "50000\n",
        "memory/docker/a/memory.limit_in_bytes": "2147483648\n",
        "memory/memory.limit_in_bytes": "9223372036854771712\n",
    }
    cgroup = "5:memory:/docker/a\n4:cpu,cpuacct:/docker/a\n1:name=systemd:/\n0::/\n"
    proc = made(tmp_path, MOUNTINFO_1, cgroup, files)
    assert available_resources.cpu_quota(proc) == 0.5
    assert available_resources.memory_limit(proc) == 2 << 30


def test_without_control_groups(tmp_path: Path) -> None:
    assert available_resources.cores(tmp_path) == HERE
    assert available_resources.memory_limit(tmp_path) is None


@pytest.fixture
def half_a_cpu() -> Iterator[Path]:
    group = CPU / f"paceline-test-{uuid.uuid4().hex[:8]}"
    try:
        group.mkdir()
        (group / "cpu.cfs_quota_us").write_text("50000")
    except OSError as error:
        pytest.skip(f"no control group for processors can be made here: {error}")
    try:
        yield group
    finally:
        group.rmdir()


def in_group(group: Path, program: str, *arguments: str) -> str:
    """What a program prints that runs in the group from its first line on."""
    enter = f"open({str(group / 'cgroup.procs')!r}, 'w').write('0')\n"
    done = subprocess.run(
        [sys.executable, "-c", enter + program, *arguments], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_real_quota_counts_in_info_and_in_a_new_run(half_a_cpu: Path) -> None:
    program = (
        "import json\n"
        "from paceline.cli.info import collect\n"
        "from paceline.frontends.run_preparation import as_recorded\n"
        "from paceline.train.settings.train_config import TrainConfig\n"
        "print(json.dumps([collect()['cores'], as_recorded(TrainConfig(shards=1)).threads]))"
    )
    found, threads = json.loads(in_group(half_a_cpu, program))
    assert found == {"cores_usable": 1, "cores_total": os.cpu_count()}
    assert threads == 1


def test_a_run_that_is_resumed_keeps_its_threads_under_a_quota(half_a_cpu: Path, tmp_path: Path) -> None:
    from paceline.train.state.run_folder import RunFolder

    config = TrainConfig(shards=1, run_dir=str(tmp_path / "run"))
    RunFolder.create(config.resolved(7))
    program = (
        "import sys\n"
        "from paceline.frontends.run_preparation import as_recorded\n"
        "from paceline.train.settings.train_config import TrainConfig\n"
        "print(as_recorded(TrainConfig(run_dir=sys.argv[1], resume='auto')).threads)"
    )
    assert in_group(half_a_cpu, program, str(tmp_path / "run")) == "7\n"
