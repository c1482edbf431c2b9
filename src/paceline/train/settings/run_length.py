"""How long a run is, for functions of the user's that ask for it by the names of their parameters.

    TrainConfig(schedule=lambda step, total_steps: 1 - step / total_steps)
    Trainer(scheduler=lambda optimizer, total_steps: OneCycleLR(optimizer, 0.1, total_steps=total_steps))

The first parameter is the step or the optimizer. Of the others, those without a default are given by name.
Imports no torch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, final

from paceline.core.errors import ConfigError
from paceline.core.wording import listed


@final
@dataclass(frozen=True)
class RunLength:
    """Numbers that a function can ask for; None where they are not known before the run has ended."""

    steps_per_epoch: int | None = None
    total_steps: int | None = None
    epochs: int | None = None


_KNOWN = [one.name for one in fields(RunLength)]
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def asked_for(function: Callable[..., Any], setting: str) -> list[str]:
    """Return the names that a function asks for besides its first parameter; refuse one that is not known."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return []  # built in: it is called with its first argument alone
    rest = [one for one in parameters[1:] if one.kind in _NAMED and one.default is inspect.Parameter.empty]
    if parameters and parameters[0].kind is inspect.Parameter.KEYWORD_ONLY:
        rest.insert(0, parameters[0])
    unknown = [one.name for one in rest if one.name not in _KNOWN]
    if unknown:
        raise ConfigError(
            f"the function {setting} asks for {listed(unknown)}, which a run does not know",
            remedy=f"besides its first parameter it can ask, by name, for {listed(_KNOWN)}; give any other "
            "parameter a default",
            key=setting,
        )
    return [one.name for one in rest]


def told(function: Callable[..., Any], length: RunLength, setting: str) -> dict[str, int]:
    """Return the arguments that a function asks for by name; refuse a number that is not known."""
    asked = {name: getattr(length, name) for name in asked_for(function, setting)}
    unknown = [name for name, value in asked.items() if value is None]
    if unknown:
        raise ConfigError(
            f"the function {setting} asks for {listed(unknown)}, and that is not known before the run has "
            "ended: the data has no length, or the batch grows",
            remedy="set max_steps, from which total_steps is known; or use a function that does not need it",
            key=setting,
        )
    return asked
