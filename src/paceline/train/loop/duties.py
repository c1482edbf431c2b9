"""Duties of all ranks between two steps: which of them are due, and what each does. How they are worked off,
also across groups, is in state/duty_progress.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import ClassVar, final

from paceline.checkpoint.digests import combined
from paceline.core import events
from paceline.core.errors import GROUP_FAILURES, UsageError
from paceline.train.history import Evaluation
from paceline.train.loop.replica_checks import ReplicaChecks
from paceline.train.loop.run_hooks import RunParts
from paceline.train.phases import CHECKPOINT, COLLECTIVE, EVALUATION
from paceline.train.settings.schedule import EarlyStopper
from paceline.train.state import modifier_states
from paceline.train.state.checkpointing import TRAIN_LOSS
from paceline.train.state.duty_progress import Duty
from paceline.train.state.run_state import RunState
from paceline.train.state.schedulers import TorchSchedulers
from paceline.train.state.weight_averages import evaluated_with
from paceline.train.step.step_counters import ReducedStep


@final
class Duties:
    """Plans and does the duties of one rank."""

    def __init__(self, parts: RunParts, state: RunState, replicas: ReplicaChecks) -> None:
        self._parts, self._state, self._replicas = parts, state, replicas

    def do(self, duty: Duty, numbers: Sequence[int]) -> None:
        self._TABLE[duty](self, *numbers)

    # planning

    def plan_after_step(self, reduced: ReducedStep) -> None:
        """Derive the agenda after this step from what every rank knows, so that all have the same."""
        parts, agenda, step = self._parts, self._state.agenda, self._state.position.step
        agenda.clear()
        if parts.checkpointer is not None and parts.checkpointer.all_written(
            reduced.parts_written, reduced.parts_failed
        ):
            agenda.add(Duty.COMMIT_CHECKPOINT, reduced.parts_written, reduced.parts_failed)
        every = parts.config.evaluate_every
        if every is not None and step % every == 0:
            agenda.add(Duty.EVALUATE)
        if reduced.stops:
            agenda.add(Duty.STOP)
        if parts.checkpointer is not None and parts.checkpointer.due_after_step(step):
            agenda.add(Duty.SAVE)

    def plan_end_of_epoch(self) -> None:
        parts, agenda, position = self._parts, self._state.agenda, self._state.position
        if position.offset == 0:
            raise UsageError(
                f"epoch {position.epoch} has no full step",
                remedy="use a smaller global_batch or drop_last=False",
            )
        parts.recorder.flush()
        if parts.config.evaluate_every is None or parts.schedulers.evaluates_epochs:
            agenda.add(Duty.EVALUATE)
        agenda.add(Duty.CLOSE_EPOCH)
        if parts.checkpointer is not None and parts.checkpointer.due_after_epoch(position.epoch + 1):
            agenda.add(Duty.SAVE_EPOCH)

    def plan_conclusion(self) -> None:
        parts, state = self._parts, self._state
        agenda = state.agenda
        parts.recorder.flush()
        agenda.concluding = True
        if not state.loop_left:
            agenda.add(Duty.COMPARE_MODIFIERS)
        if not state.stopped_on_request and self._evaluation_here is None:
            agenda.add(Duty.EVALUATE_AT_END)
        if parts.checkpointer is not None:
            if state.stopped_on_request or parts.config.checkpoint.at_end:
                agenda.add(Duty.SAVE_LAST)
            agenda.add(Duty.DRAIN_CHECKPOINTS)
        # After the save: a longer run that resumes from it is still in the middle of this epoch.
        if parts.recorder.sums.steps and not state.stopped_on_request:
            agenda.add(Duty.CLOSE_LAST_EPOCH)
        agenda.add(Duty.COMPARE_WEIGHTS)

    # doing

    def _commit_checkpoint(self, written: int, failed: int) -> None:
        if self._parts.checkpointer is not None:
            self._parts.phases.enter(COLLECTIVE)
            self._parts.checkpointer.commit(written, failed)

    def _evaluate(self) -> None:
        metrics = self._evaluated(self._parts.early)
        if metrics is not None:
            self._state.evaluated_step = self._state.position.step
            if self._parts.early is not None:
                self._observe(self._parts.early, metrics)
            with self._scheduling() as schedulers:
                schedulers.after_evaluation(self._state.position.step, metrics)

    def _observe(self, early: EarlyStopper, metrics: dict[str, float]) -> None:
        state = self._state
        if early.restores and early.improves(metrics):
            with self._evaluation_weights():
                state.best.keep(state.position.step)
        state.ended = state.ended or early.observe(metrics)

    def _evaluated(self, watching: EarlyStopper | None = None) -> dict[str, float] | None:
        """Evaluate, unless this step was. By itself, where the run ends between two of its evaluations, it
        leaves no trace in what a longer run does: it takes no part in early stopping.

        An evaluation that lacks what is watched counts for nothing: the run, mended, does it again."""
        parts, position = self._parts, self._state.position
        if parts.evaluate is None or self._state.evaluated_step == position.step:
            return None
        parts.recorder.flush()
        parts.phases.enter(EVALUATION)
        started = time.perf_counter()
        try:
            info = parts.course.at(position.step, position.epoch_of_last_step)
            with self._evaluation_weights():
                metrics, samples = parts.evaluate(info)
        except Exception as error:
            if not isinstance(error, GROUP_FAILURES):
                error.add_note(f"in the evaluation after step {position.step}")
            raise
        if parts.checkpointer is not None:
            parts.checkpointer.check_metric(metrics)
        if watching is not None:
            watching.check(metrics)
        parts.recorder.evaluated(
            events.Evaluated(
                time=time.time(),
                step=position.step,
                epoch=position.epoch,
                metrics=metrics,
                samples=samples,
                seconds=time.perf_counter() - started,
            )
        )
        parts.recorder.start_clock()
        return metrics

    def _evaluation_weights(self) -> AbstractContextManager[None]:
        """Give the model the weights that evaluations are of: its own, or an average of them."""
        parts = self._parts
        return evaluated_with(parts.transaction.trained, parts.callbacks.evaluation_weights())

    def _stop(self) -> None:
        if self._state.ended is None:
            self._state.stopped_on_request = True
            self._state.ended = self._parts.stop.reason or "a signal to another worker"

    def _save_unless_ended(self) -> None:
        if self._state.ended is None:
            self.save()

    def _save_epoch(self) -> None:
        """Save after an epoch, unless the version before is recent. The clock of one rank decides for all; no
        weight depends on it."""
        parts, state = self._parts, self._state
        if parts.checkpointer is None or state.ended is not None:
            return
        if parts.config.checkpoint.every_epochs != "auto":
            self.save()
            return
        last = parts.config.epochs is not None and state.position.epoch >= parts.config.epochs
        best = self._evaluation_here is not None and parts.checkpointer.is_best(parts.recorder.evaluations)
        parts.phases.enter(COLLECTIVE)
        if last or best or not parts.team.context.broadcast(parts.checkpointer.is_recent()):
            self.save()

    def save(self) -> None:
        """Start a checkpoint of the state as it is, unless this step has one."""
        parts, state = self._parts, self._state
        if parts.checkpointer is None or parts.checkpointer.begun_step == state.position.step:
            return
        parts.phases.enter(CHECKPOINT)
        parts.recorder.flush()
        modifier_states.compare(parts.team.context, parts.callbacks, state.position.step)
        contents = state.export()
        shares = parts.checkpointer.digests(contents)
        # A version is put together from what all ranks write: it is valid only where they hold the same.
        self._replicas.compare("saved", combined(shares))
        parts.checkpointer.begin(state.position, contents, self._version_metrics(), shares)

    def _drain_checkpoints(self) -> None:
        if self._parts.checkpointer is not None:
            self._parts.phases.enter(CHECKPOINT)
            self._parts.checkpointer.drain()

    def _close_epoch(self) -> None:
        parts, state = self._parts, self._state
        validation = {} if parts.config.evaluate_every is not None else self._validation_here()
        parts.recorder.end_epoch(state.position.epoch, validation)
        with self._scheduling() as schedulers:
            schedulers.after_epoch(state.position.step, self._validation_here())
            state.position = state.position.next_epoch()
        checkpointer = parts.checkpointer
        if (
            checkpointer is not None
            and state.ended is None
            and checkpointer.due_after_epoch(state.position.epoch)
        ):
            checkpointer.save_again()  # a version of this step does not have that the epoch has turned
        parts.recorder.start_clock()

    @contextmanager
    def _scheduling(self) -> Iterator[TorchSchedulers]:
        """Let schedulers be stepped. Meanwhile the state is that of no boundary: one whose code fails has
        counted what did not happen, and is not worth a version."""
        state, parts = self._state, self._parts
        before, state.at_boundary = state.at_boundary, False
        yield parts.schedulers
        state.at_boundary = before
        parts.update.watch()

    def _close_last_epoch(self) -> None:
        self._parts.recorder.end_epoch(self._state.position.epoch, self._validation_here())

    def _compare_modifiers(self) -> None:
        parts = self._parts
        parts.phases.enter(COLLECTIVE)
        modifier_states.compare(parts.team.context, parts.callbacks, self._state.position.step)

    def _compare_weights(self) -> None:
        parts, state = self._parts, self._state
        parts.phases.enter(COLLECTIVE)
        unsaved = parts.checkpointer.unsaved(state.position.step) if parts.checkpointer is not None else None
        digest = state.weights_hash()
        state.restored = state.step_to_restore()
        result = digest if state.restored is None else state.best.hash()
        state.final_hashes = parts.team.context.all_gather([result, parts.stop.asked(), unsaved])
        self._replicas.compare("end", digest if result == digest else f"{digest}+{result}")

    @property
    def _evaluation_here(self) -> Evaluation | None:
        """The evaluation of these very weights."""
        known = self._parts.recorder.evaluations[-1:]
        return known[0] if known and known[0].step == self._state.position.step else None

    def _validation_here(self) -> dict[str, float]:
        return {} if self._evaluation_here is None else self._evaluation_here.metrics

    def _version_metrics(self) -> dict[str, float]:
        """Return the metrics of a version: the evaluation of these weights, else (or where versions are
        chosen by it) the last step's loss under another name, because it is that of a few samples before the
        step."""
        parts = self._parts
        found = {} if self._evaluation_here is None else dict(self._evaluation_here.metrics)
        if parts.recorder.steps and (not found or parts.config.checkpoint.metric == TRAIN_LOSS):
            found[TRAIN_LOSS] = parts.recorder.steps[-1].loss
        return found

    _TABLE: ClassVar[Mapping[Duty, Callable[..., object]]] = {
        Duty.COMMIT_CHECKPOINT: _commit_checkpoint,
        Duty.EVALUATE: _evaluate,
        Duty.EVALUATE_AT_END: _evaluated,
        Duty.STOP: _stop,
        Duty.SAVE: _save_unless_ended,
        Duty.SAVE_EPOCH: _save_epoch,
        Duty.SAVE_LAST: save,
        Duty.DRAIN_CHECKPOINTS: _drain_checkpoints,
        Duty.CLOSE_EPOCH: _close_epoch,
        Duty.CLOSE_LAST_EPOCH: _close_last_epoch,
        Duty.COMPARE_MODIFIERS: _compare_modifiers,
        Duty.COMPARE_WEIGHTS: _compare_weights,
    }
