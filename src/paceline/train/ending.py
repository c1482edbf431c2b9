"""The end of a run: the last evaluation and checkpoint, the hash that all ranks must share, the history.

Must not know how the run was walked through.
"""

from __future__ import annotations

import logging
import time

from paceline.core import events
from paceline.core.errors import InternalError, PacelineError, PlatformError
from paceline.train.assembly import Assembled
from paceline.train.history import History
from paceline.train.resuming import earlier_steps
from paceline.train.run import Run

_log = logging.getLogger(__name__)


def conclude(run: Run, assembled: Assembled, started: float) -> History | None:
    """End a run that has concluded, or can; the main rank gets the history."""
    if not run.conclude():
        raise InternalError("the run was to end, and went back to an earlier step instead")
    told, recorder, is_master = run.final_hashes, assembled.recorder, assembled.team.is_master
    digest = str(told[0][0])
    if run.failing:
        return None  # whoever ends the run tells how
    recorder.note(
        events.RunEnded(
            time=time.time(),
            step=run.position.step,
            epoch=run.position.epoch,
            reason=run.ended or "finished",
            hash=digest,
        )
    )
    history = history_of(run, assembled, started) if is_master else None
    if any(asked for _, asked, _ in told):
        # Also where the signal came after the last step: whoever sent it wants the process to end.
        run.stopped_on_request, run.ended = True, assembled.stop_reason
        if is_master:
            _say_stopped(run, assembled)
    if history is not None:
        assembled.callbacks.end(history)
    if run.stopped_on_request and told[0][2] is not None:
        raise _not_saved(run, told[0][2])
    return history


def _not_saved(run: Run, reason: str) -> PacelineError:
    """Whoever asked is not told "saved, start again" where that is not so."""
    return PlatformError(
        f"stopped after step {run.position.step} ({run.ended}), and this state could not be saved: {reason}",
        remedy='make room, or see why the storage does not answer; then start again with resume="auto", '
        "which goes on from the newest version there is",
    )


def history_of(run: Run, assembled: Assembled, started: float) -> History:
    """What happened, as this rank has it."""
    recorder, digest = assembled.recorder, str(run.final_hashes[0][0])
    before = assembled.first_step
    earlier = (
        earlier_steps(assembled.journal.path, before) if assembled.journal is not None and before else []
    )
    return History(
        total_time=time.perf_counter() - started,
        state_hash=digest,
        steps=(*earlier, *recorder.steps),
        epochs=tuple(recorder.epochs),
        evaluations=tuple(recorder.evaluations),
        workers=assembled.workers,
        shards=assembled.shards,
        run_dir=None if assembled.folder is None else str(assembled.folder.path),
        stopped=run.ended,
        unfinished=recorder.sums.record(run.position.epoch, {}) if recorder.sums.samples else None,
    )


def _say_stopped(run: Run, assembled: Assembled) -> None:
    saver = assembled.saver
    if saver is None:
        what = "nothing is saved, because checkpoints are turned off"
    elif saver.newest is None:
        what = "nothing is saved: a run that goes on begins anew"
    else:
        what = f"version {saver.newest} of step {saver.newest_step} is saved"
    _log.warning("stopped after step %d (%s); %s", run.position.step, run.ended, what)
