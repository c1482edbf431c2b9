"""Registry of user-defined gradient aggregations.

    class TrimmedMean:
        def combine(self, context, tensor):
            everyone = torch.stack(context.all_gather(tensor))
            middle = everyone.sort(0).values[1:-1]
            tensor.copy_(middle.mean(0) * context.world_size)

    register("trimmed_mean", TrimmedMean())

What travels is up to `combine`, which has the whole communication layer.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Final, Protocol, runtime_checkable

from paceline.core.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.comm.context import DistributedContext

_known: Final[dict[str, Aggregation]] = {}


@runtime_checkable
class Aggregation(Protocol):
    """Combines one flat tensor over all workers, in place.

    Every worker calls it at the same point of every step with its part of the gradient. The sum of all parts
    is the gradient of the global batch, so a mean over workers has to be multiplied by their number. It must
    leave the same bits on every worker. An object of it is sent to the workers: plain data only.
    """

    def combine(self, context: DistributedContext, tensor: Tensor) -> None: ...


def register(name: str, aggregation: Aggregation, *, builtin: frozenset[str] = frozenset()) -> None:
    """Make `aggregation` known as `name`, in this process; it is sent along with a job that names it.

    Registering a name again replaces what it stood for; `builtin` names cannot be taken.
    """
    if not isinstance(name, str) or not name.isidentifier():
        raise UsageError(f"{name!r} cannot name an aggregation", remedy="use letters, digits and underscores")
    if name in builtin:
        raise UsageError(
            f"{name!r} is a strategy of Paceline's own", remedy=f"choose another name than {sorted(builtin)}"
        )
    check(aggregation)
    _known[name] = aggregation


def check(aggregation: object) -> None:
    """Raise UsageError unless it is an object whose `combine` takes a context and a tensor."""
    if isinstance(aggregation, type):
        raise UsageError(
            f"the aggregation is the class {aggregation.__name__} itself, not an object of it",
            remedy=f"give {aggregation.__name__}()",
        )
    remedy = "define def combine(self, context, tensor) -> None, which changes the tensor in place"
    if not isinstance(aggregation, Aggregation):
        raise UsageError(f"a {type(aggregation).__name__} has no method combine", remedy=remedy)
    try:
        inspect.signature(aggregation.combine).bind(None, None)
    except TypeError as error:
        raise UsageError(
            f"{type(aggregation).__name__}.combine cannot be called with (context, tensor): {error}",
            remedy=remedy,
        ) from error


def find(name: str) -> Aggregation | None:
    """Return what was registered as `name`."""
    return _known.get(name)


def registered() -> list[str]:
    """Return all names, sorted."""
    return sorted(_known)
