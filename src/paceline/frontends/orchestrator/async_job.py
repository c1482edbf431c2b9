"""The processes of asynchronous SGD as their caller sees them: one server, workers that come and go.

A worker that is lost is replaced from the fork server after a back-off, up to its budget; then training goes
on without it. A server that is lost takes the parameters along: everything starts again from the newest
checkpoint. One thread looks after all of them and never waits for one. Must not know what they compute.
"""

from __future__ import annotations

import contextlib
import os
import random
import selectors
import socket
import time
from dataclasses import dataclass
from typing import Any, Final, final

from paceline.aggregate.async_messages import pair, receive, send
from paceline.core.errors import PacelineError, PeerLostError
from paceline.core.events import Note
from paceline.core.journal import Journal
from paceline.core.system_calls import memory_file
from paceline.engines.local import call, payload
from paceline.engines.local.launch import order_here
from paceline.engines.local.verdict import Died, Raised, judge
from paceline.engines.local.worker import Worker
from paceline.frontends import tensor_payload
from paceline.frontends.orchestrator.async_entry import AsyncWork
from paceline.frontends.orchestrator.job import PRELOAD, InThread, Outcome
from paceline.train.history import EpochRecord, History, StepRecord
from paceline.train.resuming import earlier_steps
from paceline.train.run_folder import RunFolder
from paceline.train.run_lock import held

_ENTRIES: Final = "paceline.frontends.orchestrator.async_entry"
_FIRST_BACK_OFF: Final = 0.05
_LONGEST_BACK_OFF: Final = 5.0
_TICK_SECONDS: Final = 0.25
_END_SECONDS: Final = 10.0


@final
@dataclass
class _Seat:
    """One worker's number, and whoever sits there now."""

    number: int
    worker: Worker | None = None
    failures: int = 0
    start_at: float | None = None  # None: nobody is to be started


@final
class AsyncJob(InThread):
    """One asynchronous training."""

    def __init__(self, work: AsyncWork, *, replace_lost: bool, budget: int) -> None:
        super().__init__("paceline-async-job")
        self.folder = RunFolder(work.folder)
        self._work = work
        self._replace, self._budget = replace_lost, budget
        self._random = random.Random(work.config.seed)
        self._seats = [_Seat(number) for number in range(work.config.workers)]
        self._server: Worker | None = None
        self._control: socket.socket | None = None
        self._wake_read, self._wake_write = os.pipe()
        self._stop: str | None = None
        self._closing = False
        self._learned = False  # somebody handed in a gradient
        self._failure: BaseException | None = None
        self._fatal: BaseException | None = None  # why the job is given up, once its state is saved

    def stop(self, reason: str) -> None:
        """Finish what is under way, save, end."""
        self._stop = self._stop or reason
        self._wake()

    def close(self) -> None:
        """End everything now; what was saved stays."""
        self._closing = True
        self._wake()
        self._thread.join()
        for descriptor in (self._wake_read, self._wake_write):
            if descriptor >= 0:
                os.close(descriptor)
        self._wake_read = self._wake_write = -1

    def _wake(self) -> None:
        if self._wake_write >= 0:
            os.write(self._wake_write, b".")

    # the thread

    def _run(self) -> None:
        try:
            with held(self.folder.lock_file, str(self.folder.path)):
                packed, packed_call = call.pack(_unused, (self._work,), tensor_payload.reducers())
                try:
                    resume = self._work.config.resume is not None
                    attempt = 0
                    while self._outcome is None:
                        attempt += 1
                        options = {"attempt": attempt, "resume": resume or attempt > 1}
                        self._attempt(packed, packed_call, options)
                        if self._outcome is None and (not self._replace or attempt > self._budget):
                            raise self._failure or PeerLostError("the server of asynchronous SGD was lost")
                finally:
                    os.close(packed)
        except Exception as error:
            self._error = error

    def _attempt(self, packed: int, packed_call: call.Call, options: dict[str, Any]) -> None:
        """From a server's start to its end. Without an outcome afterwards, the server died."""
        now = time.monotonic()
        for seat in self._seats:
            seat.start_at = now
        self._failure = None
        told_stop = False
        try:
            control, far = pair()
            self._control = control
            with far:
                self._server = self._start("serve_main", options, packed, (far.fileno(),))
            while not self._server.done:
                if self._closing:
                    raise PeerLostError("the training was ended before it was finished")
                if self._stop is not None and not told_stop:
                    told_stop = send(control, {"do": "stop", "reason": self._stop})
                if not told_stop:
                    self._start_due(packed)
                self._listen(control)
                for seat in self._seats:
                    if seat.worker is not None and seat.worker.done:
                        self._gone(seat, control, over=told_stop or bool(self._server.returned))
            self._conclude(self._server, packed_call)
            if self._fatal is not None:
                raise self._fatal
        finally:
            self._end()

    def _start(self, entry: str, options: dict[str, Any], packed: int, files: tuple[int, ...]) -> Worker:
        order = order_here(f"{_ENTRIES}:{entry}", 1, (*PRELOAD, _ENTRIES), self._work.config.threads, options)
        return Worker.start(order, packed, files)

    def _start_due(self, packed: int) -> None:
        assert self._control is not None
        now = time.monotonic()
        for seat in self._seats:
            if seat.start_at is None or seat.start_at > now:
                continue
            seat.start_at = None
            ours, theirs = pair()
            memory = memory_file(f"paceline-async-{seat.number}")
            try:
                with ours, theirs:
                    files = (ours.fileno(), memory)
                    send(self._control, {"do": "join", "worker": seat.number}, files)
                    options = {"worker": seat.number}
                    seat.worker = self._start("work_main", options, packed, (theirs.fileno(), memory))
            finally:
                os.close(memory)

    def _listen(self, control: socket.socket) -> None:
        processes = [self._server, *(seat.worker for seat in self._seats)]
        present = [process for process in processes if process is not None and not process.done]
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake_read, selectors.EVENT_READ, None)
            selector.register(control, selectors.EVENT_READ, control)
            for process in present:
                selector.register(process.fileno(), selectors.EVENT_READ, process)
            for key, _ in selector.select(_TICK_SECONDS):
                if key.data is None:
                    os.read(self._wake_read, 4096)
                elif key.data is control:
                    self._hear(control)
                else:
                    key.data.take()

    def _hear(self, control: socket.socket) -> None:
        heard = receive(control)
        if heard is None:
            # Its end is heard of by way of its process, a moment later.
            if self._server is not None:
                self._server.take()
            return
        if heard[0]["say"] == "learned":
            self._learned = True

    def _gone(self, seat: _Seat, control: socket.socket, *, over: bool) -> None:
        """A worker's process has ended: replace it, do without it, or give the job up."""
        worker, seat.worker = seat.worker, None
        assert worker is not None
        error = None if over else _why(worker, seat.number)
        raised, pid = bool(worker.failed), worker.pid
        worker.close()
        if over or error is None:
            return
        seat.failures += 1
        self._failure = error
        reason = str(error).splitlines()[0]
        cause = "raised" if raised else "crash"
        lost = {"do": "lost", "worker": seat.number, "pid": pid, "reason": reason, "cause": cause}
        send(control, lost)
        if raised and not self._learned:
            # A mistake that nobody got past is no failure, and there is nothing to save.
            raise error
        if not self._replace:
            self._give_up(error)
            return
        if seat.failures <= self._budget:
            wait = min(_FIRST_BACK_OFF * 2 ** (seat.failures - 1), _LONGEST_BACK_OFF)
            seat.start_at = time.monotonic() + wait * self._random.uniform(0.5, 1.5)
        elif all(other.worker is None and other.start_at is None for other in self._seats):
            self._give_up(error)

    def _give_up(self, error: BaseException) -> None:
        self._fatal = self._fatal or error
        self._stop = self._stop or "workers were lost"

    def _conclude(self, server: Worker, packed_call: call.Call) -> None:
        if server.returned:
            result = call.unpack_result(server.returned[0], packed_call, 0)
            self._outcome = self._as_outcome(result)
            return
        error = _why(server, 0) or PeerLostError("the server of asynchronous SGD ended without a result")
        if server.failed:
            raise error
        self._failure = error
        text = f"the server of asynchronous SGD is lost: {str(error).splitlines()[0]}"
        with contextlib.suppress(PacelineError), Journal(self.folder.journal_file) as journal:
            journal.append(
                Note(time=time.time(), text=f"{text}; everything goes back to the newest checkpoint")
            )

    def _as_outcome(self, result: dict[str, Any]) -> Outcome:
        steps = tuple(StepRecord(**step) for step in result["steps"])
        if result["first_step"]:
            steps = (*earlier_steps(self.folder.journal_file, result["first_step"]), *steps)
        config = self._work.config
        history = History(
            total_time=result["seconds"],
            state_hash=result["hash"],
            steps=steps,
            epochs=_epochs(steps),
            workers=config.workers,
            shards=config.workers,
            run_dir=str(self.folder.path),
            stopped=result["stopped"],
        )
        return Outcome(history, result["weights"], result["epochs"], result["stopped"], result["staleness"])

    def _end(self) -> None:
        """Nobody is left, and no descriptor."""
        if self._control is not None:
            self._control.close()
            self._control = None
        left = [seat.worker for seat in self._seats if seat.worker is not None]
        if self._server is not None:
            left.append(self._server)
        finished = self._outcome is not None
        limit = time.monotonic() + (_END_SECONDS if finished else 0.0)
        for process in left:
            _finish(process, limit)
        for process in left:
            process.close()
        self._server = None
        for seat in self._seats:
            seat.worker = None


def _unused() -> None:
    """Stands for a function where only the arguments travel; the entries are named."""


def _finish(process: Worker, limit: float) -> None:
    """Lets a process end by itself until `limit`, then ends it, and waits for that."""
    with selectors.DefaultSelector() as selector:
        selector.register(process.fileno(), selectors.EVENT_READ)
        killed = False
        while not process.done:
            left = limit - time.monotonic()
            if left <= 0.0 and not killed and process.pid:
                process.kill()
                killed = True
            if left <= -_END_SECONDS:
                return
            selector.select(max(left, _TICK_SECONDS) if left > 0.0 else _TICK_SECONDS)
            process.take()


def _why(process: Worker, number: int) -> BaseException | None:
    """The error that a process ended with; None for one that ended well."""
    if process.refusal is not None:
        return process.refusal
    if process.failed:
        error: BaseException | None = None
        if len(process.failed) > 1:
            # Exceptions whose constructor wants other arguments than it stores cannot be rebuilt.
            with contextlib.suppress(Exception):
                error = payload.load(process.failed[1])
        return judge([Raised(number, process.pid, 0.0, payload.load(process.failed[0]), error)])
    if process.status == 0:
        return None
    return judge([Died(number, process.pid, 0.0, process.status if process.status is not None else -9)])


def _epochs(steps: tuple[StepRecord, ...]) -> tuple[EpochRecord, ...]:
    by_epoch: dict[int, list[StepRecord]] = {}
    for step in steps:
        by_epoch.setdefault(step.epoch, []).append(step)
    found = []
    for epoch, records in sorted(by_epoch.items()):
        samples = sum(record.samples for record in records)
        loss = sum(record.loss * record.samples for record in records) / max(samples, 1)
        seconds = sum(record.seconds for record in records)
        found.append(
            EpochRecord(epoch=epoch, steps=len(records), samples=samples, loss=loss, seconds=seconds)
        )
    return tuple(found)
