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
    Pruned,
    Raised,
    Reported,
    Returned,
    TrialEvent,
    TrialStart,
)
from paceline.frontends.tuner.trial_record import TrialRecord
from paceline.frontends.tuner.trial_schedule import TrialSchedule
from paceline.frontends.tuner.trial_value import TrialResultError, TrialSetupError
from paceline.frontends.tuner.tuning_study import TuningStudy

Objective = Callable[[Mapping[str, Any]], float]
SPACE: dict[str, Any] = {"x": [-2, -1, 0, 1, 2]}
_STEPS = 2


class InlineTrials:
    """An engine whose trials report and end in random order; `loses`: the share of turns in which a trial is
    lost."""

    def __init__(self, objective: Objective, seed: int = 0, loses: float = 0.0) -> None:
        self._objective = objective
        self._random = random.Random(seed)
        self._loses = loses
        self._running: list[TrialStart] = []
        self._steps: dict[int, int] = {}  # how often each running trial has reported
        self._pruned: set[int] = set()
        self.attempts: list[int] = []
        self.folders: list[str] = []

    def start(self, trial: TrialStart) -> None:
        assert trial.number not in [one.number for one in self._running]
        assert trial.slot not in [one.slot for one in self._running]
        self._running.append(trial)
        self.attempts.append(trial.number)
        self.folders += [trial.folder, trial.parent_folder]

    def wait(self, seconds: float | None = None) -> Sequence[TrialEvent]:
        trial = self._random.choice(self._running)
        number, step = trial.number, self._steps.get(trial.number, 0)
        if self._random.random() < self._loses:
            self._drop(trial)
            return [
                Reported(number, 0, 99.0, lambda prune: None),
                LostTrial(number, "its process was killed"),
            ]
        try:
            value = self._objective(trial.params)
        except ArithmeticError as error:
            self._drop(trial)
            return [Raised(number, f"Traceback\n{error}")]
        except (TrialResultError, TrialSetupError) as error:
            self._drop(trial)
            return [Raised(number, error.message, error)]
        if step < _STEPS and number not in self._pruned:
            self._steps[number] = step + 1
            return [Reported(number, step, value * (step + 1), lambda prune: self._answer(number, prune))]
        pruned = number in self._pruned
        self._drop(trial)
        return [Pruned(number) if pruned else Returned(number, value)]

    def close(self) -> None:
        self._running.clear()

    def _answer(self, number: int, prune: bool) -> None:
        if prune:
            self._pruned.add(number)

    def _drop(self, trial: TrialStart) -> None:
        self._running.remove(trial)
        self._steps.pop(trial.number, None)
        self._pruned.discard(trial.number)


def search(
    folder: Path,
    objective: Objective,
    total: int,
    *,
    space: dict[str, Any],
    engine: InlineTrials | None = None,
    slots: int = 1,
    sampler: Any = None,
    pruner: Any = None,
    seed: int | None = 1,
    mode: str = "min",
    max_attempts: int = 10**6,
) -> list[TrialRecord]:
    """Run a search to its end in this process, from where the folder's study stands."""
    study = TuningStudy(folder, SearchSpace.of(space), mode, None, resume=True)
    try:
        chosen = sampler_choice.choose_sampler(sampler, study.space, seed, mode)
        judge = sampler_choice.choose_pruner(pruner)
        study.use(chosen, judge)
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
            answers=sampler_choice.prunes(judge),
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
