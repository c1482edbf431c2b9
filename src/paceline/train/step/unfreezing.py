"""Which parameters learn in which step: fixed when a run starts, with those that join later among them.

`TrainConfig(unfreeze={"backbone.": 100})` has the parameters whose names begin with "backbone." learn from
step 101 on. They are the optimizers' from the start and have their place in the gradient memory; until then
they ask for no gradient, so that the backward pass leaves them out, and without a gradient no optimizer
touches them. Which of them learn is a function of the step alone: there is no state to save or to transfer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

from torch import nn

from paceline.core.errors import UsageError
from paceline.train.step.misuse_guard import refuse_freezing


@final
class Unfreezing:
    """The parameters of one module, and the number of steps after which some of them begin to learn.

    Made before the optimizers: it has all of them ask for a gradient, as those that learn from the start do.
    """

    def __init__(self, module: nn.Module, plan: Mapping[str, int]) -> None:
        self._named = dict(module.named_parameters())
        self._given = {name: parameter.requires_grad for name, parameter in self._named.items()}
        self._after = _after(self._named, plan)
        self.frozen: frozenset[str] = frozenset()  # in the step that was turned to
        for name in self._after:
            self._named[name].requires_grad_(True)
        learn = [name for name, one in self._named.items() if one.requires_grad and name not in self._after]
        if self._after and not learn:
            raise UsageError(
                "unfreeze leaves no parameter of the model that learns in the first step",
                remedy="leave some parameters out of it, such as those of the head",
            )
        self._expected = [parameter.requires_grad for parameter in self._named.values()]

    def turn_to(self, step: int) -> None:
        """Have the parameters learn that do in the step after `step` committed ones. Refuse what other code
        has changed since."""
        now = [parameter.requires_grad for parameter in self._named.values()]
        if now != self._expected:
            changed = [name for name, a, b in zip(self._named, now, self._expected, strict=True) if a != b]
            refuse_freezing(changed, step + 1)
        if not self._after:
            return
        self.frozen = frozenset(name for name, after in self._after.items() if step < after)
        for name in self._after:
            self._named[name].requires_grad_(name not in self.frozen)
        self._expected = [parameter.requires_grad for parameter in self._named.values()]

    def close(self) -> None:
        """Leave the module as it was given."""
        for name in self._after:
            self._named[name].requires_grad_(self._given[name])


def _after(named: Mapping[str, nn.Parameter], plan: Mapping[str, int]) -> dict[str, int]:
    """Return the steps by parameter; of several prefixes the longest counts."""
    found: dict[str, int] = {}
    for prefix in sorted(plan, key=len):
        matched = [name for name, one in named.items() if name.startswith(prefix) and _can_learn(one)]
        if not matched:
            raise UsageError(
                f"unfreeze names {prefix!r}, and no parameter of the model begins with it",
                remedy=f"the names are {', '.join(list(named)[:5])}{' ...' if len(named) > 5 else ''}",
            )
        found |= dict.fromkeys(matched, plan[prefix])
    return found


def _can_learn(parameter: nn.Parameter) -> bool:
    return parameter.is_floating_point() or parameter.is_complex()
