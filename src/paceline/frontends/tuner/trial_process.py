"""A trial in its process: call the user's function with its parameters, report to the search, leave a value.

`main` is the entry of a process that the fork server forked; a Ray worker calls `run_trial` itself. Imports
neither torch nor Optuna.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from paceline.core import fd_messages
from paceline.engines.local import memfd_pickle, rank_call
from paceline.engines.local.failure_report import ended_well
from paceline.engines.local.forked_rank import RankTask
from paceline.frontends.tuner import current_trial
from paceline.frontends.tuner.current_trial import CurrentTrial, TrialPruned
from paceline.frontends.tuner.trial_engine import TrialCall, TrialStart
from paceline.frontends.tuner.trial_record import OUTPUT
from paceline.frontends.tuner.trial_value import value_of

# A trial is no rank of a job: what looks for these would take it for one.
_RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def run_trial(call: TrialCall, start: TrialStart, send: Callable[[int, float], bool]) -> float | None:
    """Run a trial to its end; return its value, or None where it was pruned."""
    __tracebackhide__ = True
    params = call.decode(start.params)
    parent = Path(start.parent_folder) if start.parent_folder else None
    trial = CurrentTrial(start.number, params, Path(start.folder), parent, send)
    current_trial.begin(trial)
    try:
        result = None
        with leaving_well():
            result = call.function(dict(params))
        return value_of(result, call.metric, trial.reports)
    except TrialPruned:
        return None
    finally:
        current_trial.end()


@contextmanager
def leaving_well() -> Iterator[None]:
    """Take sys.exit() and sys.exit(0) inside the block for its end."""
    __tracebackhide__ = True
    try:
        yield
    except SystemExit as error:
        if not ended_well(error):
            raise


def main(task: RankTask) -> int:
    """Run the trial that the options name; return the descriptor of its pickled value."""
    __tracebackhide__ = True
    for name in _RANK_VARIABLES:
        os.environ.pop(name, None)
    start = start_from_plain(task.options)
    _redirect_output(Path(start.folder))
    with socket.socket(fileno=task.descriptors[0]) as link:
        work = rank_call.unpack(task.payload)
        task.shared = work.classes
        (call,) = work.args

        def send(step: int, value: float) -> bool:
            fd_messages.send(link, [step, value])
            if not call.waits_for_answers:
                return False
            answer = fd_messages.receive(link)
            # No answer: the search is gone, and this process will be in a moment.
            return answer is None or bool(answer[0][0])

        return memfd_pickle.dump(run_trial(call, start, send))


def start_to_plain(start: TrialStart) -> dict[str, fd_messages.Plain]:
    """Return a start as options of a process."""
    return {**vars(start), "params": dict(start.params)}


def start_from_plain(options: object) -> TrialStart:
    """Return what `start_to_plain` was given."""
    assert isinstance(options, dict)
    return TrialStart(**options)


def _redirect_output(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    file = os.open(folder / OUTPUT, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    for target in (1, 2):
        os.dup2(file, target)
    os.close(file)
