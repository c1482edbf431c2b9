"""Asks a run's supervisor what it measures of each worker: when it was heard, how long it takes for a shard.

May wait for an answer, so it is done off the event loop. Must not know what becomes of the answers.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Final

from paceline.core.control.messages import Ask
from paceline.core.errors import PacelineError
from paceline.elastic import tools
from paceline.frontends.orchestrator.nodes import Pulse

# Of dialling, of proving oneself and of the answer: a supervisor on the same machine takes milliseconds.
_PATIENCE_SECONDS: Final = 1.0


def take(folder: Path) -> tuple[Pulse, ...]:
    """What the supervisor at work in this folder knows now. Nothing where none answers: one that starts, is
    started again or ends is no failure of the training, and the next time it will."""
    try:
        answer = tools.ask(folder, Ask(what="status"), _PATIENCE_SECONDS)
    except (PacelineError, OSError):
        return ()
    return pulses_of(answer.facts, time.time())


def pulses_of(facts: dict[str, Any], now: float) -> tuple[Pulse, ...]:
    """Of everybody who was heard; the supervisor says how long ago, `now` is when it said so."""
    return tuple(
        Pulse(worker["rank"], worker["pid"], now - worker["heard"], worker["shard_seconds"])
        for worker in facts.get("workers", ())
        if worker["heard"] is not None
    )
