"""One trial of a search, as its user sees it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias, final

OUTPUT: Final = "output.log"
"""The file in a trial's folder with what the trial prints."""

TrialOutcome: TypeAlias = Literal["running", "complete", "pruned", "failed"]


@final
@dataclass(frozen=True)
class TrialRecord:
    """A trial. `value`: what was optimized, for a pruned trial the last that was reported, None for others;
    `error`: the traceback of a trial that failed; `reports`: value by step; `parent`: in population-based
    training, the trial whose checkpoint this one began with."""

    number: int
    params: Mapping[str, Any]
    state: TrialOutcome
    value: float | None = None
    error: str = ""
    reports: Mapping[int, float] = field(default_factory=dict)
    seconds: float | None = None
    parent: int | None = None

    @property
    def is_over(self) -> bool:
        return self.state != "running"


def trial_folder(study: Path, number: int) -> Path:
    """Return the folder of a trial in that of its study."""
    return study / "trials" / f"{number:04d}"


def best_of(trials: list[TrialRecord], mode: str) -> TrialRecord | None:
    """Return the first of the best complete trials; None where none is complete."""
    done = [trial for trial in trials if trial.state == "complete" and trial.value is not None]
    sign = 1.0 if mode == "min" else -1.0
    return min(done, key=lambda trial: (sign * (trial.value or 0.0), trial.number), default=None)
