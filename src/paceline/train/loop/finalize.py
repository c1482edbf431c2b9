"""The end of a run: the last evaluation and checkpoint, the hash that all ranks must share, the history.

Where an error ends it, the last checkpoint is of the state after the last committed step. A step is a
transaction: as long as its update has not begun, the model is that of the step before, also on the rank whose
code raised. Nothing in these functions (`save_...`) raises: the error that ends the run is the one to show.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import time
from collections.abc import Iterator

from paceline.comm.context import DistributedContext
from paceline.comm.rendezvous.transport_setup import single_rank
from paceline.control.member_shell_rules import LACKS_RESIDUALS
from paceline.core import events
from paceline.core.errors import InternalError, PacelineError, PeerError, PlatformError, ReplicasDifferError
from paceline.train.callbacks import Observer
from paceline.train.history import History, earlier_steps
from paceline.train.loop.run import Run
from paceline.train.stop_signals import NOTHING_KEPT, saved_sentence

_log = logging.getLogger(__name__)


def conclude(run: Run, started: float) -> History | None:
    """End a run that has concluded, or can; return the history on the main rank."""
    if not run.conclude():
        raise InternalError("the run was to end, and went back to an earlier step instead")
    parts, state = run.parts, run.state
    final, is_master = state.final_hashes, parts.team.is_master
    if state.failing:
        return None  # the caller raises what ended it
    parts.recorder.note(
        events.RunEnded(
            time=time.time(),
            step=state.position.step,
            epoch=state.position.epoch,
            reason=state.ended or "finished",
            hash=str(final[0][0]),
            restored=state.restored,
        )
    )
    history = history_of(run, started) if is_master else None
    if is_master and state.restored is not None:
        _log.info("the model has the weights of its best evaluation, after step %d", state.restored)
    if any(asked for _, asked, _ in final):
        # Also where the signal came after the last step: its sender wants the process to end.
        state.stopped_on_request = True
        state.ended = parts.stop.reason or "a signal to another worker"
        if is_master:
            _log.warning("stopped after step %d (%s); %s", state.position.step, state.ended, _saved(run))
    if history is not None:
        parts.callbacks.notify(Observer.on_end, history)
    unsaved = final[0][2]
    if state.stopped_on_request and unsaved is not None:
        # Not "saved, start again" where that is not so.
        raise PlatformError(
            f"stopped after step {state.position.step} ({state.ended}), and this state could not be saved: "
            f"{unsaved}",
            remedy='make room, or see why the storage does not answer; then start again with resume="auto", '
            "which continues from the newest version there is",
        )
    return history


def history_of(run: Run, started: float) -> History:
    """Return what happened, as this rank has it."""
    parts, state = run.parts, run.state
    recorder, first = parts.recorder, state.first_step
    earlier = earlier_steps(parts.journal_file, first) if parts.journal_file is not None and first else []
    return History(
        total_time=time.perf_counter() - started,
        state_hash=str(state.final_hashes[0][0]),
        steps=(*earlier, *recorder.steps),
        epochs=tuple(recorder.epochs),
        evaluations=tuple(recorder.evaluations),
        workers=parts.team.world_size,
        shards=parts.team.shards,
        run_dir=None if parts.folder is None or parts.config.run_dir is False else str(parts.folder.path),
        stopped=state.ended,
        restored=state.restored,
        unfinished=recorder.sums.record(state.position.epoch, {}) if recorder.sums.samples else None,
        profile_dir=parts.config.profile,
    )


def _saved(run: Run) -> str:
    checkpointer = run.parts.checkpointer
    if run.parts.config.run_dir is False:
        return NOTHING_KEPT
    if checkpointer is None:
        return "nothing is saved, because checkpoints are turned off"
    if checkpointer.newest is None:
        return "nothing is saved: a resumed run starts from the beginning"
    return f"version {checkpointer.newest} of step {checkpointer.newest_step} is saved"


# a run that ends because of an error


def save_in_group(run: Run) -> None:
    """Save in the current group, which is intact."""
    checkpointer = run.parts.checkpointer
    if checkpointer is None:
        return
    try:
        run.parts.transaction.abandon()
        run.duties.save()
        checkpointer.drain()
    except Exception as error:  # whatever it is, the error before it is the one to show
        _log_unsaved(run, error)


def save_alone(run: Run) -> None:
    """Save as the only rank that is left: every rank has all of the state but for residuals of
    compression."""
    checkpointer = run.parts.checkpointer
    if checkpointer is None:
        return
    run.parts.transaction.residuals.settle(run.state.position.step)
    if not run.parts.transaction.residuals.covers_all:
        _log.warning("not saved: %s", LACKS_RESIDUALS)
        return
    team = run.parts.team
    label = team.context.labels[team.rank]  # messages name this worker by the rank that it had in its group
    try:
        team.install(DistributedContext.from_transport(single_rank([label])))
        run.state.rebind()
    except PacelineError as error:
        _log_unsaved(run, error)
        return
    if not checkpointer.has(run.state.position.step):
        save_in_group(run)


def save_unsupervised(run: Run, error: BaseException) -> None:
    """Save the last committed step on a rank that raised, where no supervisor repairs the group, before the
    group ends with this rank; add a note about it to the error."""
    checkpointer = run.parts.checkpointer
    if checkpointer is None or not isinstance(error, Exception) or isinstance(error, PeerError):
        return  # the peer that was lost reports; it saves what it has
    if isinstance(error, ReplicasDifferError):
        return  # no rank is known to be right: no state may become a version
    step, several = run.state.position.step, run.parts.team.world_size > 1
    if run.state.at_boundary and not run.state.agenda.concluded and step > checkpointer.begun_step:
        with _one_at_a_time(run):
            save_alone(run) if several else save_in_group(run)
    if run.parts.config.run_dir is False:
        error.add_note(NOTHING_KEPT)
    elif checkpointer.newest is not None:
        error.add_note(saved_sentence(checkpointer.newest, checkpointer.newest_step))


@contextlib.contextmanager
def _one_at_a_time(run: Run) -> Iterator[None]:
    """Let ranks that raised in the same step save it once: the second finds what the first has saved."""
    folder = run.parts.folder
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            if folder is not None:
                held = stack.enter_context(folder.config_file.open("rb"))
                fcntl.flock(held, fcntl.LOCK_EX)
        yield


def _log_unsaved(run: Run, error: Exception) -> None:
    # Its text alone: the error itself would keep what it has seen for as long as the line is kept.
    _log.error("the state of step %d could not be saved: %s", run.state.position.step, str(error))
