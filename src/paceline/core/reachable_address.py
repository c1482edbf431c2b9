"""Find the address of this machine at which other machines reach it, for a supervisor to listen at.

    address_towards("node7")                       10.0.0.5, from which a route to node7 starts
    address_for_hosts(["node7", "node8"], interface="eth1")

A machine with several interfaces has an address on each, and its own name often stands for a loopback address
(Debian writes 127.0.1.1 into /etc/hosts): the routing table knows, the name does not. An address that other
machines cannot reach is refused before anything is started, with the remedy.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable
from typing import Final

from paceline.core.errors import UsageError
from paceline.core.listen_address import address_of, addresses_of_interfaces, is_loopback

_ANY_PORT: Final = 9  # discard: connecting a datagram socket sends nothing, and the port only has to be one
_OUTSIDE: Final = ("192.0.2.1", "2001:db8::1")  # addresses for documentation: no host has them
_INTERFACE_REMEDY: Final = "choose the interface or the address that it can reach: interface="


def address_towards(host: str, *, interface: str = "") -> str:
    """Return the address of this machine from which a route to `host` starts, or that of `interface`.

    UsageError where the name is unknown, where there is no route, and where only a loopback or a link-local
    address is found although `host` is another machine.
    """
    if interface:
        return _interface_towards(host, interface)
    targets = _resolve(host)
    local = is_this_machine(host)
    if not local and all(is_loopback(target) for target in targets):
        raise UsageError(
            f"{host} stands for {targets[0]} on this machine, a loopback address: no other machine is "
            "reached there",
            remedy=f"give the address of {host} instead of its name, or correct its line in /etc/hosts",
        )
    if all(_is_link_local(target) for target in targets):
        raise UsageError(
            f"{host} is a link-local address, and so is the one of this machine on that link: it means "
            "nothing on another machine",
            remedy="give an address of the host that is routed, or its name",
        )
    trouble: OSError | None = None
    for target in targets:
        try:
            return _route_start(target)
        except OSError as error:
            trouble = error
    reason = trouble.strerror if trouble is not None else ""
    raise UsageError(
        f"there is no route from this machine to {host} ({', '.join(targets)}): {reason}",
        remedy=f"check the network ('ip route get {targets[0]}'), or {_INTERFACE_REMEDY}",
    ) from trouble


def address_for_hosts(hosts: Iterable[str], *, interface: str = "") -> str:
    """Return the one address of this machine that all `hosts` reach; this machine itself reaches all of its
    addresses. UsageError where routes start at several interfaces: one of them has to be chosen."""
    found: dict[str, list[str]] = {}
    for host in hosts:
        found.setdefault(address_towards(host, interface=interface), []).append(host)
    if not found:
        raise UsageError("no host to reach was given", remedy="name at least one host")
    remote = {
        address: names for address, names in found.items() if not all(is_this_machine(name) for name in names)
    }
    if len(remote) > 1:
        routes = "; ".join(f"{_named(names)} from {address}" for address, names in remote.items())
        raise UsageError(
            f"routes to the hosts start at several interfaces of this machine: {routes}",
            remedy="choose the one that all of them reach: interface=",
        )
    outside = [address for address in found if not is_loopback(address)]
    return next(iter(remote), outside[0] if outside else next(iter(found)))


def _interface_towards(host: str, interface: str) -> str:
    try:
        prefer_ipv6 = ":" in _resolve(host)[0]
    except UsageError:
        prefer_ipv6 = False  # a name that only others resolve, e.g. behind a jump host
    own = address_of(interface, prefer_ipv6=prefer_ipv6)
    if is_loopback(own) and not is_this_machine(host):
        raise UsageError(
            f"{host} cannot reach interface={interface!r}, which has the loopback address {own}",
            remedy=_INTERFACE_REMEDY,
        )
    return own


def own_address(interface: str = "") -> str:
    """Return the address at which machines that are not known yet reach this one: that of `interface`, else
    that of this machine's name, else that from which its route to the outside starts, else the only one it
    has."""
    if interface:
        return address_of(interface)
    name = socket.gethostname()
    try:
        candidates = [address for address in _resolve(name) if not is_loopback(address)]
    except UsageError:
        candidates = []  # it does not know its own name
    for address in candidates:
        if _is_own(address) and not _is_link_local(address):
            return address
    for outside in _OUTSIDE:
        try:
            return _route_start(outside)
        except OSError:
            continue
    if len(only := addresses_of_interfaces()) == 1:
        return only[0]
    raise UsageError(
        f"no address of this machine ({name}) is known that other machines reach",
        remedy="choose one with interface= or PACELINE_INTERFACE: a name such as eth0, or an address",
    )


def is_known(host: str) -> bool:
    """Return whether the name of a host stands for an address on this machine."""
    try:
        return bool(_resolve(host))
    except UsageError:
        return False


def is_this_machine(host: str) -> bool:
    """Return whether a name or an address is this machine's own."""
    name = socket.gethostname()
    if is_loopback(host) or host in (name, name.partition(".")[0]):
        return True
    try:
        addresses = _resolve(host)
    except UsageError:
        return False
    return any(not is_loopback(address) and _is_own(address) for address in addresses)


def _resolve(host: str) -> list[str]:
    try:
        found = socket.getaddrinfo(host.strip("[]"), _ANY_PORT, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise UsageError(
            f"no address is known for the host {host!r}: {reason}",
            remedy="correct the name, add it to DNS or /etc/hosts, or give the host's address",
        ) from error
    addresses: list[str] = []
    for _, _, _, _, target in found:
        if str(target[0]) not in addresses:
            addresses.append(str(target[0]))
    return addresses


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _route_start(target: str) -> str:
    """Return the source address of packets to `target`: the kernel chooses it when a datagram socket is
    connected, and sends nothing."""
    with socket.socket(_family(target), socket.SOCK_DGRAM) as sock:
        sock.connect((target, _ANY_PORT))
        return str(sock.getsockname()[0])


def _is_link_local(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_link_local


def _is_own(address: str) -> bool:
    """Return whether this machine has the address: only then can a socket be bound to it."""
    try:
        with socket.socket(_family(address), socket.SOCK_DGRAM) as sock:
            sock.bind((address, 0))
    except OSError:
        return False
    return True


def _named(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
