"""Where a process is: its stack, polled until it is complete, and what the kernel and its page tell."""

from __future__ import annotations

import os
import signal

import pytest
from tests.elastic.supervisor.shell_parts import Parts, Shell

from paceline.core.phase_page import PhasePage, page_file
from paceline.elastic.machine.machine_events import ProcessProbed
from paceline.elastic.supervisor.process_probe import (
    MAX_STACK_SECONDS,
    STACK_SECONDS,
    StackProbe,
    kernel_state,
)
from paceline.engines.local import engine_messages
from paceline.engines.local.engine_messages import EngineMessage


@pytest.fixture
def stack(parts: Parts, tmp_path, signals: list[int]):
    """A worker of this process's pid, and the file in which it writes its stack."""
    process, theirs = parts.process()
    path = tmp_path / "stack"
    with open(path, "w+b", buffering=0) as file:
        engine_messages.send(theirs, EngineMessage(engine_messages.READY, descriptors=(file.fileno(),)))
        engine_messages.send(theirs, EngineMessage(engine_messages.STARTED, pid=os.getpid()))
        process.receive()
        yield process, file, signals


FRAMES = b'Thread 0x1 (most recent call first):\n  File "model.py", line 3 in forward\n'


def test_a_stack_that_has_stopped_growing_is_complete(parts: Parts, stack):
    process, file, sent = stack
    file.write(b"left by an earlier probe\n")
    probe = StackProbe(process, parts.clock.now())
    assert len(sent) == 1
    assert not probe.is_over(parts.clock.now())
    file.write(FRAMES[:30])
    assert not probe.is_over(parts.clock.now())
    file.write(FRAMES[30:])
    assert not probe.is_over(parts.clock.now())
    assert probe.is_over(parts.clock.now())
    assert any("model.py" in frame for frame in probe.frames())
    assert not any("earlier" in frame for frame in probe.frames())


def test_a_stack_that_does_not_come_is_given_up(parts: Parts):
    process, _ = parts.process()
    probe = StackProbe(process, parts.clock.now())
    parts.clock.advance(STACK_SECONDS - 0.01)
    assert not probe.is_over(parts.clock.now())
    parts.clock.advance(0.02)
    assert probe.is_over(parts.clock.now())
    assert probe.frames() == []


def test_a_process_that_waits_for_a_processor_has_longer(parts: Parts, stack):
    # The process is this test's, which runs.
    probe = StackProbe(stack[0], parts.clock.now())
    parts.clock.advance(MAX_STACK_SECONDS - 0.01)
    assert not probe.is_over(parts.clock.now())
    parts.clock.advance(0.02)
    assert probe.is_over(parts.clock.now())


def test_only_a_stopped_process_is_woken(parts: Parts, stack):
    process, _, sent = stack
    probe = StackProbe(process, parts.clock.now())
    sent.clear()
    probe.wake()
    assert not sent
    probe.state = "the process is stopped (SIGSTOP)"
    probe.wake()
    assert sent == [signal.SIGCONT]


def test_a_process_that_has_ended_is_not_asked(parts: Parts):
    process, _ = parts.process()
    process.status = 1
    probe = StackProbe(process, parts.clock.now())
    assert probe.is_over(parts.clock.now())


def test_a_probe_of_a_running_process_tells_its_phase_and_for_how_long(shell: Shell, tmp_path):
    shell.start(7, 2)
    shell.probe.probe([7])
    assert shell.emitted() == [ProcessProbed(7, False)]  # without a page
    page = PhasePage(page_file(tmp_path, 7))
    page.write("data", 3)
    shell.probe.probe([7, 8])
    (event,) = shell.emitted()
    assert isinstance(event, ProcessProbed)
    assert (event.member, event.stopped, event.phase) == (7, False, "data")
    assert event.seconds >= 0.0
    page.close()


def test_a_process_that_is_gone_gives_no_answer(shell: Shell):
    record = shell.start(7, 2)
    assert record.process is not None
    record.process.status = 1
    shell.probe.probe([7])
    assert not shell.emitted()
    assert kernel_state(2**22 + 1) == kernel_state(os.getpid()) == ""
