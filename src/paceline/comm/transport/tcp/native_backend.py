"""The backend's own all-reduce (Gloo, NCCL, MPI), behind one interface.

The order of summation, the precision on the way and the dtypes are the backend's, and so is who may
connect: nothing that these groups carry is authenticated. So there is no group of Gloo until all ranks have
called for it (algorithm="native"); Paceline's own algorithms never use it. `start` hands an all-reduce to a
thread of this module, for the backends' waits can neither be polled nor cancelled.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroupGloo, Store  # type: ignore[attr-defined]

from paceline.comm.call_status import RankState
from paceline.comm.ops import ReduceOp, dtype_name, finish
from paceline.comm.transport.tcp.bulk_transfer import BulkTransfer
from paceline.comm.transport.tcp.mesh import Mesh
from paceline.comm.transport.wait_watch import LOOK_SECONDS
from paceline.core.errors import UnavailableError, UsageError
from paceline.core.wording import ranks

BACKENDS = ("gloo", "nccl", "mpi")
_LAST_SECONDS = 2.0

_FOREVER = timedelta(days=1)
_UNUSED_TAG = 0
_GLOO_DTYPES = frozenset(
    getattr(torch, name)
    for name in ("float16", "bfloat16", "float32", "float64", "int8", "uint8", "int32", "int64")
)


class BackendGroup:
    """Group of a backend. `make(deadline)` gives a group or backend of torch, the first time one is needed;
    `device` is where it wants tensors (None: where they are)."""

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
        """Refuse what the backend would refuse, before anything travels."""
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

    def start(
        self, op: ReduceOp, tensor: Tensor, deadline: float, notify: Callable[[], None]
    ) -> BulkTransfer:
        """All-reduce in place, in the thread of this group; `notify` is called at the end."""
        transfer = BulkTransfer(-1)

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
        # Averages are divided at the end, by `finish`.
        options.reduceOp = getattr(dist.ReduceOp, "SUM" if op is ReduceOp.AVERAGE else op.name)
        options.timeout = timedelta(seconds=max(deadline - time.monotonic(), 0.001) + 1)
        self._group.allreduce([moved], options).wait()
        if moved.is_cuda:
            torch.cuda.current_stream(moved.device).synchronize()
        if moved is not values:
            values.copy_(moved)
        finish(op, tensor, self._world_size)

    def abort(self) -> None:
        """End an all-reduce that is under way; the group is of no use afterwards."""
        if self._group is None:
            return
        if self.backend == "gloo":
            backend = self._group
            if hasattr(backend, "_get_backend"):
                backend = backend._get_backend(torch.device("cpu"))
            _abort_gloo(backend, self._peers)
        elif self.backend == "nccl":
            self._group.abort()

    def close(self, *, in_haste: bool = False) -> None:
        """End what is under way, the thread and the group; in haste, the group's threads end later."""
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


@final
class _NoteStore(Store):
    """Store over the mesh, for a process group of torch to come up: every key is set by one rank, once."""

    def __init__(self, mesh: Mesh, deadline: float) -> None:
        super().__init__()
        self._mesh = mesh
        self._deadline = deadline

    def set(self, key: str, value: str | bytes) -> None:
        self._mesh.note(key, value.encode() if isinstance(value, str) else value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._mesh.notes[key]

    def check(self, keys: Sequence[str]) -> bool:
        return all(key in self._mesh.notes for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        while True:
            self._mesh.check_open()
            seen = self._mesh.version
            if self.check(keys):
                return
            peers, labels = self._mesh.peers(), self._mesh.labels
            gone = [labels[rank] for rank, peer in peers.items() if peer.state is not RankState.RUNNING]
            if gone or time.monotonic() >= self._deadline:
                raise TimeoutError(
                    f"{', '.join(keys)} did not come"
                    + (f": {ranks(gone, all_named=True)} left" if gone else "")
                )
            self._mesh.wait(seen, LOOK_SECONDS)


def _open_gloo(mesh: Mesh, address: str, deadline: float) -> Any:
    """Make this rank's end of a Gloo group; all ranks make it now and exchange addresses over the mesh."""
    options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [ProcessGroupGloo.create_device(hostname=address)]
    options._timeout = timedelta(seconds=max(deadline - time.monotonic(), 1.0))
    options._threads = 1
    group: Any = ProcessGroupGloo(_NoteStore(mesh, deadline), mesh.rank, mesh.world_size, options)
    group.set_timeout(_FOREVER)
    return group


def _abort_gloo(group: Any, peers: Sequence[int]) -> None:
    """Make every wait on a Gloo group end with an error, here and now; the group is of no use afterwards.

    Gloo's waits cannot be cancelled. The way out uses what Gloo does when a wait times out: it closes every
    connection of the group, and with that every wait for a receive ends. So wait a millisecond for a message
    that is never sent.
    """
    for peer in peers:
        try:
            group.recv([torch.empty(1, device="cpu")], peer, _UNUSED_TAG).wait(timedelta(milliseconds=1))
        except RuntimeError as error:
            # A connection that is closed already fails at once; the others need one that times out.
            if "imed out" in str(error):
                return


def check_backend(backend: str) -> None:
    """Refuse a backend that this build of torch does not have."""
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


def own_group(backend: str, mesh: Mesh, address: str) -> BackendGroup:
    """Make a native group where the caller has none; one of Gloo comes up when it is first needed."""
    if backend == "mpi":
        mpi: Any = dist.ProcessGroupMPI  # type: ignore[attr-defined,unused-ignore]
        group = mpi.create(list(range(mesh.world_size)))
        return BackendGroup(backend, lambda deadline: group, mesh.world_size, mesh.rank)
    return BackendGroup("gloo", partial(_open_gloo, mesh, address), mesh.world_size, mesh.rank)


def nccl_group(store: Store, rank: int, world_size: int, local_rank: int) -> BackendGroup:
    """Make an NCCL group on the GPU that belongs to this rank of its host."""
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    nccl: Any = dist.ProcessGroupNCCL  # type: ignore[attr-defined,unused-ignore]
    group = nccl(store, rank, world_size)
    return BackendGroup("nccl", lambda deadline: group, world_size, rank, device)
