"""What an all-reduce algorithm is asked to do. Apart from the package, which loads the algorithms by name."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from paceline.comm.call_status import CollectiveCall
from paceline.comm.compression.error_feedback import Compression
from paceline.comm.ops import ReduceOp
from paceline.comm.transport.base import Transport


@dataclass(slots=True)
class ReduceRequest:
    """One all-reduce. `flat` is this rank's contribution, `out` takes the result and may be the same memory;
    both are flat CPU tensors of one dtype."""

    transport: Transport
    call: CollectiveCall
    op: ReduceOp
    flat: Tensor
    out: Tensor
    deadline: float
    compression: Compression | None = None
    name: str = ""  # whose error-feedback residual it is
    groups: tuple[tuple[int, ...], ...] = ()  # ranks by host, for hierarchical; empty: the transport's
