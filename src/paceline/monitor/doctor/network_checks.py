"""Checks of names and ports of this machine, and of the meeting point that launchers are given."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from typing import Final

from paceline.core import listen_address
from paceline.core.errors import PacelineError
from paceline.monitor.doctor.finding import DoctorFinding, ok, warning, wrong

_CONNECT_SECONDS: Final = 5.0


def look_at_network(master_addr: str | None, master_port: int | None) -> Iterator[DoctorFinding]:
    """Look at loopback, the machine's own name, and a meeting point that is given."""
    yield check_loopback()
    yield check_own_name(socket.gethostname())
    if master_addr is not None:
        resolved = check_name(master_addr)
        yield resolved
        if resolved.verdict == "wrong":
            return
    if master_port is None:
        yield check_ports_variable(os.environ.get(listen_address.PORTS_VARIABLE, ""))
    elif master_addr is None or is_here(master_addr):
        yield check_free_port(master_addr or "", master_port)
    else:
        yield check_reachable(master_addr, master_port)


def check_loopback() -> DoctorFinding:
    try:
        listen_address.check_loopback()
    except PacelineError as error:
        return wrong("loopback", error.message, error.remedy)
    return ok("loopback", "this machine reaches itself")


def check_own_name(name: str) -> DoctorFinding:
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError as error:
        return warning(
            "own name",
            f"{name} has no address: {error.strerror or error}",
            "give it one in /etc/hosts; until then name machines by their addresses",
        )
    if listen_address.resolves_to_loopback(name):
        return warning(
            "own name",
            f"{name} means {found[0][4][0]}, which other machines do not reach",
            "give it the machine's address in /etc/hosts, or give addresses: bind=, --master-addr",
        )
    return ok("own name", f"{name} is {found[0][4][0]}")


def check_name(name: str) -> DoctorFinding:
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        return wrong(
            "master address",
            f"{name} has no address: {getattr(error, 'strerror', None) or error}",
            "check the name, or give an address such as 10.0.0.5",
        )
    return ok("master address", f"{name} is {found[0][4][0]}")


def is_here(name: str) -> bool:
    """Return whether a name or an address is one of this machine's own."""
    import psutil

    try:
        meant = {str(found[4][0]) for found in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)}
    except (OSError, UnicodeError):
        return False
    own = {address.address for addresses in psutil.net_if_addrs().values() for address in addresses}
    return bool(meant & own) or any(listen_address.is_loopback(address) for address in meant)


def check_free_port(host: str, port: int) -> DoctorFinding:
    """Judge whether rank 0 could listen there."""
    try:
        listen_address.listener(host, port, 1).close()
    except OSError as error:
        remedy = "give another --master-port, or end what listens there: ss -ltnp"
        if error.errno == errno.EACCES:
            remedy = "ports below 1024 are root's: give another --master-port"
        return wrong("port", f"{port} cannot be listened at: {error.strerror or error}", remedy)
    return ok("port", f"{port} is free here")


def check_reachable(host: str, port: int) -> DoctorFinding:
    """Judge whether a rank here would reach rank 0 there; that nothing listens yet is no mistake."""
    try:
        socket.create_connection((host, port), timeout=_CONNECT_SECONDS).close()
    except ConnectionRefusedError:
        return warning(
            "master port",
            f"{host} answers, and nothing listens at {port} yet",
            "start rank 0 there first, or look again when it runs",
        )
    except OSError as error:
        return wrong(
            "master port",
            f"{host}:{port} cannot be reached: {error.strerror or error}",
            "check the route and what filters connections between the machines (firewall, security group)",
        )
    return ok("master port", f"{host}:{port} answers")


def check_ports_variable(text: str) -> DoctorFinding:
    """Judge PACELINE_PORTS: some port of it must be free."""
    if not text:
        return ok("ports", "the system chooses; PACELINE_PORTS=42000-42100 where only some are open")
    try:
        listen_address.ListenAddress(ports=text).open("127.0.0.1").close()
    except PacelineError as error:
        return wrong("ports", error.message, error.remedy)
    return ok("ports", f"PACELINE_PORTS={text}: there is a free one")
