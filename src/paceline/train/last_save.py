"""The last checkpoint of a run that ends because of an error: the state after the last committed step.

A step is a transaction: as long as its update has not begun, the model is that of the step before, also on
the rank whose code raised. Nothing here raises: the error that ends the run is the one to show. Must not know
which error it is.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING

from paceline.comm.context import DistributedContext
from paceline.comm.rendezvous import alone
from paceline.core.errors import PacelineError, PeerError, ReplicasDifferError
from paceline.train.signals import saved_words

if TYPE_CHECKING:
    from paceline.train.assembly import Assembled
    from paceline.train.run import Run

_log = logging.getLogger(__name__)


def save_here(run: Run, assembled: Assembled) -> None:
    """In the group that this rank is in, which is whole."""
    if assembled.saver is None:
        return
    try:
        run.abandon_step()
        run.save()
        assembled.saver.finish()
    except Exception as error:  # whatever it is, the error before it is the one to show
        # Its text alone: the error itself would keep what it has seen for as long as the line is kept.
        _log.error("the state of step %d could not be saved: %s", run.position.step, str(error))


def save_alone(run: Run, assembled: Assembled) -> None:
    """As the only rank that is left: every rank has all of the state, but for what compression owes."""
    if assembled.saver is None:
        return
    assembled.transaction.settle(run.position.step)
    if not assembled.transaction.owes_all:
        _log.warning("not saved: what compression still owes is spread over members that cannot be reached")
        return
    try:
        assembled.team.install(DistributedContext.from_transport(alone()))
        assembled.rebind()
    except PacelineError as error:
        # Its text alone: the error itself would keep what it has seen for as long as the line is kept.
        _log.error("the state of step %d could not be saved: %s", run.position.step, str(error))
        return
    if not assembled.saver.has(run.position.step):
        save_here(run, assembled)


def save_unsupervised(run: Run, assembled: Assembled, error: BaseException) -> None:
    """On a rank that raised, in a group that no supervisor repairs: before the group ends with it. The error
    gets a note that says what was saved."""
    saver = assembled.saver
    if saver is None or not isinstance(error, Exception) or isinstance(error, PeerError):
        return  # of a lost peer the peer tells; it saves what it has
    if isinstance(error, ReplicasDifferError):
        return  # whose state is right is not known: none of them may become a version
    step, several = run.position.step, assembled.team.world_size > 1
    if run.whole and not run.concluded and step > saver.saved_step:
        with _one_at_a_time(assembled):
            save_alone(run, assembled) if several else save_here(run, assembled)
    if saver.newest is not None:
        error.add_note(saved_words(saver.newest, saver.newest_step))


@contextlib.contextmanager
def _one_at_a_time(assembled: Assembled) -> Iterator[None]:
    """Ranks that raised in the same step save it once: the second finds what the first has saved."""
    folder = assembled.folder
    file = None if folder is None else folder.path / "config.toml"
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            if file is not None:
                held = stack.enter_context(file.open("rb"))
                fcntl.flock(held, fcntl.LOCK_EX)
        yield
