"""Native all-reduce: torch.distributed's own, unchanged.

Idea: the backend of the process group (NCCL on GPUs, MPI, Gloo) has an all-reduce of its own; hand the
tensor to it.
What travels, what it costs: the backend's business; it is not counted here beyond the size of the message.
What it asks: a transport over torch.distributed. The order of summation is the backend's, and so is the
precision on the way.
"""

from __future__ import annotations

from paceline.comm.algorithms.job import Job
from paceline.comm.cost import Links, Situation
from paceline.core.errors import UsageError


def run(job: Job) -> None:
    native = getattr(job.transport, "native_all_reduce", None)
    if native is None or job.compression is not None:
        raise UsageError(
            f"algorithm='native' needs a group of torch.distributed and no compression; "
            f"this one is {job.transport.name!r}",
            remedy="use algorithm='auto', or init_process_group(backend='gloo')",
        )
    if job.out.data_ptr() != job.flat.data_ptr():
        job.out.copy_(job.flat)
    native(job.call, job.op, job.out, job.deadline)


def cost(situation: Situation, links: Links) -> float:
    """Only where tensors are on GPUs and the backend moves them there; elsewhere Paceline's own count
    their bytes."""
    if situation.native == "nccl" and situation.on_gpu and not situation.compressed:
        return 0.0
    return float("inf")
