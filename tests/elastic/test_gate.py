"""Where a restarted supervisor listens: at the port where other machines look for it."""

from __future__ import annotations

import socket
import time

import pytest
from tests.core.test_listening import free_range

from paceline.core.errors import ResourceError, UsageError
from paceline.core.listening import Listening
from paceline.elastic.shell import gate


def test_the_old_port_is_waited_for(monkeypatch):
    taken = socket.create_server(("127.0.0.1", 0))
    port = taken.getsockname()[1]
    pauses = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            taken.close()

    monkeypatch.setattr(time, "sleep", pause)
    with gate.listen("127.0.0.1", 0, port) as listener:
        assert listener.getsockname()[1] == port
    assert len(pauses) == 3


@pytest.mark.parametrize("host", ["nonsense.invalid", "192.0.2.1"])
def test_an_address_that_is_not_this_machines(host):
    with pytest.raises(UsageError, match=f"cannot listen at {host}.*\n.*an address of this machine"):
        gate.listen(host, 0)


def test_and_given_up_when_it_stays_taken():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with gate.listen("127.0.0.1", 0, port, seconds=0.1) as listener:
            assert listener.getsockname()[1] != port


def test_a_name_that_stands_for_loopback_is_refused_with_the_remedy(monkeypatch):
    """Debian writes the host's own name as 127.0.1.1 into /etc/hosts."""
    resolve = socket.getaddrinfo

    def debian(host, *arguments, **options):
        return resolve("127.0.1.1" if host == "h1" else host, *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", debian)
    with pytest.raises(UsageError, match=r"bind='h1' stands for 127\.0\.1\.1.*\n.*ip address"):
        gate.listen("h1", 0)


def test_the_control_port_obeys_the_range():
    first, last = free_range(1)
    with gate.listen("127.0.0.1", 0, listening=Listening(f"{first}-{last}")) as listener:
        assert listener.getsockname()[1] == first
        with pytest.raises(ResourceError, match=f"no port of the range {first}-{last}"):
            gate.listen("127.0.0.1", 0, listening=Listening(f"{first}-{last}"))
