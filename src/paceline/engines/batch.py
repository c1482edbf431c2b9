"""Hand a whole run over: `paceline submit`. The engine runs the script without this terminal, the supervisor
on the first of its nodes and agents on the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeAlias, final, runtime_checkable

from paceline.engines.engine import Engine

NewLines: TypeAlias = Callable[[bool], Sequence[str]]
"""Returns the lines that a run wrote since the call before. The argument says whether the run is over: a last
line without an end is given only then, because more of it may come."""
BatchState: TypeAlias = Literal["pending", "running", "succeeded", "failed", "stopped", "lost"]


@final
@dataclass(frozen=True, kw_only=True)
class BatchSpec:
    """A run to hand over. `arguments`: the script's; `options`: those of `paceline train` that were given,
    e.g. ["--epochs", "3"]; `agent_options`: those of `paceline join` that the settings call for, where the
    engine starts agents by itself; `time`: as a person writes it ("2:00:00"), empty: the engine's own limit.
    """

    script: str
    arguments: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    agent_options: tuple[str, ...] = ()
    name: str = "train"
    nodes: int = 1
    workers_per_node: int = 1
    gpus_per_node: int = 0
    time: str = ""
    image: str = ""
    folder: str = ""
    python: str = "python3"
    environment: Mapping[str, str] = field(default_factory=dict)


@final
@dataclass(frozen=True)
class BatchStatus:
    """What became of a run that was handed over; `reason` is the engine's own word. `never_ran`: the failure
    is concluded from what keeps the run from beginning, and wrong of a run that was seen to run."""

    state: BatchState
    code: int | None = None
    reason: str = ""
    never_ran: bool = False

    @property
    def is_over(self) -> bool:
        return self.state in ("succeeded", "failed", "stopped", "lost")


@runtime_checkable
class BatchEngine(Protocol):
    """An engine to which a run can be handed over."""

    def batch_text(self, job: BatchSpec) -> str:
        """Return what would be submitted, as the engine reads it (a batch script, a manifest, a command):
        what `paceline submit --dry-run` prints."""
        ...

    def submit_batch(self, job: BatchSpec) -> str:
        """Hand the run over; return the engine's identifier of it."""
        ...

    def batch_status(self, identifier: str) -> BatchStatus: ...

    def batch_logs(self, identifier: str) -> NewLines:
        """Return a function whose first call has the lines that the run wrote so far, and each later call
        those since then."""
        ...

    def stop_batch(self, identifier: str) -> None:
        """Have the run save and leave."""
        ...


@runtime_checkable
class ChecksBatch(Protocol):
    """An engine of which a hand-over needs less, or something else, than agents do."""

    def check_batch(self) -> None:
        """Raise UnavailableError or UsageError, with the remedy, where no run can be handed over from here.
        What `submit_batch` finds out by itself need not be looked at."""
        ...


def check_hand_over(engine: Engine) -> None:
    """Raise where no run can be handed over to this engine from here: by its `check_batch` where it has one,
    else by `check`."""
    if isinstance(engine, ChecksBatch):
        engine.check_batch()
    else:
        engine.check()


def new_lines(read: Callable[[], Mapping[str, str]]) -> NewLines:
    """Follow logs that are read whole: `read` returns the text of each of a run's files by its name."""
    shown: dict[str, int] = {}

    def fresh(is_over: bool) -> list[str]:
        found: list[str] = []
        for name, text in read().items():
            *lines, unfinished = text.split("\n")
            if is_over and unfinished:
                lines.append(unfinished)
            found += lines[shown.get(name, 0) :]
            shown[name] = max(shown.get(name, 0), len(lines))
        return found

    return fresh
