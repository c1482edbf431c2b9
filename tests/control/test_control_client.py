"""A worker's link: says hello first, keeps what was not heard, comes back, and never blocks its worker."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Iterator

import pytest
from tests.control.far_end import SECRET, FarEnd, hear, next_of
from tests.waiting import wait_for

from paceline.control.channel import Channel
from paceline.control.control_client import ControlClient
from paceline.control.messages import (
    Ack,
    ControlMessage,
    Dismissed,
    Heartbeat,
    LeaveRequest,
    MemberAccepted,
    MemberHello,
    Prepare,
    Stop,
    ViewInstalled,
)
from paceline.core.errors import RendezvousError


class Worker:
    """The handler of a client; messages wait in a queue."""

    def __init__(self) -> None:
        self.generation = 0
        self.inbox: queue.SimpleQueue[ControlMessage] = queue.SimpleQueue()
        self.attempts = 0

    def receive(self, message: ControlMessage) -> None:
        self.inbox.put(message)

    def supervisor_away(self) -> None:
        self.attempts += 1

    def next(self, timeout: float) -> ControlMessage | None:
        try:
            return self.inbox.get(timeout=timeout)
        except queue.Empty:
            return None

    def hello(self) -> MemberHello:
        return MemberHello(
            member=7, slot=2, pid=1, host="h", hostname="h", endpoint=("", 0), generation=self.generation
        )

    def heartbeat(self) -> Heartbeat:
        return Heartbeat(phase="forward", seconds=0.1)


@contextlib.contextmanager
def linked(far: FarEnd, **settings: object) -> Iterator[ControlClient]:
    link = ControlClient(far.address, SECRET, **settings)  # type: ignore[arg-type]
    try:
        yield link
    finally:
        link.close()
        far.close()


def started(link: ControlClient, far: FarEnd, worker: Worker) -> tuple[Channel, MemberAccepted]:
    """Start a link while the far end answers in this thread."""
    found: list[MemberAccepted] = []
    thread = threading.Thread(target=lambda: found.append(link.start(worker, 10.0)))
    thread.start()
    channel, _ = far.welcome()
    thread.join()
    return channel, found[0]


def test_hello_comes_first_then_heartbeats_and_what_is_sent():
    far, worker = FarEnd(), Worker()
    with linked(far) as link:
        channel, welcome = started(link, far, worker)
        assert welcome.patience == 5.0
        link.send(ViewInstalled(generation=3))
        assert hear(channel) == [(1, ViewInstalled(generation=3))]
        assert next_of(channel, Heartbeat) == worker.heartbeat()
        assert link.away == 0.0
        channel.close()


def test_messages_reach_the_handler_in_their_order():
    far, worker = FarEnd(), Worker()
    with linked(far) as link:
        channel, _ = started(link, far, worker)
        channel.send(Prepare(generation=2, abort=True, reason="why"))
        assert isinstance(worker.next(10.0), MemberAccepted)
        assert worker.next(10.0) == Prepare(generation=2, abort=True, reason="why")
        assert worker.next(0.0) is None
        channel.close()


def test_what_was_not_heard_comes_again_after_a_reconnect_in_order():
    far, worker = FarEnd(), Worker()
    with linked(far) as link:
        channel, _ = started(link, far, worker)
        for generation in (1, 2, 3):
            link.send(ViewInstalled(generation=generation))
        got: list[tuple[int, ControlMessage]] = []
        while len(got) < 3:
            got += hear(channel)
        channel.send(Ack(number=1))
        channel.send(Stop(reason="marks that the Heard was taken in"))
        while not isinstance(worker.next(10.0), Stop):
            pass
        # Before the cut: the link may be back before this thread runs again.
        worker.generation = 3
        channel.close()
        link.send(LeaveRequest(reason="said while away"))
        channel, hello = far.welcome()
        assert hello.generation == 3
        again: list[tuple[int, ControlMessage]] = []
        while len(again) < 3:
            again += hear(channel)
        assert again == [
            (2, ViewInstalled(generation=2)),
            (3, ViewInstalled(generation=3)),
            (4, LeaveRequest(reason="said while away")),
        ]
        channel.close()


def test_a_new_address_is_looked_up():
    first, second, worker = FarEnd(), FarEnd(), Worker()
    with linked(first, lookup=lambda: second.address) as link:
        channel, _ = started(link, first, worker)
        first.close()
        channel.close()
        channel, hello = second.welcome()
        assert hello.member == 7
        channel.close()
    second.close()


def test_being_away_is_counted():
    far, worker = FarEnd(), Worker()
    with linked(far) as link:
        channel, _ = started(link, far, worker)
        far.close()
        channel.close()
        wait_for(lambda: link.away > 0.05, "the lost connection is not counted", seconds=5)
        wait_for(lambda: worker.attempts > 0, "the client does not reconnect", seconds=5)


def test_a_mute_link_says_and_hears_nothing_and_then_all_of_it():
    far, worker = FarEnd(), Worker()
    with linked(far) as link:
        channel, _ = started(link, far, worker)
        assert isinstance(worker.next(10.0), MemberAccepted)
        link.mute(0.3)
        wait_for(lambda: link.away > 0.0, "a mute client counts as connected", seconds=5)
        link.send(ViewInstalled(generation=1))
        channel.send(Stop(reason="not heard"))
        assert worker.next(0.1) is None
        assert hear(channel) == [(1, ViewInstalled(generation=1))]
        assert worker.next(10.0) == Stop(reason="not heard")
        assert link.away == 0.0
        channel.close()


def test_delivered_is_what_was_heard():
    far, worker = FarEnd(), Worker()
    with linked(far) as link:
        channel, _ = started(link, far, worker)
        assert not link.deliver(ViewInstalled(generation=1), 0.01)
        answers: list[bool] = []
        thread = threading.Thread(
            target=lambda: answers.append(link.deliver(ViewInstalled(generation=2), 10.0))
        )
        thread.start()
        found: list[int] = []
        while 2 not in found:
            found += [number for number, _ in hear(channel)]
        channel.send(Ack(number=2))
        thread.join()
        assert answers == [True]
        assert link.undelivered() == []
        channel.close()


def test_a_refused_worker_is_told_why():
    far, worker = FarEnd(), Worker()
    with linked(far) as link:
        found: list[BaseException] = []

        def start() -> None:
            try:
                link.start(worker, 10.0)
            except RendezvousError as error:
                found.append(error)

        thread = threading.Thread(target=start)
        thread.start()
        channel = far.accept()
        channel.send(Dismissed(reason="another processor"))
        thread.join()
        assert "another processor" in str(found[0])
        channel.close()


def test_a_supervisor_with_another_secret_is_not_believed():
    far, worker = FarEnd(secret=b"t" * 32), Worker()

    def refuse() -> None:
        with contextlib.suppress(OSError):
            while True:
                try:
                    far.accept()
                except ConnectionError:
                    continue

    thread = threading.Thread(target=refuse)
    thread.start()
    with linked(far) as link, pytest.raises(RendezvousError, match="does not know this secret"):
        link.start(worker, 0.5)
    thread.join()


def test_without_a_supervisor_start_gives_up_and_says_so():
    far, worker = FarEnd(), Worker()
    far.close()
    with linked(far) as link, pytest.raises(RendezvousError, match="did not accept this worker"):
        link.start(worker, 0.2)


def test_what_waits_is_bounded(monkeypatch):
    monkeypatch.setattr("paceline.control.control_client.MAX_UNACKED_BYTES", 400)
    far, worker = FarEnd(), Worker()
    with linked(far) as link:
        channel, _ = started(link, far, worker)
        far.close()
        channel.close()
        wait_for(lambda: link.away > 0.0, "the lost connection is not counted", seconds=5)
        for generation in range(50):
            link.send(ViewInstalled(generation=generation))
        kept = link.undelivered()
        assert len(kept) < 20
        assert kept[-1] == ViewInstalled(generation=49)
