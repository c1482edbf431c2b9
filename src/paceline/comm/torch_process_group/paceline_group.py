"""PacelineProcessGroup: the process group that torch calls.

Methods have torch's names and signatures; torch calls them from Python, and from C++ for DDP's reducer and
the functional collectives. A call that its caller waits for runs in the caller's thread; any other in the
group's background thread, in the order of the calls. Tensors on other devices than the CPU go to the backend
that the user named for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import wraps
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Store  # type: ignore[attr-defined]

from paceline.comm.call_status import PlannedCall, call_site, on_behalf_of
from paceline.comm.collectives.call_queue import CallQueue
from paceline.comm.collectives.reduction import Reducer
from paceline.comm.cost import LinkCosts
from paceline.comm.torch_process_group import NAME, device_map, tensor_calls
from paceline.comm.torch_process_group.background_threads import BackgroundThreads
from paceline.comm.torch_process_group.callback_order import CallOrder
from paceline.comm.torch_process_group.device_map import OtherDevices
from paceline.comm.torch_process_group.tensor_messages import TensorMessages
from paceline.comm.torch_process_group.work import (
    NotSupportedError,
    PacelineWork,
    profiled,
    profiler_runs,
    raise_for_torch,
)
from paceline.comm.transport.base import ANY_SOURCE, Transport, labels_of
from paceline.core.errors import DisagreementError, GroupInterruptedError, PacelineError

_CLOSE_SECONDS = 5.0

Method = TypeVar("Method", bound=Callable[..., Any])


def _tensor_in(argument: Any) -> Tensor | None:
    while isinstance(argument, list | tuple):
        if not argument:
            return None
        argument = argument[0]
    return argument if isinstance(argument, Tensor) else None


def _no_split(call: str) -> NotSupportedError:
    return NotSupportedError(
        f"ProcessGroup.{call} of the backend {NAME!r}: groups are not made of others",
        remedy="use torch.distributed.new_group",
    )


def _by_device(method: Method) -> Method:
    """Hand the call to the group of the tensor's device where that is not the CPU."""
    name = method.__name__

    @wraps(method)
    def chosen(self: PacelineProcessGroup, *args: Any, **kwargs: Any) -> Any:
        for argument in args[:2]:
            tensor = _tensor_in(argument)
            if tensor is not None:
                if tensor.device.type != "cpu":
                    return getattr(self.other_group(tensor.device), name)(*args, **kwargs)
                break
        return method(self, *args, **kwargs)

    return chosen  # type: ignore[return-value]


# torch declares overloads for its C++ bindings; what it calls on a group in Python is one form of each.
_TorchGroup: Any = ProcessGroup


class PacelineProcessGroup(_TorchGroup):  # type: ignore[misc]
    """One group of ranks on Paceline's transports."""

    def __init__(
        self, transport: Transport, links: LinkCosts, store: Store, timeout: timedelta, name: str
    ) -> None:
        super().__init__(transport.rank, transport.world_size)
        self._transport = transport
        self._store = store
        self._name = name
        self._description = ""
        self._queue = CallQueue(transport, timeout.total_seconds())
        self._reducer = Reducer(transport, links)
        self._threads = BackgroundThreads("paceline-torch")
        self._order = CallOrder(self._threads, labels_of(transport)[transport.rank])
        queue = self._queue  # not through the group, which would hold itself
        self._messages = TensorMessages(transport, self._threads, lambda: queue.timeout)
        self._others = OtherDevices(store, transport.rank, transport.world_size, timeout)
        self._register_backend(torch.device("cpu"), ProcessGroup.BackendType.CUSTOM, None)

    # who

    def getBackendName(self) -> str:  # noqa: N802
        return NAME

    def name(self) -> str:
        return NAME

    def _get_backend_name(self) -> str:
        return NAME

    @property
    def group_name(self) -> str:
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def getGroupName(self) -> str:  # noqa: N802
        return self._name

    @property
    def group_desc(self) -> str:
        return self._description

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    def getGroupDesc(self) -> str:  # noqa: N802
        return self._description

    def get_group_store(self) -> Store:
        return self._store

    def _get_backend(self, device: torch.device) -> Any:
        """Return what serves a device: this group itself for the CPU."""
        if device.type == "cpu" or device_map.config_of(self) is None:
            # torch asks once before it registers the group, to connect the backend of `device_id` at once
            # if it supports splitting. The group makes that backend later.
            return self
        return self.other_group(device)._get_backend(device)

    @property
    def supports_splitting(self) -> bool:
        return False

    @property
    def supports_coalescing(self) -> bool:
        return False

    @property
    def supports_time_estimate(self) -> bool:
        return False

    # What torch asks a backend, which this group is for the CPU.

    @property
    def supports_shrinking(self) -> bool:
        return False

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return False

    def eager_connect_single_device(self, device: torch.device) -> None:
        """Do nothing: the ranks have connected when the group was made."""

    def split_group(self, *args: Any, **kwargs: Any) -> Any:
        raise _no_split("split_group")

    def merge_remote_group(self, *args: Any, **kwargs: Any) -> Any:
        raise _no_split("merge_remote_group")

    def other_group(self, device: torch.device) -> Any:
        """Return the group of torch's for a device other than the CPU."""
        return self._others.group_for(device, device_map.config_of(self) or "")

    def __repr__(self) -> str:
        return f"PacelineProcessGroup(rank={self.rank()}, size={self.size()}, over {self._transport.name})"

    # life

    def set_timeout(self, timeout: timedelta) -> None:
        self._queue.timeout = timeout.total_seconds()
        self._others.set_timeout(timeout)

    _set_default_timeout = set_timeout

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: the queue numbers the calls of a group from the start."""

    def _get_sequence_number_for_group(self) -> int:
        return self._queue.calls

    def shutdown(self) -> None:
        """Leave the group after what is under way."""
        self._threads.wait_idle(_CLOSE_SECONDS)
        self._others.shutdown()
        self._queue.close()
        self._reducer.forget()

    def leave(self, error: BaseException | None = None) -> None:
        """Leave the group without waiting, at the end of the process: in good order, or because of an
        error."""
        self._queue.close(error)

    def abort(self) -> None:
        """Leave the group at once: what this rank waits for ends with an error, here and on its peers."""
        self._queue.interrupt("its process group was aborted")
        self._queue.close(GroupInterruptedError(f"rank {self.rank()} aborted its process group"))
        self._others.abort()

    # collectives

    @_by_device
    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> PacelineWork:
        opts = opts if opts is not None else dist.AllreduceOptions()
        planned = self._plan(tensor_calls.plan_all_reduce, self._reducer, tensors, opts.reduceOp)
        return self._run(planned, tensors, opts)

    @_by_device
    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any = None) -> PacelineWork:
        return self.allreduce(tensors, opts)

    @_by_device
    def broadcast(self, tensors: Sequence[Tensor], opts: Any) -> PacelineWork:
        plans = [self._plan(tensor_calls.plan_broadcast, tensor, opts.rootRank) for tensor in tensors]
        return self._run(tensor_calls.plan_all("broadcast", plans), tensors, opts)

    @_by_device
    def reduce(self, tensors: Sequence[Tensor], opts: Any) -> PacelineWork:
        plans = [
            self._plan(tensor_calls.plan_reduce_to, tensor, opts.rootRank, opts.reduceOp)
            for tensor in tensors
        ]
        return self._run(tensor_calls.plan_all("reduce", plans), tensors, opts)

    @_by_device
    def allgather(
        self, outputs: Sequence[Sequence[Tensor]], tensors: Sequence[Tensor], opts: Any = None
    ) -> PacelineWork:
        plans = [
            self._plan(tensor_calls.plan_all_gather, output, tensor)
            for output, tensor in zip(outputs, tensors, strict=True)
        ]
        flat = [tensor for output in outputs for tensor in output]
        return self._run(tensor_calls.plan_all("all_gather", plans), flat, opts, tensors)

    @_by_device
    def allgather_coalesced(
        self, outputs: Sequence[Sequence[Tensor]], tensors: Sequence[Tensor], opts: Any = None
    ) -> PacelineWork:
        """Gather several tensors: `outputs[rank][index]` is the tensor with that index of that rank."""
        return self.allgather([list(column) for column in zip(*outputs, strict=True)], tensors, opts)

    @_by_device
    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> PacelineWork:
        planned = self._plan(tensor_calls.plan_all_gather_single, output, tensor)
        return self._run(planned, [output], opts, [tensor])

    @_by_device
    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], tensors: Sequence[Tensor], opts: Any = None
    ) -> PacelineWork:
        plans = [
            self._plan(tensor_calls.plan_all_gather_single, output, tensor)
            for output, tensor in zip(outputs, tensors, strict=True)
        ]
        return self._run(tensor_calls.plan_all("all_gather", plans), outputs, opts)

    @_by_device
    def reduce_scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any = None
    ) -> PacelineWork:
        return self._reduce_scatter(outputs, inputs, opts)

    @_by_device
    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> PacelineWork:
        return self._reduce_scatter([output], [tensor], opts)

    @_by_device
    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> PacelineWork:
        return self._reduce_scatter(outputs, inputs, opts)

    def _reduce_scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor | Sequence[Tensor]], opts: Any
    ) -> PacelineWork:
        opts = opts if opts is not None else dist.ReduceScatterOptions()
        plans = [
            self._plan(tensor_calls.plan_reduce_scatter, output, given, opts.reduceOp)
            for output, given in zip(outputs, inputs, strict=True)
        ]
        return self._run(tensor_calls.plan_all("reduce_scatter", plans), outputs, opts)

    @_by_device
    def alltoall(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None) -> PacelineWork:
        return self._run(self._plan(tensor_calls.plan_all_to_all, outputs, inputs), outputs, opts)

    @_by_device
    def all_to_all_single(
        self,
        output: Tensor,
        tensor: Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        opts: Any = None,
    ) -> PacelineWork:
        planned = self._plan(
            tensor_calls.plan_all_to_all_single,
            output,
            tensor,
            output_split_sizes or (),
            input_split_sizes or (),
        )
        return self._run(planned, [output], opts)

    @_by_device
    def gather(
        self, outputs: Sequence[Sequence[Tensor]], tensors: Sequence[Tensor], opts: Any
    ) -> PacelineWork:
        output = list(outputs[0]) if outputs else []
        planned = self._plan(tensor_calls.plan_gather, output, tensors[0], opts.rootRank)
        return self._run(planned, output, opts, tensors)

    @_by_device
    def scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any
    ) -> PacelineWork:
        given = list(inputs[0]) if inputs else []
        planned = self._plan(tensor_calls.plan_scatter, outputs[0], given, opts.rootRank)
        return self._run(planned, outputs, opts, given)

    def barrier(self, opts: Any = None) -> PacelineWork:
        return self._run(tensor_calls.plan_barrier(self._transport), (), opts)

    def monitored_barrier(
        self, timeout: timedelta | float | None = None, wait_all_ranks: bool = False
    ) -> None:
        """Return when all ranks have called it; within the timeout, or rank 0 names those that are late."""
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        seconds = self._queue.timeout if seconds is None else seconds
        try:
            self._queue.check_open()
            self._messages.monitored_barrier(seconds, wait_all_ranks)
        except PacelineError as error:
            raise_for_torch(error)

    # point to point

    @_by_device
    def send(self, tensors: Sequence[Tensor], dest: int, tag: int = 0) -> PacelineWork:
        return self._message(self._messages.send, tensors[0], dest, tag)

    @_by_device
    def recv(self, tensors: Sequence[Tensor], source: int, tag: int = 0) -> PacelineWork:
        return self._message(self._messages.receive, tensors[0], source, tag)

    @_by_device
    def recv_anysource(self, tensors: Sequence[Tensor], tag: int = 0) -> PacelineWork:
        return self._message(self._messages.receive, tensors[0], ANY_SOURCE, tag)

    # Names of torch before 2.13, and those that its C++ looks for beside the new ones.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    def _message(
        self, start: Callable[[Tensor, int, int], PacelineWork], tensor: Tensor, peer: int, tag: int
    ) -> PacelineWork:
        try:
            self._queue.check_open()
            return start(tensor, peer, tag)
        except PacelineError as error:
            raise_for_torch(error)

    def _plan(self, planner: Callable[..., PlannedCall[Any]], *args: Any) -> PlannedCall[Any]:
        return planner(self._transport, *args)

    def _run(
        self,
        planned: PlannedCall[Any],
        result: Sequence[Tensor],
        opts: Any,
        inputs: Sequence[Tensor] | None = None,
    ) -> PacelineWork:
        """Run a call here if its caller waits for it and nothing is ahead of it, else in the background.
        `inputs` are for the profiler, where they are not the result."""
        seconds = opts.timeout.total_seconds() if opts is not None else -1.0
        timeout = seconds if seconds > 0 else None
        # The profiler knows a collective by its end in another thread.
        here = opts is not None and not opts.asyncOp and not profiler_runs()
        if here and self._order.begin_here():
            try:
                self._queue.run(planned, timeout)
            except PacelineError as error:
                raise_for_torch(error)
            return PacelineWork(planned.text, result, done=True)
        return self._start(planned, result, timeout, result if inputs is None else inputs)

    def _start(
        self,
        planned: PlannedCall[Any],
        result: Sequence[Tensor],
        timeout: float | None,
        inputs: Sequence[Tensor],
    ) -> PacelineWork:
        try:
            self._queue.check_open()
        except PacelineError as error:
            raise_for_torch(error)
        work, line = PacelineWork(planned.text, result), call_site()
        inference, ended = torch.is_inference_mode_enabled(), profiled(planned.operation, inputs)

        def later() -> None:
            with on_behalf_of(line):  # what callbacks of its future do, too
                try:
                    with torch.inference_mode(inference):
                        self._queue.run(planned, timeout)
                    ended()
                except BaseException as error:
                    work.fail(error)
                else:
                    work.finish()

        try:
            work.issued = self._order.submit(later, f"{planned.text} at {line}")
        except PacelineError as error:
            if isinstance(error, DisagreementError):
                self._queue.fail(error)
            raise_for_torch(error)
        return work
