"""Entry point of each worker of a supervised job: train as the member that its options name, return a result.

The fork server imports this module once, before any worker, and with it torch.
"""

from __future__ import annotations

from paceline.comm import payload_pickling
from paceline.control.worker_options import WorkerOptions
from paceline.engines.local import rank_call
from paceline.engines.local.forked_rank import RankTask


def main(task: RankTask) -> int:
    """Run one worker, for the local engine; return the descriptor of its result's payload."""
    __tracebackhide__ = True
    work = rank_call.unpack(task.payload)
    task.shared = work.classes
    try:
        result = work.function(*work.args, WorkerOptions.from_plain(task.options))
        return rank_call.pack_result(result, work, task.rank, payload_pickling.reducers())
    except SystemExit:
        raise  # reported by the engine, with its code
    except BaseException as error:
        task.fail(error)
        raise
