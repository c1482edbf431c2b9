"""Progress of a run: one bar on a terminal or in a notebook, plain lines everywhere else.

    epoch 1/2 ━━━━━━━━━━━╸━━━━━━━━━━━ 118/300 loss 0.4312  18.2k samples/s  0:00:12 left  4 workers

An observer without a thread: a step costs one reading of the clock, and the bar is drawn at most ten times a
second. The time left is the number of steps left times the mean time of the steps done, evaluations included;
the first step, which compiles and warms up, counts only until there are others.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import final

from rich.console import Console

from paceline.core.clock import Clock, MonotonicClock
from paceline.core.wording import counted
from paceline.monitor.number_format import clock_time, duration, metrics_text, number, rate
from paceline.monitor.progress_bars import BarFigures, ProgressBar, choose_bar
from paceline.train.callbacks import Observer, RunInfo
from paceline.train.history import EpochRecord, Evaluation, History, StepRecord

_log = logging.getLogger(__name__)

_REDRAW_SECONDS = 0.1
_LINE_SECONDS = 30.0
# Half of the weight of the shown loss is in the last few steps, so that it can be read while it changes.
_LOSS_SMOOTHING = 0.8


@final
class ProgressDisplay(Observer):
    """One bar with loss, samples/s, workers and time left; lines when `console` is not a terminal."""

    def __init__(self, console: Console | None = None, *, clock: Clock | None = None) -> None:
        self._console = console
        self._clock = clock or MonotonicClock()
        self._meter: _Meter | None = None
        self._bar: ProgressBar | None = None
        self._line_at = 0.0
        self._held: Evaluation | None = None
        self._unwritable = False

    def on_start(self, run: RunInfo) -> None:
        # Without a stderr (it was closed) rich would write to stdout, which belongs to the program.
        self._unwritable = self._console is None and sys.stderr is None
        own = self._console is None
        self._console = console = self._console or _Stderr(file=sys.stderr)
        self._line_at = now = self._clock.now()
        self._meter = _Meter(run, now)
        if not self._unwritable:
            with self._writing():
                self._bar = choose_bar(console, self._meter.figures, own=own)
        self._say(opening_line(run))

    def on_workers(self, workers: int) -> None:
        if self._meter is not None:
            self._meter.workers = workers

    def on_step(self, record: StepRecord) -> None:
        if self._meter is None:
            return
        now = self._clock.now()
        self._meter.add(record, now)
        if self._bar is not None:
            if now - self._line_at >= _REDRAW_SECONDS:
                self._line_at = now
                with self._writing():
                    self._bar.draw()
        elif record.step % self._meter.run.config.log_every == 0 or now - self._line_at >= _LINE_SECONDS:
            self._line_at = now
            self._say(self._meter.line())

    def on_evaluation(self, evaluation: Evaluation) -> None:
        # The evaluation that ends an epoch is shown together with the epoch.
        if self._meter is not None and self._meter.run.config.evaluate_every is None:
            self._held = evaluation
            return
        self._say(
            f"epoch {evaluation.epoch}, step {evaluation.step:,}: validation "
            f"{metrics_text(evaluation.metrics)} ({duration(evaluation.seconds)})"
        )

    def on_epoch(self, record: EpochRecord) -> None:
        held, self._held = self._held, None
        validation = record.validation or ({} if held is None else held.metrics)
        shown = [metrics_text({"loss": record.loss, **record.metrics})]
        if validation:
            shown.append(f"validation {metrics_text(validation)}")
        name = f"epoch {record.epoch}" if self._meter is None else self._meter.epoch_text(record.epoch)
        samples = counted(record.samples, "sample")
        self._say(f"{name}: {'; '.join(shown)}; {samples} in {duration(record.seconds)}")

    def on_end(self, history: History) -> None:
        last = closing(history)
        if self._bar is None:
            self._say(last)
        self.close(last)

    def close(self, last: str = "") -> None:
        """Restore the terminal, also after a run that failed, and end with this line. May be called twice."""
        bar, self._bar = self._bar, None
        if bar is not None:
            with self._writing():
                bar.close(last)

    def _say(self, text: str) -> None:
        if self._console is None or self._unwritable:
            return
        with self._writing():
            if self._bar is not None:
                self._bar.say(text)
            else:
                # A line in a log file must not be wrapped to the width of a terminal.
                self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Stop showing progress on a full disk, a closed pipe or a closed stream, which must not end a run.
        (For a pipe whose reader is gone rich raises SystemExit, if the console was given.)"""
        try:
            yield
        except (OSError, ValueError, SystemExit) as error:
            self._bar, self._unwritable = None, True
            _log.warning("progress is no longer shown: it cannot be written: %s", error)


@final
class _Stderr(Console):
    """Raises for a pipe whose reader is gone, where rich would turn the program's stdout off."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


@final
class _Meter:
    """The figures to show, computed from the records so far."""

    def __init__(self, run: RunInfo, now: float) -> None:
        self.run = run
        self.step = run.first_step
        self.epoch = run.first_epoch
        self.loss = math.nan
        self._started = now
        self._first_done = math.nan
        self._now = now
        self._steps = 0
        self._samples = 0
        self._first_samples = 0
        self._computed = 0.0  # seconds of the steps after the first, as their workers measured them
        self.workers = run.workers

    def add(self, record: StepRecord, now: float) -> None:
        self.step, self.epoch, self._now = record.step, record.epoch, now
        # A loss that is not finite is shown as it is, and not smoothed into later ones.
        fresh = not (math.isfinite(self.loss) and math.isfinite(record.loss))
        past = 0.0 if fresh else _LOSS_SMOOTHING
        self.loss = record.loss if fresh else past * self.loss + (1.0 - past) * record.loss
        self._steps += 1
        self._samples += record.samples
        if self._steps == 1:
            self._first_done, self._first_samples = now, record.samples
        else:
            self._computed += record.seconds

    def _measured(self) -> tuple[float, int, int]:
        """Return seconds, steps and samples, without the first step as soon as there are others."""
        if self._steps < 2:
            return self._now - self._started, self._steps, self._samples
        # Records may arrive in a burst: then their own times count.
        seconds = max(self._now - self._first_done, self._computed)
        return seconds, self._steps - 1, self._samples - self._first_samples

    @property
    def samples_per_second(self) -> float:
        seconds, _, samples = self._measured()
        return samples / seconds if seconds > 0.0 else math.nan

    @property
    def seconds_left(self) -> float | None:
        total = self.run.total_steps
        if total is None or self._steps == 0:
            return None
        seconds, steps, _ = self._measured()
        return max(0, total - self.step) * seconds / steps

    def epoch_text(self, epoch: int | None = None) -> str:
        """Return the epoch, from 0 as in all records, and the last one of the run."""
        epochs = self.run.config.epochs
        number = self.epoch if epoch is None else epoch
        return f"epoch {number}" if epochs is None or epochs == 1 else f"epoch {number}/{epochs - 1}"

    def step_text(self) -> str:
        total = self.run.total_steps
        return f"{self.step:,}" + ("" if total is None else f"/{total:,}")

    def parts(self) -> list[str]:
        left = self.seconds_left
        return [
            f"loss {number(self.loss)}",
            f"{rate(self.samples_per_second)} samples/s",
            *([] if left is None else [f"{clock_time(left)} left"]),
            counted(self.workers, "worker"),
        ]

    def figures(self) -> BarFigures:
        begun = self.step > self.run.first_step
        return BarFigures(
            self.epoch_text(),
            self.step,
            self.run.total_steps,
            self.step_text(),
            tuple(self.parts()) if begun else (),
        )

    def line(self) -> str:
        return ", ".join([f"{self.epoch_text()}, step {self.step_text()}", *self.parts()])


def opening_line(run: RunInfo) -> str:
    config = run.config
    samples = "an unknown number of samples" if run.samples is None else counted(run.samples, "sample")
    total = "" if run.total_steps is None else f", {counted(run.total_steps, 'step')}"
    again = f", continuing after step {run.first_step:,}" if run.first_step else ""
    dynamic = config.dynamic_batch
    batch = f"{config.global_batch}" if dynamic is None else f"{dynamic.min} to {dynamic.max}"
    workers = counted(run.workers, "worker")
    if config.mode == "exact" and config.shards is not None:
        workers += f", {counted(config.shards, 'shard')}"
    where = "" if run.run_dir is None else f"; {run.run_dir}"
    return f"training on {samples} with {workers} ({run.device}): batches of {batch}{total}{again}{where}"


def closing(history: History) -> str:
    """Format the last line: the results, and why the run ended early if it did."""
    steps = history.steps[-1].step if history.steps else 0
    parts = [
        f"{'done' if history.stopped is None else f'stopped ({history.stopped})'}: "
        f"{counted(steps, 'step')} in {duration(history.total_time)}",
        f"{rate(history.samples_per_second)} samples/s",
        f"loss {number(history.final_loss)}",
    ]
    if history.best_accuracy is not None and history.best_epoch is not None:
        parts.append(f"best accuracy {history.best_accuracy:.4f} (epoch {history.best_epoch})")
    return ", ".join([*parts, f"state {history.state_hash[:16]}"])
