"""A member with a small run of its own, in this process: no supervisor, no second process, views of one."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from tests.control.member_driver import ME, PATIENCE, accepted, view
from tests.train.member.unconnected_worker import Worker
from tests.train.running import job, mlp, regression

from paceline.control.messages import ControlMessage, View
from paceline.train.loop import process_setup
from paceline.train.loop.run import Run
from paceline.train.loop.run_builder import RunBuilder, SupervisedHooks
from paceline.train.loop.worker_jobs import BuiltModel, build, train_steps
from paceline.train.member.fault_injection import FaultInjector
from paceline.train.member.membership import Membership
from paceline.train.member.outbox import Outbox
from paceline.train.member.step_reports import StepReports
from paceline.train.stop_signals import StopRequest

SHARDS = 2
STEPS = 3
Message = TypeVar("Message", bound=ControlMessage)


def alone_in(generation: int, **changes: Any) -> View:
    """A view whose only member is this one."""
    return replace(view(generation, members=(ME,), **changes), shards=(tuple(range(SHARDS)),))


class Member:
    """A worker, its run and its membership. `replies`: what a supervisor would answer, by the message that it
    answers; each is sent once, in their order, by another thread, as the control connection would."""

    def __init__(self, worker: Worker, run: Run, built: BuiltModel, membership: Membership) -> None:
        self.worker, self.run, self.built, self.membership = worker, run, built, membership
        self.replies: dict[type[ControlMessage], list[ControlMessage]] = {}
        self.leave = membership._leave
        self._closed = threading.Event()
        self._supervisor = threading.Thread(target=self._supervise)
        self._supervisor.start()

    def _supervise(self) -> None:
        seen = 0
        while not self._closed.wait(0.002):
            sent = self.worker.client.undelivered()
            for message in sent[seen:]:
                replies = self.replies.get(type(message), [])
                if replies:
                    self.membership.receive(replies.pop(0))
            seen = len(sent)

    def close(self) -> None:
        self._closed.set()
        self._supervisor.join()

    def join(self, first: View | None = None) -> None:
        """Enter the first view of a job."""
        self.membership.receive(accepted())
        self.membership.receive(first or alone_in(1, restore=True))
        self.membership.join()

    def train(self) -> None:
        train_steps(self.run, self.built)

    def sent(self, kind: type[Message]) -> list[Message]:
        return [one for one in self.worker.client.undelivered() if isinstance(one, kind)]

    @property
    def kinds(self) -> list[type[ControlMessage]]:
        """What was sent, in its order."""
        return [type(one) for one in self.worker.client.undelivered()]


@contextmanager
def member(
    folder: Path | None = None, patience: float = PATIENCE, config: Mapping[str, Any] | None = None
) -> Iterator[Member]:
    settings = {"max_steps": STEPS, "shards": SHARDS, **(config or {})}
    given = job(mlp(), regression(29), run_dir=folder, **settings)
    worker = Worker(folder, patience, shards=SHARDS)
    with ExitStack() as stack:
        stack.callback(worker.close)
        stack.enter_context(process_setup.prepared(given.config))
        built = build(given, stack, 0)
        outbox = Outbox(worker.client, worker.team)
        reports = StepReports(worker.shell, worker.client, outbox, worker.team, FaultInjector(None, slot=0))
        hooks = SupervisedHooks(reports, reports, outbox.tell, time.monotonic, slot=0)
        builder = RunBuilder(
            worker.team, built.spec, built.device, worker.stop, hooks=hooks, phases=worker.phases
        )
        run = stack.enter_context(builder).run(built.evaluation(worker.team))
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        membership = Membership(
            worker.options, run, worker.shell, worker.client, outbox, reports, StopRequest(), listener
        )
        stack.callback(membership.close)
        made = Member(worker, run, built, membership)
        stack.callback(made.close)
        yield made
