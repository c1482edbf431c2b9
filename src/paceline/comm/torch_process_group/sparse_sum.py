"""The sum of sparse tensors: ranks gather each other's indices and values, which differ in number, and each
rank adds them up in rank order; 16-bit floats in fp32, rounded once, as dense ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp as TorchOp

from paceline.comm.call_status import CollectiveCall, PlannedCall
from paceline.comm.collectives import tensor_movement
from paceline.comm.ops import accumulator_dtype, dtype_name
from paceline.comm.transport.base import Transport
from paceline.core.errors import UsageError


def plan_sparse_sum(transport: Transport, tensors: Sequence[Tensor], kind: Any) -> PlannedCall[Any]:
    """Plan an all-reduce of one sparse COO tensor, in place."""
    if len(tensors) != 1 or tensors[0].layout is not torch.sparse_coo or kind != TorchOp.SUM:
        raise UsageError(
            "all_reduce of sparse tensors: one tensor of layout sparse_coo and ReduceOp.SUM at a time",
            remedy="reduce each sparse tensor in a call of its own, or call .to_dense()",
        )
    tensor = tensors[0]

    def work(call: CollectiveCall, deadline: float) -> None:
        mine = tensor.detach().coalesce()
        count = torch.tensor([mine._nnz()], device="cpu")
        counts = _gathered(transport, call, count, [1] * transport.world_size, deadline)
        entries = [int(count) for count in counts]
        dims = mine.sparse_dim()
        indices = _gathered(
            transport, call, mine.indices().t().contiguous(), [dims * count for count in entries], deadline
        )
        shape = mine.shape[dims:]
        values = _gathered(
            transport,
            call,
            mine.values().contiguous(),
            [shape.numel() * count for count in entries],
            deadline,
        )
        total = torch.sparse_coo_tensor(
            torch.cat([part.view(-1, dims) for part in indices]).t(),
            torch.cat([part.view(-1, *shape) for part in values]).to(accumulator_dtype(mine.dtype)),
            mine.shape,
            device="cpu",
        ).coalesce()
        # As in Gloo, the tensor gets the sum's entries, also where it has more of them than before.
        with torch.no_grad(), torch.inference_mode(tensor.is_inference() or total.is_inference()):
            tensor.copy_(total.to(mine.dtype))

    text = f"all_reduce(SUM, sparse {dtype_name(tensor.dtype)}{list(tensor.shape)})"
    return PlannedCall("all_reduce", text, work)


def _gathered(
    transport: Transport, call: CollectiveCall, mine: Tensor, sizes: Sequence[int], deadline: float
) -> list[Tensor]:
    outs = [torch.empty(size, dtype=mine.dtype, device="cpu") for size in sizes]
    raw = [out.view(torch.uint8) for out in outs]
    tensor_movement.all_gather(transport, call, mine.view(-1).view(torch.uint8), raw, deadline)
    return outs
