"""The state of a process of this host: running, stopped, ended, gone."""

from __future__ import annotations

import os
import signal

from paceline.core.process_state import has_ended, is_stopped, is_stopped_or_frozen, start_time, state_letter


def test_what_the_kernel_says_of_a_process():
    assert is_stopped_or_frozen(os.getpid()) is False
    assert is_stopped_or_frozen(2**22 + 1) is None
    child = os.fork()
    if child == 0:
        signal.pause()
    try:
        os.kill(child, signal.SIGSTOP)
        os.waitpid(child, os.WUNTRACED)
        assert is_stopped_or_frozen(child) is True
        assert is_stopped(child)
        assert not has_ended(child)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
        zombie = state_letter(child), start_time(child)
        os.waitpid(child, 0)
    assert is_stopped_or_frozen(child) is None
    assert zombie == ("Z", 0)
    assert has_ended(child)
    assert not is_stopped(child)
    assert start_time(child) == 0 < start_time(os.getpid())
