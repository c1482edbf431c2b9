"""One all-reduce to be done: the data, the operation and the means. Plain data that every algorithm takes."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from paceline.comm.calls import Call
from paceline.comm.compression.base import Compression
from paceline.comm.ops import ReduceOp
from paceline.comm.transport.base import Transport


@dataclass(slots=True)
class Job:
    """`flat` is this rank's contribution, `out` takes the result and may be the same memory; both are flat
    CPU tensors of one dtype."""

    transport: Transport
    call: Call
    op: ReduceOp
    flat: Tensor
    out: Tensor
    deadline: float
    compression: Compression | None = None
    name: str = ""  # whose error-feedback residual it is
    groups: tuple[
        tuple[int, ...], ...
    ] = ()  # ranks by host, for hierarchical; empty: as the transport sees it
