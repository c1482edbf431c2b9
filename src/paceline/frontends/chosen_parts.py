"""The objective and the optimizer of a training, chosen where the caller gives none, and said once.

Shared by the front doors that choose; what is chosen, and by which rule, is in loss_inference.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from paceline.frontends.announcements import announce

if TYPE_CHECKING:
    from paceline.train.state.optimizers import OptimizerFactory


def objective_for(loss_fn: Callable[..., Any] | None, targets: Callable[[], Any]) -> Callable[..., Any]:
    """Return the objective of a loss; without a loss, of that which goes with the targets."""
    from paceline.frontends import loss_inference

    if loss_fn is not None:
        return loss_inference.as_objective(loss_fn)
    inferred = loss_inference.infer_loss(targets())
    announce(f"no loss_fn: the loss is {inferred.name}, because {inferred.reason}")
    return inferred.loss


def optimizer_for(optimizer: Any, learning_rate: float, *, rate_is_usual: bool = True) -> OptimizerFactory:
    """Return the caller's optimizer, else AdamW with `learning_rate`. `rate_is_usual`: the caller has not
    named it, so that an optimizer with another rate contradicts nothing."""
    from paceline.frontends.loss_inference import default_optimizer

    if optimizer is None:
        announce(
            f"no optimizer: AdamW with learning_rate {learning_rate:g}, which is not scaled with the batch"
        )
        return default_optimizer(learning_rate)
    if not rate_is_usual:
        announce(f"learning_rate {learning_rate:g} is not used: optimizer= makes an optimizer with its own")
    made: OptimizerFactory = optimizer
    return made
