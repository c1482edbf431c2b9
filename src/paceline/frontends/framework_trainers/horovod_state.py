"""State of a Horovod rank: model, optimizer, and how far it has come; to a version, from one, and to peers.

The learning rate is scaled by the number of ranks that it was set for. A run that goes on with another number
scales it again, by the ratio.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, final

from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.checkpoint.loader import Checkpoint
from paceline.core.errors import UsageError
from paceline.data.batch_plan import DataPosition
from paceline.train.settings.learning_rate_scaling import scaling_factor
from paceline.train.state import model_state, optimizers

RateRule = Literal["none", "linear", "sqrt"]


@final
@dataclass
class HorovodProgress:
    """How far the ranks have come together: equal on all of them after every commit.

    batches     of this epoch that each rank has trained on: where it is in data of its own
    folder      of the run; empty before the chief has made it
    scaled_for  the number of ranks that the learning rate is scaled for
    """

    position: DataPosition = field(default_factory=DataPosition)
    batches: int = 0
    folder: str = ""
    scaled_for: int = 1

    def pass_batches(self, batches: int, samples: int) -> None:
        """Count a step: the batches of one rank, and the samples of all."""
        self.position = self.position.after(samples, samples)
        self.batches += batches

    def turn_epoch(self) -> None:
        self.position, self.batches = self.position.next_epoch(), 0


@final
class HorovodState:
    """Model and optimizer of this rank, through all of its trainings. `distributed`: the optimizer whose step
    sums over the ranks; `scaled_for`: the number of ranks that its learning rate is scaled for."""

    def __init__(self, module: nn.Module, optimizer: Optimizer, rule: RateRule) -> None:
        self.module, self._plain, self._rule = module, optimizer, rule
        self.distributed: Any = optimizer
        self.scaled_for = 1

    def distribute(self, hvd: Any, compression: Any, passes: int) -> None:
        """Make the optimizer one of Horovod's."""
        self.distributed = hvd.DistributedOptimizer(
            self._plain,
            named_parameters=self.module.named_parameters(),
            compression=compression,
            backward_passes_per_step=passes,
        )

    def scale(self, progress: HorovodProgress, size: int) -> None:
        """Scale the learning rate from the ranks that it was scaled for to `size` ranks."""
        factor = scaling_factor(self._rule, size) / scaling_factor(self._rule, progress.scaled_for)
        if factor != 1.0:
            for group in self.distributed.param_groups:
                group["lr"] *= factor
        progress.scaled_for = self.scaled_for = size

    def share(self, hvd: Any, progress: HorovodProgress) -> HorovodProgress:
        """Give every rank the chief's weights, optimizer state and progress; all ranks call it."""
        hvd.broadcast_parameters(self.module.state_dict(), root_rank=0)
        state = hvd.broadcast_object(self.distributed.state_dict(), root_rank=0, name="paceline.optimizer")
        self.distributed.load_state_dict(state)
        shared: HorovodProgress = hvd.broadcast_object(progress, root_rank=0, name="paceline.progress")
        return shared

    def contents(self, progress: HorovodProgress) -> tuple[Mapping[str, Tensor], dict[str, Any]]:
        """Return what a version holds."""
        owner = self._owner()
        weights = {
            f"{model_state.MODEL}{name}": one for name, one in model_state.model_tensors(self.module).items()
        }
        tensors, pairs = model_state.as_pairs({**weights, **optimizers.tensors_of([owner], self.module)})
        return tensors, {
            "optimizers": optimizers.plain_state_of([owner], self.module),
            "model": model_state.model_names(self.module),
            "complex": pairs,
            "scaled_for": progress.scaled_for,
            "batches": progress.batches,
        }

    def load(self, found: Checkpoint, progress: HorovodProgress, *, own_data: bool) -> None:
        """Load a version, and what it says of the progress. In data of its own (`own_data`) a rank finds its
        place by the number of batches, which versions of an earlier Paceline do not have."""
        if own_data and progress.position.offset and "batches" not in found.state:
            raise UsageError(
                f"version {found.version} is from inside epoch {progress.position.epoch} and does not say "
                "how many batches each rank had passed: an earlier Paceline saved it",
                remedy="move the folder of that version away: the run then resumes from the one before it",
            )
        tensors = model_state.from_pairs(found.tensors(), found.state["complex"])
        model_state.load_model(self.module, tensors)
        owner = self._owner()
        optimizers.load([owner], self.module, found.state["optimizers"], tensors, scheduled=True)
        self.distributed.load_state_dict(owner.state_dict())
        progress.scaled_for = int(found.state["scaled_for"])
        progress.batches = int(found.state.get("batches", 0))

    def hash(self) -> str:
        return model_state.state_hash(self.module)

    def _owner(self) -> Optimizer:
        """Return the caller's optimizer with the state of Horovod's, whose own attributes are no state."""
        self._plain.load_state_dict(self.distributed.state_dict())
        return self._plain


def plain(progress: HorovodProgress) -> dict[str, Any]:
    """Return the progress as data that Horovod's elastic state keeps."""
    return dataclasses.asdict(progress)


def from_plain(data: Mapping[str, Any]) -> HorovodProgress:
    return HorovodProgress(**{**data, "position": DataPosition(**data["position"])})
