"""Where trials run: an engine starts a trial in a process of its own and says what becomes of it.

An engine decides nothing about the search: it neither repeats nor counts trials.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, final


@final
@dataclass(frozen=True)
class TrialCall:
    """What every trial of a search calls. `decode` turns plain parameters into the user's;
    `waits_for_answers`: a report returns when the search has decided about pruning."""

    function: Callable[[dict[str, Any]], Any]
    metric: str | None
    decode: Callable[[Mapping[str, Any]], dict[str, Any]]
    waits_for_answers: bool = False


@final
@dataclass(frozen=True)
class TrialStart:
    """One trial to start: plain data. `parent_folder` is empty where it begins anew."""

    number: int
    slot: int
    params: Mapping[str, Any]
    folder: str
    parent_folder: str = ""


@final
@dataclass(frozen=True)
class Reported:
    """A trial reported; `answer` is to be called where it waits for one."""

    number: int
    step: int
    value: float
    answer: Callable[[bool], None] = field(repr=False, compare=False)


@final
@dataclass(frozen=True)
class Returned:
    """A trial came to its end."""

    number: int
    value: float


@final
@dataclass(frozen=True)
class Pruned:
    """A trial ended because it was told to."""

    number: int


@final
@dataclass(frozen=True)
class Raised:
    """A trial's code raised. `ends_search`: no trial of this function can be judged."""

    number: int
    text: str
    ends_search: BaseException | None = None


@final
@dataclass(frozen=True)
class LostTrial:
    """A trial's process is gone and the trial is not over; `how`: in words."""

    number: int
    how: str


TrialEvent: TypeAlias = Reported | Returned | Pruned | Raised | LostTrial


class TrialEngine(Protocol):
    """Starts trials; one thread uses it. To be closed: then no trial runs any longer."""

    def start(self, trial: TrialStart) -> None: ...

    def wait(self, seconds: float | None = None) -> Sequence[TrialEvent]:
        """Wait for something to happen to the trials that run, and return it."""
        ...

    def close(self) -> None: ...
