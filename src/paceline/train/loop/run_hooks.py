"""Parts of a run, and the hooks that it calls: the vocabulary of run.py."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol, final

from paceline.core import events
from paceline.train.objective import ObjectiveResult, split_pair
from paceline.train.phases import Phases
from paceline.train.settings.schedule import Schedule
from paceline.train.state.run_folder import RunFolder
from paceline.train.state.run_state import RunState, StateParts
from paceline.train.step.lockstep import Lockstep
from paceline.train.step.optimizer_turns import OptimizerTurns
from paceline.train.step.replica_agreement import differ_error
from paceline.train.step_info import StepInfo
from paceline.train.stop_signals import StopRequest
from paceline.train.team import Team

Evaluate = Callable[[StepInfo], tuple[dict[str, float], int]]


class GroupChangedError(Exception):
    """The group that trains has to change before the run can continue; raised by `Run` to its driver, see
    `worker_jobs.train_to_end`. `cause` is the error of the collective that failed; None for a pause that all
    ranks agreed on."""

    def __init__(self, cause: BaseException | None = None) -> None:
        super().__init__("a pause was agreed on" if cause is None else str(cause))
        self.cause = cause


@contextmanager
def one_group() -> Iterator[None]:
    """Raise the failure of the group itself, not GroupChangedError: for a driver without another group."""
    try:
        yield
    except GroupChangedError as change:
        failure = change.cause or change
        context = failure.__context__
        try:
            raise failure
        finally:
            # The traceback that users read is that of the failure alone.
            failure.__context__ = context


class StepHooks(Protocol):
    """Hooks that a run calls while it computes steps; under a supervisor, member/step_reports.py."""

    @property
    def wants_pause(self) -> bool:
        """Whether the group should change after the next step that all ranks commit."""

    def shards_to_compute(
        self, step: int, missing: Sequence[int], lasted: float | None = None
    ) -> Iterable[int]:
        """Return the shards that this rank computes: those it lacks and, under the backup policy, some of
        slow ranks. Each is computed when the next one is asked for; where all were computed together before,
        each took `lasted` seconds. Raises one of GROUP_FAILURES, also while iterated, if the group has to
        change at once."""

    def committed(
        self, state: RunState, step: events.StepCommitted, shards: tuple[int, ...], hashes: Mapping[int, str]
    ) -> None:
        """Note that this rank committed a step, with these of its own shards and their hashes in it."""


class ReplicaHooks(Protocol):
    """Hooks for reporting that ranks hold the same state, or do not. `state` is this rank's, at the step that
    is compared; `digest` is what the comparison sees of it."""

    @property
    def watches_weights(self) -> bool:
        """Whether a rank compares its weights with what its last update left: where they have changed in
        memory, another group can go back to a checkpoint."""

    def replicas_agree(self, state: RunState, digest: str) -> None:
        """Note that all ranks hold this hash."""

    def replicas_differ(self, state: RunState, digest: str) -> NoReturn:
        """Raise because the ranks' states differ: one of GROUP_FAILURES where a supervisor decides which rank
        is right."""

    def comparison_interrupted(self, state: RunState, digest: str) -> None:
        """Note that the comparison was interrupted, perhaps because another rank has found a difference
        already."""


@final
class FixedGroup:
    """The StepHooks and ReplicaHooks of a run whose group never changes: nothing is reported, and replicas
    that differ end the run."""

    wants_pause = watches_weights = False

    def __init__(self, team: Team) -> None:
        self._team = team

    def shards_to_compute(
        self, step: int, missing: Sequence[int], lasted: float | None = None
    ) -> Iterable[int]:
        return missing

    def committed(
        self, state: RunState, step: events.StepCommitted, shards: tuple[int, ...], hashes: Mapping[int, str]
    ) -> None: ...

    def replicas_agree(self, state: RunState, digest: str) -> None: ...

    def replicas_differ(self, state: RunState, digest: str) -> NoReturn:
        raise differ_error(state.position.step, self._team.context.all_gather(digest))

    def comparison_interrupted(self, state: RunState, digest: str) -> None: ...


@final
@dataclass(frozen=True)
class MicroBatch:
    """A micro-batch to compute: `x` and `y` of a pair, or all of it as `data`; `count` samples. `info` has
    the step's place in the run, and whose turn it is where optimizers take turns."""

    data: Any
    count: int
    shard: int
    info: StepInfo

    @property
    def step(self) -> int:
        return self.info.step

    @property
    def epoch(self) -> int:
        return self.info.epoch

    @property
    def x(self) -> Any:
        return split_pair(self.data)[0]

    @property
    def y(self) -> Any:
        return split_pair(self.data)[1]


ScoreMicroBatch = Callable[[MicroBatch, Callable[[Any], Any]], ObjectiveResult]
"""From a micro-batch, and what changes its data, to its loss and metrics."""


@dataclass(kw_only=True)
class RunParts(StateParts):
    """All parts of a run, made by `RunBuilder`: those that hold its state, and those of the loop."""

    schedule: Schedule
    turns: OptimizerTurns
    course: StepInfo  # the first step; the others have the same lengths of epoch and run
    stop: StopRequest
    step_hooks: StepHooks
    replica_hooks: ReplicaHooks
    evaluate: Evaluate | None = None
    phases: Phases = field(default_factory=Phases)
    folder: RunFolder | None = None
    lockstep: Lockstep | None = None  # where the shards of a step are computed together
    score: ScoreMicroBatch | None = None  # None: a loop of the user's own computes the losses
    draws_after_exchange: bool = True  # modifiers, or optimizers that may use randomness
