"""The trial that this process is: what `paceline.tune.report` and its neighbours are about.

Outside of a trial `report` does nothing and `params` gives back what it was given, so that a script that is
searched with `paceline tune` also runs alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, SupportsFloat, final

from paceline.core.errors import UsageError
from paceline.core.wording import with_article


class TrialPruned(BaseException):
    """The search gave this trial up. Not an Exception, so that a handler of errors does not continue it."""


@final
@dataclass
class CurrentTrial:
    """The trial of a process. `send` hands a report to the search; True: the trial is to end."""

    number: int
    params: Mapping[str, Any]
    folder: Path
    parent_folder: Path | None
    send: Callable[[int, float], bool]
    reports: dict[int, float] = field(default_factory=dict)
    params_were_read: bool = False
    process: int = field(default_factory=os.getpid)


_here: list[CurrentTrial] = []


def begin(trial: CurrentTrial) -> None:
    """Make this process that of a trial."""
    _here.append(trial)


def end() -> None:
    """Have this process be no trial's any longer."""
    _here.clear()


def report(step: int, value: SupportsFloat) -> None:
    """Report how good the trial is after `step` steps (epochs, batches): for pruning, the table and the plot.
    The last report is the trial's value where its function returns None. Ends the trial where it is pruned:
    raises `TrialPruned`, which is to be let through."""
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        raise UsageError(
            f"report was given the step {step!r}", remedy="count steps with whole numbers from 0"
        )
    try:
        if isinstance(value, str):
            raise TypeError("text")
        number = float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(
            f"report was given {with_article(value)}, which is not one number",
            remedy="report(step, value), with a number or a tensor of one element",
        ) from error
    trial = current()
    if trial is None:
        return
    trial.reports[step] = number
    if trial.send(step, number):
        raise TrialPruned(f"trial {trial.number} was pruned at step {step}")


def params(defaults: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the parameters of this trial, over `defaults`; outside of a trial the defaults alone."""
    given = dict(defaults or {})
    trial = current()
    if trial is None:
        return given
    trial.params_were_read = True
    return given | dict(trial.params)


def folder() -> Path:
    """Return this trial's own folder, for checkpoints; a repeated trial finds there what the lost attempt
    saved. Outside of a trial that is the working directory."""
    trial = current()
    return Path() if trial is None else trial.folder


def parent_folder() -> Path | None:
    """Return, in population-based training, the folder of the trial that this one continues; None: it begins
    anew."""
    trial = current()
    return None if trial is None else trial.parent_folder


def current() -> CurrentTrial | None:
    """Return the trial of this process; None outside of one."""
    # A process that the trial forked has a copy: its reports would be answered in place of the trial's.
    return _here[-1] if _here and _here[-1].process == os.getpid() else None
