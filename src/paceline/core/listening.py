"""Where a process listens: one address, and a port of a range. Every listening socket of a run is made here.

    Listening(ports="42000-42100", interface="eth0").open(host)

`host` is what the caller knows (the address of the connection that brought it here); an interface that was
chosen by name or address comes first. Nothing listens on all interfaces unless a caller asks for 0.0.0.0 or
`::` by name. Must not know what is said over the connections.
"""

from __future__ import annotations

import errno
import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, final

from paceline.core.errors import ConfigError, ResourceError, UsageError

BACKLOG: Final = 1024
ALL_ADDRESSES: Final = ("0.0.0.0", "::", "")
"""What stands for every interface; the empty text for both families at once."""
PORTS_VARIABLE: Final = "PACELINE_PORTS"
INTERFACE_VARIABLE: Final = "PACELINE_INTERFACE"

_SIOCGIFADDR: Final = 0x8915
_NAME_BYTES: Final = 16
_USABLE_SCOPES: Final = (0x00, 0x10)  # global, and loopback's; a link-local address means nothing elsewhere


def port_range(text: str) -> tuple[int, int] | None:
    """First and last port of "42000-42100" or "42000"; None for the empty text."""
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
class Listening:
    """A policy for listening sockets.

    ports      "42000-42100" or "42000"; empty: the system chooses
    interface  an interface's name or one of its addresses; empty: the address that the caller gives
    """

    ports: str = ""
    interface: str = ""

    def __post_init__(self) -> None:
        port_range(self.ports)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Listening:
        """What PACELINE_PORTS and PACELINE_INTERFACE say."""
        return cls(environment.get(PORTS_VARIABLE, ""), environment.get(INTERFACE_VARIABLE, ""))

    def address(self, host: str) -> str:
        """The address to listen at: the chosen interface's, of the same family as `host` where it has one."""
        return address_of(self.interface, prefer_ipv6=":" in host) if self.interface else host

    def open(self, host: str, port: int = 0, *, backlog: int = BACKLOG) -> socket.socket:
        """A listening socket. A `port` that is given comes before the range; OSError where it is taken."""
        where = self.address(host)
        found = port_range(self.ports)
        if port or found is None:
            return listener(where, port, backlog)
        trouble: OSError | None = None
        for candidate in _shuffled(*found):
            try:
                return listener(where, candidate, backlog)
            except OSError as error:
                if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                    raise
                trouble = error
        raise ResourceError(
            f"no port of the range {self.ports} is free at {where}",
            remedy="widen the range (ports=): each worker of a machine needs two, the supervisor one",
        ) from trouble


ANY_PORT: Final = Listening()
"""The default: the address that the caller gives, and a port that the system chooses."""


def listener(host: str, port: int, backlog: int = BACKLOG) -> socket.socket:
    """A listening socket at one address or name; see ALL_ADDRESSES for those that are more than one."""
    if not host and socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, backlog=backlog, dualstack_ipv6=True)
    if not host:
        return socket.create_server(("", port), backlog=backlog)
    family, _, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    return socket.create_server((str(target[0]), port), family=family, backlog=backlog)


def from_here(listening: socket.socket) -> tuple[str, int]:
    """Where this machine itself reaches a listening socket."""
    host, port = listening.getsockname()[:2]
    own = str(host)
    if own == "0.0.0.0":
        own = "127.0.0.1"
    elif own == "::":
        own = "::1"
    return own, int(port)


def address_of(interface: str, *, prefer_ipv6: bool = False) -> str:
    """The address of an interface of this machine, given by name or by address."""
    try:
        ipaddress.ip_address(interface)
        return interface
    except ValueError:
        pass  # a name
    found = [_ipv4_of(interface), _ipv6_of(interface)]
    for address in reversed(found) if prefer_ipv6 else found:
        if address:
            return address
    names = ", ".join(name for _, name in socket.if_nameindex())
    raise UsageError(
        f"there is no interface {interface!r} with an address on this machine (it has {names})",
        remedy="give the name of an interface that is up, or one of this machine's addresses",
    )


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach this address or name."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False


def resolves_to_loopback(name: str) -> str:
    """The loopback address that a name other than "localhost" stands for; empty where it is another one."""
    if is_loopback(name) or name in ALL_ADDRESSES:
        return ""
    try:
        found = socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM)
    except OSError:
        return ""  # whoever listens there gives the reason
    addresses = [str(target[0]) for *_, target in found]
    return addresses[0] if all(is_loopback(address) for address in addresses) else ""


def own_address(sock: socket.socket) -> str:
    """The address by which the other side of a connection reaches this machine."""
    try:
        host = str(sock.getsockname()[0])
    except OSError:
        return ""
    return host.removeprefix("::ffff:")


def _shuffled(first: int, last: int) -> Iterator[int]:
    """All ports, from one that differs between processes: workers that start together do not all try the
    same ones."""
    count = last - first + 1
    offset = os.getpid() % count
    for number in range(count):
        yield first + (offset + number) % count


def _ipv4_of(name: str) -> str:
    encoded = name.encode()[: _NAME_BYTES - 1]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            answer = fcntl.ioctl(asking, _SIOCGIFADDR, struct.pack("256s", encoded))
        except OSError:
            return ""
    return socket.inet_ntoa(answer[20:24])


def _ipv6_of(name: str) -> str:
    try:
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
    except OSError:
        return ""
    for line in lines:
        digits, _, _, scope, _, device = line.split()
        if device == name and int(scope, 16) in _USABLE_SCOPES:
            return str(ipaddress.IPv6Address(bytes.fromhex(digits)))
    return ""
