"""The caller's side of asynchronous SGD: one server process, and workers that are replaced when they fail.

A lost worker is replaced from the fork server with the back-off and the budget of `elastic`; beyond it
training continues without that worker. A lost server takes the parameters with it: everything starts again
from the newest checkpoint, with the same back-off and budget. One thread watches all processes and never
waits for a single one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import time
from multiprocessing.connection import wait
from typing import Final, final

from paceline.aggregate.async_sgd.gradient_exchange import send
from paceline.aggregate.async_sgd.process_entries import AsyncTraining, AsyncWorkerOptions, ServerOptions
from paceline.comm import tensor_pickling
from paceline.core.errors import PacelineError, PeerLostError
from paceline.core.events import Note
from paceline.core.fd_messages import pair, receive
from paceline.core.journal import Journal
from paceline.core.plain_options import PlainOptions
from paceline.core.sandbox_fallbacks import memory_file
from paceline.elastic.machine.budgets import after_failure
from paceline.elastic.machine.settings import MachineSettings
from paceline.elastic.machine.state import Slot
from paceline.engines.local import rank_call
from paceline.engines.local.blame import RankDied, RankRaised, root_cause
from paceline.engines.local.launch import order_from_caller
from paceline.engines.local.worker_handle import WorkerProcess
from paceline.train.loop.training_thread import PRELOAD, TrainingJob, TrainingOutcome
from paceline.train.state.run_folder import RunFolder
from paceline.train.state.run_lock import held

_ENTRIES: Final = "paceline.aggregate.async_sgd.process_entries"
_TICK_SECONDS: Final = 0.25
_END_SECONDS: Final = 10.0


@final
class AsyncJob(TrainingJob):
    """One asynchronous training."""

    def __init__(self, training: AsyncTraining) -> None:
        assert training.job.folder is not None
        super().__init__("paceline-async-job", RunFolder(training.job.folder))
        self._training, self._config = training, training.job.config
        self._care = self._config.fault_tolerance
        workers = self._config.workers
        self._settings = MachineSettings(
            workers=workers,
            shards=workers,
            max_worker_failures=self._care.max_worker_failures,
            backoff=self._care.backoff,
            seed=self._config.seed,
        )
        self._slots = {number: Slot(number) for number in range(workers)}
        self._workers: dict[int, WorkerProcess] = {}
        self._server: WorkerProcess | None = None
        self._wake_read, self._wake_write = os.pipe()
        self._closing = False
        self._has_gradient = False  # a worker has computed one
        self._failure: BaseException | None = None
        self._fatal: BaseException | None = None  # why the job is given up, once its state is saved

    def stop(self, reason: str) -> None:
        super().stop(reason)
        self._wake()

    def close(self) -> None:
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

    def _train(self) -> TrainingOutcome:
        with held(self.folder.lock_file, str(self.folder.path)):
            packed, call = rank_call.pack(_entry_is_named, (self._training,), tensor_pickling.reducers())
            try:
                resume = self._config.resume is not None
                # A slot beyond those of the workers: its back-off has a random share of its own.
                slot = Slot(self._config.workers)
                while True:
                    attempt = slot.total_failures + 1
                    options = ServerOptions(attempt, resume=resume or attempt > 1)
                    outcome = self._attempt(packed, call, options)
                    if outcome is not None:
                        return outcome
                    slot = after_failure(self._settings, slot, "crash", 0.0, time.monotonic())
                    if not self._care.enabled or slot.start_at is None:
                        raise self._failure or PeerLostError("the server of asynchronous SGD was lost")
                    self._wait_until(slot.start_at)
            finally:
                os.close(packed)

    def _wait_until(self, start_at: float) -> None:
        """Wait for the time of the next server. A request to stop is answered by a server, which saves: it
        ends the wait, like the end of the job."""
        while self._stop_reason is None and not self._closing:
            left = start_at - time.monotonic()
            if left <= 0.0:
                return
            if wait([self._wake_read], left):
                os.read(self._wake_read, 4096)

    def _attempt(
        self, packed: int, call: rank_call.RankCall, options: ServerOptions
    ) -> TrainingOutcome | None:
        """Run one server from its start to its end; None if it died."""
        now = time.monotonic()
        self._slots = {
            number: dataclasses.replace(slot, start_at=now, given_up=False)
            for number, slot in self._slots.items()
        }
        self._failure = None
        stopping = False
        outcome: TrainingOutcome | None = None
        control, far = pair()
        try:
            with far:
                server = self._server = self._start("server_main", options, packed, (far.fileno(),))
            while not server.done:
                if self._closing:
                    raise PeerLostError("the training was ended before it was finished")
                if self._stop_reason is not None and not stopping:
                    stopping = send(control, {"type": "stop", "reason": self._stop_reason})
                if not stopping:
                    self._start_due(control, packed)
                self._wait_for_news(control)
                for number in [number for number, worker in self._workers.items() if worker.done]:
                    self._worker_ended(number, control, over=stopping or bool(server.returned))
            outcome = self._conclude(server, call)
            if self._fatal is not None:
                raise self._fatal
            return outcome
        finally:
            control.close()
            self._end_all(grace=_END_SECONDS if outcome is not None else 0.0)

    def _start(self, entry: str, options: PlainOptions, packed: int, files: tuple[int, ...]) -> WorkerProcess:
        threads = self._config.threads
        order = order_from_caller(f"{_ENTRIES}:{entry}", 1, (*PRELOAD, _ENTRIES), threads, options.to_plain())
        return WorkerProcess.start(order, packed, files)

    def _start_due(self, control: socket.socket, packed: int) -> None:
        now = time.monotonic()
        for number, slot in self._slots.items():
            if slot.start_at is None or slot.start_at > now:
                continue
            self._slots[number] = dataclasses.replace(slot, start_at=None)
            ours, theirs = pair()
            memory = memory_file(f"paceline-async-{number}")
            try:
                with ours, theirs:
                    send(control, {"type": "join", "worker": number}, (ours.fileno(), memory))
                    files = (theirs.fileno(), memory)
                    options = AsyncWorkerOptions(number)
                    self._workers[number] = self._start("worker_main", options, packed, files)
            finally:
                os.close(memory)

    def _wait_for_news(self, control: socket.socket) -> None:
        everything = [self._server, *self._workers.values()]
        processes = {one.fileno(): one for one in everything if one is not None and not one.done}
        for ready in wait([self._wake_read, control, *processes], _TICK_SECONDS):
            if ready == self._wake_read:
                os.read(self._wake_read, 4096)
            elif isinstance(ready, int):
                processes[ready].receive()
            elif receive(control) is not None:
                self._has_gradient = True  # the only message that a server sends
            elif self._server is not None:
                # The server is gone; its process says how, a moment later.
                self._server.receive()

    def _worker_ended(self, number: int, control: socket.socket, *, over: bool) -> None:
        """Replace a worker whose process has ended, continue without it, or give the job up."""
        worker = self._workers.pop(number)
        error = None if over else _failure_of(worker, number)
        raised, pid = bool(worker.failed), worker.pid
        worker.close()
        if error is None:
            return
        self._failure = error
        cause, reason = "raised" if raised else "crash", str(error).splitlines()[0]
        send(control, {"type": "lost", "worker": number, "pid": pid, "reason": reason, "cause": cause})
        if raised and not self._has_gradient:
            # A mistake that no worker got past is not a failure, and there is nothing to save.
            raise error
        slot = after_failure(self._settings, self._slots[number], "crash", 0.0, time.monotonic())
        self._slots[number] = slot
        left = self._workers or any(other.start_at is not None for other in self._slots.values())
        if not self._care.enabled or not left:
            self._fatal = self._fatal or error
            self._stop_reason = self._stop_reason or "workers were lost"

    def _conclude(self, server: WorkerProcess, call: rank_call.RankCall) -> TrainingOutcome | None:
        if server.returned:
            outcome: TrainingOutcome = rank_call.unpack_result(server.returned[0], call, 0)
            return outcome
        ended = "the server of asynchronous SGD ended without a result"
        self._failure = _failure_of(server, 0) or PeerLostError(ended)
        if server.failed:
            raise self._failure
        text = f"the server of asynchronous SGD is lost: {str(self._failure).splitlines()[0]}"
        with contextlib.suppress(PacelineError), Journal(self.folder.journal_file) as journal:
            journal.append(
                Note(time=time.time(), text=f"{text}; everything goes back to the newest checkpoint")
            )
        return None

    def _end_all(self, grace: float) -> None:
        """End every process, after `grace` seconds in which they may exit by themselves."""
        left = [*self._workers.values(), *([] if self._server is None else [self._server])]
        limit = time.monotonic() + grace
        for process in left:
            _end(process, limit)
        for process in left:
            process.close()
        self._server, self._workers = None, {}


def _entry_is_named() -> None:
    """Do nothing: a placeholder where only the arguments travel, because an order names its entry."""


def _end(process: WorkerProcess, limit: float) -> None:
    """Let a process exit by itself until `limit`, then kill it and wait for its end."""
    while not process.done:
        left = limit - time.monotonic()
        if left <= 0.0:
            process.kill()
        if left <= -_END_SECONDS:
            return
        wait([process.fileno()], max(left, _TICK_SECONDS))
        process.receive()


def _failure_of(process: WorkerProcess, number: int) -> BaseException | None:
    """Return the error that a process ended with; None for one that ended well."""
    if process.refusal is not None:
        return process.refusal
    if process.failed:
        return root_cause([RankRaised.load(number, process.pid, 0.0, process.failed)])
    if process.status == 0:
        return None
    status = -9 if process.status is None else process.status
    return root_cause([RankDied(number, process.pid, 0.0, status)])
