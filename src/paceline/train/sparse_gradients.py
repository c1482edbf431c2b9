"""Gradients of sparse embeddings: rows and their values travel, and are summed in the order of the shards.

Every rank gets every shard's rows and adds them up in the same order, so the bits do not depend on who
computed which shard, and optimizers such as SparseAdam see the rows that were touched and no others. The rows
travel before the step is decided and are applied after it: the exchange is repeatable.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import Parameter

Rows = list[list[Any]]
"""As it travels: [shard, for each parameter the rows' indices and values, or None] of each shard."""


def sparse_parameters(module: nn.Module) -> set[str]:
    """The names of parameters whose modules ask for sparse gradients."""
    wanted = {
        id(child.weight)
        for child in module.modules()
        if isinstance(child, nn.Embedding | nn.EmbeddingBag) and child.sparse
    }
    return {name for name, parameter in module.named_parameters() if id(parameter) in wanted}


@final
class SparseGradients:
    """The sparse gradients of one step."""

    def __init__(self, parameters: Mapping[str, Parameter]) -> None:
        self._parameters = dict(parameters)
        self._held: dict[int, list[tuple[Tensor, Tensor] | None]] = {}

    def start(self) -> None:
        self._held = {}

    def collect(self, shard: int) -> None:
        """Keeps what the shard computed and clears it from the parameters."""
        if not self._parameters:
            return
        held: list[tuple[Tensor, Tensor] | None] = []
        for parameter in self._parameters.values():
            gradient = parameter.grad
            if gradient is None:
                held.append(None)
                continue
            rows = (gradient if gradient.is_sparse else gradient.to_sparse(1)).coalesce()
            held.append((rows.indices(), rows.values()))
            parameter.grad = None
        self._held[shard] = held

    def values(self, shard: int) -> list[Tensor]:
        """The rows' values that a shard of this rank has collected."""
        return [pair[1] for pair in self._held.get(shard, ()) if pair is not None]

    @property
    def used(self) -> bool:
        return bool(self._parameters)

    def rows(self, shards: Sequence[int]) -> Rows:
        """What these shards of this rank have collected, as it travels."""
        return [[shard, [_to_host(pair) for pair in self._held[shard]]] for shard in shards]

    def apply(self, told: Sequence[Rows]) -> None:
        """Every parameter's gradient becomes the sum over the shards of all ranks; None where no shard has
        one. Of a shard that several ranks computed the bits are equal."""
        by_shard: dict[int, list[Any]] = {shard: pairs for rows in told for shard, pairs in rows}
        for position, parameter in enumerate(self._parameters.values()):
            pairs = [by_shard[shard][position] for shard in sorted(by_shard)]
            parts = [pair for pair in pairs if pair is not None]
            if not parts:
                parameter.grad = None
                continue
            where = parameter.device
            indices = torch.cat([torch.as_tensor(indices).to(where) for indices, _ in parts], 1)
            values = torch.cat([torch.as_tensor(values).to(where) for _, values in parts])
            parameter.grad = torch.sparse_coo_tensor(
                indices, values, parameter.shape, check_invariants=False
            ).coalesce()


def _to_host(pair: tuple[Tensor, Tensor] | None) -> list[Tensor] | None:
    return None if pair is None else [pair[0].cpu(), pair[1].cpu()]
