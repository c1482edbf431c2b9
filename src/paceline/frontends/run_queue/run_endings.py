"""What the end of a run's process means for its place in the queue. Pure.

exit code 0                      finished
75, the queue had asked          waiting, held or cancelled: saved, no step is lost
75 after a signal by others      waiting: the machine is shut down, or the process was moved away
75 after `paceline stop`, Ctrl-C  held: a person stopped it, so that it does not start again by itself
any other code                   failed: the run's own mistake, and trying again would repeat it
a signal, or no code at all      crashed: started again, from what it saved, after a pause; failed after
                                 several crashes without a step between them
the machine was started anew     waiting, and not counted as a crash
"""

from __future__ import annotations

import signal
from dataclasses import dataclass, replace
from typing import Final, final

from paceline.frontends.run_queue.queued_run import QueuedRun
from paceline.train.stop_signals import CTRL_C, STOP_SIGNALS, STOPPED_EXIT_CODE

MAX_CRASHES: Final = 3
FIRST_PAUSE: Final = 1.0
LONGEST_PAUSE: Final = 300.0
_INTERRUPTED: Final = (-signal.SIGINT, 128 + signal.SIGINT)
_SIGNALS: Final = {one.name for one in STOP_SIGNALS}


@final
@dataclass(frozen=True, kw_only=True)
class RunEnd:
    """What is known of an end. `code`: of the process, negative for a signal, None where no process
    saw it; `stop_reason`: why the journal says that the run stopped; `step`: the last one in the journal;
    `other_boot`: the machine was started anew since."""

    code: int | None
    step: int = 0
    stop_reason: str = ""
    other_boot: bool = False
    tail: tuple[str, ...] = ()


def after_end(run: QueuedRun, end: RunEnd, now: float) -> QueuedRun:
    """Return the run as it stands in the queue after its process has ended."""
    run = replace(run, code=end.code)
    if end.code == 0:
        return replace(run, crashes=0, intent="run").moved(now, "finished")
    if run.intent in ("cancel", "kill"):
        return run.moved(now, "cancelled", f"after step {end.step}" if end.step else "before its first step")
    if end.code in (STOPPED_EXIT_CODE, *_INTERRUPTED) or (run.state == "stopping" and _by_signal(end.code)):
        return _stopped(run, end, now)
    if end.other_boot:
        return run.moved(now, "waiting", f"the machine was started anew after step {end.step}")
    if _by_signal(end.code):
        return _crashed(run, end, now)
    return replace(run, tail=end.tail).moved(now, "failed", f"exit code {end.code}{_last_line(end.tail)}")


def _by_signal(code: int | None) -> bool:
    # 128 + number: a shell or a launcher in between says so.
    return code is None or code < 0 or 128 < code <= 128 + signal.SIGRTMAX


def _stopped(run: QueuedRun, end: RunEnd, now: float) -> QueuedRun:
    how = "saved" if end.code == STOPPED_EXIT_CODE else "stopped"
    saved = f"{how} after step {end.step}" if end.step else "stopped before its first step"
    if run.intent == "hold":
        return run.moved(now, "held", saved)
    if run.state == "stopping" or end.stop_reason in _SIGNALS:
        why = run.reason if run.state == "stopping" else end.stop_reason
        return run.moved(now, "waiting", f"{saved}: {why}" if why else saved)
    who = end.stop_reason or (CTRL_C if end.code in _INTERRUPTED else "a request")
    held = replace(run, intent="hold")
    return held.moved(now, "held", f"{saved}: {who}; `paceline queue release {run.id}` continues it")


def _crashed(run: QueuedRun, end: RunEnd, now: float) -> QueuedRun:
    crashes = 1 if end.step > run.crash_step else run.crashes + 1
    what = "its process is gone" if end.code is None else f"killed by {_signal_name(end.code)}"
    run = replace(run, crashes=crashes, crash_step=end.step)
    if run.intent == "hold":
        return run.moved(now, "held", f"{what} after step {end.step}")
    if crashes > MAX_CRASHES:
        why = f"{what} after step {end.step}, {crashes} times without a step between them"
        return replace(run, tail=end.tail).moved(now, "failed", why)
    pause = min(LONGEST_PAUSE, FIRST_PAUSE * 4 ** (crashes - 1)) if crashes > 1 else 0.0
    again = f"in {pause:g} s" if pause else "at once"
    text = f"{what} after step {end.step}: started again {again}"
    return replace(run, not_before=now + pause).moved(now, "waiting", text)


def _signal_name(code: int) -> str:
    number = -code if code < 0 else code - 128
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _last_line(tail: tuple[str, ...]) -> str:
    line = next((line.strip() for line in reversed(tail) if line.strip()), "")
    return f": {line}" if line else ""
