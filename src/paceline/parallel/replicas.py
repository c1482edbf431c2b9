"""Copies of one model on several ranks: are they copies at all, and making them equal.

Knows names, shapes and bytes of tensors; nothing of gradients or of how a model is trained.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from paceline.comm.context import DistributedContext
from paceline.core.errors import DisagreementError

_ABSENT = "has none of this name"
_CHUNK_BYTES = 32 << 20


def check_same(context: DistributedContext, model: nn.Module, settings: str) -> None:
    """Raises the same error on every rank if the ranks' models or settings differ, naming what and where."""
    mine = [["settings", settings], *describe(model)]
    everybody = [dict(told) for told in context.all_gather(mine)]
    names = list(dict.fromkeys(name for told in everybody for name in told))
    differing = [name for name in names if len({told.get(name) for told in everybody}) > 1]
    if differing:
        name = differing[0]
        others = [rank for rank, told in enumerate(everybody) if told.get(name) != everybody[0].get(name)]
        more = f", and {len(differing) - 1} more differ" if len(differing) > 1 else ""
        raise DisagreementError(
            f"the models to keep equal are not: {name!r} on rank 0 differs from {_ranks(others)}{more}",
            calls={rank: f"{name}: {told.get(name, _ABSENT)}" for rank, told in enumerate(everybody)},
            remedy="build the same model with the same settings on every rank, then wrap it",
        )
    orders = [list(told) for told in everybody]
    if any(order != orders[0] for order in orders):
        place = next(place for place, found in enumerate(zip(*orders, strict=True)) if len(set(found)) > 1)
        raise DisagreementError(
            f"the models to keep equal hold their parameters in another order, from number {place} on",
            calls={rank: order[place] for rank, order in enumerate(orders)},
            remedy="register the model's parts in the same order on every rank",
        )


def describe(model: nn.Module) -> list[list[str]]:
    """Name and a short text for every parameter and buffer, in order."""
    described = []
    for name, parameter in model.named_parameters():
        frozen = "" if parameter.requires_grad else ", frozen"
        described.append([name, f"parameter {_about(parameter)}{frozen}"])
    for name, buffer in model.named_buffers():
        described.append([name, f"buffer {_about(buffer)}"])
    return described


def copy_from_root(context: DistributedContext, tensors: Iterable[Tensor]) -> None:
    """Rank 0's values into everybody's tensors, many tensors per message."""
    for group in _groups(tensors):
        sizes = [tensor.numel() for tensor in group]
        if context.is_master:
            context.broadcast(torch.cat([tensor.detach().cpu().reshape(-1) for tensor in group]), 0)
            continue
        arrived: Tensor = context.broadcast(None, 0)
        if arrived.numel() != sum(sizes) or arrived.dtype != group[0].dtype:
            raise DisagreementError(
                f"rank 0 sent {_about(arrived)}, and rank {context.rank} has {_about(group[0])} "
                f"and {len(group) - 1} more to fill with it",
                remedy="keep the same buffers, with the same shapes, on every rank",
            )
        for tensor, piece in zip(group, torch.split(arrived, sizes), strict=True):
            # .data: a graph that is kept for another backward must not find this tensor modified.
            tensor.data.copy_(piece.view(tensor.shape))


def _groups(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Tensors of one dtype, a bounded number of bytes at a time, in an order that all ranks share."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            by_dtype.setdefault(tensor.dtype, []).append(tensor)
    for group in by_dtype.values():
        taken: list[Tensor] = []
        filled = 0
        for tensor in group:
            nbytes = tensor.numel() * tensor.element_size()
            if taken and filled + nbytes > _CHUNK_BYTES:
                yield taken
                taken, filled = [], 0
            taken.append(tensor)
            filled += nbytes
        yield taken


def _about(tensor: Tensor) -> str:
    text = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
    # The order of elements in memory is part of what travels.
    return text if tensor.is_contiguous() else f"{text} with strides {list(tensor.stride())}"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else "ranks " + ", ".join(map(str, ranks))
