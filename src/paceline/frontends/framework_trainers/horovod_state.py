"""State of a Horovod rank: model, optimizer, and how far it has come; to a version, from one, and to peers.

The learning rate is scaled by the number of ranks that it was set for. A run that goes on with another number
scales it again, by the ratio.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, final
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.checkpoint.loader import Checkpoint
from paceline.core.errors import UsageError
from paceline.data.batch_plan import DataPosition
from paceline.train.settings.learning_rate_scaling import scaling_factor
from paceline.train.state import model_state, optimizers

RateRule = Literal["none", "linear", "sqrt"]

# Of optimizers that were trained with: another trainer may be given one of them.
_scaled_for: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()


@final
@dataclass
class HorovodProgress:
    """How far the ranks have come together: equal on all of them after every commit.

    batches     of this epoch that each rank has trained on: where it is in data of its own
    folder      of the run; empty before the chief has made it
    scaled_for  the number of ranks that the learning rate is scaled for
    seed        of what the steps draw, such as Dropout
    """

    position: DataPosition = field(default_factory=DataPosition)
    batches: int = 0
    folder: str = ""
    scaled_for: int = 1
    seed: int = 0

    def pass_batches(self, batches: int, samples: int) -> None:
        """Count a step: the batches of one rank, and the samples of all."""
        self.position = self.position.after(samples, samples)
        self.batches += batches

    def turn_epoch(self) -> None:
        self.position, self.batches = self.position.next_epoch(), 0


@final
class HorovodState:
    """Model and optimizer of this rank, through all of its trainings. `distributed`: the optimizer whose step
    sums over the ranks, in a training; `scaled_for`: the number of ranks that its learning rate is for."""

    def __init__(self, module: nn.Module, optimizer: Optimizer, rule: RateRule) -> None:
        self.module, self._plain, self._rule = module, optimizer, rule
        self.distributed: Any = optimizer
        self.scaled_for = _scaled_for.get(optimizer, 1)
        self._compression = "none"

    @contextmanager
    def summing(self, hvd: Any, compression: Any, passes: int, *, elastic: bool) -> Iterator[None]:
        """Have gradients summed over the ranks in a training, by an optimizer of Horovod's that begins with
        the state of the caller's, and leaves its own there.

        It is made anew for every training, of the weights that are trained then. Horovod does not give back
        the hooks that it registers, with which a second optimizer would sum each gradient twice: it is made
        while no weight is trained, which registers none, and the hooks are registered here.
        """
        optimizers.build(self._plain, self.module)
        self._compression = getattr(compression, "__name__", type(compression).__name__)
        trained = [one for group in self._plain.param_groups for one in group["params"] if one.requires_grad]
        hooks = []
        try:
            with _frozen(trained):
                self.distributed = hvd.DistributedOptimizer(
                    self._plain,
                    named_parameters=self.module.named_parameters(),
                    compression=compression,
                    backward_passes_per_step=passes,
                )
            if hvd.size() > 1 or elastic:
                self.distributed._requires_update.update(trained)
                for one in trained:
                    hooks.append(one.register_post_accumulate_grad_hook(self.distributed._make_hook(one)))
            self.distributed.load_state_dict(self._plain.state_dict())
            yield
        finally:
            for hook in hooks:
                hook.remove()
            self.distributed = self._owner()
            _scaled_for[self._plain] = self.scaled_for

    def terms(self) -> dict[str, str]:
        """Return what must be the same on all ranks, by name."""
        return {
            "model": _shape_of(self.module),
            "optimizer": type(self._plain).__name__,
            "lr_rule": self._rule,
            "compression": self._compression,
        }

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
            "seed": progress.seed,
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
        progress.seed = int(found.state.get("seed", progress.seed))

    def hash(self) -> str:
        return model_state.state_hash(self.module)

    def _owner(self) -> Optimizer:
        """Return the caller's optimizer with the state of Horovod's, whose own attributes are no state."""
        self._plain.load_state_dict(self.distributed.state_dict())
        return self._plain


@contextmanager
def _frozen(parameters: Sequence[Tensor]) -> Iterator[None]:
    for one in parameters:
        one.requires_grad_(False)
    try:
        yield
    finally:
        for one in parameters:
            one.requires_grad_(True)


def _shape_of(module: nn.Module) -> str:
    """Return a short text that differs for models with other parameters."""
    shapes = [
        f"{name} {tuple(one.shape)} {one.dtype} {one.requires_grad}"
        for name, one in module.named_parameters()
    ]
    digest = hashlib.sha256("\n".join(shapes).encode()).hexdigest()[:8]
    return f"{len(shapes)} parameters ({digest})"


def plain(progress: HorovodProgress) -> dict[str, Any]:
    """Return the progress as data that Horovod's elastic state keeps."""
    return dataclasses.asdict(progress)


def from_plain(data: Mapping[str, Any]) -> HorovodProgress:
    return HorovodProgress(**{**data, "position": DataPosition(**data["position"])})
