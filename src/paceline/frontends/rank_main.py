"""Entry points of the processes that run a user's work: a rank of `spawn` opens its context and calls the
user's function, a worker of a supervised job trains as the member that its options name.

The fork server imports this module, and with it torch, once for all of them.
"""

from __future__ import annotations

from paceline.comm import default_group, tensor_pickling
from paceline.comm.context import DistributedContext
from paceline.control.worker_options import WorkerOptions
from paceline.core import log
from paceline.engines.local import rank_call
from paceline.engines.local.failure_report import ended_well
from paceline.engines.local.forked_rank import RankTask
from paceline.frontends.spawn import SpawnOptions


def main(task: RankTask) -> int:
    """Run one rank of `spawn`; return the descriptor of its pickled result."""
    __tracebackhide__ = True
    work = rank_call.unpack(task.payload)
    task.shared = work.classes
    (segment,) = task.descriptors
    options = SpawnOptions.from_plain(task.options)
    context = DistributedContext.from_segment(
        segment, task.rank, task.workers, timeout=options.comm_timeout, links=options.links
    )
    default_group.offer(context)
    log.label_records(task.rank)  # to the end of this process
    try:
        try:
            result = work.function(context, *work.args)
        except SystemExit as error:
            if not ended_well(error):
                raise
            result = None
        # Before the context closes, because the result may live in its shared memory.
        packed = rank_call.pack_result(result, work, task.rank, tensor_pickling.reducers())
    except BaseException as error:
        # Reported first, so that no peer can fail because of this rank and be taken for the cause.
        task.fail(error)
        context.close(error=error)
        raise
    context.close()
    return packed


def member_main(task: RankTask) -> int:
    """Run one worker of a supervised job; return the descriptor of its pickled result."""
    __tracebackhide__ = True
    log.label_records(task.rank)  # to the end of this process
    work = rank_call.unpack(task.payload)
    task.shared = work.classes
    try:
        result = work.function(*work.args, WorkerOptions.from_plain(task.options))
        return rank_call.pack_result(result, work, task.rank, tensor_pickling.reducers())
    except SystemExit:
        raise  # reported by the engine, with its code
    except BaseException as error:
        task.fail(error)
        raise
