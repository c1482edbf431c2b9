"""The backend's own all-reduce (Gloo, NCCL, MPI), behind one face.

The order of summation, the precision on the way and the dtypes are the backend's, and so is who may
connect: nothing that these groups carry is authenticated. `start` hands an all-reduce to a thread of this
module, for the backends' waits can neither be polled nor cancelled. Knows torch's groups, not Paceline's
calls.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]

from paceline.comm.ops import ReduceOp, dtype_name, finish
from paceline.comm.transport.bulk import Transfer
from paceline.comm.transport.gloo import abort
from paceline.core.errors import UnavailableError, UsageError

BACKENDS = ("gloo", "nccl", "mpi")
_LAST_SECONDS = 2.0

_GLOO_DTYPES = frozenset(
    (
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.int8,
        torch.uint8,
        torch.int32,
        torch.int64,
    )
)


class NativeGroup:
    """`make(deadline)` gives a group or backend of torch, the first time one is needed; `device` is where it
    wants tensors (None: where they are)."""

    def __init__(
        self,
        backend: str,
        make: Callable[[float], Any],
        world_size: int,
        rank: int,
        device: torch.device | None = None,
    ) -> None:
        self.backend = backend
        self._make = make
        self._group: Any = None
        self._world_size = world_size
        self._peers = [peer for peer in range(world_size) if peer != rank]
        self._device = device
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._under_way = 0
        self._closing = threading.Lock()

    def check(self, op: ReduceOp, tensor: Tensor) -> None:
        """Refuses what the backend would refuse, before anything travels."""
        if self.backend == "gloo" and tensor.dtype not in _GLOO_DTYPES and not tensor.is_complex():
            allowed = ", ".join(sorted(dtype_name(dtype) for dtype in _GLOO_DTYPES))
            raise UsageError(
                f"Gloo's own all-reduce does not know {dtype_name(tensor.dtype)}",
                remedy=f"use algorithm='auto', or one of {allowed}",
            )
        if tensor.is_complex() and op not in (ReduceOp.SUM, ReduceOp.AVERAGE):
            raise UsageError(
                f"the backend's own all-reduce cannot do {op.name} of complex numbers",
                remedy="use algorithm='auto'",
            )

    def start(self, op: ReduceOp, tensor: Tensor, deadline: float, notify: Callable[[], None]) -> Transfer:
        """All-reduces in place, in the thread of this group; `notify` is called at the end."""
        transfer = Transfer(-1)

        def run() -> None:
            try:
                self._all_reduce(op, tensor, deadline)
            except BaseException as error:
                transfer.error = error
            transfer.done = True
            self._under_way -= 1
            notify()

        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="paceline-native", daemon=True)
            self._thread.start()
        self._under_way += 1
        self._queue.put(run)
        return transfer

    def _run(self) -> None:
        while (errand := self._queue.get()) is not None:
            errand()
            del errand  # and with it the tensor

    def _all_reduce(self, op: ReduceOp, tensor: Tensor, deadline: float) -> None:
        if self._group is None:
            self._group = self._make(deadline)
        values = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        moved = values if self._device is None or values.is_cuda else values.to(self._device)
        options = dist.AllreduceOptions()
        options.reduceOp = _torch_op(op)
        options.timeout = timedelta(seconds=max(deadline - time.monotonic(), 0.001) + 1)
        self._group.allreduce([moved], options).wait()
        if moved.is_cuda:
            torch.cuda.current_stream(moved.device).synchronize()
        if moved is not values:
            values.copy_(moved)
        finish(op, tensor, self._world_size)

    def abort(self) -> None:
        """Ends an all-reduce that is under way; the group is of no use afterwards."""
        if self._group is None:
            return
        if self.backend == "gloo":
            backend = self._group
            if hasattr(backend, "_get_backend"):
                backend = backend._get_backend(torch.device("cpu"))
            abort(backend, self._peers)
        elif self.backend == "nccl":
            self._group.abort()

    def close(self, *, in_haste: bool = False) -> None:
        """Ends what is under way, the thread and the group; in haste, a group's own threads end after the
        return."""
        with self._closing:
            if self._under_way:
                self.abort()
            if self._thread is not None:
                self._queue.put(None)
                # A collective of the backend itself may take until its own deadline to end.
                self._thread.join(_LAST_SECONDS)
                self._thread = None
            holder, self._group = [self._group], None
            if in_haste and holder[0] is not None:
                # Gloo takes some 20 ms to end its threads. Not a daemon: the interpreter waits for it.
                threading.Thread(target=holder.clear, name="paceline-native-end").start()


def check_backend(backend: str) -> None:
    """Refuses a backend that this build of torch does not have."""
    if backend == "nccl" and not (dist.is_nccl_available() and torch.cuda.is_available()):
        raise UnavailableError(
            "backend='nccl' needs a CUDA build of torch and a GPU; there is none here",
            remedy="use backend='gloo' or 'auto'",
        )
    if backend == "mpi" and not dist.is_mpi_available():
        raise UnavailableError(
            "backend='mpi': this build of torch was made without MPI",
            remedy="use backend='gloo' (it also runs under mpirun), or build torch with MPI",
        )


def own_group(backend: str, gloo: Callable[[float], Any], rank: int, world_size: int) -> NativeGroup:
    """A native group where the caller has none; `gloo(deadline)` makes one of Gloo when it is called for."""
    if backend == "mpi":
        mpi: Any = dist.ProcessGroupMPI  # type: ignore[attr-defined,unused-ignore]
        group = mpi.create(list(range(world_size)))
        return NativeGroup(backend, lambda deadline: group, world_size, rank)
    return NativeGroup("gloo", gloo, world_size, rank)


def nccl_group(store: Store, rank: int, world_size: int, local_rank: int) -> NativeGroup:
    """An NCCL group on the GPU that belongs to this rank of its host."""
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    nccl: Any = dist.ProcessGroupNCCL  # type: ignore[attr-defined,unused-ignore]
    group = nccl(store, rank, world_size)
    return NativeGroup("nccl", lambda deadline: group, world_size, rank, device)


def _torch_op(op: ReduceOp) -> Any:
    return {
        ReduceOp.SUM: dist.ReduceOp.SUM,
        ReduceOp.AVERAGE: dist.ReduceOp.SUM,
        ReduceOp.MIN: dist.ReduceOp.MIN,
        ReduceOp.MAX: dist.ReduceOp.MAX,
        ReduceOp.PRODUCT: dist.ReduceOp.PRODUCT,
    }[op]
