"""Entry point of each rank of `spawn`: open the context, call the user's function, send its result.

The fork server imports this module, and with it torch, once for all ranks.
"""

from __future__ import annotations

from paceline.comm import default_group, payload_pickling
from paceline.comm.context import DistributedContext
from paceline.engines.local import rank_call
from paceline.engines.local.failure_report import ended_well
from paceline.engines.local.forked_rank import RankTask
from paceline.frontends.spawn import SpawnOptions


def main(task: RankTask) -> int:
    """Run one rank; return the descriptor of its pickled result."""
    __tracebackhide__ = True
    work = rank_call.unpack(task.payload)
    task.shared = work.classes
    (segment,) = task.descriptors
    options = SpawnOptions.from_plain(task.options)
    context = DistributedContext.from_segment(
        segment, task.rank, task.workers, timeout=options.comm_timeout, links=options.links
    )
    default_group.offer(context)
    try:
        try:
            result = work.function(context, *work.args)
        except SystemExit as error:
            if not ended_well(error):
                raise
            result = None
        # Before the context closes, because the result may live in its shared memory.
        packed = rank_call.pack_result(result, work, task.rank, payload_pickling.reducers())
    except BaseException as error:
        # Reported first, so that no peer can fail because of this rank and be taken for the cause.
        task.fail(error)
        context.close(error=error)
        raise
    context.close()
    return packed
