"""Parts of a run, and the hooks that it calls: the vocabulary of run.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol, final

from paceline.core import events
from paceline.core.errors import CommTimeoutError, PeerError
from paceline.train.objective import split_pair
from paceline.train.phases import Phases
from paceline.train.settings.schedule import Schedule
from paceline.train.state.run_folder import RunFolder
from paceline.train.state.run_state import RunState, StateParts
from paceline.train.step.gradient_reducer import GradientChecks
from paceline.train.stop_signals import StopRequest

Evaluate = Callable[[], tuple[dict[str, float], int]]

GROUP_FAILURES = (PeerError, CommTimeoutError)
"""What a collective raises when the cause is another rank, or the group itself."""


class GroupChangedError(Exception):
    """The group that trains has to change before the run can continue; raised by `Run` to its driver, see
    `worker_tasks.train_to_end`. `cause` is the error of the collective that failed; None for a pause that all
    ranks agreed on."""

    def __init__(self, cause: BaseException | None = None) -> None:
        super().__init__("a pause was agreed on" if cause is None else str(cause))
        self.cause = cause


class StepHooks(Protocol):
    """Hooks that a supervised run calls while it computes steps; see member/step_reports.py."""

    @property
    def wants_pause(self) -> bool:
        """Whether the group should change after the next step that all ranks commit."""

    def shards_to_compute(self, step: int, missing: Sequence[int]) -> Iterator[int]:
        """Yield the shards that this rank computes: those it lacks and, under the backup policy, some of slow
        ranks. Raises one of GROUP_FAILURES if the group has to change at once."""

    def shard_done(self, step: int, shard: int, seconds: float) -> None:
        """Note that this rank computed a shard in `seconds`."""

    def committed(
        self, state: RunState, step: events.StepCommitted, shards: tuple[int, ...], hashes: Mapping[int, str]
    ) -> None:
        """Note that this rank committed a step, with these of its own shards and their hashes in it."""


class ReplicaHooks(Protocol):
    """Hooks for reporting that ranks hold the same state, or do not. `state` is this rank's, at the step that
    is compared; `digest` is what the comparison sees of it."""

    def replicas_agree(self, state: RunState, digest: str) -> None:
        """Note that all ranks hold this hash."""

    def replicas_differ(self, state: RunState, digest: str) -> NoReturn:
        """Raise one of GROUP_FAILURES because the ranks' states differ: the supervisor decides which rank is
        right."""

    def comparison_interrupted(self, state: RunState, digest: str) -> None:
        """Note that the comparison was interrupted, perhaps because another rank has found a difference
        already."""


@dataclass(frozen=True)
class SupervisedHooks:
    """Hooks of a run under a supervisor, which keeps the journal and the folder: members join and leave, some
    on machines that do not see the folder. `slot` is this worker's rank."""

    steps: StepHooks
    replicas: ReplicaHooks
    tell: Callable[[events.Event], None]
    journal_acked_at: Callable[[], float]  # on this process's clock
    slot: int
    checks: GradientChecks = field(default_factory=GradientChecks)
    sees_folder: bool = True


@final
@dataclass(frozen=True)
class MicroBatch:
    """A micro-batch to compute: `x` and `y` of a pair, or all of it as `data`; `count` samples."""

    data: Any
    count: int
    shard: int
    epoch: int
    step: int

    @property
    def x(self) -> Any:
        return split_pair(self.data)[0]

    @property
    def y(self) -> Any:
        return split_pair(self.data)[1]


@dataclass(kw_only=True)
class RunParts(StateParts):
    """All parts of a run, made by `RunBuilder`: those that hold its state, and those of the loop."""

    schedule: Schedule
    stop: StopRequest
    evaluate: Evaluate | None = None
    hooks: SupervisedHooks | None = None
    phases: Phases = field(default_factory=Phases)
    folder: RunFolder | None = None
    draws_after_exchange: bool = True  # modifiers, or optimizers that may use randomness
