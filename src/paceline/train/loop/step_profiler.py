"""Record a few steps of a worker with torch's profiler, as a trace in the folder of `TrainConfig.profile`.

The first step of a start is left out, because it compiles and warms up. Phases of the loop (data, forward,
backward, collective, optimizer) are in the trace beside the operators, so that the time in which a worker
exchanges gradients or waits for others shows too. Results do not change: the profiler only watches.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, final

from torch.profiler import ProfilerActivity, profile, record_function

from paceline.train.loop.run import Run
from paceline.train.trace_summary import phase_label, trace_name

_log = logging.getLogger(__name__)

_WARM_STEPS = 1


@contextmanager
def profiled(run: Run) -> Iterator[None]:
    """Record the steps to profile among those that this worker computes inside, if there are any.

    The trace is written when the next step begins, or at the end of the block.
    """
    if run.parts.config.profile is None:
        yield
        return
    profiler, phases = _StepProfiler(run, Path(run.parts.config.profile)), run.parts.phases
    phases.on_enter = profiler.enter
    try:
        yield
    finally:
        phases.on_enter = None
        profiler.finish()


@final
class _StepProfiler:
    """Follows the phases of a worker: starts with the first step to record, and ends before the step after
    the last. By phases and not by micro-batches: a rank whose shards are empty has phases too."""

    def __init__(self, run: Run, folder: Path) -> None:
        self._parts, self._folder = run.parts, folder
        # Counted from the first step of this start of the run, which all members of a view know alike.
        self._first = run.state.first_step + 1 + _WARM_STEPS
        self._after = self._first + run.parts.config.profile_steps
        self._recording = ExitStack()
        self._profiler: profile | None = None
        self._file = folder
        self._phase: Any = None

    def enter(self, phase: str) -> None:
        """Follow the worker into a phase."""
        step = self._parts.phases.step
        if self._profiler is None and self._first <= step < self._after:
            self._start(step)
        elif self._profiler is not None and step >= self._after:
            self.finish()
        if self._profiler is not None:
            self._annotate(phase)

    def _start(self, step: int) -> None:
        team = self._parts.team
        self._file = self._folder / trace_name(team.context.labels[team.rank], step)
        on_gpu = self._parts.device.type == "cuda"
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
        self._profiler = self._recording.enter_context(profile(activities=activities, acc_events=True))

    def _annotate(self, phase: str | None) -> None:
        """Close the annotation of the phase that ends, and open that of the next."""
        if self._phase is not None:
            self._phase.__exit__(None, None, None)
        self._phase = None if phase is None else record_function(phase_label(phase))
        if self._phase is not None:
            self._phase.__enter__()

    def finish(self) -> None:
        """Write the trace, or say why it cannot be written: a run does not end because it was watched."""
        if self._profiler is None:
            return
        self._annotate(None)
        self._recording.close()
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self._profiler.export_chrome_trace(str(self._file))
        except (OSError, RuntimeError) as error:
            # Its text alone: the error itself would keep the run for as long as the line is kept.
            _log.warning("the trace of this worker cannot be written: %s", str(error))
        self._profiler = None
