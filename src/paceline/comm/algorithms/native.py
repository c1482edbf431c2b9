"""Native all-reduce: torch.distributed's own, unchanged.

Idea: the backend of the process group (NCCL on GPUs, MPI, Gloo) has its own all-reduce; hand the
tensor to it.
What travels, what it costs: the backend's business; it is not counted here beyond the size of the message.
What it asks: a transport over torch.distributed. The order of summation is the backend's, and so is the
precision on the way.
"""

from __future__ import annotations

from typing import cast

from paceline.comm.algorithms.reduce_request import ReduceRequest
from paceline.comm.cost import LinkCosts, Situation
from paceline.comm.transport.base import NativeAllReduce


def run(request: ReduceRequest) -> None:
    transport = cast(NativeAllReduce, request.transport)  # reduction.py lets no other come here
    if request.out.data_ptr() != request.flat.data_ptr():
        request.out.copy_(request.flat)
    transport.native_all_reduce(request.call, request.op, request.out, request.deadline)


def cost(situation: Situation, links: LinkCosts) -> float:
    """Return 0 where tensors are on GPUs and the backend moves them there, so that it wins; else infinity."""
    if situation.native == "nccl" and situation.on_gpu and not situation.compressed:
        return 0.0
    return float("inf")
