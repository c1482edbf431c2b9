"""What runs in each rank that `spawn` starts: opens the context, calls the user's function, sends its result.

The fork server imports this module once, before any rank, and with it torch. Must not know how processes
start.
"""

from __future__ import annotations

from typing import cast

from paceline.comm import default_group
from paceline.comm.context import DistributedContext
from paceline.comm.cost import Links
from paceline.engines.local import call
from paceline.engines.local.child import Task
from paceline.engines.local.report import ended_well
from paceline.frontends import tensor_payload


def main(task: Task) -> int:
    """Entry of the local engine; its result is the descriptor of a payload."""
    __tracebackhide__ = True
    work = call.unpack(task.payload)
    task.shared = work.classes
    (segment,) = task.descriptors
    timeout = task.options.get("comm_timeout")
    assert timeout is None or isinstance(timeout, int | float)
    links = Links.from_plain(cast("dict[str, object]", task.options["links"]))
    context = DistributedContext.from_segment(segment, task.rank, task.workers, timeout=timeout, links=links)
    default_group.offer(context)
    try:
        try:
            result = work.function(context, *work.args)
        except SystemExit as error:
            if not ended_well(error):
                raise
            result = None
        # Before the context closes, because the result may live in its shared memory.
        packed = call.pack_result(result, work, task.rank, tensor_payload.reducers())
    except BaseException as error:
        # Reported first, so that no peer can fail because of this rank and be taken for the cause.
        task.fail(error)
        context.close(error=error)
        raise
    context.close()
    return packed
