"""Listening sockets: one address, and a port of a range. Every listening socket of a run is made here.

    ListenAddress(ports="42000-42100", interface="eth0").open(host)

`host` is what the caller knows (the address of the connection that brought it here); an interface that was
chosen by name or address comes first. Nothing listens on all interfaces unless a caller asks for 0.0.0.0 or
`::` by name.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, final

from paceline.core.errors import ConfigError, PlatformError, ResourceError, UsageError

BACKLOG: Final = 1024
ALL_ADDRESSES: Final = ("0.0.0.0", "::", "")
"""What stands for every interface; the empty text for both families at once."""
PORTS_VARIABLE: Final = "PACELINE_PORTS"
INTERFACE_VARIABLE: Final = "PACELINE_INTERFACE"

_LOOPBACK: Final = "127.0.0.1"
_LOOPBACK_SECONDS: Final = 5.0


def port_range(text: str) -> tuple[int, int] | None:
    """Return the first and last port of "42000-42100" or "42000"; None for the empty text."""
    if not text:
        return None
    first, dash, last = text.partition("-")
    if first.strip().isdecimal() and (last.strip().isdecimal() if dash else True):
        low, high = int(first), int(last) if dash else int(first)
        if 0 < low <= high <= 65535:
            return low, high
    raise ConfigError(
        f"ports={text!r} is not a range of ports", remedy='write it like "42000-42100"', key="ports"
    )


@final
@dataclass(frozen=True)
class ListenAddress:
    """A policy for listening sockets.

    ports      "42000-42100" or "42000"; empty: the system chooses
    interface  an interface's name or one of its addresses; empty: the address that the caller gives
    """

    ports: str = ""
    interface: str = ""

    def __post_init__(self) -> None:
        port_range(self.ports)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> ListenAddress:
        """Return the policy of PACELINE_PORTS and PACELINE_INTERFACE."""
        return cls(environment.get(PORTS_VARIABLE, ""), environment.get(INTERFACE_VARIABLE, ""))

    def address(self, host: str) -> str:
        """Return the address to listen at: the chosen interface's, of the same family as `host` where it has
        one."""
        return address_of(self.interface, prefer_ipv6=":" in host) if self.interface else host

    def open(self, host: str, port: int = 0) -> socket.socket:
        """Return a listening socket. A `port` that is given comes before the range; OSError where it is
        taken."""
        where = self.address(host)
        found = port_range(self.ports)
        if port or found is None:
            return listener(where, port)
        trouble: OSError | None = None
        low, high = found
        count = high - low + 1
        for number in range(count):
            # From a port that differs between processes: those that start together try different ones.
            candidate = low + (os.getpid() + number) % count
            try:
                return listener(where, candidate)
            except OSError as error:
                if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                    raise
                trouble = error
        raise ResourceError(
            f"no port of the range {self.ports} is free at {where}",
            remedy="widen the range (ports=): each worker of a machine needs two, the supervisor one",
        ) from trouble


ANY_PORT: Final = ListenAddress()
"""The default: the address that the caller gives, and a port that the system chooses."""


def listener(host: str, port: int, backlog: int = BACKLOG) -> socket.socket:
    """Return a listening socket at one address or name; see ALL_ADDRESSES for those that are more than
    one."""
    both, where = not host and socket.has_dualstack_ipv6(), ""
    family = socket.AF_INET6 if both else socket.AF_INET
    if host:
        family, _, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        where = str(target[0])
    try:
        return socket.create_server((where, port), family=family, backlog=backlog, dualstack_ipv6=both)
    except OSError as error:
        if not error.errno:
            raise
        # Python adds the address, which the message of every caller has already.
        raise OSError(error.errno, os.strerror(error.errno)) from None


def local_address(listening: socket.socket) -> tuple[str, int]:
    """Return where this machine itself reaches a listening socket."""
    host, port = listening.getsockname()[:2]
    return {"0.0.0.0": _LOOPBACK, "::": "::1"}.get(host, str(host)), int(port)


def address_of(interface: str, *, prefer_ipv6: bool = False) -> str:
    """Return the address of an interface of this machine, given by name or by address."""
    try:
        ipaddress.ip_address(interface)
        return interface
    except ValueError:
        pass  # a name
    interfaces = _routed_addresses()
    found = interfaces.get(interface, [])
    if found:
        return next((one for one in found if (":" in one) == prefer_ipv6), found[0])
    names = ", ".join(interfaces)
    raise UsageError(
        f"there is no interface {interface!r} with an address on this machine (it has {names})",
        remedy="give the name of an interface that is up, or one of this machine's addresses",
    )


def addresses_of_interfaces() -> list[str]:
    """Return the addresses of this machine that another one may reach: of all interfaces but loopback's."""
    return [one for found in _routed_addresses().values() for one in found if not is_loopback(one)]


def _routed_addresses() -> dict[str, list[str]]:
    """Return each interface's addresses, IPv4 first."""
    import psutil

    try:
        interfaces = psutil.net_if_addrs()
    except OSError:
        return {}  # a sandbox without netlink
    # A link-local address, which has a zone behind a %, means nothing on another machine.
    return {
        name: [
            str(one.address)
            for family in (socket.AF_INET, socket.AF_INET6)
            for one in found
            if one.family == family and "%" not in one.address
        ]
        for name, found in interfaces.items()
    }


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach this address or name."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False


def resolves_to_loopback(name: str) -> str:
    """Return the loopback address that a name other than "localhost" stands for; empty where it is another
    one."""
    if is_loopback(name) or name in ALL_ADDRESSES:
        return ""
    try:
        found = socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM)
    except OSError:
        return ""  # listening there fails with the reason
    addresses = [str(target[0]) for *_, target in found]
    return addresses[0] if all(is_loopback(address) for address in addresses) else ""


def check_loopback() -> None:
    """Raise PlatformError where this machine cannot connect to itself: a network namespace begins with its
    loopback interface down, and a connection to 127.0.0.1 there waits for an answer that cannot come."""
    try:
        with socket.create_server((_LOOPBACK, 0), backlog=1) as listening:
            socket.create_connection(listening.getsockname(), timeout=_LOOPBACK_SECONDS).close()
    except OSError as error:
        raise PlatformError(
            f"this machine cannot reach itself at {_LOOPBACK} ({error.strerror or error}): workers and their "
            "supervisor talk over the loopback interface",
            remedy="bring it up (ip link set lo up), or let a firewall pass what stays on the machine",
        ) from error
