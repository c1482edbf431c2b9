"""Collectives of torch.distributed as planned calls: check the tensors, describe the call, run it on flat
memory, and write what is not flat back.

`text` describes a call for the comparison with the other ranks' calls, so it holds what must be equal on all
of them: operation, dtype, number of elements, root. Shapes may differ, as in Gloo."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce as fold
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp as TorchOp

from paceline.comm.call_status import CollectiveCall, PlannedCall
from paceline.comm.collectives import tensor_movement
from paceline.comm.collectives.data_movement import await_all_ranks
from paceline.comm.collectives.reduction import Reducer, plan_reduce
from paceline.comm.ops import ReduceOp, check_op, dtype_name
from paceline.comm.torch_process_group.flat_memory import FlatMemory, describe
from paceline.comm.torch_process_group.sparse_sum import plan_sparse_sum
from paceline.comm.transport.base import Transport, labels_of
from paceline.core.errors import UsageError
from paceline.core.wording import counted

_OPS = {
    TorchOp.SUM: ReduceOp.SUM,
    TorchOp.AVG: ReduceOp.AVERAGE,
    TorchOp.PRODUCT: ReduceOp.PRODUCT,
    TorchOp.MIN: ReduceOp.MIN,
    TorchOp.MAX: ReduceOp.MAX,
}
_BITWISE: dict[Any, tuple[str, Callable[[Tensor, Tensor], Tensor]]] = {
    TorchOp.BAND: ("BAND", torch.bitwise_and),
    TorchOp.BOR: ("BOR", torch.bitwise_or),
    TorchOp.BXOR: ("BXOR", torch.bitwise_xor),
}

CallBody = Callable[[CollectiveCall, float], None]


def plan_all_reduce(
    transport: Transport, reducer: Reducer, tensors: Sequence[Tensor], op: Any
) -> PlannedCall[Any]:
    """Plan an all-reduce in place, of one tensor or of several in one message."""
    kind = torch_op(op)
    if tensors[0].is_sparse:
        return plan_sparse_sum(transport, tensors, kind)
    opened = [FlatMemory.of(tensor, "all_reduce") for tensor in tensors]
    if kind in _BITWISE:
        return _bitwise_all_reduce(transport, opened, kind)
    if len(opened) == 1:
        planned = reducer.all_reduce_in_place(opened[0].flat, _OPS[kind])
    else:
        flats = [memory.flat for memory in opened]
        planned = reducer.all_reduce(flats, _OPS[kind], "auto", flats, None, "")
    return _written_back(planned, opened)


def plan_reduce_to(transport: Transport, tensor: Tensor, root: int, op: Any) -> PlannedCall[Any]:
    """Plan a reduction into the root's tensor."""
    memory, kind = FlatMemory.of(tensor, "reduce"), torch_op(op)
    if transport.rank == root:
        memory.check_writable("reduce")
    if kind in _BITWISE:
        return _bitwise_all_reduce(transport, [memory], kind, root)
    planned = plan_reduce(transport, memory.flat, root, _OPS[kind])
    inner = planned.work

    def work(call: CollectiveCall, deadline: float) -> None:
        result = inner(call, deadline)
        if result is not None:
            memory.flat.copy_(result)
            memory.write_back()

    planned.work = work
    return planned


def plan_broadcast(transport: Transport, tensor: Tensor, root: int) -> PlannedCall[Any]:
    memory = FlatMemory.of(tensor, "broadcast", values=transport.rank == root)

    def run(call: CollectiveCall, deadline: float) -> None:
        tensor_movement.broadcast(transport, call, memory.bytes, root, deadline)

    text = f"broadcast({describe(tensor)}, src={labels_of(transport)[root]})"
    return _planned("broadcast", text, run, () if transport.rank == root else (memory,))


def plan_all_gather(transport: Transport, outputs: Sequence[Tensor], mine: Tensor) -> PlannedCall[Any]:
    """Plan an all-gather into one tensor per rank; their sizes may differ from rank to rank."""
    _check_count("all_gather", len(outputs), transport)
    _check_fits("all_gather", outputs[transport.rank], mine)
    other = next((output for output in outputs if output.dtype != mine.dtype), None)
    if other is not None:
        raise UsageError(
            f"all_gather: {describe(other)} cannot take {dtype_name(mine.dtype)} of another rank",
            remedy="pass outputs of the input's dtype",
        )
    given = FlatMemory.of(mine, "all_gather")
    opened = [FlatMemory.of(output, "all_gather", values=False) for output in outputs]

    def run(call: CollectiveCall, deadline: float) -> None:
        outs = [memory.bytes for memory in opened]
        tensor_movement.all_gather(transport, call, given.bytes, outs, deadline)

    # By rank, since a rank that expects another size than its peer sends would read beyond it.
    sizes = [output.numel() for output in outputs]
    shown = sizes if len(set(sizes)) > 1 else sizes[:1]
    text = f"all_gather({dtype_name(mine.dtype)}{shown})"
    return _planned("all_gather", text, run, opened)


def plan_all_gather_single(transport: Transport, output: Tensor, mine: Tensor) -> PlannedCall[Any]:
    """Plan an all-gather into one tensor with a part for each rank."""
    if output.numel() != mine.numel() * transport.world_size or output.dtype != mine.dtype:
        raise UsageError(
            f"all_gather_into_tensor: {describe(mine)} of {counted(transport.world_size, 'rank')} do not "
            f"fill {describe(output)}",
            remedy="pass an output with world_size times the elements of the input, and of its dtype",
        )
    given = FlatMemory.of(mine, "all_gather_into_tensor")
    target = FlatMemory.of(output, "all_gather_into_tensor", values=False)

    def run(call: CollectiveCall, deadline: float) -> None:
        outs = (
            target.bytes.chunk(transport.world_size)
            if mine.numel()
            else [target.bytes] * transport.world_size
        )
        tensor_movement.all_gather(transport, call, given.bytes, outs, deadline)

    return _planned("all_gather", f"all_gather_into_tensor({describe(mine)})", run, (target,))


def plan_reduce_scatter(
    transport: Transport, output: Tensor, inputs: Tensor | Sequence[Tensor], op: Any
) -> PlannedCall[Any]:
    """Plan a reduce-scatter of a tensor with equal parts, or of a list with one tensor per rank."""
    kind = torch_op(op)
    if kind in _BITWISE:
        raise UsageError(
            f"reduce_scatter with ReduceOp.{_BITWISE[kind][0]}",
            remedy="call all_reduce and take this rank's part",
        )
    if isinstance(inputs, Tensor):
        if inputs.numel() != output.numel() * transport.world_size or inputs.dtype != output.dtype:
            raise UsageError(
                f"reduce_scatter: {describe(inputs)} has not {transport.world_size} parts like "
                f"{describe(output)}",
                remedy="pass an input with world_size times the elements of the output, and of its dtype",
            )
        flat = FlatMemory.of(inputs, "reduce_scatter").flat
    else:
        _check_count("reduce_scatter", len(inputs), transport)
        for part in inputs:
            _check_fits("reduce_scatter", output, part)
        flat = torch.cat([FlatMemory.of(part, "reduce_scatter").flat for part in inputs])
    check_op(_OPS[kind], output.dtype)
    target = FlatMemory.of(output, "reduce_scatter", values=False)

    def run(call: CollectiveCall, deadline: float) -> None:
        out, into = target.flat, target.flat
        if _overlaps(out, flat, transport.rank):
            into = torch.empty_like(out)
        tensor_movement.reduce_scatter(transport, call, _OPS[kind], flat, into, deadline)
        if into is not out:
            out.copy_(into)

    text = f"reduce_scatter({_OPS[kind].name}, {describe(flat)})"
    return _planned("reduce_scatter", text, run, (target,))


def plan_all_to_all(
    transport: Transport, outputs: Sequence[Tensor], inputs: Sequence[Tensor]
) -> PlannedCall[Any]:
    _check_count("all_to_all", len(outputs), transport)
    _check_count("all_to_all", len(inputs), transport)
    given = [FlatMemory.of(part, "all_to_all").bytes for part in inputs]
    opened = [FlatMemory.of(output, "all_to_all", values=False) for output in outputs]
    _check_fits("all_to_all", outputs[transport.rank], inputs[transport.rank])

    def run(call: CollectiveCall, deadline: float) -> None:
        outs = [memory.bytes for memory in opened]
        tensor_movement.all_to_all(transport, call, given, outs, deadline)

    return _planned("all_to_all", f"all_to_all({dtype_name(inputs[0].dtype)})", run, opened)


def plan_all_to_all_single(
    transport: Transport, output: Tensor, mine: Tensor, out_rows: Sequence[int], in_rows: Sequence[int]
) -> PlannedCall[Any]:
    """Plan an all-to-all of the rows of one tensor, cut equally or by the given numbers of rows."""
    if output.dtype != mine.dtype:
        raise UsageError(
            f"all_to_all_single: {describe(mine)} and {describe(output)} do not fit together",
            remedy="pass tensors of one dtype",
        )
    given = FlatMemory.of(mine, "all_to_all_single")
    target = FlatMemory.of(output, "all_to_all_single", values=False)
    ins = _cut_rows(transport, given, in_rows, "input")
    outs = _cut_rows(transport, target, out_rows, "output")
    rank = transport.rank
    if ins[rank].numel() != outs[rank].numel():
        raise UsageError(
            f"all_to_all_single: rank {labels_of(transport)[rank]} keeps {ins[rank].numel()} bytes for "
            f"itself and expects {outs[rank].numel()}",
            remedy="the split sizes of input and output have to agree for this rank's own part",
        )

    def run(call: CollectiveCall, deadline: float) -> None:
        tensor_movement.all_to_all_parts(transport, call, ins, outs, deadline)

    # With split sizes, which some ranks may give and others not, the numbers of elements differ.
    return _planned("all_to_all", f"all_to_all_single({dtype_name(mine.dtype)})", run, (target,))


def plan_gather(transport: Transport, outputs: Sequence[Tensor], mine: Tensor, root: int) -> PlannedCall[Any]:
    given = FlatMemory.of(mine, "gather").bytes
    opened: list[FlatMemory] = []
    if transport.rank == root:
        _check_count("gather", len(outputs), transport)
        for output in outputs:
            _check_fits("gather", output, mine)
        opened = [FlatMemory.of(output, "gather", values=False) for output in outputs]

    def run(call: CollectiveCall, deadline: float) -> None:
        outs = [memory.bytes for memory in opened]
        tensor_movement.gather(transport, call, given, outs, root, deadline)

    text = f"gather({describe(mine)}, dst={labels_of(transport)[root]})"
    return _planned("gather", text, run, opened)


def plan_scatter(
    transport: Transport, output: Tensor, inputs: Sequence[Tensor], root: int
) -> PlannedCall[Any]:
    target = FlatMemory.of(output, "scatter", values=False)
    given: list[Tensor] = []
    if transport.rank == root:
        _check_count("scatter", len(inputs), transport)
        for part in inputs:
            _check_fits("scatter", output, part)
        given = [FlatMemory.of(part, "scatter").bytes for part in inputs]

    def run(call: CollectiveCall, deadline: float) -> None:
        tensor_movement.scatter(transport, call, given, target.bytes, root, deadline)

    text = f"scatter({describe(output)}, src={labels_of(transport)[root]})"
    return _planned("scatter", text, run, (target,))


def plan_barrier(transport: Transport) -> PlannedCall[Any]:
    return _planned("barrier", "barrier()", lambda call, deadline: await_all_ranks(transport, call, deadline))


def plan_all(operation: str, plans: Sequence[PlannedCall[Any]]) -> PlannedCall[Any]:
    """Plan several calls as one: they run one after the other under one number."""
    if len(plans) == 1:
        return plans[0]

    def run(call: CollectiveCall, deadline: float) -> None:
        for planned in plans:
            planned.work(call, deadline)

    return _planned(operation, " + ".join(planned.text for planned in plans), run)


def torch_op(op: Any) -> Any:
    """Return torch's reduction as a key of the tables above; refuse those that only NCCL has."""
    kind = getattr(op, "op", op)
    if kind not in _OPS and kind not in _BITWISE:
        raise UsageError(
            f"{op} is not a reduction of the backend 'paceline'",
            remedy="use SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR or BXOR",
        )
    return kind


def _planned(
    operation: str, text: str, run: CallBody, written: Sequence[FlatMemory] = (), algorithm: str = ""
) -> PlannedCall[Any]:
    return _written_back(PlannedCall(operation, text, run, algorithm), written)


def _written_back(planned: PlannedCall[Any], written: Sequence[FlatMemory]) -> PlannedCall[Any]:
    indirect = [memory for memory in written if memory.flat.data_ptr() != memory.tensor.data_ptr()]
    for memory in indirect:
        memory.check_writable(planned.operation)
    if indirect:
        inner = planned.work

        def work(call: CollectiveCall, deadline: float) -> None:
            inner(call, deadline)
            for memory in indirect:
                memory.write_back()

        planned.work = work
    return planned


def _bitwise_all_reduce(
    transport: Transport, opened: Sequence[FlatMemory], kind: Any, root: int | None = None
) -> PlannedCall[Any]:
    """Plan a bitwise reduction: every rank gathers all contributions and combines them. Such reductions are
    of small masks, for which this is the fastest way as well."""
    name, kernel = _BITWISE[kind]
    for memory in opened:
        if memory.flat.is_floating_point() or memory.flat.is_complex():
            raise UsageError(
                f"all_reduce: ReduceOp.{name} of {dtype_name(memory.flat.dtype)}",
                remedy="bitwise reductions take integers and bool",
            )

    def run(call: CollectiveCall, deadline: float) -> None:
        for memory in opened:
            outs = [torch.empty_like(memory.flat) for _ in range(transport.world_size)]
            raw = [out.view(torch.uint8) for out in outs]
            tensor_movement.all_gather(transport, call, memory.bytes, raw, deadline)
            if root in (None, transport.rank):
                memory.flat.copy_(fold(kernel, outs))

    where = "" if root is None else f", dst={labels_of(transport)[root]}"
    sizes = " + ".join(describe(memory.flat) for memory in opened)
    written = opened if root in (None, transport.rank) else ()
    return _planned("all_reduce", f"all_reduce({name}, {sizes}{where})", run, written)


def _cut_rows(transport: Transport, memory: FlatMemory, rows: Sequence[int], what: str) -> list[Tensor]:
    size, length = transport.world_size, len(memory.tensor) if memory.tensor.ndim else 0
    if not rows:
        if length % size:
            raise UsageError(
                f"all_to_all_single: {length} rows of the {what} cannot be cut equally for "
                f"{counted(size, 'rank')}",
                remedy="pass split sizes, or a number of rows that the number of ranks divides",
            )
        rows = [length // size] * size
    if len(rows) != size or sum(rows) != length:
        raise UsageError(
            f"all_to_all_single: split sizes {list(rows)} for {length} rows of the {what} and "
            f"{counted(size, 'rank')}",
            remedy="pass one size per rank, which add up to the number of rows",
        )
    row = memory.bytes.numel() // length if length else 0
    return list(torch.split(memory.bytes, [count * row for count in rows]))


def _overlaps(out: Tensor, flat: Tensor, rank: int) -> bool:
    """Return whether writing to `out` would change what peers still read of `flat`."""
    # By address and not by storage: two tensors can be made of one array of NumPy's.
    start, own = out.data_ptr() - flat.data_ptr(), rank * out.nbytes
    return start != own and -out.nbytes < start < flat.nbytes


def _check_count(what: str, given: int, transport: Transport) -> None:
    if given != transport.world_size:
        raise UsageError(
            f"{what}: {counted(given, 'tensor')} for {counted(transport.world_size, 'rank')}",
            remedy="pass one tensor per rank of the group",
        )


def _check_fits(what: str, one: Tensor, other: Tensor) -> None:
    if one.numel() != other.numel() or one.dtype != other.dtype:
        raise UsageError(
            f"{what}: {describe(one)} and {describe(other)} do not fit together",
            remedy="pass tensors of one dtype and one number of elements",
        )
