"""Trials on this machine: each a process of its own session from the warm fork server, which has imported
torch already, so that a trial begins after milliseconds.

A trial is a group of processes with the share of devices of its slot; what it starts ends with it. When this
process ends, however it ends, the fork server kills all trials.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, final

from paceline.comm import tensor_pickling
from paceline.core import fd_messages
from paceline.core.errors import PacelineError
from paceline.engines.local import fork_server_client, memfd_pickle, rank_call
from paceline.engines.local.blame import RankRaised, how_ended
from paceline.engines.local.launch import order_from_caller
from paceline.engines.local.worker_handle import WorkerProcess
from paceline.frontends.tuner.trial_engine import (
    LostTrial,
    Pruned,
    Raised,
    Reported,
    Returned,
    TrialCall,
    TrialEvent,
    TrialStart,
)
from paceline.frontends.tuner.trial_process import start_to_plain
from paceline.frontends.tuner.trial_slots import TrialSlot
from paceline.frontends.tuner.trial_value import TrialResultError, TrialSetupError

_ENTRY: Final = "paceline.frontends.tuner.trial_process:main"
_PRELOAD: Final = (
    "torch",
    # The first optimizer of a process imports torch's compiler, a second's worth of modules.
    "torch._inductor.config",
    "paceline.frontends.tuner.trial_process",
    # Named by what trials unpickle and call.
    "paceline.frontends.tuner.search_space",
    "paceline.tune",
)
_CLOSE_SECONDS: Final = 10.0


@final
@dataclass(eq=False)
class _LocalTrial:
    number: int
    worker: WorkerProcess
    link: socket.socket


@final
class LocalTrials:
    """The trials of one search on this machine's fork server."""

    def __init__(self, call: TrialCall, slots: Sequence[TrialSlot], preload: tuple[str, ...] = ()) -> None:
        self._slots = slots
        self._preload = (*_PRELOAD, *preload)
        self._running: dict[int, _LocalTrial] = {}
        self._events: list[TrialEvent] = []
        self._selector = selectors.DefaultSelector()
        try:
            self._packed, self._call = rank_call.pack(call.function, (call,), tensor_pickling.reducers())
        except BaseException:
            self._selector.close()
            raise

    def start(self, trial: TrialStart) -> None:
        slot = self._slots[trial.slot]
        order = order_from_caller(_ENTRY, 1, self._preload, slot.threads, start_to_plain(trial))
        order = replace(order, environ={**order.environ, **slot.environment})
        link, far_end = fd_messages.pair()
        try:
            worker = WorkerProcess.start(order, self._packed, (far_end.fileno(),))
        except BaseException:
            link.close()
            raise
        finally:
            far_end.close()
        link.setblocking(False)
        running = _LocalTrial(trial.number, worker, link)
        self._running[trial.number] = running
        self._selector.register(worker, selectors.EVENT_READ, (running, self._listen))
        self._selector.register(link, selectors.EVENT_READ, (running, self._read_reports))

    def wait(self, seconds: float | None = None) -> Sequence[TrialEvent]:
        while not self._events:
            ready = self._selector.select(seconds)
            for key, _ in ready:
                # What was handled before may have closed this one.
                if key.fd in self._selector.get_map():
                    running, handle = key.data
                    handle(running)
            if seconds is not None:
                break
        events, self._events = self._events, []
        return events

    def close(self) -> None:
        """Kill all trials and wait until they, and what they started, are gone."""
        interrupted: KeyboardInterrupt | None = None
        while True:
            # A second Ctrl-C must not leave trials behind: it takes effect a moment later.
            try:
                self._end_all()
                break
            except KeyboardInterrupt as error:
                interrupted = error
        if interrupted is not None:
            raise interrupted

    def _end_all(self) -> None:
        for running in self._running.values():
            running.worker.kill()
        limit = time.monotonic() + _CLOSE_SECONDS
        # Why the search ends is known by now; a trial that was refused meanwhile does not matter.
        while self._running and time.monotonic() < limit:
            with contextlib.suppress(PacelineError):
                self.wait(limit - time.monotonic())
        for running in list(self._running.values()):
            self._release(running)
        self._selector.close()
        if self._packed >= 0:
            os.close(self._packed)
            self._packed = -1

    def _listen(self, running: _LocalTrial) -> None:
        running.worker.receive()
        if running.worker.refusal is not None:
            refusal = running.worker.refusal
            self._release(running)
            raise refusal
        if running.worker.done:
            _end_with_server(running.worker)
            self._read_reports(running)
            self._events.append(self._end_of(running))
            self._release(running)

    def _read_reports(self, running: _LocalTrial) -> None:
        while running.link.fileno() in self._selector.get_map():
            try:
                message = fd_messages.receive(running.link)
            except BlockingIOError:
                return
            if message is None:
                self._selector.unregister(running.link)
                return
            (step, value), _ = message
            self._events.append(Reported(running.number, step, value, _Answer(running.link)))

    def _end_of(self, running: _LocalTrial) -> TrialEvent:
        number, worker = running.number, running.worker
        if worker.returned:
            value = memfd_pickle.load(worker.returned[0])
            return Pruned(number) if value is None else Returned(number, value)
        if worker.failed:
            raised = RankRaised.load(number, worker.pid, 0.0, worker.failed, self._call.classes)
            ends = raised.error if isinstance(raised.error, TrialResultError | TrialSetupError) else None
            return Raised(number, raised.report.traceback_text, ends)
        how = how_ended(worker.status) if worker.status is not None else "was lost with the fork server"
        return LostTrial(number, f"its process (pid {worker.pid}) {how}")

    def _release(self, running: _LocalTrial) -> None:
        for source in (running.worker, running.link):
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(source)
        running.link.close()
        running.worker.close()
        self._running.pop(running.number, None)


def _end_with_server(worker: WorkerProcess) -> None:
    """Kill what a trial has started where its fork server, which would have done so, is gone too."""
    if worker.status is None and worker.watch >= 0:
        # What the process forks until its own end is of its group as well.
        fork_server_client.has_ended(worker.watch, _CLOSE_SECONDS)
        worker.kill_orphans()


@final
@dataclass(frozen=True)
class _Answer:
    link: socket.socket

    def __call__(self, prune: bool) -> None:
        # Closed: the trial's process is gone, and its end has been or will be seen.
        with contextlib.suppress(OSError):
            fd_messages.send(self.link, [prune])
