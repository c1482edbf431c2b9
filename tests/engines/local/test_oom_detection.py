"""Kills for memory are told from other kills, with the real kernel: in a group with a small limit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from paceline.core import memory_cgroup
from paceline.core.memory_cgroup import MemoryCgroup
from paceline.engines.local import oom_detection
from paceline.engines.local.oom_detection import OomWatch

LIMIT = 48 << 20
EATER = """
import sys
from pathlib import Path
Path(sys.argv[1], "cgroup.procs").write_text(str(__import__("os").getpid()))
print("in", flush=True)
sys.stdin.readline()
held = [bytearray(b"x" * (1 << 20)) for _ in range(200)]
"""


@pytest.fixture
def group() -> Iterator[MemoryCgroup]:
    try:
        made = memory_cgroup.make_cgroup_below(f"paceline-test-{os.getpid()}", LIMIT)
    except OSError as error:
        pytest.skip(f"a memory cgroup cannot be made here: {error}")
    yield made
    deadline = time.monotonic() + 10.0
    while made.path.exists():
        try:
            made.remove()
        except OSError:
            assert time.monotonic() < deadline


def start(group: MemoryCgroup) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", EATER, str(group.path)]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "in\n"
    return child


def eat(child: subprocess.Popen[str]) -> None:
    """Lets it use memory until it is killed."""
    child.communicate("go\n", timeout=60)
    assert child.returncode == -signal.SIGKILL


def kill(child: subprocess.Popen[str]) -> None:
    child.kill()
    child.communicate(timeout=60)


@pytest.fixture(params=["with the kernel's log", "without the kernel's log"])
def log(request, monkeypatch) -> None:
    """Containers often may not read the log: the counters have to do there."""
    if request.param.startswith("without"):
        monkeypatch.setattr(oom_detection, "_LOG", "/nowhere")


@pytest.mark.usefixtures("log")
def test_a_kill_for_memory_is_named_with_the_limit(group):
    watch = OomWatch()
    child = start(group)
    watch.note(child.pid)
    eat(child)
    assert watch.explain(child.pid) == "killed by the kernel: out of memory (cgroup limit 48 MiB)"
    assert watch.explain(child.pid) is None


@pytest.mark.usefixtures("log")
def test_a_kill_by_hand_is_none(group):
    watch = OomWatch()
    child = start(group)
    watch.note(child.pid)
    kill(child)
    assert watch.explain(child.pid) is None


@pytest.mark.usefixtures("log")
def test_of_two_deaths_in_a_group_one_kill_explains_one(group):
    watch = OomWatch()
    first = start(group)
    watch.note(first.pid)
    eat(first)
    second = start(group)
    watch.note(second.pid)
    kill(second)
    assert watch.explain(first.pid) is not None
    assert watch.explain(second.pid) is None


def test_a_kill_in_another_group_does_not_explain_a_death_here(group, monkeypatch):
    monkeypatch.setattr(oom_detection, "_LOG", "/nowhere")
    watch = OomWatch()
    bystander = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, text=True)
    watch.note(bystander.pid)
    child = start(group)
    watch.note(child.pid)
    eat(child)
    kill(bystander)
    assert watch.explain(bystander.pid) is None
    assert watch.explain(child.pid) is not None


def test_a_group_that_was_entered_after_the_last_look(group):
    """The log names the process; where there is no log, the group that it was in has no kill to show."""
    watch = OomWatch()
    watch.note(os.getpid())
    child = start(group)
    eat(child)
    if oom_detection.kills_in_log(time.monotonic()) is None:
        pytest.skip("the kernel's log cannot be read here")
    assert watch.explain(child.pid) == "killed by the kernel: out of memory (cgroup limit 48 MiB)"


def test_an_old_kill_does_not_explain_a_new_death(group, monkeypatch):
    monkeypatch.setattr(oom_detection, "_LOG", "/nowhere")
    now = [0.0]
    watch = OomWatch(clock=lambda: now[0])
    child = start(group)
    eat(child)
    other = start(group)
    for second in (1.0, 8.0, 15.0):
        now[0] = second
        watch.note(other.pid)
    kill(other)
    assert watch.explain(other.pid) is None


def test_a_kill_is_not_missed_because_of_a_look_in_between(group, monkeypatch):
    monkeypatch.setattr(oom_detection, "_LOG", "/nowhere")
    now = [0.0]
    watch = OomWatch(clock=lambda: now[0])
    child, other = start(group), start(group)
    watch.note(child.pid)
    watch.note(other.pid)
    eat(child)
    for second in (0.6, 1.2, 1.8):
        now[0] = second
        watch.note(other.pid)
    assert watch.explain(child.pid) is not None
    kill(other)
    assert watch.explain(other.pid) is None


def test_unknown_processes_are_no_trouble():
    watch = OomWatch()
    watch.note(2**22 - 1)
    watch.forget(2**22 - 1)
    assert watch.explain(2**22 - 1) is None


def test_it_is_cheap():
    watch = OomWatch()
    watch.note(os.getpid())
    started = time.perf_counter()
    for _ in range(200):
        watch.note(os.getpid())
        watch.explain(os.getpid())
    assert (time.perf_counter() - started) / 200 < 0.005
