"""Find tools that watch the caller's own process, a debugger or torch's profiler: with one worker `fit` then
computes there, where they see it. Importing this module does not import torch.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any

# Tools that set a trace function to count lines; their user does not wait for a breakpoint.
_LINE_COUNTERS = ("coverage", "hypothesis", "trace")
_DEBUGGERS = ("bdb", "pdb", "pydevd", "_pydevd_bundle", "debugpy")
_PROFILER_STEP = "ProfilerStep"  # torch.profiler's name of the counter that a profile keeps while it is open


def watching_tool() -> str | None:
    """Return which tool watches this process, in words; None: none does."""
    if profiler_is_active():
        return "a torch.profiler is active"
    return "a debugger is active" if debugger_is_active() else None


def debugger_is_active() -> bool:
    """Return whether a debugger traces this thread, has registered itself with `sys.monitoring`, or runs the
    program: one without a breakpoint so far traces nothing, and waits for a `breakpoint()`."""
    monitoring: Any = getattr(sys, "monitoring", None)  # from Python 3.12
    if monitoring is not None and monitoring.get_tool(monitoring.DEBUGGER_ID) is not None:
        return True
    tracer = sys.gettrace()
    if tracer is None:
        return _runs_this_program()
    owner = getattr(tracer, "__self__", tracer)
    module = getattr(tracer, "__module__", None) or type(owner).__module__
    return module.partition(".")[0] not in _LINE_COUNTERS


def _runs_this_program() -> bool:
    """Return whether a debugger is among the callers of this function."""
    frame = inspect.currentframe()
    while frame is not None:
        if str(frame.f_globals.get("__name__", "")).partition(".")[0] in _DEBUGGERS:
            return True
        frame = frame.f_back
    return False


def profiler_is_active() -> bool:
    """Return whether a profiler of torch records, or waits for the steps of its schedule, in this process."""
    profiler: Any = sys.modules.get("torch.autograd.profiler")
    if profiler is None:
        return False
    tracker = getattr(profiler, "KinetoStepTracker", None)
    waiting = _PROFILER_STEP in getattr(tracker, "_step_dict", ())
    return bool(getattr(profiler, "_is_profiler_enabled", False)) or waiting
