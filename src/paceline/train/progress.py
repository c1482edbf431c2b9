"""How a run looks while it runs: one bar on a terminal, plain lines everywhere else.

    epoch 2/3 ━━━━━━━━━━━╸━━━━━━━━━━━ 118/300 loss 0.4312  18.2k samples/s  0:00:12 left  4 workers

An observer without a thread of its own: a step costs a look at the clock, and the bar is drawn at most ten
times a second. Time left is the steps left times the mean time of the steps done, evaluations and all; the
first step, which compiles and warms up, counts only until there are others. Must not know the loop.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import final

from rich.console import Console
from rich.progress import BarColumn, Progress as Bars, ProgressColumn, Task, TextColumn
from rich.text import Text

from paceline.core.clock import Clock, MonotonicClock
from paceline.train.callbacks import Observer, RunInfo
from paceline.train.history import EpochRecord, Evaluation, History, StepRecord

_log = logging.getLogger(__name__)

_REDRAW_SECONDS = 0.1
_LINE_SECONDS = 30.0
# Columns: what stands left and right of the bar, and how far the bar itself may shrink and grow.
_TEXT_WIDTH = 78
_BAR_LEAST = 8
_BAR_MOST = 36
_STYLES = ("cyan", "green", "magenta", "dim")
# Half of the weight of the shown loss is in the last few steps: a number that can be read while it moves.
_LOSS_SMOOTHING = 0.8


@final
class Progress(Observer):
    """One bar with loss, samples/s, workers and time left; lines when `console` is not a terminal."""

    def __init__(self, console: Console | None = None, *, clock: Clock | None = None) -> None:
        self._console = console
        self._clock = clock or MonotonicClock()
        self._meter: _Meter | None = None
        self._bar: _Bar | None = None
        self._line_at = 0.0
        self._held: Evaluation | None = None
        self._lost = False  # nothing can be written

    def on_start(self, run: RunInfo) -> None:
        # Without a stderr (it was closed) rich would write to stdout, which is the program's.
        self._lost = self._console is None and sys.stderr is None
        console = self._console or _Stderr(file=sys.stderr)
        self._console = console
        now = self._clock.now()
        self._meter = _Meter(run, now)
        self._line_at = now
        if console.is_terminal and not console.is_dumb_terminal and not self._lost:
            with self._writing():
                self._bar = _Bar(console, self._meter)
        self._say(_opening(run))

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
        # The one that ends an epoch is told together with the epoch.
        if self._meter is not None and self._meter.run.config.evaluate_every is None:
            self._held = evaluation
            return
        self._say(
            f"epoch {evaluation.epoch + 1}, step {evaluation.step:,}: validation "
            f"{metrics_text(evaluation.metrics)} ({duration(evaluation.seconds)})"
        )

    def on_epoch(self, record: EpochRecord) -> None:
        held, self._held = self._held, None
        validation = record.validation or ({} if held is None else held.metrics)
        told = [metrics_text({"loss": record.loss, **record.metrics})]
        if validation:
            told.append(f"validation {metrics_text(validation)}")
        name = f"epoch {record.epoch + 1}" if self._meter is None else self._meter.epoch_text(record.epoch)
        self._say(f"{name}: {'; '.join(told)}; {record.samples:,} samples in {duration(record.seconds)}")

    def on_end(self, history: History) -> None:
        self.close()
        self._say(closing(history))

    def close(self) -> None:
        """Leave the terminal as it was; also after a run that failed. May be called twice."""
        bar, self._bar = self._bar, None
        if bar is not None:
            with self._writing():
                bar.close()

    def _say(self, text: str) -> None:
        if self._console is None or self._lost:
            return
        with self._writing():
            # Printing puts the bar below the line as it was last drawn, so it has to be up to date.
            if self._bar is not None:
                self._bar.draw()
            # A line in a log file must not be folded to the width of a terminal that is not there.
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """A full disk, a closed pipe or a closed stream is no reason to end a run: nothing more is shown.
        (Of a pipe whose reader is gone rich makes a SystemExit, where the console was given.)"""
        try:
            yield
        except (OSError, ValueError, SystemExit) as error:
            self._bar, self._lost = None, True
            _log.warning("progress is no longer shown: it cannot be written: %s", error)


@final
class _Stderr(Console):
    """A pipe whose reader is gone is an error like any other: rich would turn the program's stdout off."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


@final
class _Meter:
    """What is shown, computed from the records so far."""

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
        # A loss that is not finite is shown as it is, and forgotten as soon as it is over.
        fresh = not (math.isfinite(self.loss) and math.isfinite(record.loss))
        past = 0.0 if fresh else _LOSS_SMOOTHING
        self.loss = record.loss if fresh else past * self.loss + (1.0 - past) * record.loss
        self._steps += 1
        self._samples += record.samples
        if self._steps == 1:
            self._first_done, self._first_samples = now, record.samples
        else:
            self._computed += record.seconds

    @property
    def _seconds(self) -> float:
        """Since the first step. Steps that are told in a burst took as long as they took."""
        return max(self._now - self._first_done, self._computed)

    @property
    def samples_per_second(self) -> float:
        seconds, samples = self._seconds, self._samples - self._first_samples
        if self._steps < 2:
            seconds, samples = self._now - self._started, self._samples
        return samples / seconds if seconds > 0.0 else math.nan

    @property
    def seconds_left(self) -> float | None:
        total = self.run.total_steps
        if total is None or self._steps == 0:
            return None
        seconds, steps = self._seconds, self._steps - 1
        if steps == 0:
            seconds, steps = self._now - self._started, 1
        return max(0, total - self.step) * seconds / steps

    def epoch_text(self, epoch: int | None = None) -> str:
        epochs = self.run.config.epochs
        return f"epoch {(self.epoch if epoch is None else epoch) + 1}" + (
            "" if epochs is None else f"/{epochs}"
        )

    def step_text(self) -> str:
        total = self.run.total_steps
        return f"{self.step:,}" + ("" if total is None else f"/{total:,}")

    def parts(self) -> list[str]:
        workers = self.workers
        left = self.seconds_left
        return [
            f"loss {number(self.loss)}",
            f"{rate(self.samples_per_second)} samples/s",
            *([] if left is None else [f"{clock_time(left)} left"]),
            f"{workers} worker{'' if workers == 1 else 's'}",
        ]

    def line(self) -> str:
        return ", ".join([f"{self.epoch_text()}, step {self.step_text()}", *self.parts()])


@final
class _Bar:
    """The rich bar; drawn when told to, never by a thread."""

    def __init__(self, console: Console, meter: _Meter) -> None:
        self._meter = meter
        self._bars = Bars(
            TextColumn("{task.description}", style="bold"),
            BarColumn(
                bar_width=max(_BAR_LEAST, min(_BAR_MOST, console.width - _TEXT_WIDTH)),
                complete_style="cyan",
                finished_style="green",
                pulse_style="cyan",
            ),
            TextColumn("{task.fields[steps]}"),
            _Figures(),
            console=console,
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._task = self._bars.add_task(
            meter.epoch_text(), total=meter.run.total_steps, steps="", figures=()
        )
        self._bars.start()
        self._update()

    def draw(self) -> None:
        self._update()
        self._bars.refresh()

    def _update(self) -> None:
        meter = self._meter
        self._bars.update(
            self._task,
            completed=meter.step,
            description=meter.epoch_text(),
            steps=meter.step_text(),
            figures=tuple(meter.parts()) if meter.step > meter.run.first_step else (),
        )

    def close(self) -> None:
        self._update()
        self._bars.stop()


@final
class _Figures(ProgressColumn):
    """Loss, speed, workers and time left; what does not fit is cut at the end, never wrapped."""

    def render(self, task: Task) -> Text:
        text = Text(no_wrap=True, overflow="ellipsis")
        for index, part in enumerate(task.fields["figures"]):
            text.append("  " if index else "")
            text.append(part, style=_STYLES[min(index, len(_STYLES) - 1)])
        return text


def _opening(run: RunInfo) -> str:
    config = run.config
    samples = "an unknown number of samples" if run.samples is None else f"{run.samples:,} samples"
    total = "" if run.total_steps is None else f", {run.total_steps:,} steps"
    again = f", going on after step {run.first_step:,}" if run.first_step else ""
    dynamic = config.dynamic_batch
    batch = f"{config.global_batch}" if dynamic is None else f"{dynamic.min} to {dynamic.max}"
    workers = f"{run.workers} worker{'' if run.workers == 1 else 's'}"
    if config.mode == "exact" and config.shards is not None:
        workers += f", {config.shards} shard{'' if config.shards == 1 else 's'}"
    where = "" if run.run_dir is None else f"; {run.run_dir}"
    return f"training on {samples} with {workers} ({run.device}): batches of {batch}{total}{again}{where}"


def closing(history: History) -> str:
    """The last line: what came out, and why it ended if it was before its time."""
    steps = history.steps[-1].step if history.steps else 0
    parts = [
        f"{'done' if history.stopped is None else f'stopped ({history.stopped})'}: "
        f"{steps:,} step{'' if steps == 1 else 's'} in {duration(history.total_time)}",
        f"{rate(history.samples_per_second)} samples/s",
        f"loss {number(history.final_loss)}",
    ]
    if history.best_accuracy is not None and history.best_epoch is not None:
        parts.append(f"best accuracy {history.best_accuracy:.4f} (epoch {history.best_epoch + 1})")
    return ", ".join([*parts, f"state {history.state_hash[:16]}"])


def metrics_text(metrics: Mapping[str, float]) -> str:
    """`loss 0.4312, accuracy 0.8710`, the loss first."""
    names = sorted(metrics, key=lambda name: (name != "loss", name))
    return ", ".join(f"{name} {number(metrics[name])}" for name in names)


def number(value: float) -> str:
    """Four digits that keep their width while the value changes, scientific where they would not do."""
    if value == 0.0 or not math.isfinite(value) or 0.001 <= abs(value) < 1000.0:
        return f"{value:.4f}"
    return f"{value:.3e}"


def rate(value: float) -> str:
    """Samples per second for a glance: 834, 18.2k, 1.31M."""
    if not math.isfinite(value):
        return "?"
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if value >= size:
            scaled = value / size
            return f"{scaled:.{max(0, 2 - int(math.log10(scaled)))}f}{unit}"
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"


def clock_time(seconds: float) -> str:
    """0:00:12, and days where there are any."""
    whole = round(seconds)
    days, rest = divmod(whole, 86400)
    text = f"{rest // 3600}:{rest % 3600 // 60:02}:{rest % 60:02}"
    return f"{days}d {text}" if days else text


def duration(seconds: float) -> str:
    """A span in the unit that suits it: 12 ms, 4.1 s, 3:20 min, 1:02:03 h."""
    if seconds < 1.0:
        return f"{seconds * 1e3:.0f} ms"
    if seconds < 100.0:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02} min"
    return f"{whole // 3600}:{whole % 3600 // 60:02}:{whole % 60:02} h"
