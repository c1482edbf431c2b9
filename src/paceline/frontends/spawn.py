"""`paceline.spawn`: call a function on several ranks of this machine and get their results.

Joins the local engine, which starts processes, to the shared-memory transport, over which they talk. Must not
import torch: a process that only starts ranks never needs it.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, final

from paceline.comm import tensor_pickling
from paceline.comm.cost import LinkCosts, load_links
from paceline.core.errors import UsageError
from paceline.core.plain_options import PlainOptions
from paceline.core.shm_segment_layout import create_segment
from paceline.core.wording import counted
from paceline.engines.local import Launch, run
from paceline.engines.local.launch import check, check_seconds
from paceline.frontends.error_folding import folding_errors

T = TypeVar("T")

_ENTRY = "paceline.frontends.rank_main:main"
_PRELOAD = (
    "torch",
    "paceline.comm.context",
    "paceline.frontends.rank_main",
    "paceline.frontends.collective_functions",
    "paceline.frontends.process_group",
    "paceline.parallel.ddp",
)


@final
@dataclasses.dataclass(frozen=True)
class SpawnOptions(PlainOptions):
    """Options of each rank: seconds that a collective may wait for a peer, and the costs of the links."""

    comm_timeout: float | None
    links: LinkCosts


@folding_errors
def spawn(
    fn: Callable[..., T],
    *args: Any,
    workers: int = 4,
    timeout: float | None = None,
    comm_timeout: float | None = None,
    threads: int | None = None,
    preload: Sequence[str] = (),
) -> list[T]:
    """Call `fn(ctx, *args)` on `workers` local ranks and return their results by rank.

        def total(ctx, x):
            return ctx.all_reduce([float(ctx.rank) * x])

        paceline.spawn(total, 10.0, workers=4)      # [[60.0], [60.0], [60.0], [60.0]]

    fn            any function: of a module, of `__main__`, of a notebook cell, a lambda
    args          sent to every rank once; arrays and tensors are shared until a rank writes to them
    timeout       seconds that the ranks may take; then they end and CommTimeoutError says where each was
    comm_timeout  seconds that one communication may wait for its peers
    threads       of numeric libraries per rank; default OMP_NUM_THREADS, else an equal share of the cores
    preload       modules to import once, ahead of the ranks of this and later calls

    The first rank that fails ends the others. Its error is raised here: a Paceline error as it is, anything
    else as RankFailedError with the rank's traceback and the error itself as `original`. A rank whose process
    dies is a PeerLostError. However the call ends, no process, descriptor or shared memory is left of it.
    """
    if isinstance(preload, str):
        raise UsageError(
            f"preload must be a sequence of module names, not {preload!r}", remedy='write preload=("name",)'
        )
    launch = Launch(
        entry=_ENTRY,
        function=fn,
        args=args,
        workers=workers,
        preload=(*_PRELOAD, *preload),
        # Read once, here: ranks that chose algorithms by different links would disagree.
        options=SpawnOptions(comm_timeout, load_links()).to_plain(),
        reducers=tensor_pickling.reducers(),
        threads=threads,
        timeout=timeout,
    )
    check(launch)
    check_seconds("comm_timeout", comm_timeout)
    _check_signature(fn, args)
    segment = create_segment(workers)
    try:
        return run(dataclasses.replace(launch, descriptors=(segment,)))
    finally:
        os.close(segment)


def _check_signature(fn: Callable[..., Any], args: Sequence[Any]) -> None:
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):
        # Some callables of compiled code do not say what they take.
        return
    try:
        signature.bind(None, *args)
    except TypeError as error:
        name = getattr(fn, "__qualname__", type(fn).__qualname__)
        raise UsageError(
            f"{name}{signature} cannot be called with the context and {counted(len(args), 'argument')}: "
            f"{error}",
            remedy="the first parameter of the function is the rank's context: def train(ctx, ...)",
        ) from error
