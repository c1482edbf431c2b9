"""The server of a queue: looks at the runs, has the pure functions decide, and carries the decision out.

What is decided is written before it is done: a server that is killed in between leaves a run that is said to
run and has no process, and the next server finds that out. Only the server starts runs and ends them; what it
needs to know about a run that trains is on disk, so that runs train on without a server.
"""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, final

from paceline.core.claims import GPU_CLAIMS_VARIABLE
from paceline.core.clock import Clock, MonotonicClock, WallClock
from paceline.core.errors import PacelineError
from paceline.core.host import host_identity
from paceline.core.wording import counted
from paceline.frontends.run_queue import run_host, run_observation
from paceline.frontends.run_queue.queue_folder import QueueFolder
from paceline.frontends.run_queue.queued_run import ACTIVE, QueueContent, QueuedRun
from paceline.frontends.run_queue.run_endings import LONGEST_PAUSE, after_end
from paceline.frontends.run_queue.run_observation import SizeLimits
from paceline.frontends.run_queue.train_command import train_command
from paceline.frontends.run_queue.worker_allocation import Candidate, Resize, Start, StopRun, decide

QUICK_SECONDS: Final = 0.1  # between two looks while a run starts, shrinks or stops
IDLE_SECONDS: Final = 1.0
_CHECK_SECONDS: Final = 10.0  # between two questions to a run that nothing was asked of
_SUPERVISOR_SECONDS: Final = 60.0  # a run without a supervisor by then has none
# The folder or the program that the user named; anything else may pass.
_MISTAKES: Final = (errno.ENOENT, errno.ENOTDIR, errno.EACCES)
_ANSWER_SECONDS: Final = 10.0  # for a supervisor to agree to a stop; then the run's group is signalled


_ELSEWHERE: Final = (
    "it was started on another machine, or in another container: its processes cannot be signalled from "
    "here; serve the queue there"
)


def _is_pausing(run: QueuedRun, now: float) -> bool:
    """Return whether a waiting run is to wait after a crash. Nothing waits longer than the longest pause: a
    clock that was ahead has been set back."""
    return run.state == "waiting" and 0 < run.not_before - now <= LONGEST_PAUSE


@dataclass
class _RunWatch:
    """What the server remembers of one start of a run; a new server begins without. Times are those of a
    clock that no person sets."""

    attempt: int
    begun: float
    reserved: int
    agreed: int | None = None  # the size that the supervisor last agreed to
    limits: SizeLimits | None = None
    checked: float = 0.0
    stop_since: float = 0.0
    stop_agreed: bool = False
    is_remote_noted: bool = False


@final
class QueueServer:
    """Serves one queue; `look` is one round. Hold `folder.serving()` around it.

    `tell` gets a line for everything that happens; `clock` is the wall's, `steady` one that is never set.
    """

    def __init__(
        self,
        folder: QueueFolder,
        capacity: int,
        tell: Callable[[str], None],
        clock: Clock | None = None,
        steady: Clock | None = None,
    ) -> None:
        self._folder = folder
        self._capacity = capacity
        self._tell = tell
        self._clock = clock or WallClock()
        self._steady = steady or MonotonicClock()
        self._watched: dict[int, _RunWatch] = {}
        self._children: list[subprocess.Popen[bytes]] = []
        self._problem = ""

    def look(self) -> float:
        """Observe, decide, act; return the seconds after which to look again."""
        self._children = [child for child in self._children if child.poll() is None]
        try:
            content = self._folder.read()
            self._observe(content)
            content = self._folder.change(self._ended)
            self._obey(content)
            content = self._decide()
            self._ask(content)
        except PacelineError as error:
            # A full disk, a folder that is away for a moment: runs train on meanwhile.
            if self._problem != str(error):
                self._problem = str(error)
                self._tell(f"error: {error}")
            return IDLE_SECONDS
        if self._problem:
            self._problem = ""
            self._tell("the queue can be written again")
        return self._pause(content)

    # observe

    def _observe(self, content: QueueContent) -> None:
        now = self._steady.now()
        active = {run.id: run for run in content.runs if run.state in ACTIVE}
        self._watched = {number: watch for number, watch in self._watched.items() if number in active}
        for run in active.values():
            watch = self._watched.get(run.id)
            run_dir = Path(run.request.run_dir)
            if watch is None or watch.attempt != run.attempt:
                watch = self._watched[run.id] = _RunWatch(run.attempt, now, run.begun_with or run.workers)
                if run_observation.has_supervisor(run_dir):
                    # Of an earlier server, which may have been killed before the run had shrunk.
                    watch.reserved = max(run.workers, run.request.most)
            watch.limits = watch.limits or run_observation.limits(run_dir)
            if watch.reserved > run.workers or now - watch.checked > _CHECK_SECONDS:
                self._count_workers(run, watch, run_dir)

    def _count_workers(self, run: QueuedRun, watch: _RunWatch, run_dir: Path) -> None:
        late = self._steady.now() - watch.checked > _CHECK_SECONDS
        watch.checked = self._steady.now()
        found = run_observation.workers_now(run_dir)
        if found is None:
            return
        if watch.agreed == run.workers:  # else the run has not been asked for its size yet
            watch.reserved = max(found, run.workers)
        if late and found > run.workers:
            watch.agreed = None  # another caller has scaled the run: ask it again

    def _ended(self, content: QueueContent) -> QueueContent:
        """Note which runs have ended, and what users want of runs that have no process."""
        now = self._clock.now()
        for run in content.runs:
            if run.state in ACTIVE and not run_observation.is_alive(self._folder, run):
                after = after_end(run, run_observation.end_of(self._folder, run), now)
            elif run.state in ("waiting", "held") and run.intent in ("cancel", "kill"):
                after = run.moved(now, "cancelled")
            elif run.state == "waiting" and run.intent == "hold":
                after = run.moved(now, "held")
            elif run.state == "held" and run.intent == "run":
                after = run.moved(now, "waiting", "released")
            else:
                continue
            self._say(after)
            content = content.with_run(after)
        return content

    # decide

    def _decide(self) -> QueueContent:
        """Write what is decided, then start what is to start."""
        starting: list[QueuedRun] = []

        def change(content: QueueContent) -> QueueContent:
            starting.clear()
            now = self._clock.now()
            by_id = {run.id: run for run in content.runs}
            for action in decide(self._candidates(content, now), self._capacity):
                run = by_id[action.id]
                match action:
                    case Start():
                        after = run.started(now, action.workers, host_identity())
                        starting.append(after)
                    case Resize():
                        verb = "grows" if action.workers > run.workers else "shrinks"
                        text = f"{verb} to {counted(action.workers, 'worker')}: {action.reason}"
                        after = replace(run, workers=action.workers).noted(now, text)
                    case StopRun():
                        after = run.moved(now, "stopping", action.reason)
                content = content.with_run(after)
                self._say(after)
            return content

        content = self._folder.change(change)
        for run in starting:
            self._start(run)
        return content

    def _candidates(self, content: QueueContent, now: float) -> list[Candidate]:
        found = []
        for run in content.runs:
            watch = self._watched.get(run.id)
            request = run.request
            limits = self._limits(run, watch)
            # A start keeps the least that it was started with, whatever a user has changed since.
            least = max(request.least, run.floor if run.state in ACTIVE else 0)
            most = max(least, request.most if limits.most is None else min(request.most, limits.most))
            if run.state in ACTIVE:
                held = run.workers if watch is None else watch.reserved
            elif run.state != "waiting" or _is_pausing(run, now) or least > self._capacity:
                continue
            else:
                held = 0
            found.append(
                Candidate(
                    id=run.id,
                    priority=request.priority,
                    least=least,
                    most=most,
                    unit=request.per_node or 1,
                    workers=run.workers,
                    reserved=held,
                    is_fixed=watch is not None and self._is_fixed(run, watch, limits),
                    is_leaving=run.state == "stopping" or (run.state == "running" and run.intent != "run"),
                )
            )
        return found

    def _limits(self, run: QueuedRun, watch: _RunWatch | None) -> SizeLimits:
        """Return the sizes that a run accepts. Before its process has read them again, only those that stay
        the same from start to start count: the shards."""
        if watch is not None and watch.limits is not None:
            return watch.limits
        known = run_observation.limits(Path(run.request.run_dir))
        return SizeLimits() if known is None else SizeLimits(most=known.most)

    def _is_fixed(self, run: QueuedRun, watch: _RunWatch, limits: SizeLimits) -> bool:
        if watch.limits is not None and not limits.is_elastic:
            return True
        late = self._steady.now() - watch.begun > _SUPERVISOR_SECONDS
        return late and not run_observation.has_supervisor(Path(run.request.run_dir))

    # act

    def _start(self, run: QueuedRun) -> None:
        """Start the process of a run that is noted as running."""
        folder = self._folder.folder_of(run.id)
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            for old in (*folder.glob("exit-*"), *folder.glob("alive-*")):
                old.unlink()
            alive = self._folder.alive_file_of(run.id, run.attempt)
            lock = os.open(alive, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                child = self._spawn(run, lock)
            finally:
                os.close(lock)
        except OSError as error:
            self._not_started(run, error)
            return
        self._children.append(child)

    def _spawn(self, run: QueuedRun, lock: int) -> subprocess.Popen[bytes]:
        limits = self._limits(run, None)
        command = [
            # By its file: it imports nothing of Paceline, and starts whatever the run's environment is.
            *(sys.executable, "-I", run_host.__file__),
            str(self._folder.exit_file_of(run.id, run.attempt)),
            str(self._folder.wake_pipe),
            str(lock),
            *train_command(run.request, run.workers, limits.most),
        ]
        with open(self._folder.log_of(run.id), "ab") as log:
            return subprocess.Popen(
                command,
                cwd=run.request.folder,
                env={**os.environ, GPU_CLAIMS_VARIABLE: str(self._folder.path), **run.request.environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(lock,),
                start_new_session=True,  # neither Ctrl-C nor the end of the server's terminal reaches it
            )

    def _not_started(self, run: QueuedRun, error: OSError) -> None:
        now = self._clock.now()
        where = f"{error.filename}: " if error.filename else ""
        text = f"it cannot be started: {where}{error.strerror}"

        def change(run: QueuedRun) -> QueuedRun:
            if error.errno in _MISTAKES:
                return run.moved(now, "failed", text)
            return replace(run, not_before=now + _CHECK_SECONDS).moved(now, "waiting", text)

        self._update(run.id, change)

    def _obey(self, content: QueueContent) -> None:
        """Stop runs whose users want that."""
        now = self._clock.now()
        wanted = [run for run in content.runs if run.state == "running" and run.intent != "run"]
        for run in wanted:
            self._update(run.id, lambda run: run.moved(now, "stopping", f"a user asked to {run.intent} it"))

    def _ask(self, content: QueueContent) -> None:
        """Have runs grow, shrink and stop as it is written."""
        for run in content.runs:
            watch = self._watched.get(run.id)
            if watch is None or watch.attempt != run.attempt:
                continue
            run_dir = Path(run.request.run_dir)
            if run.state == "stopping":
                self._stop(run, watch, run_dir)
            elif run.state == "running" and watch.agreed != run.workers and self._scale(run, run_dir):
                watch.agreed = run.workers
                watch.reserved = max(watch.reserved, run.workers)

    def _scale(self, run: QueuedRun, run_dir: Path) -> bool:
        return run_observation.has_supervisor(run_dir) and run_observation.ask_to_scale(run_dir, run.workers)

    def _stop(self, run: QueuedRun, watch: _RunWatch, run_dir: Path) -> None:
        now = self._steady.now()
        watch.stop_since = watch.stop_since or now
        if not run_observation.is_here(run) and not watch.is_remote_noted:
            watch.is_remote_noted = True
            self._update(run.id, lambda run: run.noted(self._clock.now(), _ELSEWHERE))
        if run.intent == "kill":
            self._signal(run, signal.SIGKILL)
            for process in run_observation.processes(run):
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(process, signal.SIGKILL)
            return
        if watch.stop_agreed:
            return
        if run_observation.has_supervisor(run_dir):
            watch.stop_agreed = run_observation.ask_to_stop(run_dir, f"paceline queue: {run.reason}")
            if watch.stop_agreed or now - watch.stop_since < _ANSWER_SECONDS:
                return
        # Noted afterwards: a server that is killed in between sends it twice rather than never. A run whose
        # process is just being started is signalled at a later look.
        if run.signalled != run.attempt and self._signal(run, signal.SIGTERM):
            self._update(run.id, lambda run: replace(run, signalled=run.attempt))

    def _signal(self, run: QueuedRun, number: signal.Signals) -> bool:
        """Signal the process group of a run that lives; return whether there was one."""
        group = run_observation.process_group(self._folder, run)
        if group is None:
            return False
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(group, number)
        return True

    # tell

    def _update(self, number: int, change: Callable[[QueuedRun], QueuedRun]) -> None:
        """Change one run, as it is on disk now; a user may have changed it meanwhile."""
        before = {run.id: run for run in self._folder.read().runs}.get(number)
        content = self._folder.change(lambda content: content.updated(number, change))
        after = {run.id: run for run in content.runs}.get(number)
        if before is not None and after is not None and after.state != before.state:
            self._say(after)

    def _say(self, run: QueuedRun) -> None:
        text = run.notes[-1].text if run.notes else run.state
        self._tell(f"{run.label}: {text} [{run.request.run_dir}]")

    def _pause(self, content: QueueContent) -> float:
        """Return how long nothing is expected to happen that no event announces."""
        now = self._clock.now()
        quick = any(
            run.state == "stopping"
            or (run.state == "running" and self._is_unsettled(run))
            or (_is_pausing(run, now) and run.not_before - now < IDLE_SECONDS)
            for run in content.runs
        )
        return QUICK_SECONDS if quick else IDLE_SECONDS

    def _is_unsettled(self, run: QueuedRun) -> bool:
        watch = self._watched.get(run.id)
        if watch is None or watch.reserved > run.workers:
            return True
        is_young = self._steady.now() - watch.begun < _SUPERVISOR_SECONDS
        return watch.agreed != run.workers and is_young
