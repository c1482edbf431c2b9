"""A worker without torch: speaks the control protocol like a real one and counts steps instead of training.

The "collective" is a file in the run's folder: the first member of the view counts steps in it, the others
follow. So a killed member loses nothing, and a test sees in the journal whether every step came once.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import queue
import signal
import time
from pathlib import Path
from typing import Any

from paceline.control import supervisor_address
from paceline.control.control_client import ControlClient
from paceline.control.messages import (
    ControlMessage,
    DialRequest,
    Dismissed,
    Heartbeat,
    JournalLines,
    LeaveRequest,
    MemberFinished,
    MemberHello,
    MemberReport,
    Prepare,
    StepReceipt,
    Stop,
    View,
    ViewInstalled,
    WorkerException,
)
from paceline.control.reachability import ReachabilityProber
from paceline.control.worker_options import WorkerOptions
from paceline.core import events, phase_page
from paceline.core.events import StepCommitted
from paceline.core.host import host_identity, host_name
from paceline.core.listen_address import ListenAddress
from paceline.engines.local import memfd_pickle
from paceline.engines.local.forked_rank import RankTask

ENTRY = "tests.elastic.fake_member:main"


def main(task: RankTask) -> int:
    """Entry of the engine."""
    member = FakeMember(WorkerOptions.from_plain(task.options), memfd_pickle.load(task.payload))
    with contextlib.closing(member):
        return memfd_pickle.dump(member.run())


class FakeMember:
    """One worker. Options: steps, step_seconds, raise_at, fault, hang_at=[slot, step],
    grip_at=[slot, step, seconds] (0: for good), fingerprints by slot, follow_seconds, oom=slot."""

    def __init__(self, worker: WorkerOptions, options: dict[str, Any]) -> None:
        self.options = options
        self.slot, self.number, self.attempt = worker.slot, worker.member, worker.attempt
        # A worker on another machine has no folder of the run; in tests it is the same machine after all.
        self.folder = Path(worker.folder or options["shared"])
        self.count = Path(options.get("count", self.folder)) / "count"
        self.view: View | None = None
        self.generation = 0
        self.step = 0
        self.told = 0
        self.waits_for: tuple[int, ...] = ()
        page = phase_page.page_file(self.folder, self.number)
        self.page = phase_page.PhasePage(page) if worker.folder else None
        self.phase, self.since = "start", time.monotonic()
        self.asked_to_go = False
        self.stop: str | None = None
        self.gripped = False
        self.inbox: queue.SimpleQueue[ControlMessage] = queue.SimpleQueue()
        signal.signal(signal.SIGTERM, self._on_term)
        self.listener = ListenAddress().open(worker.listen)
        self.link = ControlClient(
            worker.address,
            bytes.fromhex(worker.secret),
            tls=worker.tls,
            lookup=lambda: supervisor_address.lookup(self.folder),
            on_turn=self.page.tick if self.page is not None else lambda: None,
        )
        secret = bytes.fromhex(worker.secret)
        self.dialer = ReachabilityProber(self.number, self.slot, secret, self.listener, self.link.send)

    def receive(self, message: ControlMessage) -> None:
        if isinstance(message, DialRequest):
            self.dialer.dial(message.peers)
        else:
            self.inbox.put(message)

    def supervisor_away(self) -> None:
        pass

    def next_message(self, timeout: float) -> ControlMessage | None:
        try:
            return self.inbox.get(timeout=timeout)
        except queue.Empty:
            return None

    def close(self) -> None:
        self.dialer.close()
        self.link.close()
        self.listener.close()

    def hello(self) -> MemberHello:
        return MemberHello(
            member=self.number,
            slot=self.slot,
            pid=os.getpid(),
            host=host_identity(),
            hostname=host_name(),
            endpoint=self.listener.getsockname()[:2],
            fingerprint=dict(self.options.get("fingerprints", {}).get(str(self.slot), {"cpu": "same"})),
            generation=self.generation,
            progress=(self.step, 0, 0) if self.generation else None,
        )

    def heartbeat(self) -> Heartbeat:
        return Heartbeat(
            phase=self.phase,
            seconds=time.monotonic() - self.since,
            progress=(self.step, 0, 0) if self.generation else None,
            waits_for=self.waits_for,
            shard_seconds=0.001,
            step_seconds=float(self.options.get("step_seconds", 0.01)),
        )

    def run(self) -> Any:
        """Until dismissed; the result is the number of steps."""
        self.welcome = self.link.start(self, 30.0)
        self.enter("wait")
        done = False
        while True:
            message = self.next_message(0.0 if self.training and not done else 0.02)
            if isinstance(message, Dismissed):
                return {"steps": self.step, "slot": self.slot, "reason": message.reason}
            if message is not None:
                self.take(message)
                done = done and not isinstance(message, View)
                continue
            if self.link.away > self.welcome.patience:
                with open(self.folder / "left", "a") as left:
                    left.write("76\n")
                os._exit(76)
            if self.asked_to_go:
                self.asked_to_go = False
                self.link.send(LeaveRequest(reason="SIGTERM"))
            if self.training and not done:
                if self.stop is not None or self.step >= self.options["steps"]:
                    done = True
                    self.finish()
                else:
                    self.train()

    @property
    def training(self) -> bool:
        return self.view is not None

    def take(self, message: ControlMessage) -> None:
        match message:
            case Prepare():
                self.view = None
                self.enter("wait")
                self.step = self.committed()
                progress = (self.step, 0, 0) if self.generation else None
                self.link.send(MemberReport(generation=message.generation, progress=progress))
            case View():
                self.view, self.generation = message, message.generation
                self.step = self.committed()
                self.told = max(message.journaled, 0)
                if message.segment:
                    pid, descriptor, inode, _ = message.segment
                    try:
                        found = os.stat(f"/proc/{pid}/fd/{descriptor}").st_ino
                    except FileNotFoundError:
                        # The supervisor was killed, or lost another member and has closed the segment: this
                        # view is over, and a Prepare for the next one follows.
                        self.view = None
                        self.enter("wait")
                        return
                    assert found == inode
                self.link.send(ViewInstalled(generation=message.generation))
                # The first counts, the others wait for it.
                self.waits_for = message.members[:1] if message.members[0] != self.number else ()
                self.enter("collective" if self.waits_for else "forward")
            case Stop():
                self.stop = message.reason

    def train(self) -> None:
        assert self.view is not None
        self._misbehave()
        seconds = float(self.options.get("step_seconds", 0.01))
        time.sleep(float(self.options.get("follow_seconds", seconds)) if self.waits_for else seconds)
        before = self.step
        if self.view.members[0] == self.number:
            self.step += 1
            self._write_count(self.step)
            self.tell()
        else:
            self.step = self.committed()
        if self.step > before:
            shards = self.view.shards[self.view.members.index(self.number)]
            self.enter(self.phase)
            self.link.send(
                StepReceipt(generation=self.generation, first=before + 1, last=self.step, shards=shards)
            )

    def tell(self) -> None:
        lines = []
        while self.told < self.step:
            self.told += 1
            lines.append(
                events.to_json(
                    StepCommitted(time=time.time(), step=self.told, epoch=0, loss=1.0 / self.told, samples=8)
                )
            )
        self.link.send(JournalLines(generation=self.generation, lines=tuple(lines)))

    def finish(self) -> None:
        assert self.view is not None
        if self.view.members[0] == self.number:
            self.tell()
        self.enter("wait")
        self.link.send(
            MemberFinished(
                generation=self.generation, progress=(self.step, 0, 0), hash="same", stopped=self.stop
            )
        )

    def committed(self) -> int:
        try:
            return int(self.count.read_text() or 0)
        except FileNotFoundError:
            return 0

    def enter(self, phase: str) -> None:
        self.phase, self.since = phase, time.monotonic()
        if self.page is not None:
            self.page.write(phase, self.step)

    def _write_count(self, step: int) -> None:
        """In place: putting a file in another's place waits for the disk, which looks like a hang."""
        file = os.open(self.count, os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            os.pwrite(file, b"%012d" % step, 0)
        finally:
            os.close(file)

    def _misbehave(self) -> None:
        if self.options.get("raise_at") == self.step and not self.waits_for:
            error = ValueError(f"no good in step {self.step}")
            text = f"Traceback (most recent call last):\n  here\nValueError: {error}\n"
            fault = self.options.get("fault", "code")
            self.link.send(
                WorkerException(
                    summary=f"ValueError: {error}",
                    traceback=text,
                    phase="forward",
                    fault=fault,
                    step=self.step,
                )
            )
            raise error
        if self.options.get("hang_at") == [self.slot, self.step] and self.attempt == 1:
            self.enter("data")
            _hang_here()

        slot, step, seconds = self.options.get("grip_at", (-1, 0, 0))
        if slot == self.slot and self.step >= step and self.attempt == 1 and not self.gripped:
            self.gripped = True
            self.enter("data")
            _grip_here(seconds)
            (self.folder / "let-go").touch()
            self.enter("collective" if self.waits_for else "forward")

        if self.options.get("oom") == self.slot and self.attempt == 1:
            # Not at the top: it imports torch, and no other member needs that.
            from paceline.train.member.fault_injection import run_out_of_memory

            run_out_of_memory()

    def _on_term(self, *_: object) -> None:
        self.asked_to_go = True


def _grip_here(seconds: float) -> None:
    """A call that holds the interpreter's lock, as one of a C extension may: no other thread runs."""
    libc = ctypes.PyDLL(None)
    libc.usleep(int(seconds * 1e6)) if seconds else libc.sigwait(_empty_set(), ctypes.byref(ctypes.c_int()))


def _empty_set() -> ctypes.Array[ctypes.c_char]:
    return ctypes.create_string_buffer(128)


def _hang_here() -> None:
    signal.sigwait([signal.SIGUSR2])
