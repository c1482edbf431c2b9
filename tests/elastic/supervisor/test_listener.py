"""Where a restarted supervisor listens: at the port where other machines look for it."""

from __future__ import annotations

import socket

import pytest
from tests.core.free_ports import free_range
from tests.virtual_clock import VirtualClock

from paceline.core.errors import ResourceError, UsageError
from paceline.core.listen_address import ListenAddress
from paceline.elastic.supervisor import control_port


class Freeing:
    """A clock on which a port becomes free at the third pause."""

    def __init__(self, taken: socket.socket) -> None:
        self.taken = taken
        self.pauses: list[float] = []

    def now(self) -> float:
        return sum(self.pauses)

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        if len(self.pauses) == 3:
            self.taken.close()


def test_the_old_port_is_waited_for():
    taken = socket.create_server(("127.0.0.1", 0))
    port = taken.getsockname()[1]
    clock = Freeing(taken)
    with control_port.listen("127.0.0.1", 0, clock, port) as bound:
        assert bound.getsockname()[1] == port
    assert len(clock.pauses) == 3


@pytest.mark.parametrize("host", ["nonsense.invalid", "192.0.2.1"])
def test_an_address_that_is_not_this_machines(host):
    with pytest.raises(UsageError, match=f"cannot listen at {host}.*\n.*an address of this host"):
        control_port.listen(host, 0, VirtualClock())


def test_and_given_up_when_it_stays_taken():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with control_port.listen("127.0.0.1", 0, VirtualClock(autojump=True), port) as bound:
            assert bound.getsockname()[1] != port


def test_a_port_that_is_asked_for_and_taken_is_named():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ResourceError, match=f"cannot listen at 127.0.0.1:{port}: another program does"):
            control_port.listen("127.0.0.1", port, VirtualClock())


def test_a_name_that_stands_for_loopback_is_refused_with_the_remedy(monkeypatch):
    """Debian writes the host's own name as 127.0.1.1 into /etc/hosts."""
    resolve = socket.getaddrinfo

    def debian(host, *arguments, **options):
        return resolve("127.0.1.1" if host == "h1" else host, *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", debian)
    with pytest.raises(UsageError, match=r"bind='h1' stands for 127\.0\.1\.1.*\n.*ip address"):
        control_port.listen("h1", 0, VirtualClock())


def test_the_control_port_obeys_the_range():
    first, last = free_range(1)
    with control_port.listen(
        "127.0.0.1", 0, VirtualClock(), listening=ListenAddress(f"{first}-{last}")
    ) as bound:
        assert bound.getsockname()[1] == first
        with pytest.raises(ResourceError, match=f"no port of the range {first}-{last}"):
            control_port.listen("127.0.0.1", 0, VirtualClock(), listening=ListenAddress(f"{first}-{last}"))
