"""One search: ask for trials, start them, record how each ended, until the study is complete.

The study's file is written before anything follows from it: a trial before it starts, its end before its slot
is given to the next. So the search can be killed at any moment, and the next process goes on from the file.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from paceline.core.wording import counted
from paceline.frontends.tuner.trial_engine import (
    LostTrial,
    Pruned,
    Raised,
    Reported,
    Returned,
    TrialEngine,
    TrialEvent,
    TrialStart,
)
from paceline.frontends.tuner.trial_record import trial_folder
from paceline.frontends.tuner.trial_schedule import StartTrial, TrialSchedule
from paceline.frontends.tuner.trial_value import TrialResultError

if TYPE_CHECKING:
    from paceline.frontends.tuner.tuning_study import TuningStudy


@final
@dataclass
class SearchLoop:
    """A search under way. `answers`: trials wait for an answer to each report; `sees_only_first`: the sampler
    is shown the results of the trials that `schedule.needs` names, and no others; `on_end` and `on_loss` are
    called with a trial's number when it is over, and when it is lost and will be repeated."""

    study: TuningStudy
    engine: TrialEngine
    schedule: TrialSchedule
    answers: bool
    sees_only_first: bool
    on_end: Callable[[int], None]
    on_loss: Callable[[int, str], None]

    def run(self) -> None:
        """Run until the study is complete."""
        while not self.schedule.is_done:
            if self.study.is_exhausted:
                self.schedule.close()
            while (start := self.schedule.start_next()) is not None:
                self._start(start)
            if self.schedule.running:
                # The others are recorded before the one that ends the search, which is the last of its trial.
                for event in sorted(self.engine.wait(), key=_ends_search):
                    self._handle(event)

    def _start(self, start: StartTrial) -> None:
        if start.is_new:
            needed = self.schedule.needs(start.number) if self.sees_only_first else None
            self.study.ask(needed)
        # Absolute: a trial may change its folder, and on Ray has another one.
        study = self.study.folder.absolute()
        parent = self.study.parent(start.number)
        self.study.begin(start.number)
        self.engine.start(
            TrialStart(
                number=start.number,
                slot=start.slot,
                params=self.study.params(start.number),
                folder=str(trial_folder(study, start.number)),
                parent_folder="" if parent is None else str(trial_folder(study, parent)),
            )
        )

    def _handle(self, event: TrialEvent) -> None:
        number = event.number
        if isinstance(event, Reported):
            prune = self.study.report(number, event.step, event.value)
            if self.answers:
                event.answer(prune)
            return
        if isinstance(event, LostTrial):
            if self.schedule.lose(number):
                self.study.forget_reports(number)
                self.on_loss(number, event.how)
                return
            times = counted(self.schedule.max_attempts, "attempt")
            self.study.fail(number, f"{event.how}; lost in {times}, the trial is not repeated again")
        elif isinstance(event, Raised):
            # Where the function gave other trials a value, only this one has none. A trial that could not
            # begin stays asked for: a resumed search repeats it.
            is_own = isinstance(event.ends_search, TrialResultError) and self.study.has_values
            if event.ends_search is not None and not is_own:
                raise event.ends_search
            self.study.fail(number, event.text)
        elif isinstance(event, Pruned):
            self.study.prune(number)
        elif isinstance(event, Returned):
            self.study.finish(number, event.value)
        self.schedule.end(number)
        self.on_end(number)


def _ends_search(event: TrialEvent) -> bool:
    return isinstance(event, Raised) and event.ends_search is not None
