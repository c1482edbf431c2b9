"""When to give up: a metric that has not become better for some evaluations in a row.

Pure, and fed with global metrics only, so every rank comes to the same end. Must not know the loop.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, final

from paceline.core.errors import UsageError
from paceline.train.config import EarlyStopping


@final
class EarlyStopper:
    """Remembers the best value and how many evaluations ago it was."""

    def __init__(self, settings: EarlyStopping) -> None:
        self._settings = settings
        self._best: float | None = None
        self._waited = 0

    def observe(self, metrics: Mapping[str, float]) -> str | None:
        """Take in one evaluation and return the reason to stop, or None. NaN is never an improvement."""
        settings = self._settings
        if settings.metric not in metrics:
            raise UsageError(
                f"early_stopping watches {settings.metric!r}, and the evaluation has "
                f"{', '.join(sorted(metrics)) or 'no metrics'}",
                remedy="return the metric from the objective, or watch one of those that are there",
            )
        value = metrics[settings.metric]
        if self._improves(value):
            self._best, self._waited = value, 0
            return None
        self._waited += 1
        if self._waited < settings.patience:
            return None
        best = "a number" if self._best is None else f"{self._best:.6g}"
        return (
            f"early stopping: {settings.metric} was not better than {best} "
            f"in {self._waited} evaluation{'s' if self._waited > 1 else ''}"
        )

    def _improves(self, value: float) -> bool:
        if math.isnan(value):
            return False
        if self._best is None:
            return True
        gain = self._best - value if self._settings.mode == "min" else value - self._best
        return gain > self._settings.min_delta

    def state_dict(self) -> dict[str, Any]:
        return {"best": self._best, "waited": self._waited}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._best = None if state["best"] is None else float(state["best"])
        self._waited = int(state["waited"])
