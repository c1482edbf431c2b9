"""All-reduce and its relatives from the caller's data to the caller's data: plan, choose the algorithm, run
it, restore the kind.

Everything that can be wrong with the arguments is found here, before anything travels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.comm import algorithms
from paceline.comm.algorithms import canonical, direct
from paceline.comm.algorithms.reduce_request import ReduceRequest
from paceline.comm.algorithms.shm.all_reduce import SmallReduce, small_reduce
from paceline.comm.call_status import CollectiveCall, PlannedCall, signature_of
from paceline.comm.collectives.arguments import check_rank
from paceline.comm.collectives.data_movement import chunks_of
from paceline.comm.collectives.reduction_input import (
    ReductionInput,
    check_dense,
    describe,
    flatten,
    holds_values,
    open_input,
)
from paceline.comm.compression import PowerSGD
from paceline.comm.compression.error_feedback import Compression
from paceline.comm.cost import Choice, LinkCosts, Situation
from paceline.comm.ops import ReduceOp, accumulator_dtype, check_op, dtype_name
from paceline.comm.reduction_order import cut
from paceline.comm.transport.base import HasLocalGroup, NativeAllReduce, Transport, labels_of, peers_of
from paceline.core.errors import UsageError

Groups = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class ReductionPlan:
    """Plan of an all_reduce of data of one dtype and shape."""

    text: str
    algorithm: str
    run: Callable[[ReduceRequest], None]


@dataclass(frozen=True, slots=True)
class PreparedReduction:
    """A small all-reduce with everything looked up."""

    text: str
    signature: int
    small: SmallReduce


_UNKNOWN = PreparedReduction("", 0, None)  # type: ignore[arg-type]
_MOST_PLANS = 4096  # of each kind: shapes that change with every call must not fill the memory
_RECIPES = {"direct": direct.recipe, "canonical": canonical.recipe}


class Reducer:
    """Reductions of one group: plans and runs them."""

    def __init__(self, transport: Transport, links: LinkCosts, groups: Groups = ()) -> None:
        self._transport = transport
        self._links = links
        self._groups = groups
        self._backend = transport.backend if isinstance(transport, NativeAllReduce) else ""
        self._plans: dict[tuple[Any, ...], ReductionPlan] = {}
        self._flat_plans: dict[tuple[Any, ...], ReductionPlan] = {}
        self._prepared: dict[tuple[Any, ...], PreparedReduction | None] = {}

    def plan(
        self,
        flat: Tensor,
        shape: str,
        op: ReduceOp,
        algorithm: str,
        compression: Compression | None,
        on_gpu: bool,
    ) -> ReductionPlan:
        key = (flat.dtype, shape, op, algorithm, on_gpu, compression.name if compression is not None else "")
        plan = self._plans.get(key)
        if plan is None:
            check_op(op, flat.dtype)
            check_algorithm(self._transport, algorithm, compression)
            squeezed = ""
            if compression is not None:
                check_compressible(op, flat.dtype)
                squeezed = f", {compression.name}"
            chosen, nbytes = algorithm, flat.numel() * flat.element_size()
            if algorithm == "auto":
                chosen = self.choose(nbytes, on_gpu=on_gpu, compressed=compression is not None).algorithm
            given = f", hosts={[list(group) for group in self._groups]}" if self._groups else ""
            text = f"all_reduce({op.name}, {shape}, {chosen}{squeezed}{given})"
            if len(self._plans) >= _MOST_PLANS:
                self._plans.clear()
            plan = self._plans[key] = ReductionPlan(text, chosen, algorithms.load(chosen).run)
        return plan

    def prepared(self, data: Tensor, op: ReduceOp, algorithm: str) -> PreparedReduction | None:
        """Look up the short way for small CPU tensors in shared memory; None: take the long way."""
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

    def _prepare(self, data: Tensor, op: ReduceOp, algorithm: str) -> PreparedReduction | None:
        transport = self._transport
        window = transport.window
        if window is None or data.is_quantized or accumulator_dtype(data.dtype) != data.dtype:
            return None
        if len(self._prepared) >= _MOST_PLANS:
            self._prepared.clear()
        plan = self.plan(data, describe(data), op, algorithm, None, False)
        recipe = _RECIPES.get(plan.algorithm)
        if recipe is None or data.numel() * data.element_size() > window.small.shape[2]:
            return None
        small = small_reduce(transport, window, recipe(transport.world_size, op), data.dtype, data.shape)
        return PreparedReduction(plan.text, signature_of(plan.text), small)

    def reduces_on_gpu(self, data: Any, algorithm: str) -> bool:
        """Return whether the transport's own all-reduce takes this data where it is, on the GPU."""
        if self._backend != "nccl" or algorithm not in ("auto", "native"):
            return False
        parts = [data] if isinstance(data, Tensor) else data if isinstance(data, list | tuple) else []
        return bool(parts) and all(isinstance(part, Tensor) and part.is_cuda for part in parts)

    def forget(self) -> None:
        """Drop what was prepared: it holds the group's memory."""
        self._plans.clear()
        self._flat_plans.clear()
        self._prepared.clear()

    def choose(self, nbytes: int, *, on_gpu: bool = False, compressed: bool = False) -> Choice:
        """Return what algorithm="auto" picks for a message, and why."""
        transport = self._transport
        situation = Situation(
            nbytes,
            transport.world_size,
            len(self._groups) or transport.topology.hosts,
            transport.window is not None and not compressed,
            self._backend,
            on_gpu,
            compressed,
            isinstance(transport, HasLocalGroup),
        )
        return algorithms.choose(situation, self._links)

    def all_reduce_in_place(self, flat: Tensor, op: ReduceOp) -> PlannedCall[Any]:
        """Plan an all-reduce of flat CPU memory in place: `all_reduce` for callers that know what they pass,
        in a tenth of its steps."""
        key = (flat.dtype, flat.numel(), op)
        plan = self._flat_plans.get(key)
        if plan is None:
            if len(self._flat_plans) >= _MOST_PLANS:
                self._flat_plans.clear()
            plan = self._flat_plans[key] = self.plan(flat, describe(flat), op, "auto", None, False)
        transport, run, groups = self._transport, plan.run, self._groups

        def work(call: CollectiveCall, deadline: float) -> None:
            run(ReduceRequest(transport, call, op, flat, flat, deadline, None, "", groups))

        return PlannedCall("all_reduce", plan.text, work, plan.algorithm)

    def all_reduce(
        self,
        data: Any,
        op: ReduceOp,
        algorithm: str,
        out: Any,
        compression: Compression | None,
        name: str,
    ) -> PlannedCall[Any]:
        """Plan an all-reduce; its result is of the caller's kind again."""
        # Only NCCL reduces where the tensors are; everything else works on the host's memory.
        on_gpu = self.reduces_on_gpu(data, algorithm) and compression is None
        given = open_input(data, "all_reduce", on_device=on_gpu)
        plan = self.plan(given.flat, given.shape, op, algorithm, compression, on_gpu)
        if compression is not None:
            compression.check(given.flat.numel(), accumulator_dtype(given.flat.dtype), name)
        target, restore = result_memory(given, out, "all_reduce")
        transport, groups = self._transport, self._groups

        def work(call: CollectiveCall, deadline: float) -> Any:
            flat = given.flat
            plan.run(ReduceRequest(transport, call, op, flat, target, deadline, compression, name, groups))
            return restore(target)

        return PlannedCall("all_reduce", plan.text, work, plan.algorithm)


def check_algorithm(transport: Transport, algorithm: str, compression: Compression | None) -> None:
    """Refuse an algorithm that this group does not have, or that cannot be compressed."""
    if algorithm == "canonical" and compression is not None:
        raise UsageError(
            "algorithm='canonical' cannot be compressed: what is lost depends on who sends what",
            remedy="use algorithm='direct', 'ring', 'tree' or 'hierarchical' with compression",
        )
    if algorithm == "native" and (compression is not None or not isinstance(transport, NativeAllReduce)):
        raise UsageError(
            f"algorithm='native' needs a group of torch.distributed and no compression; "
            f"this one is {transport.name!r}",
            remedy="use algorithm='auto', or init_process_group(backend='gloo')",
        )


def check_compressible(op: ReduceOp, dtype: torch.dtype) -> None:
    floating = accumulator_dtype(dtype) in (torch.float32, torch.float64)
    if op not in (ReduceOp.SUM, ReduceOp.AVERAGE) or not floating:
        raise UsageError(
            f"compression works on SUM and AVERAGE of floating-point values, not on "
            f"{op.name} of {dtype_name(dtype)}",
            remedy="call without compression",
        )


def result_memory(given: ReductionInput, out: Any, what: str) -> tuple[Tensor, Callable[[Tensor], Any]]:
    """Return where the result goes, flat, and how it becomes the caller's: new memory, or `out` alone."""
    # Everything that can be wrong with `out` is refused here, while the call has no number yet: this rank can
    # correct it and call again. An error after the exchange would be this rank's alone, with the group
    # broken.
    if out is None:
        return torch.empty_like(given.flat), given.restore
    targets = [out] if isinstance(out, Tensor) else list(out) if isinstance(out, list | tuple) else []
    sources = given.parts
    tensors_only = all(isinstance(target, Tensor) for target in targets)
    if not targets or len(targets) != len(sources) or not tensors_only:
        raise UsageError(
            f"{what}: out has to be a tensor (or a list of tensors) like the data",
            remedy="pass out=data to work in place",
        )
    for target, source in zip(targets, sources, strict=True):
        check_dense(target, f"{what}: out")
        # torch would refuse this only when the result is written.
        if target.is_inference() and not torch.is_inference_mode_enabled():
            raise UsageError(
                f"{what}: out was made in inference mode and cannot be written outside of it",
                remedy="pass a tensor made outside torch.inference_mode(), or leave out= away",
            )
        # Ranks write finished slices into `out` while others still read this rank's data. With out=data that
        # is safe: each element is read and then written by the one owner of its slice. With memory that is
        # shifted against the data, an owner would read elements that another one has already overwritten.
        if _overlap_in_part(target, source):
            raise UsageError(
                f"{what}: out shares part of its memory with the data",
                remedy="pass out=data itself, or memory of its own",
            )
        # An expanded tensor: different results would have to stand in one element. 1 is torch's "yes".
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
    # One flat tensor where the reduction works: the algorithm writes straight into it, and with out=data,
    # whose flat form is the same memory, reduces in place.
    first = targets[0]
    in_order = len(targets) == 1 and first.is_contiguous() and holds_values(first)
    if in_order and first.device == given.flat.device:
        return flatten(first.detach()), lambda _: out

    # Anything else (several tensors, strides, lazily conjugated or negated views, another device) gets the
    # result after the collective, from memory beside it.
    @torch.no_grad()
    def scatter(flat: Tensor) -> Any:
        parts = torch.split(flat, [target.numel() for target in targets])
        for target, part in zip(targets, parts, strict=True):
            target.copy_(part.view(target.shape))
        return out

    return torch.empty_like(given.flat), scatter


def _overlap_in_part(target: Tensor, source: Tensor) -> bool:
    """Return whether two tensors share memory without being the same view of it."""
    if target.untyped_storage().data_ptr() != source.untyped_storage().data_ptr() or not target.numel():
        return False
    same = target.data_ptr() == source.data_ptr() and target.stride() == source.stride()
    (low, high), (first, last) = _extent(target), _extent(source)
    return not same and low < last and first < high


def _extent(tensor: Tensor) -> tuple[int, int]:
    start = tensor.data_ptr()
    last = sum((side - 1) * stride for side, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.element_size()


def plan_reduce_scatter(transport: Transport, data: Any, op: ReduceOp) -> PlannedCall[Any]:
    """Plan a reduce-scatter: this rank's chunk of all ranks, folded in rank order."""
    parts = chunks_of(data, transport.world_size, "reduce_scatter")
    chunks = [open_input(part, f"reduce_scatter: chunk {peer}") for peer, part in enumerate(parts)]
    for chunk in chunks:
        check_op(op, chunk.flat.dtype)

    def work(call: CollectiveCall, deadline: float) -> Any:
        flats = [chunk.flat for chunk in chunks]
        return chunks[transport.rank].restore(direct.reduce_scatter(transport, call, op, flats, deadline))

    text = f"reduce_scatter({op.name}, {' | '.join(chunk.shape for chunk in chunks)})"
    return PlannedCall("reduce_scatter", text, work, "direct")


def plan_reduce(transport: Transport, data: Any, root: int, op: ReduceOp) -> PlannedCall[Any]:
    """Plan a reduction to the root. In shared memory every rank may as well have the result; elsewhere only
    finished slices go to the root."""
    check_rank("root_rank", root, transport.world_size)
    given = open_input(data, "reduce")
    flat = given.flat
    check_op(op, flat.dtype)
    out = torch.empty_like(flat)

    def work(call: CollectiveCall, deadline: float) -> Any:
        rank = transport.rank
        if transport.window is not None:
            algorithms.load("direct").run(ReduceRequest(transport, call, op, flat, out, deadline))
            return given.restore(out) if rank == root else None
        slices = [slice(*part) for part in cut(flat.numel(), transport.world_size)]
        parts = [flat[part] for part in slices]
        out[slices[rank]] = direct.reduce_scatter(transport, call, op, parts, deadline)
        if rank != root:
            transport.exchange(call, [(root, out[slices[rank]])], [], deadline)
            return None
        transport.exchange(call, [], [(peer, out[slices[peer]]) for peer in peers_of(transport)], deadline)
        return given.restore(out)

    text = f"reduce({op.name}, {given.shape}, root_rank={labels_of(transport)[root]})"
    return PlannedCall("reduce", text, work, "direct")


def by_power_sgd(
    data: Any,
    op: ReduceOp,
    compression: PowerSGD,
    average: Callable[[Tensor], Tensor],
    world_size: int,
    name: str,
    out: Any,
    async_op: bool,
) -> Any:
    """Return the low-rank approximation of the sum or average; `average` is the all-reduce of its factors."""
    if async_op:
        raise UsageError(
            "PowerSGD has no asynchronous form: it is two all-reduces with arithmetic in between",
            remedy="call it without async_op, or use another compression",
        )
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
