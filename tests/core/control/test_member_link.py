"""A worker's link: says hello first, keeps what was not heard, comes back, and never blocks its worker."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import pytest
from tests.core.control.far_end import SECRET, FarEnd, hear, next_of
from tests.engines.local.processes import eventually

from paceline.core.control.channel import Channel
from paceline.core.control.member_link import MemberLink
from paceline.core.control.messages import (
    Beat,
    Dismissed,
    Heard,
    Hello,
    Installed,
    Leaving,
    Message,
    Prepare,
    Stop,
    Welcome,
)
from paceline.core.errors import RendezvousError


class Worker:
    """What a link asks its worker."""

    def __init__(self) -> None:
        self.generation = 0
        self.urgent: list[Message] = []

    def hello(self) -> Hello:
        return Hello(
            member=7, slot=2, pid=1, host="h", hostname="h", endpoint=("", 0), generation=self.generation
        )

    def beat(self) -> Beat:
        return Beat(phase="forward", seconds=0.1)


@contextlib.contextmanager
def linked(far: FarEnd, worker: Worker, **settings: object) -> Iterator[MemberLink]:
    link = MemberLink(far.address, SECRET, worker.hello, worker.beat, worker.urgent.append, **settings)  # type: ignore[arg-type]
    try:
        yield link
    finally:
        link.close()
        far.close()


def started(link: MemberLink, far: FarEnd) -> tuple[Channel, Welcome]:
    """Start a link while the far end answers in this thread."""
    found: list[Welcome] = []
    thread = threading.Thread(target=lambda: found.append(link.start(10.0)))
    thread.start()
    channel, _ = far.welcome()
    thread.join()
    return channel, found[0]


def test_hello_comes_first_then_heartbeats_and_what_is_sent():
    far, worker = FarEnd(), Worker()
    with linked(far, worker) as link:
        channel, welcome = started(link, far)
        assert welcome.patience == 5.0
        link.send(Installed(generation=3))
        assert hear(channel) == [(1, Installed(generation=3))]
        assert next_of(channel, Beat) == worker.beat()
        assert link.away == 0.0
        channel.close()


def test_a_message_is_urgent_first_and_received_then():
    far, worker = FarEnd(), Worker()
    with linked(far, worker) as link:
        channel, _ = started(link, far)
        channel.send(Prepare(generation=2, abort=True, reason="why"))
        assert isinstance(link.receive(10.0), Welcome)
        assert link.receive(10.0) == Prepare(generation=2, abort=True, reason="why")
        assert [type(message) for message in worker.urgent] == [Welcome, Prepare]
        assert link.receive(0.0) is None
        channel.close()


def test_what_was_not_heard_comes_again_after_a_reconnect_in_order():
    far, worker = FarEnd(), Worker()
    with linked(far, worker) as link:
        channel, _ = started(link, far)
        for generation in (1, 2, 3):
            link.send(Installed(generation=generation))
        got: list[tuple[int, Message]] = []
        while len(got) < 3:
            got += hear(channel)
        channel.send(Heard(number=1))
        channel.send(Stop(reason="marks that the Heard was taken in"))
        while not isinstance(link.receive(10.0), Stop):
            pass
        # Before the cut: the link may be back before this thread runs again.
        worker.generation = 3
        channel.close()
        link.send(Leaving(reason="said while away"))
        channel, hello = far.welcome()
        assert hello.generation == 3
        again: list[tuple[int, Message]] = []
        while len(again) < 3:
            again += hear(channel)
        assert again == [
            (2, Installed(generation=2)),
            (3, Installed(generation=3)),
            (4, Leaving(reason="said while away")),
        ]
        channel.close()


def test_a_new_address_is_looked_up():
    first, second, worker = FarEnd(), FarEnd(), Worker()
    with linked(first, worker, lookup=lambda: second.address) as link:
        channel, _ = started(link, first)
        first.close()
        channel.close()
        channel, hello = second.welcome()
        assert hello.member == 7
        channel.close()
    second.close()


def test_being_away_is_counted():
    far, worker = FarEnd(), Worker()
    with linked(far, worker) as link:
        channel, _ = started(link, far)
        far.close()
        channel.close()
        assert eventually(lambda: link.away > 0.05)


def test_a_mute_link_says_and_hears_nothing_and_then_all_of_it():
    far, worker = FarEnd(), Worker()
    with linked(far, worker) as link:
        channel, _ = started(link, far)
        assert isinstance(link.receive(10.0), Welcome)
        link.mute(0.3)
        assert eventually(lambda: link.away > 0.0)
        link.send(Installed(generation=1))
        channel.send(Stop(reason="not heard"))
        assert link.receive(0.1) is None
        assert hear(channel) == [(1, Installed(generation=1))]
        assert link.receive(10.0) == Stop(reason="not heard")
        assert link.away == 0.0
        channel.close()


def test_delivered_is_what_was_heard():
    far, worker = FarEnd(), Worker()
    with linked(far, worker) as link:
        channel, _ = started(link, far)
        assert not link.deliver(Installed(generation=1), 0.01)
        answers: list[bool] = []
        thread = threading.Thread(target=lambda: answers.append(link.deliver(Installed(generation=2), 10.0)))
        thread.start()
        found: list[int] = []
        while 2 not in found:
            found += [number for number, _ in hear(channel)]
        channel.send(Heard(number=2))
        thread.join()
        assert answers == [True]
        assert not link._kept
        channel.close()


def test_a_refused_worker_is_told_why():
    far, worker = FarEnd(), Worker()
    with linked(far, worker) as link:
        found: list[BaseException] = []

        def start() -> None:
            try:
                link.start(10.0)
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
    with linked(far, worker) as link, pytest.raises(RendezvousError, match="does not know this secret"):
        link.start(0.5)
    thread.join()


def test_without_a_supervisor_start_gives_up_and_says_so():
    far, worker = FarEnd(), Worker()
    far.close()
    with linked(far, worker) as link, pytest.raises(RendezvousError, match="did not take this worker in"):
        link.start(0.2)


def test_what_waits_is_bounded(monkeypatch):
    monkeypatch.setattr("paceline.core.control.member_link.KEPT_BYTES", 400)
    far, worker = FarEnd(), Worker()
    with linked(far, worker) as link:
        channel, _ = started(link, far)
        far.close()
        channel.close()
        assert eventually(lambda: link.away > 0.0)
        for generation in range(50):
            link.send(Installed(generation=generation))
        assert len(link._kept) < 20
        assert link._kept[-1][0] == 50
