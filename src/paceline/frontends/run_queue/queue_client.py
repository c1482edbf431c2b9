"""What commands do with a queue: add runs, find one, change what is wanted of it, forget those that ended."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from paceline.core.available_resources import cores, visible_gpus
from paceline.core.clock import Clock, WallClock
from paceline.core.errors import UsageError
from paceline.core.wording import counted
from paceline.frontends.run_queue import run_observation
from paceline.frontends.run_queue.queue_folder import QueueFolder
from paceline.frontends.run_queue.queued_run import ENDED, Intent, QueueContent, QueuedRun, RunRequest
from paceline.train.state.run_folder import RUNS, RunFolder

# What decides which program runs and what it sees of the machine; other variables may hold secrets.
KEPT_VARIABLES: Final = (
    "PATH", "PYTHONPATH", "VIRTUAL_ENV", "CONDA_PREFIX", "CONDA_DEFAULT_ENV", "LD_LIBRARY_PATH",
    "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS",
)  # fmt: skip
# By which this machine reaches an engine's nodes. The server may have been started in another login, whose
# ssh agent and tickets are gone by now.
_ENGINE_VARIABLES: Final = ("SSH_AUTH_SOCK", "KRB5CCNAME", "KUBECONFIG", "RAY_ADDRESS", "SLURM_CONF")
KEPT_ENDED: Final = 1000
"""Runs that have ended and stay in the queue; with more the oldest leave it."""
_ENGINE_PREFIXES: Final = ("OMPI_MCA_", "PRTE_MCA_", "PMIX_MCA_")  # settings of mpirun


def capacity_of(folder: QueueFolder, content: QueueContent) -> int:
    """Return the workers of a queue: those that a server was told to use, else those that the one which
    serves has counted, else the GPUs of this machine, and without any its cores."""
    counted = content.counted if folder.is_served else 0
    return content.capacity or counted or own_workers()


def own_workers() -> int:
    """Return the workers of this machine, as this process sees it."""
    return visible_gpus() or cores()


def kept_environment(
    named: Iterable[str], *, has_engine: bool = False, environment: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Return the variables that a run keeps from the shell that adds it; `named`: NAME or NAME=VALUE."""
    names = {*KEPT_VARIABLES, *_ENGINE_VARIABLES} if has_engine else set(KEPT_VARIABLES)
    prefixes = _ENGINE_PREFIXES if has_engine else ()
    kept = {name: value for name, value in environment.items() if name in names or name.startswith(prefixes)}
    for text in named:
        name, equals, value = text.partition("=")
        if not name or (not equals and name not in environment):
            raise UsageError(
                f"--env {text}: there is no such variable here", remedy="write --env NAME=VALUE, or export it"
            )
        kept[name] = value if equals else environment[name]
    return kept


def add_run(folder: QueueFolder, request: RunRequest, clock: Clock | None = None) -> QueuedRun:
    """Put a run at the end of its priority; a request without `run_dir` gets a folder of its own below runs/
    of the folder in which it is started."""
    now = (clock or WallClock()).now()
    added: list[QueuedRun] = []
    oldest: set[int] = set()

    def change(content: QueueContent) -> QueueContent:
        check_size(request.least, request.most, capacity_of(folder, content))
        check_shards(request.run_dir, request.least)
        taken = {run.request.run_dir: run for run in content.runs if run.state not in ENDED}
        run_dir = request.run_dir or _fresh(request, now, taken)
        if run_dir in taken:
            raise UsageError(
                f"{run_dir} is the folder of {taken[run_dir].label}, which has not ended",
                remedy="choose another --run-dir, or leave it out",
            )
        run = QueuedRun(
            id=content.next_id, request=replace(request, run_dir=run_dir), added=now, since=now
        ).noted(now, "added")
        added.append(run)
        # Each change writes all runs that there are.
        oldest.update([run.id for run in content.runs if run.state in ENDED][:-KEPT_ENDED])
        kept = tuple(run for run in content.runs if run.id not in oldest)
        return replace(content, runs=kept).with_run(run)

    folder.change(change)
    _remove_output(folder, oldest)
    folder.wake()
    return added[-1]


def _remove_output(folder: QueueFolder, runs: Iterable[int]) -> None:
    for number in runs:
        shutil.rmtree(folder.folder_of(number), ignore_errors=True)


def check_size(least: int, most: int, capacity: int) -> None:
    """Refuse a number of workers that this queue can never give."""
    if not 1 <= least <= most:
        raise UsageError(
            f"--workers {least}-{most}: "
            + ("a run needs a worker" if least < 1 else f"{least} is more than {most}"),
            remedy="give the fewest and the most workers, such as 1-4, or one number",
        )
    if most > capacity:
        raise UsageError(
            f"--workers {least}-{most}: this queue has {counted(capacity, 'worker')}",
            remedy=f"give at most {capacity}, or serve the queue with more: paceline queue serve "
            f"--workers {most}",
        )


def check_shards(run_dir: str, least: int) -> None:
    """Refuse more workers than the run in a folder can have."""
    known = run_observation.limits(Path(run_dir)) if run_dir else None
    if known is not None and known.most is not None and least > known.most:
        raise UsageError(
            f"--workers: {least} and more, and the run in {run_dir} has {counted(known.most, 'shard')}, of "
            "which each worker computes at least one",
            remedy=f"ask for at most {known.most}, or begin another run (another --run-dir)",
        )


def check_unit(least: int, most: int, per_node: int) -> None:
    """Refuse a number of workers that is not one of whole nodes; `per_node` 0: the run has none."""
    if per_node and (least % per_node or most % per_node):
        raise UsageError(
            f"--workers {least}-{most}: a node of this run has {counted(per_node, 'worker')}, which come "
            "and go together",
            remedy=f"give multiples of {per_node}, or add the run with another --workers-per-node",
        )


def _fresh(request: RunRequest, now: float, taken: Mapping[str, QueuedRun]) -> str:
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime(now))
    base = Path(request.folder) / RUNS / f"{stamp}-{request.name}"
    path, number = base, 2
    while path.exists() or str(path) in taken:
        path, number = base.with_name(f"{base.name}+{number}"), number + 1
    return str(path)


def find_run(content: QueueContent, word: str) -> QueuedRun:
    """Return the run of this number, or of this name where only one has it."""
    if word.isdigit():
        for run in content.runs:
            if run.id == int(word):
                return run
    named = [run for run in content.runs if run.request.name == word]
    open_ones = [run for run in named if run.state not in ENDED]
    for runs in (named, open_ones):
        if len(runs) == 1:
            return runs[0]
    if named:
        numbers = ", ".join(str(run.id) for run in named)
        raise UsageError(f"several runs of the queue are called {word}: {numbers}", remedy="give the number")
    known = ", ".join(f"{run.id} ({run.request.name})" for run in content.runs[-8:])
    raise UsageError(
        f"there is no run {word} in the queue",
        remedy=f"its runs are {known}" if known else "the queue is empty: paceline queue add SCRIPT",
    )


def want(folder: QueueFolder, word: str, intent: Intent) -> QueuedRun:
    """Have a run stopped, kept or continued; return it as it is then. A run without a process changes at
    once, others when the server has seen to it."""

    def change(run: QueuedRun) -> QueuedRun:
        if run.state in ENDED:
            raise UsageError(
                f"{run.label} has ended: {run.state}", remedy="add it again: paceline queue add ... --run-dir"
            )
        if intent == "run" and run.state != "held" and run.intent != "hold":
            raise UsageError(f"{run.label} is not held: it is {run.state}", remedy="see paceline queue ls")
        if intent == "hold" and run.state == "held":
            raise UsageError(f"{run.label} is held already", remedy=f"paceline queue release {run.id}")
        now = WallClock().now()
        run = replace(run, intent=intent, not_before=0.0)
        if run.state in ("waiting", "held"):
            at_once = {"run": "waiting", "hold": "held", "cancel": "cancelled", "kill": "cancelled"}
            return run.moved(now, at_once[intent])  # type: ignore[arg-type]
        return run.noted(now, {"run": "released"}.get(intent, f"to {intent}"))

    return change_run(folder, word, change)


def change_run(folder: QueueFolder, word: str, change: Callable[[QueuedRun], QueuedRun]) -> QueuedRun:
    """Change one run, and tell the server; return it."""
    found: list[QueuedRun] = []

    def change_content(content: QueueContent) -> QueueContent:
        found.append(change(find_run(content, word)))
        return content.with_run(found[-1])

    folder.change(change_content)
    folder.wake()
    return found[-1]


def remark(run: QueuedRun, capacity: int) -> str:
    """Return why a run is in its state, for people."""
    if run.state == "waiting" and run.request.least > capacity:
        return f"needs {counted(run.request.least, 'worker')}, and the queue has {capacity}"
    return run.reason


def forget(folder: QueueFolder, content_filter: Callable[[QueuedRun], bool]) -> list[QueuedRun]:
    """Take ended runs out of the queue, with what they printed; their folders stay."""
    gone: list[QueuedRun] = []

    def change(content: QueueContent) -> QueueContent:
        gone.extend(run for run in content.runs if run.state in ENDED and content_filter(run))
        return replace(content, runs=tuple(run for run in content.runs if run not in gone))

    folder.change(change)
    _remove_output(folder, [run.id for run in gone])
    return gone


def steps(run: QueuedRun) -> int:
    """Return the last step of a run; 0 before its first."""
    path = Path(run.request.run_dir)
    return run_observation.progress(path)[0] if RunFolder(path).journal_file.exists() else 0
