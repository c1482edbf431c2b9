"""What a run is put together from, and what it asks of others: the words of run.py.

Must not know the order in which anything happens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, final

import torch
from torch import nn

from paceline.core.errors import CommTimeoutError, PeerError
from paceline.train.callbacks import Callbacks
from paceline.train.config import TrainConfig
from paceline.train.dynamic_batch import GradientNoise
from paceline.train.early_stop import EarlyStopper
from paceline.train.feed import Feed
from paceline.train.objective import split_pair
from paceline.train.phases import Phases
from paceline.train.recorder import CommittedStep, Recorder
from paceline.train.saving import Contents, Saver
from paceline.train.schedule import Schedule
from paceline.train.signals import StopRequest
from paceline.train.step import StepTransaction
from paceline.train.team import Team
from paceline.train.update import Update

if TYPE_CHECKING:
    from paceline.train.run import Run

Evaluate = Callable[[], tuple[dict[str, float], int]]

GROUP_TROUBLE = (PeerError, CommTimeoutError)
"""What a collective raises when the reason is not here."""


class Members(Protocol):
    """What a run asks of those who look after its group; see membership.py."""

    def todo(self, step: int, missing: Sequence[int]) -> Iterator[int]:
        """The shards that this rank computes in the step, of those that it lacks, and under the backup
        policy some of slow ranks; raises one of GROUP_TROUBLE if the group is being changed at once."""

    @property
    def wants_pause(self) -> bool:
        """Whether this member is to stop after the next common step."""

    @property
    def heard_at(self) -> float:
        """When the journal was last known to have what was told, on this process's clock."""

    def meet_again(self, run: Run, trouble: BaseException | None) -> None:
        """Returns in a new group, with the state of the furthest member."""

    def shard_done(self, step: int, shard: int, seconds: float) -> None:
        """A shard was computed here, in so many seconds."""

    def differ(self, step: int, digest: str, agreed: int) -> NoReturn:
        """The members' weights after `step` are not the same; this is the hash of this one's, and all were
        the same after step `agreed`. Raises one of GROUP_TROUBLE: who is right is decided elsewhere."""

    def broken_off(self, step: int, digest: str) -> None:
        """The comparison after `step` was interrupted, perhaps because another member has seen a difference
        in it already; this is the hash that this member brought."""

    def agree(self, step: int, digest: str) -> None:
        """The members' weights after `step` are the same, with this hash."""

    def committed(
        self, step: CommittedStep, shards: tuple[int, ...], shard_hashes: Mapping[int, str]
    ) -> None:
        """A step was committed here, with these shards of this rank."""


@final
@dataclass(frozen=True)
class Micro:
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


@dataclass
class Parts:
    """What a run is put together from; see worker.py and session.py."""

    team: Team
    config: TrainConfig
    device: torch.device
    module: nn.Module
    transaction: StepTransaction
    update: Update
    schedule: Schedule
    feed: Feed
    recorder: Recorder
    callbacks: Callbacks
    stop: StopRequest
    noise: GradientNoise | None = None
    early: EarlyStopper | None = None
    saver: Saver | None = None
    evaluate: Evaluate | None = None
    contents: Callable[[Run], Contents] | None = None
    members: Members | None = None
    phases: Phases = field(default_factory=Phases)
    draws_after_exchange: bool = True  # modifiers, or optimizers that may use randomness
