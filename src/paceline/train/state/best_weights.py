"""The weights of the best evaluation, for `EarlyStopping(restore_best=True)`: kept beside those that train.

Every rank holds the same copy, in the memory of its host. It is part of the run's state: a checkpoint has it,
and so gets a member that joins. The weights that train are never replaced: a longer run continues from them.
Only what a run returns at its end, and the hash of that, are those of the best evaluation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

import torch
from torch import Tensor, nn

from paceline.train.state import model_state

BEST = "best/"


@final
class BestWeights:
    """Parameters and buffers after `step`; none while `step` is None."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._tensors: dict[str, Tensor] = {}
        self.step: int | None = None

    def keep(self, step: int) -> None:
        """Copy the module as it is after this step."""
        here = model_state.model_tensors(self._module)
        if self._tensors.keys() != here.keys():
            self._tensors = {name: torch.empty_like(one, device="cpu") for name, one in here.items()}
        for name, tensor in here.items():
            self._tensors[name].copy_(tensor)
        self.step = step

    def export(self) -> dict[str, Tensor]:
        """Return the tensors by the names that they have in a checkpoint; not copied."""
        return {} if self.step is None else {BEST + name: one for name, one in self._tensors.items()}

    def load(self, step: int | None, tensors: Mapping[str, Tensor]) -> None:
        """Take over what `export` returned."""
        self.step = step
        self._tensors = (
            {}
            if step is None
            else {name: tensors[BEST + name].clone() for name in model_state.model_tensors(self._module)}
        )

    def hash(self) -> str:
        return model_state.hash_of(self._tensors)

    @torch.no_grad()
    def restore(self) -> None:
        """Copy the weights into the module, at the end of the run."""
        for name, tensor in model_state.model_tensors(self._module).items():
            tensor.copy_(self._tensors[name])
