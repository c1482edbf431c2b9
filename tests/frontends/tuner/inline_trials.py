"""Searches without processes: trials are computed in this one, and end in an order that the test chooses."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.frontends.tuner import sampler_choice
from paceline.frontends.tuner.search_loop import SearchLoop
from paceline.frontends.tuner.search_space import SearchSpace
from paceline.frontends.tuner.trial_engine import (
    LostTrial,
    Raised,
    Reported,
    Returned,
    TrialEvent,
    TrialStart,
)
from paceline.frontends.tuner.trial_record import TrialRecord
from paceline.frontends.tuner.trial_schedule import TrialSchedule
from paceline.frontends.tuner.tuning_study import TuningStudy

Objective = Callable[[Mapping[str, Any]], float]
SPACE: dict[str, Any] = {"x": [-2, -1, 0, 1, 2]}


class InlineTrials:
    """An engine whose trials end in random order; `loses`: the share of attempts that are lost half-way."""

    def __init__(self, objective: Objective, seed: int = 0, loses: float = 0.0) -> None:
        self._objective = objective
        self._random = random.Random(seed)
        self._loses = loses
        self._running: list[TrialStart] = []
        self.attempts: list[int] = []

    def start(self, trial: TrialStart) -> None:
        assert trial.number not in [one.number for one in self._running]
        assert trial.slot not in [one.slot for one in self._running]
        self._running.append(trial)
        self.attempts.append(trial.number)

    def wait(self, seconds: float | None = None) -> Sequence[TrialEvent]:
        trial = self._running.pop(self._random.randrange(len(self._running)))
        if self._random.random() < self._loses:
            report = Reported(trial.number, 0, 99.0, lambda prune: None)
            return [report, LostTrial(trial.number, "its process was killed")]
        try:
            value = self._objective(trial.params)
        except ArithmeticError as error:
            return [Raised(trial.number, f"Traceback\n{error}")]
        reports = [Reported(trial.number, step, value * (step + 1), lambda prune: None) for step in range(2)]
        return [*reports, Returned(trial.number, value)]

    def close(self) -> None:
        self._running.clear()


def search(
    folder: Path,
    objective: Objective,
    total: int,
    *,
    space: dict[str, Any],
    engine: InlineTrials | None = None,
    slots: int = 1,
    sampler: Any = None,
    seed: int | None = 1,
    mode: str = "min",
    max_attempts: int = 10**6,
) -> list[TrialRecord]:
    """Run a search to its end in this process, from where the folder's study stands."""
    study = TuningStudy(folder, SearchSpace.of(space), mode, None, resume=True)
    try:
        chosen = sampler_choice.choose_sampler(sampler, study.space, seed, mode)
        study.use(chosen, sampler_choice.choose_pruner(None))
        schedule = TrialSchedule(
            total=total,
            slots=slots,
            asked=study.asked,
            unfinished=study.unfinished,
            needs=sampler_choice.trials_needed(chosen, slots, in_order=True),
            max_attempts=max_attempts,
        )
        SearchLoop(
            study=study,
            engine=engine or InlineTrials(objective),
            schedule=schedule,
            answers=False,
            sees_only_first=sampler_choice.sees_only_first(chosen, in_order=True),
            on_end=lambda number: None,
            on_loss=lambda number, how: None,
        ).run()
        return study.records()
    finally:
        study.close()


def outcome(trials: Sequence[TrialRecord]) -> list[tuple[Any, ...]]:
    """What must not depend on failures: all but the times."""
    return [(one.number, one.params, one.state, one.value, one.reports, one.parent) for one in trials]
