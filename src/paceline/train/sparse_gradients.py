"""Gradients of sparse embeddings: rows and their values travel, and are summed in the order of the shards.

Every rank gets every shard's rows and adds them up in the same order, so the bits do not depend on who
computed which shard, and optimizers such as SparseAdam see the rows that were touched and no others.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from paceline.comm.context import DistributedContext


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

    def reduce(self, context: DistributedContext) -> None:
        """Every parameter's gradient becomes the sum over all shards; None where no shard has one."""
        if not self._parameters:
            return
        by_shard: dict[int, list[Any]] = dict(self._held)
        if context.world_size > 1:
            mine = [[shard, [_to_host(pair) for pair in pairs]] for shard, pairs in self._held.items()]
            for told in context.all_gather(mine):
                by_shard |= dict(told)
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
