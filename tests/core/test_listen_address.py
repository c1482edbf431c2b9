"""Listening sockets: one address, a port of a range, and clear errors where there is none."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.core.free_ports import free_range

from paceline.core import listen_address
from paceline.core.errors import ConfigError, ResourceError, UsageError
from paceline.core.listen_address import ListenAddress


def test_ports_come_from_the_range_and_a_full_one_is_named() -> None:
    first, last = free_range(3)
    policy = ListenAddress(f"{first}-{last}")
    with ExitStack() as stack:
        ports = {stack.enter_context(policy.open("127.0.0.1")).getsockname()[1] for _ in range(3)}
        assert ports == set(range(first, last + 1))
        with pytest.raises(ResourceError, match=f"no port of the range {first}-{last} is free at 127.0.0.1"):
            policy.open("127.0.0.1")


def test_a_port_that_is_asked_for_comes_before_the_range() -> None:
    first, last = free_range(2)
    with ListenAddress(f"{first}-{first}").open("127.0.0.1", last) as sock:
        assert sock.getsockname()[1] == last


@pytest.mark.parametrize("text", ["x", "42000-", "-1", "0-5", "50-40", "1-70000", "1-2-3"])
def test_a_range_that_is_none(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a range of ports"):
        ListenAddress(text)


def test_an_interface_by_name_and_by_address() -> None:
    for interface in ("lo", "127.0.0.1"):
        with ListenAddress(interface=interface).open("0.0.0.0") as sock:
            assert sock.getsockname()[0] == "127.0.0.1"
    with pytest.raises(UsageError, match=r"no interface 'nothing0' .*it has .*lo"):
        ListenAddress(interface="nothing0").open("127.0.0.1")


def test_the_family_follows_the_address() -> None:
    with ListenAddress().open("::1") as sock:
        assert sock.family == socket.AF_INET6
        assert listen_address.local_address(sock)[0] == "::1"
    if "lo" in Path("/proc/net/if_inet6").read_text():
        with ListenAddress(interface="lo").open("::1") as sock:
            assert sock.getsockname()[0] == "::1"


def test_policies_of_the_environment() -> None:
    assert ListenAddress.from_environment({}) == ListenAddress()
    given = {"PACELINE_PORTS": "42000-42001", "PACELINE_INTERFACE": "lo"}
    assert ListenAddress.from_environment(given) == ListenAddress("42000-42001", "lo")


def test_names_that_stand_for_loopback() -> None:
    assert listen_address.resolves_to_loopback("127.0.0.1") == ""
    assert listen_address.resolves_to_loopback("localhost") == ""
    assert listen_address.resolves_to_loopback("0.0.0.0") == ""
    assert listen_address.resolves_to_loopback("ip6-localhost") in ("", "::1")
