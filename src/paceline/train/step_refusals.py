"""What a step refuses to go on with, in words. Must not know how a step is computed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from torch import Tensor

from paceline.core.errors import InternalError, UsageError


def freezing(changed: Sequence[str], step: int) -> NoReturn:
    """Parameters that began or ceased to be trained."""
    raise UsageError(
        f"requires_grad of {', '.join(changed[:5])}{' ...' if len(changed) > 5 else ''} changed during "
        f"the run, before step {step}: which parameters are trained is fixed when it starts",
        remedy="end the run, change it, and begin another run with these weights; or train them from "
        "the start, with a learning rate of their own",
    )


def lacking(step: int, planned: int, applied: int, left_out: int) -> NoReturn:
    """The last line of defence of "every sample once": what the sum says of itself must add up."""
    raise InternalError(
        f"step {step} has {planned} samples, and in the sum of all shards are {applied}, "
        f"with {left_out} left out: it was not applied",
        remedy="report this with the run's journal; the run can be resumed from its last checkpoint",
    )


def loss(given: Any) -> NoReturn:
    """A loss that nothing can be learned from."""
    if not isinstance(given, Tensor):
        what = f"the loss is a {type(given).__name__}"
    elif given.numel() != 1:
        what = f"the loss is a tensor of shape {tuple(given.shape)}"
    else:
        what = "the loss does not depend on any parameter that is trained"
    raise UsageError(
        what,
        remedy="give the mean loss of the micro-batch's samples as one number that the model computed, "
        "not detached, not under torch.no_grad()",
    )
