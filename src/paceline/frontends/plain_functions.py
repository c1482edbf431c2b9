"""Communication as plain functions on the default group, written as users of torch.distributed write it.

Tensors are filled in place, as torch does, and returned; arrays, numbers and plain Python data are returned.
Where torch takes the output first (`all_gather(outputs, tensor)`), both forms work. `src` and `dst` are
torch's names for `root_rank`, `source_rank` and `dest_rank`. `group=` takes a DistributedContext. Only puts
arguments and results in their places: everything else is done by the context.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar, final

import torch
from torch import Tensor

from paceline.comm import default_group
from paceline.comm.compression import Compression, PowerSGD
from paceline.comm.context import DistributedContext
from paceline.comm.ops import ReduceOp
from paceline.comm.sequence import Handle
from paceline.core.errors import UsageError
from paceline.core.words import a_kind

T = TypeVar("T")

ANY = -1


@final
class Pending(Generic[T]):
    """An operation under way whose result still has to be put in its place, which `wait` does."""

    def __init__(self, handle: Handle[Any], settle: Callable[[Any], T]) -> None:
        self._handle = handle
        self._settle = settle

    def wait(self, timeout: float | None = None) -> T:
        return self._settle(self._handle.wait(timeout))

    def done(self) -> bool:
        return self._handle.done()


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
    """The combination of everybody's data: one or several tensors in place, anything else as a new value."""
    out = data if _tensors(data) else None
    return _group("all_reduce", group).all_reduce(
        data,
        _op(op),
        algorithm,
        out=out,
        compression=compression,
        name=name,
        timeout=timeout,
        async_op=async_op,
    )


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
    """The combination of everybody's data on the root, in place if it is a tensor; None elsewhere."""
    result = _group("reduce", group).reduce(
        data, _root("reduce", root_rank, dst), _op(op), timeout=timeout, async_op=async_op
    )
    return _settled(result, lambda total: total if total is None else _into(data, total, "reduce"))


def broadcast(
    data: Any = None,
    root_rank: int = 0,
    *,
    src: int | None = None,
    group: DistributedContext | None = None,
    timeout: float | None = None,
    async_op: bool = False,
) -> Any:
    """The root's data on every rank: tensors that the others pass are filled, else they get a new value."""
    result = _group("broadcast", group).broadcast(
        data, _root("broadcast", root_rank, src), timeout=timeout, async_op=async_op
    )
    return _settled(result, lambda arrived: _into(data, arrived, "broadcast"))


def all_gather(
    data: Any,
    tensor: Any = None,
    *,
    group: DistributedContext | None = None,
    timeout: float | None = None,
    async_op: bool = False,
) -> Any:
    """`all_gather(data)` returns everybody's data by rank, `all_gather(outputs, tensor)` fills tensors."""
    context = _group("all_gather", group)
    if tensor is None:
        return context.all_gather(data, timeout=timeout, async_op=async_op)
    outputs = _outputs(data, context.world_size, "all_gather")
    _check_fits(outputs[context.rank], tensor, "all_gather")
    result = context.all_gather(tensor, timeout=timeout, async_op=async_op)
    return _settled(result, lambda arrived: _fill(outputs, arrived, "all_gather"))


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
    """Everybody's data by rank on the root, None elsewhere. `gather_list` has tensors to fill there."""
    context = _group("gather", group)
    if _is_rank(gather_list):
        gather_list, root_rank = None, gather_list
    root = _root("gather", root_rank, dst)
    outputs = None
    if gather_list is not None and context.rank == root:
        outputs = _outputs(gather_list, context.world_size, "gather")
        _check_fits(outputs[root], data, "gather")
    result = context.gather(data, root, timeout=timeout, async_op=async_op)
    return _settled(result, lambda arrived: arrived if outputs is None else _fill(outputs, arrived, "gather"))


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
    """This rank's chunk of the root's data.

    `scatter(chunks)`: the root passes a list with one chunk per rank, or a tensor or array to cut by rows.
    `scatter(output, chunks)` on the root and `scatter(output)` on the others fill the tensor, as in torch.
    """
    context = _group("scatter", group)
    if _is_rank(scatter_list):
        scatter_list, root_rank = None, scatter_list
    root = _root("scatter", root_rank, src)
    if context.rank == root:
        chunks, output = (data, None) if scatter_list is None else (scatter_list, data)
    else:
        chunks, output = None, data if isinstance(data, Tensor) else None
    if output is not None and scatter_list is not None and isinstance(scatter_list, list | tuple):
        _check_fits(output, scatter_list[root] if len(scatter_list) > root else output, "scatter")
    # A rank that only has the whole tensor at hand, as the root has, is not asking to have it overwritten.
    strict = src is not None or scatter_list is not None

    def settle(arrived: Any) -> Any:
        fits = isinstance(output, Tensor) and isinstance(arrived, Tensor) and _fits(output, arrived)
        return _into(output, arrived, "scatter") if strict or fits else arrived

    return _settled(context.scatter(chunks, root, timeout=timeout, async_op=async_op), settle)


def reduce_scatter(
    data: Any,
    input_list: Any = None,
    op: Any = ReduceOp.SUM,
    *,
    group: DistributedContext | None = None,
    timeout: float | None = None,
    async_op: bool = False,
) -> Any:
    """This rank's chunk of the combination.

    `reduce_scatter(chunks, op=...)` returns it; `reduce_scatter(output, chunks, op)` fills a tensor, as in
    torch. Chunks are a list with one per rank, or a tensor or array to cut by rows.
    """
    context = _group("reduce_scatter", group)
    if input_list is not None and not isinstance(input_list, list | tuple | Tensor):
        input_list, op = None, input_list
    if input_list is None:
        return context.reduce_scatter(data, _op(op), timeout=timeout, async_op=async_op)
    if isinstance(input_list, list | tuple) and len(input_list) == context.world_size:
        _check_fits(data, input_list[context.rank], "reduce_scatter")
    result = context.reduce_scatter(input_list, _op(op), timeout=timeout, async_op=async_op)
    return _settled(result, lambda arrived: _into(data, arrived, "reduce_scatter"))


def all_to_all(
    data: Any,
    input_list: Any = None,
    *,
    group: DistributedContext | None = None,
    timeout: float | None = None,
    async_op: bool = False,
) -> Any:
    """Chunk p goes to rank p. `all_to_all(chunks)` returns what came, by rank; with outputs it fills them."""
    context = _group("all_to_all", group)
    if input_list is None:
        return context.all_to_all(data, timeout=timeout, async_op=async_op)
    outputs = _outputs(data, context.world_size, "all_to_all")
    result = context.all_to_all(input_list, timeout=timeout, async_op=async_op)
    return _settled(result, lambda arrived: _fill(outputs, arrived, "all_to_all"))


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
    """Sends a tensor, an array or plain Python data to one rank."""
    dest = _one("send", "dest_rank", dest_rank, "dst", dst)
    if dest is None:
        raise UsageError("send: to which rank?", remedy="send(message, dest_rank=1)")
    return _group("send", group).send(message, dest, tag=tag, timeout=timeout, async_op=async_op)


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
    """The next message from a rank, by default from any: `recv(0)` returns it, `recv(tensor, 0)` fills."""
    if _is_rank(tensor):
        tensor, source_rank = None, _one("recv", "source_rank", tensor, "source_rank", source_rank)
    source = _one("recv", "source_rank", source_rank, "src", src)
    if tensor is not None and not isinstance(tensor, Tensor):
        raise UsageError(
            f"recv: cannot receive into {a_kind(tensor)}",
            remedy="pass a tensor to fill, or nothing to get the message back",
        )
    result = _group("recv", group).receive(
        ANY if source is None else source, tag=tag, timeout=timeout, async_op=async_op
    )
    return _settled(result, lambda message: message if tensor is None else _into(tensor, message, "recv"))


def barrier(
    *, group: DistributedContext | None = None, timeout: float | None = None, async_op: bool = False
) -> Any:
    """Returns when every rank has called it."""
    return _group("barrier", group).barrier(timeout=timeout, async_op=async_op)


def _group(what: str, group: object) -> DistributedContext:
    if group is None:
        return default_group.required(what)
    if not isinstance(group, DistributedContext):
        raise UsageError(
            f"{what}: group is {a_kind(group)}",
            remedy="pass a DistributedContext, or nothing for the default group",
        )
    return group


def _op(op: Any) -> Any:
    """Torch's name of an operation as Paceline's; everything else is the context's to judge."""
    if isinstance(op, str | ReduceOp):
        return op
    name = getattr(op, "name", None)
    return {"AVG": "average"}.get(name, name.lower()) if isinstance(name, str) else op


def _root(what: str, root_rank: int, torch_name: int | None) -> int:
    if torch_name is None:
        return root_rank
    if root_rank not in (0, torch_name):
        raise UsageError(
            f"{what}: root_rank={root_rank} and torch's src or dst {torch_name} name two ranks",
            remedy="pass one of them",
        )
    return torch_name


def _one(what: str, name: str, value: int | None, torch_name: str, other: int | None) -> int | None:
    if value is not None and other is not None and value != other:
        raise UsageError(
            f"{what}: {name}={value} and {torch_name}={other} name two ranks", remedy="pass one of them"
        )
    return other if value is None else value


def _is_rank(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _tensors(data: object) -> bool:
    if isinstance(data, list | tuple):
        return bool(data) and all(isinstance(part, Tensor) for part in data)
    return isinstance(data, Tensor)


def _settled(result: Any, settle: Callable[[Any], Any]) -> Any:
    return Pending(result, settle) if isinstance(result, Handle) else settle(result)


def _outputs(outputs: Any, world_size: int, what: str) -> Sequence[Tensor]:
    if not isinstance(outputs, list | tuple) or not _tensors(outputs) or len(outputs) != world_size:
        given = f"{len(outputs)} outputs" if isinstance(outputs, list | tuple) else type(outputs).__name__
        raise UsageError(
            f"{what}: {given} for {world_size} ranks", remedy="pass a list with one tensor per rank to fill"
        )
    return outputs


def _fill(outputs: Sequence[Tensor], arrived: Sequence[Any], what: str) -> Sequence[Tensor]:
    for rank, (output, value) in enumerate(zip(outputs, arrived, strict=True)):
        _into(output, value, f"{what}: from rank {rank}")
    return outputs


def _into(target: Any, value: Any, what: str) -> Any:
    """The value where the caller wants it: in the tensor that was passed, or by itself."""
    if not isinstance(target, Tensor) or value is target:
        return value
    _check_fits(target, value, what)
    with torch.no_grad():
        target.copy_(value)
    return target


def _fits(target: Tensor, value: Tensor) -> bool:
    return target.shape == value.shape and target.dtype == value.dtype


def _check_fits(target: Any, value: Any, what: str) -> None:
    if isinstance(target, Tensor) and isinstance(value, Tensor) and _fits(target, value):
        return
    raise UsageError(
        f"{what}: {_about(value)} does not fit into {_about(target)}",
        remedy="pass a tensor of the same shape and dtype to fill, or none to get the value back",
    )


def _about(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return type(value).__name__
