"""Communication as plain functions on the default group, written as users of torch.distributed write it.

Tensors are filled in place, as torch does, and returned; arrays, numbers and plain Python data are returned.
Where torch takes the output first (`all_gather(outputs, tensor)`), both forms work. `src` and `dst` are
torch's names for `root_rank`, `source_rank` and `dest_rank`. `group=` takes a DistributedContext, which does
everything but putting arguments and results in their places. `timeout`: seconds to wait for peers.
`async_op=True`: return a handle at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

from torch import Tensor

from paceline.comm import default_group
from paceline.comm.collectives.call_queue import finished
from paceline.comm.collectives.result_buffers import check_fits, fill, fill_by_rank, fits
from paceline.comm.compression import Compression, PowerSGD
from paceline.comm.context import DistributedContext
from paceline.comm.ops import ReduceOp
from paceline.core.errors import UsageError
from paceline.core.wording import counted, with_article

ANY = -1


def all_reduce(
    data: Any,
    op: Any = ReduceOp.SUM,
    algorithm: str = "auto",
    *,
    compression: Compression | PowerSGD | None = None,
    name: str = "default",
    group: DistributedContext | None = None,
    timeout: float | None = None,
    async_op: bool = False,
) -> Any:
    """Combine the data of all ranks: one or several tensors in place, anything else as a new value."""
    out = data if _are_tensors(data) else None
    call = _PlainCall("all_reduce", group, timeout, async_op)
    return call.run(data, _op(op), algorithm, out=out, compression=compression, name=name)


def reduce(
    data: Any,
    root_rank: int = 0,
    op: Any = ReduceOp.SUM,
    *,
    dst: int | None = None,
    group: DistributedContext | None = None,
    timeout: float | None = None,
    async_op: bool = False,
) -> Any:
    """Combine the data of all ranks on the root, in place if it is a tensor; None elsewhere."""
    call = _PlainCall("reduce", group, timeout, async_op)
    root = call.root(root_rank, "dst", dst)
    return call.run(data, root, _op(op), finish=lambda sum_: None if sum_ is None else call.into(data, sum_))


def broadcast(
    data: Any = None,
    root_rank: int = 0,
    *,
    src: int | None = None,
    group: DistributedContext | None = None,
    timeout: float | None = None,
    async_op: bool = False,
) -> Any:
    """Copy the root's data to every rank: into tensors that the others pass, else as a new value."""
    call = _PlainCall("broadcast", group, timeout, async_op)
    return call.run(data, call.root(root_rank, "src", src))


def all_gather(
    data: Any,
    tensor: Any = None,
    *,
    group: DistributedContext | None = None,
    timeout: float | None = None,
    async_op: bool = False,
) -> Any:
    """Gather every rank's data. `all_gather(data)` returns it by rank; with outputs it fills them."""
    call = _PlainCall("all_gather", group, timeout, async_op)
    if tensor is None:
        return call.run(data)
    outputs = call.outputs(data)
    check_fits("all_gather", outputs[call.context.rank], tensor)
    return call.run(tensor, finish=lambda values: call.fill(outputs, values))


def gather(
    data: Any,
    gather_list: Any = None,
    root_rank: int = 0,
    *,
    dst: int | None = None,
    group: DistributedContext | None = None,
    timeout: float | None = None,
    async_op: bool = False,
) -> Any:
    """Collect every rank's data on the root, None elsewhere. `gather_list` has tensors to fill there."""
    call = _PlainCall("gather", group, timeout, async_op)
    if _is_rank(gather_list):
        gather_list, root_rank = None, gather_list
    root = call.root(root_rank, "dst", dst)
    if gather_list is None or call.context.rank != root:
        return call.run(data, root)
    outputs = call.outputs(gather_list)
    check_fits("gather", outputs[root], data)
    return call.run(data, outputs, root)


def scatter(
    data: Any = None,
    scatter_list: Any = None,
    root_rank: int = 0,
    *,
    src: int | None = None,
    group: DistributedContext | None = None,
    timeout: float | None = None,
    async_op: bool = False,
) -> Any:
    """Return this rank's chunk of the root's data.

    `scatter(chunks)`: the root passes a list with one chunk per rank, or a tensor or array to cut by rows.
    `scatter(output, chunks)` on the root and `scatter(output)` on the others fill the tensor, as in torch.
    """
    call = _PlainCall("scatter", group, timeout, async_op)
    if _is_rank(scatter_list):
        scatter_list, root_rank = None, scatter_list
    root = call.root(root_rank, "src", src)
    if call.context.rank == root:
        chunks, output = (data, None) if scatter_list is None else (scatter_list, data)
    else:
        chunks, output = None, data if isinstance(data, Tensor) else None
    if output is not None and scatter_list is not None and isinstance(scatter_list, list | tuple):
        check_fits("scatter", output, scatter_list[root] if len(scatter_list) > root else output)
    # A rank that only has the whole tensor at hand, as the root has, is not asking to have it overwritten.
    strict = src is not None or scatter_list is not None

    def finish(chunk: Any) -> Any:
        return call.into(output, chunk) if strict or fits(output, chunk) else chunk

    return call.run(chunks, root, finish=finish)


def reduce_scatter(
    data: Any,
    input_list: Any = None,
    op: Any = ReduceOp.SUM,
    *,
    group: DistributedContext | None = None,
    timeout: float | None = None,
    async_op: bool = False,
) -> Any:
    """Return this rank's chunk of the combination.

    `reduce_scatter(chunks, op=...)` returns it; `reduce_scatter(output, chunks, op)` fills a tensor, as in
    torch. Chunks are a list with one per rank, or a tensor or array to cut by rows.
    """
    call = _PlainCall("reduce_scatter", group, timeout, async_op)
    if input_list is not None and not isinstance(input_list, list | tuple | Tensor):
        input_list, op = None, input_list
    if input_list is None:
        return call.run(data, _op(op))
    if isinstance(input_list, list | tuple) and len(input_list) == call.context.world_size:
        check_fits("reduce_scatter", data, input_list[call.context.rank])
    return call.run(input_list, _op(op), finish=lambda chunk: call.into(data, chunk))


def all_to_all(
    data: Any,
    input_list: Any = None,
    *,
    group: DistributedContext | None = None,
    timeout: float | None = None,
    async_op: bool = False,
) -> Any:
    """Send chunk p to rank p. `all_to_all(chunks)` returns those received; with outputs it fills them."""
    call = _PlainCall("all_to_all", group, timeout, async_op)
    if input_list is None:
        return call.run(data)
    outputs = call.outputs(data)
    return call.run(input_list, finish=lambda values: call.fill(outputs, values))


def send(
    message: Any,
    dest_rank: int | None = None,
    *,
    dst: int | None = None,
    tag: int = 0,
    group: DistributedContext | None = None,
    timeout: float | None = None,
    async_op: bool = False,
) -> Any:
    """Send a tensor, an array or plain Python data to one rank."""
    call = _PlainCall("send", group, timeout, async_op)
    dest = call.rank("dest_rank", dest_rank, "dst", dst)
    if dest is None:
        raise UsageError("send: to which rank?", remedy="send(message, dest_rank=1)")
    return call.run(message, dest, tag=tag)


def recv(
    tensor: Any = None,
    source_rank: int | None = None,
    *,
    src: int | None = None,
    tag: int | None = None,
    group: DistributedContext | None = None,
    timeout: float | None = None,
    async_op: bool = False,
) -> Any:
    """Receive the next message of a rank, or of any: `recv(0)` returns it, `recv(tensor, 0)` fills."""
    call = _PlainCall("recv", group, timeout, async_op)
    if _is_rank(tensor):
        tensor, source_rank = None, call.rank("source_rank", tensor, "source_rank", source_rank)
    source = call.rank("source_rank", source_rank, "src", src)
    if tensor is not None and not isinstance(tensor, Tensor):
        raise UsageError(
            f"recv: cannot receive into {with_article(tensor)}",
            remedy="pass a tensor to fill, or nothing to get the message back",
        )
    return call.run(ANY if source is None else source, tag=tag, finish=lambda value: call.into(tensor, value))


def barrier(
    *,
    group: DistributedContext | None = None,
    timeout: float | None = None,
    async_op: bool = False,
) -> Any:
    """Return when every rank has called it."""
    return _PlainCall("barrier", group, timeout, async_op).run()


@final
class _PlainCall:
    """One call of a plain function: runs the context's method of that name and puts its result in place."""

    def __init__(self, function: str, group: object, timeout: float | None, async_op: bool) -> None:
        if group is not None and not isinstance(group, DistributedContext):
            raise UsageError(
                f"{function}: group is {with_article(group)}",
                remedy="pass a DistributedContext, or nothing for the default group",
            )
        self.context = default_group.required(function) if group is None else group
        self._name = function
        self._options = {"timeout": timeout, "async_op": async_op}

    def run(self, *args: Any, finish: Callable[[Any], Any] | None = None, **more: Any) -> Any:
        """Run the context's method; `finish` gets the result, at once or when a pending one is waited for."""
        method = "receive" if self._name == "recv" else self._name
        result = getattr(self.context, method)(*args, **more, **self._options)
        return result if finish is None else finished(result, finish)

    def rank(
        self, name: str, value: int | None, torch_name: str, other: int | None, default: int | None = None
    ) -> int | None:
        """Return the rank that was given under either name."""
        if other is not None and value not in (default, other):
            raise UsageError(
                f"{self._name}: {name}={value} and {torch_name}={other} name two ranks",
                remedy="pass one of them",
            )
        return value if other is None else other

    def root(self, root_rank: int, torch_name: str, other: int | None) -> Any:
        return self.rank("root_rank", root_rank, torch_name, other, default=0)

    def outputs(self, outputs: Any) -> Sequence[Tensor]:
        """Check that there is one tensor per rank to fill."""
        ranks = self.context.world_size
        if not isinstance(outputs, list | tuple) or not _are_tensors(outputs) or len(outputs) != ranks:
            several = isinstance(outputs, list | tuple)
            given = counted(len(outputs), "output") if several else type(outputs).__name__
            raise UsageError(
                f"{self._name}: {given} for {counted(ranks, 'rank')}",
                remedy="pass a list with one tensor per rank to fill",
            )
        return outputs

    def fill(self, outputs: Sequence[Tensor], values: Sequence[Any]) -> Sequence[Tensor]:
        filled: Sequence[Tensor] = fill_by_rank(self._name, outputs, values)
        return filled

    def into(self, target: Any, value: Any) -> Any:
        """Return the value in the tensor that the caller passed, or by itself if it passed none."""
        return fill(self._name, target, value)


def _op(op: Any) -> Any:
    """Translate torch's name of an operation; the context judges everything else."""
    if isinstance(op, str | ReduceOp):
        return op
    name = getattr(op, "name", None)
    return {"AVG": "average"}.get(name, name.lower()) if isinstance(name, str) else op


def _is_rank(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _are_tensors(data: object) -> bool:
    if isinstance(data, list | tuple):
        return bool(data) and all(isinstance(part, Tensor) for part in data)
    return isinstance(data, Tensor)
