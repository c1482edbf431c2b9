"""Native all-reduce: torch.distributed's own, unchanged.

Idea: the backend of the process group (NCCL on GPUs, MPI, Gloo) has an all-reduce of its own; hand the
tensor to it.
What travels, what it costs: the backend's business; it is not counted here beyond the size of the message.
What it asks: a transport over torch.distributed. The order of summation is the backend's, and so is the
precision on the way.
"""

from __future__ import annotations

from typing import Protocol, cast

from torch import Tensor

from paceline.comm.algorithms.job import Job
from paceline.comm.calls import Call
from paceline.comm.cost import Links, Situation
from paceline.comm.ops import ReduceOp


class HasNative(Protocol):
    """A transport over torch.distributed."""

    def native_all_reduce(self, call: Call, op: ReduceOp, tensor: Tensor, deadline: float) -> None: ...


def run(job: Job) -> None:
    transport = cast(HasNative, job.transport)  # reduction.py lets no other come here
    if job.out.data_ptr() != job.flat.data_ptr():
        job.out.copy_(job.flat)
    transport.native_all_reduce(job.call, job.op, job.out, job.deadline)


def cost(situation: Situation, links: Links) -> float:
    """Only where tensors are on GPUs and the backend moves them there; elsewhere Paceline's own count
    their bytes."""
    if situation.native == "nccl" and situation.on_gpu and not situation.compressed:
        return 0.0
    return float("inf")
