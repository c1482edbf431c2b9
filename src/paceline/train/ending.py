"""The end of a run: the last evaluation and checkpoint, the hash that all ranks must share, the history.

Must not know how the run was walked through.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from paceline.core import events
from paceline.core.errors import InternalError
from paceline.train.assembly import Assembled
from paceline.train.history import History
from paceline.train.run import Run
from paceline.train.state import state_hash


def conclude(run: Run, assembled: Assembled, started: float) -> History | None:
    """Ends the run on this rank; the main rank gets the history."""
    recorder, saver, context = assembled.recorder, assembled.saver, assembled.context
    recorder.flush()
    if not run.stopped_on_request:
        validation = run.evaluate()
        if recorder.sums.steps:
            recorder.end_epoch(run.position.epoch, validation)
    if saver is not None and (run.stopped_on_request or assembled.config.checkpoint.at_end):
        run.save()
        saver.finish()
    digest = state_hash(assembled.module)
    _check_equal(context.all_gather(digest))
    recorder.note(
        events.RunEnded(
            time=time.time(),
            step=run.position.step,
            epoch=run.position.epoch,
            reason=run.ended or "finished",
            hash=digest,
        )
    )
    if not context.is_master:
        return None
    history = History(
        total_time=time.perf_counter() - started,
        state_hash=digest,
        steps=tuple(recorder.steps),
        epochs=tuple(recorder.epochs),
        evaluations=tuple(recorder.evaluations),
        workers=context.world_size,
        shards=assembled.shards,
        run_dir=None if assembled.folder is None else str(assembled.folder.path),
        stopped=run.ended,
    )
    assembled.callbacks.end(history)
    return history


def _check_equal(hashes: Sequence[str]) -> None:
    odd = [rank for rank, digest in enumerate(hashes) if digest != hashes[0]]
    if odd:
        raise InternalError(
            f"the weights of rank{'s' if len(odd) > 1 else ''} {', '.join(map(str, odd))} are not those of "
            "rank 0 at the end of the run",
            remedy="a modifier or the model may depend on the rank, on time or on randomness of its own; "
            "else suspect the memory of that machine",
        )
