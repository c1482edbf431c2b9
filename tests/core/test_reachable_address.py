"""The address of this machine that others reach: several interfaces, IPv6, and names that lead nowhere."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from paceline.core.errors import UsageError
from paceline.core.reachable_address import address_for_hosts, address_towards, is_known, is_this_machine
from paceline.testing import netns
from paceline.testing.netns import Hosts

_WHY_NOT = netns.why_not()
_needs_hosts = pytest.mark.skipif(bool(_WHY_NOT), reason=_WHY_NOT)
_CALL = """
import json, sys
from paceline.core import reachable_address
from paceline.core.errors import UsageError
name, *arguments = json.loads(sys.argv[1])
options = arguments.pop() if arguments and isinstance(arguments[-1], dict) else {}
try:
    print(getattr(reachable_address, name)(*arguments, **options))
except UsageError as error:
    print(error)
"""


def _on(hosts: Hosts, number: int, *call: Any) -> str:
    """Return what a function of the module answers on one of the hosts."""
    process = hosts.start(
        number, [sys.executable, "-c", _CALL, json.dumps(call)], stdout=subprocess.PIPE, text=True
    )
    answer, _ = process.communicate(timeout=30)
    return str(answer).strip()


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Have names stand for addresses, as lines of /etc/hosts would."""
    known: dict[str, str] = {}
    original: Callable[..., Any] = socket.getaddrinfo

    def resolve(host: Any, *arguments: Any, **options: Any) -> Any:
        return original(known.get(host, host), *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    return known


def test_this_machine_reaches_itself() -> None:
    assert address_towards("localhost") in ("127.0.0.1", "::1")
    assert address_towards("127.0.0.1") == address_for_hosts(["localhost", "127.0.0.1"]) == "127.0.0.1"
    assert is_this_machine("localhost")
    assert is_this_machine(socket.gethostname())


def test_the_own_name_may_stand_for_loopback(names: dict[str, str]) -> None:
    names[socket.gethostname()] = "127.0.1.1"
    assert address_towards(socket.gethostname()).startswith("127.")


def test_another_name_that_stands_for_loopback_is_refused(names: dict[str, str]) -> None:
    names["node7"] = "127.0.1.1"
    with pytest.raises(UsageError, match=r"node7 stands for 127.0.1.1 .*loopback") as error:
        address_towards("node7")
    assert "/etc/hosts" in error.value.remedy
    with pytest.raises(UsageError, match=r"node7 cannot reach interface='lo'.* loopback address 127.0.0.1"):
        address_towards("node7", interface="lo")


def test_a_name_that_nobody_knows() -> None:
    with pytest.raises(UsageError, match=r"no address is known for the host 'node7.invalid'"):
        address_towards("node7.invalid")
    assert not is_this_machine("node7.invalid")
    assert (is_known("node7.invalid"), is_known("localhost")) == (False, True)
    with pytest.raises(UsageError, match="no host to reach was given"):
        address_for_hosts([])


def _add_interface(name: str) -> None:
    """Give a host an interface ib0 with the address 10.88.0.1."""
    for command in (
        ["link", "add", "ib0", "type", "veth", "peer", "name", "ib1"],
        ["addr", "add", "10.88.0.1/24", "dev", "ib0"],
        ["link", "set", "ib0", "up"],
        ["link", "set", "ib1", "up"],
    ):
        subprocess.run(["ip", "-n", name, *command], check=True)


@_needs_hosts
def test_routes_of_a_host_with_several_interfaces() -> None:
    with Hosts(2) as hosts:
        name = hosts.names[0]
        _add_interface(name)
        assert _on(hosts, 0, "address_towards", "10.77.0.2") == "10.77.0.1"
        assert _on(hosts, 0, "address_towards", "10.88.0.9") == "10.88.0.1"
        assert _on(hosts, 0, "address_towards", "10.77.0.2", {"interface": "ib0"}) == "10.88.0.1"
        # A name that only a jump host knows.
        assert _on(hosts, 0, "address_towards", "node.invalid", {"interface": "ib0"}) == "10.88.0.1"
        assert _on(hosts, 0, "address_for_hosts", ["10.77.0.2", "10.77.0.1", "127.0.0.1"]) == "10.77.0.1"
        assert _on(hosts, 0, "address_for_hosts", ["127.0.0.1", "10.77.0.1"]) == "10.77.0.1"
        assert _on(hosts, 0, "is_this_machine", "10.88.0.1") == "True"
        assert _on(hosts, 0, "is_this_machine", "10.88.0.9") == "False"
        answer = _on(hosts, 0, "address_for_hosts", ["10.77.0.2", "10.88.0.9"])
        assert "several interfaces" in answer
        assert "10.77.0.2 from 10.77.0.1; 10.88.0.9 from 10.88.0.1" in answer
        assert "interface=" in answer
        answer = _on(hosts, 0, "address_towards", "10.99.0.1")
        assert "no route from this machine to 10.99.0.1" in answer
        assert "unreachable" in answer


@_needs_hosts
def test_the_own_address_for_hosts_that_are_not_known_yet() -> None:
    with Hosts(1) as hosts:
        assert _on(hosts, 0, "own_address", "eth0") == "10.77.0.1"
        # Its name stands for loopback, and it has no route to the outside: the only address it has.
        assert _on(hosts, 0, "own_address") == "10.77.0.1"
        _add_interface(hosts.names[0])
        answer = _on(hosts, 0, "own_address")
        assert "no address of this machine" in answer
        assert "PACELINE_INTERFACE" in answer
        subprocess.run(["ip", "-n", hosts.names[0], "route", "add", "default", "dev", "eth0"], check=True)
        assert _on(hosts, 0, "own_address") == "10.77.0.1"


@_needs_hosts
def test_hosts_with_ipv6_alone() -> None:
    with Hosts(2, ipv6=True) as hosts:
        assert _on(hosts, 0, "address_towards", "fd77::2") == "fd77::1"
        assert _on(hosts, 0, "address_towards", "[fd77::2]") == "fd77::1"
        assert _on(hosts, 0, "address_towards", "fd77::2", {"interface": "eth0"}) == "fd77::1"
        answer = _on(hosts, 0, "address_towards", "fe80::2%eth0")
        assert "fe80::2%eth0 is a link-local address" in answer
        assert "give an address of the host that is routed" in answer


def test_the_module_is_light() -> None:
    """An engine's settings are checked before anything heavy is imported."""
    code = "import sys, paceline.core.reachable_address; print('psutil' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
