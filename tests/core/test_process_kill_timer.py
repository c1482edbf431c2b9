"""The kernel ends a process at a time that was set, whatever the process does."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable

from paceline.core.process_kill_timer import KernelDeadline


def status_of(function: Callable[[], int]) -> int:
    """How a process ends that does this."""
    child = os.fork()
    if child == 0:
        os._exit(function())
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_process_that_holds_the_interpreters_lock_for_ever_is_ended():
    def hang() -> int:
        KernelDeadline().arm(0.05)
        return int(ctypes.PyDLL(None).pause())

    assert status_of(hang) == -signal.SIGKILL


def test_it_can_be_put_off_and_given_up():
    def go_on() -> int:
        last_resort = KernelDeadline()
        last_resort.disarm()
        last_resort.arm(0.05)
        last_resort.arm(3600.0)
        last_resort.arm(0.1)
        last_resort.disarm()
        last_resort.arm(3600.0)
        last_resort.close()
        last_resort.close()
        return 7

    assert status_of(go_on) == 7
