"""All-reduce and its relatives from the caller's data to the caller's data: plan, choose the algorithm, run
it, restore the kind.

Everything that can be wrong with the arguments is found here, before anything travels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from paceline.comm import algorithms
from paceline.comm.algorithms import canonical, direct
from paceline.comm.algorithms.hops import cut
from paceline.comm.algorithms.job import Job
from paceline.comm.algorithms.window import SmallReduce, small_reduce
from paceline.comm.calls import Call, signature_of
from paceline.comm.compression import PowerSGD
from paceline.comm.compression.base import Compression
from paceline.comm.cost import Choice, Links, Situation
from paceline.comm.fold import left_fold, run_blocks
from paceline.comm.ops import ReduceOp, accumulator_dtype, check_op, dtype_name, finish, kernel_of
from paceline.comm.payload import Payload, check_dense, describe, flatten, open_payload
from paceline.comm.transport.base import Transport
from paceline.core.errors import UsageError

Groups = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """What all_reduce will do with data of one dtype and shape."""

    text: str
    algorithm: str
    run: Callable[[Job], None]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A small all-reduce with everything looked up."""

    text: str
    algorithm: str
    signature: int
    small: SmallReduce


_UNKNOWN = Prepared("", "", 0, None)  # type: ignore[arg-type]
_RECIPES = {"direct": direct.recipe, "canonical": canonical.recipe}


class Reducer:
    """Plans and runs reductions of one group."""

    def __init__(self, transport: Transport, links: Links, groups: Groups = ()) -> None:
        self._transport = transport
        self._links = links
        self._groups = groups
        self._plans: dict[tuple[Any, ...], Plan] = {}
        self._prepared: dict[tuple[Any, ...], Prepared | None] = {}

    def plan(
        self,
        flat: Tensor,
        shape: str,
        op: ReduceOp,
        algorithm: str,
        compression: Compression | None,
        on_gpu: bool,
    ) -> Plan:
        key = (flat.dtype, shape, op, algorithm, on_gpu, compression.name if compression is not None else "")
        plan = self._plans.get(key)
        if plan is None:
            check_op(op, flat.dtype)
            check_algorithm(self._transport, algorithm, compression)
            squeezed = ""
            if compression is not None:
                check_compressible(op, flat.dtype)
                squeezed = f", {compression.name}"
            chosen = algorithm
            if algorithm == "auto":
                chosen = self.choose(
                    flat.numel() * flat.element_size(), on_gpu=on_gpu, compressed=compression is not None
                ).algorithm
            given = f", hosts={[list(group) for group in self._groups]}" if self._groups else ""
            text = f"all_reduce({op.name}, {shape}, {chosen}{squeezed}{given})"
            plan = self._plans[key] = Plan(text, chosen, algorithms.load(chosen).run)
        return plan

    def prepared(self, data: Tensor, op: ReduceOp, algorithm: str) -> Prepared | None:
        """The short way for small CPU tensors in shared memory, which come again and again; None: take the
        long way."""
        key = (data.dtype, data.shape, op, algorithm)
        entry = self._prepared.get(key, _UNKNOWN)
        if entry is _UNKNOWN:
            entry = self._prepared[key] = self._prepare(data, op, algorithm)
        usual = (
            data.is_cpu and data.layout is torch.strided and data.is_contiguous() and not data.is_inference()
        )
        if entry is None or data.requires_grad or not usual:
            return None
        return entry

    def _prepare(self, data: Tensor, op: ReduceOp, algorithm: str) -> Prepared | None:
        transport = self._transport
        window = transport.window
        if window is None or data.is_quantized or accumulator_dtype(data.dtype) != data.dtype:
            return None
        if len(self._prepared) >= 4096:
            self._prepared.clear()
        plan = self.plan(data, describe(data), op, algorithm, None, False)
        recipe = _RECIPES.get(plan.algorithm)
        if recipe is None or data.numel() * data.element_size() > window.small.shape[2]:
            return None
        small = small_reduce(transport, window, recipe(transport.world_size, op), data.dtype, data.shape)
        return Prepared(plan.text, plan.algorithm, signature_of(plan.text), small)

    def reduces_on_gpu(self, data: Any, algorithm: str) -> bool:
        """Whether the transport's own all-reduce takes this data where it is, on the GPU."""
        if getattr(self._transport, "backend", "") != "nccl" or algorithm not in ("auto", "native"):
            return False
        parts = [data] if isinstance(data, Tensor) else data if isinstance(data, list | tuple) else []
        return bool(parts) and all(isinstance(part, Tensor) and part.is_cuda for part in parts)

    def forget(self) -> None:
        """Drops what was prepared: it holds the group's memory."""
        self._plans.clear()
        self._prepared.clear()

    def choose(self, nbytes: int, *, on_gpu: bool = False, compressed: bool = False) -> Choice:
        """What algorithm="auto" picks for a message, and why."""
        transport = self._transport
        situation = Situation(
            nbytes,
            transport.world_size,
            len(self._groups) or transport.topology.hosts,
            transport.window is not None and not compressed,
            getattr(transport, "backend", ""),
            on_gpu,
            compressed,
            getattr(transport, "local", None) is not None,
        )
        return algorithms.choose(situation, self._links)

    def all_reduce(
        self,
        data: Any,
        op: ReduceOp,
        algorithm: str,
        out: Any,
        compression: Compression | None,
        name: str,
    ) -> tuple[Plan, Callable[[Call, float], Any]]:
        """What has to be done, and how: the result is the caller's kind again."""
        # Only NCCL reduces where the tensors are; everything else works on the host's memory.
        on_gpu = self.reduces_on_gpu(data, algorithm) and compression is None
        payload = open_payload(data, "all_reduce", on_device=on_gpu)
        plan = self.plan(payload.flat, payload.shape, op, algorithm, compression, on_gpu)
        if compression is not None:
            compression.check(payload.flat.numel(), accumulator_dtype(payload.flat.dtype), name)
        target, restore = result_memory(payload, out, "all_reduce")
        transport, groups = self._transport, self._groups

        def work(call: Call, deadline: float) -> Any:
            plan.run(Job(transport, call, op, payload.flat, target, deadline, compression, name, groups))
            return restore(target)

        return plan, work


def check_algorithm(transport: Transport, algorithm: str, compression: Compression | None) -> None:
    """Refuses an algorithm that this group does not have, or that cannot be compressed."""
    if algorithm == "canonical" and compression is not None:
        raise UsageError(
            "algorithm='canonical' cannot be compressed: what is lost depends on who sends what",
            remedy="use algorithm='direct', 'ring', 'tree' or 'hierarchical' with compression",
        )
    if algorithm == "native" and (compression is not None or not hasattr(transport, "native_all_reduce")):
        raise UsageError(
            f"algorithm='native' needs a group of torch.distributed and no compression; "
            f"this one is {transport.name!r}",
            remedy="use algorithm='auto', or init_process_group(backend='gloo')",
        )


def check_compressible(op: ReduceOp, dtype: torch.dtype) -> None:
    if op not in (ReduceOp.SUM, ReduceOp.AVERAGE) or accumulator_dtype(dtype) not in (
        torch.float32,
        torch.float64,
    ):
        raise UsageError(
            f"compression works on SUM and AVERAGE of floating-point values, not on "
            f"{op.name} of {dtype_name(dtype)}",
            remedy="call without compression",
        )


def result_memory(payload: Payload, out: Any, what: str) -> tuple[Tensor, Callable[[Tensor], Any]]:
    """Where the result goes, flat, and how it becomes the caller's: new memory, or `out` and nothing else."""
    if out is None:
        return torch.empty_like(payload.flat), payload.restore
    targets = [out] if isinstance(out, Tensor) else list(out) if isinstance(out, list | tuple) else []
    sources = payload.parts
    if (
        not targets
        or len(targets) != len(sources)
        or not all(isinstance(target, Tensor) for target in targets)
    ):
        raise UsageError(
            f"{what}: out has to be a tensor (or a list of tensors) like the data",
            remedy="pass out=data to work in place",
        )
    for target, source in zip(targets, sources, strict=True):
        check_dense(target, f"{what}: out")
        if target.is_inference() and not torch.is_inference_mode_enabled():
            raise UsageError(
                f"{what}: out was made in inference mode and cannot be written outside of it",
                remedy="pass a tensor made outside torch.inference_mode(), or leave out= away",
            )
        if _overlap_in_part(target, source):
            raise UsageError(
                f"{what}: out shares part of its memory with the data",
                remedy="pass out=data itself, or memory of its own",
            )
        if torch._debug_has_internal_overlap(target) == 1:
            raise UsageError(
                f"{what}: several elements of out share one place in memory",
                remedy="pass out=data.contiguous()",
            )
        if target.shape != source.shape or target.dtype != source.dtype:
            raise UsageError(
                f"{what}: out is {dtype_name(target.dtype)}{list(target.shape)}, "
                f"the data is {dtype_name(source.dtype)}{list(source.shape)}",
                remedy="out has to have the data's shape and dtype",
            )
    if len(targets) == 1 and targets[0].is_contiguous() and targets[0].device == payload.flat.device:
        return flatten(targets[0].detach()), lambda _: out
    return torch.empty_like(payload.flat), lambda flat: _scatter_into(out, targets, flat)


def _overlap_in_part(target: Tensor, source: Tensor) -> bool:
    """Whether two tensors share memory without being the same view of it."""
    if target.untyped_storage().data_ptr() != source.untyped_storage().data_ptr() or not target.numel():
        return False
    same = target.data_ptr() == source.data_ptr() and target.stride() == source.stride()
    (low, high), (first, last) = _extent(target), _extent(source)
    return not same and low < last and first < high


def _extent(tensor: Tensor) -> tuple[int, int]:
    start = tensor.data_ptr()
    last = sum((side - 1) * stride for side, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.element_size()


def _scatter_into(out: Any, targets: list[Tensor], flat: Tensor) -> Any:
    with torch.no_grad():
        parts = torch.split(flat, [target.numel() for target in targets])
        for target, part in zip(targets, parts, strict=True):
            target.copy_(part.view(target.shape))
    return out


def chunks_of(data: Any, world_size: int, what: str) -> list[Any]:
    """The data's chunk for each rank: a list's own, else a tensor's or array's rows, as evenly as they go."""
    if isinstance(data, list | tuple):
        if len(data) != world_size:
            raise UsageError(
                f"{what}: a list of {len(data)} chunks for {world_size} ranks",
                remedy="pass one chunk per rank",
            )
        return list(data)
    rows = getattr(data, "shape", None)
    if not rows:
        raise UsageError(
            f"{what}: cannot cut a {type(data).__name__} into chunks",
            remedy="pass a list with one chunk per rank",
        )
    edges = [len(data) * part // world_size for part in range(world_size + 1)]
    return [data[start:stop] for start, stop in pairwise(edges)]


def open_chunks(data: Any, world_size: int, op: ReduceOp) -> list[Payload]:
    """One chunk per rank for a reduce-scatter, after checking that they can be combined."""
    parts = chunks_of(data, world_size, "reduce_scatter")
    chunks = [open_payload(part, f"reduce_scatter: chunk {peer}") for peer, part in enumerate(parts)]
    for chunk in chunks:
        check_op(op, chunk.flat.dtype)
    return chunks


def reduce_scatter(
    transport: Transport, call: Call, op: ReduceOp, chunks: list[Payload], deadline: float
) -> Any:
    """This rank's chunk of everybody, folded in rank order."""
    rank, size = transport.rank, transport.world_size
    peers = [peer for peer in range(size) if peer != rank]
    mine = chunks[rank]
    arrived = {peer: torch.empty_like(mine.flat) for peer in peers}
    transport.exchange(call, [(peer, chunks[peer].flat) for peer in peers], list(arrived.items()), deadline)
    arrived[rank] = mine.flat
    total = torch.empty(mine.flat.numel(), dtype=accumulator_dtype(mine.flat.dtype), device="cpu")
    run_blocks(left_fold(size), kernel_of(op), [arrived[peer] for peer in range(size)], total)
    finish(op, total, size)
    return mine.restore(total.to(mine.flat.dtype))


def reduce(
    transport: Transport, call: Call, op: ReduceOp, flat: Tensor, out: Tensor, root: int, deadline: float
) -> None:
    """The combination on the root. In shared memory everybody may as well have it; elsewhere only finished
    slices go to the root."""
    if transport.window is not None:
        algorithms.load("direct").run(Job(transport, call, op, flat, out, deadline))
        return
    rank, size = transport.rank, transport.world_size
    slices = cut(flat.numel(), size)
    chunks = [Payload(flat[start:stop], "", lambda result: result) for start, stop in slices]
    out[slice(*slices[rank])] = reduce_scatter(transport, call, op, chunks, deadline)
    peers = [peer for peer in range(size) if peer != root]
    if rank == root:
        transport.exchange(call, [], [(peer, out[slice(*slices[peer])]) for peer in peers], deadline)
    else:
        transport.exchange(call, [(root, out[slice(*slices[rank])])], [], deadline)


def check_synchronous(async_op: bool) -> None:
    if async_op:
        raise UsageError(
            "PowerSGD has no asynchronous form: it is two all-reduces with arithmetic in between",
            remedy="call it without async_op, or use another compression",
        )


def by_power_sgd(
    data: Any,
    op: ReduceOp,
    compression: PowerSGD,
    average: Callable[[Tensor], Tensor],
    world_size: int,
    name: str,
    out: Any,
) -> Any:
    """The low-rank approximation of the sum or average; `average` is the all-reduce of its factors."""
    if op not in (ReduceOp.SUM, ReduceOp.AVERAGE):
        raise UsageError(f"PowerSGD of {op.name}: it approximates sums only", remedy="use SUM or AVERAGE")
    tensors = [data] if isinstance(data, Tensor) else data
    if not isinstance(tensors, list | tuple) or not all(isinstance(tensor, Tensor) for tensor in tensors):
        raise UsageError(
            f"PowerSGD of a {type(data).__name__}: it compresses matrices",
            remedy="pass a tensor or a list of tensors",
        )
    reduced = compression.reduce(list(tensors), average, name=name)
    if op is ReduceOp.SUM:
        reduced = [tensor * world_size for tensor in reduced]
    if out is not None:
        for target, tensor in zip([out] if isinstance(out, Tensor) else out, reduced, strict=True):
            target.copy_(tensor)
        return out
    return reduced[0] if isinstance(data, Tensor) else type(data)(reduced)
