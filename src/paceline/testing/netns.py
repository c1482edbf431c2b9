"""Several hosts on one machine: network namespaces behind a switch, with real interfaces, rates and byte
counters.

    with Hosts(2) as hosts:
        hosts.rate("1gbit")
        process = hosts.start(0, [sys.executable, "train.py"])

Needs root and iproute2; `why_not()` says what is missing. Names are unique to the process, and everything
is gone when the block ends: interfaces and routes live in the namespaces and go with them.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import Any, Self, final

from paceline.core.errors import PlatformError, ResourceError, UsageError

_serial = itertools.count()
_libc = ctypes.CDLL(None, use_errno=True)
_CLONE_NEWNET = 0x40000000
_END_SECONDS = 5.0
_WALL = ("table", "77")
# A link address that no host has: the switch carries the packets, and no host accepts them.
_NOWHERE = ("lladdr", "02:00:00:00:00:01", "dev", "eth0", "nud", "permanent")
_REMEDY = "run as root, with iproute2 installed, on a Linux that allows network namespaces"


def why_not() -> str:
    """Return why this machine cannot have such hosts; empty if it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} not found: install iproute2"
    name = f"pl{os.getpid()}x{next(_serial)}"
    probe = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if probe.returncode:
        return f"this system does not allow network namespaces: {probe.stderr.strip()}"
    _ip("netns", "del", name)
    return ""


def enter_namespace(descriptor: int) -> None:
    """Move the calling thread to the network namespace of an open file, e.g. /proc/thread-self/ns/net."""
    if _libc.setns(descriptor, _CLONE_NEWNET):
        code = ctypes.get_errno()
        raise PlatformError(f"cannot enter a network namespace: {os.strerror(code)}", remedy=_REMEDY)


@final
class Hosts:
    """`count` hosts with the addresses 10.77.0.1, ... on one switch; with `ipv6` fd77::1, ... and no IPv4."""

    def __init__(self, count: int, *, ipv6: bool = False) -> None:
        self._prefix = f"pl{os.getpid()}x{next(_serial)}"
        self._ipv6 = ipv6
        self.names = [f"{self._prefix}h{number}" for number in range(count)]
        self._family = ("-6",) if ipv6 else ()
        self.addresses = [self._address(number + 1) for number in range(count)]
        self._switch = f"{self._prefix}sw"
        self._processes: list[subprocess.Popen[Any]] = []

    def _address(self, number: int) -> str:
        return f"fd77::{number:x}" if self._ipv6 else f"10.77.0.{number}"

    def __enter__(self) -> Self:
        try:
            _ip("netns", "add", self._switch)
            _ip("-n", self._switch, "link", "add", "br0", "type", "bridge")
            _ip("-n", self._switch, "link", "set", "br0", "up")
            for number, name in enumerate(self.names):
                _ip("netns", "add", name)
                _ip("-n", name, "link", "set", "lo", "up")
                peer = ("peer", "name", f"p{number}", "netns", self._switch)
                _ip("-n", name, "link", "add", "eth0", "type", "veth", *peer)
                # Without duplicate address detection, which would keep the address unusable for a second.
                size = ("/64", "nodad") if self._ipv6 else ("/24",)
                _ip("-n", name, "addr", "add", self.addresses[number] + size[0], "dev", "eth0", *size[1:])
                _ip("-n", name, "link", "set", "eth0", "up")
                _ip("-n", self._switch, "link", "set", f"p{number}", "master", "br0")
                _ip("-n", self._switch, "link", "set", f"p{number}", "up")
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def rate(self, rate: str, latency: str = "50ms") -> None:
        """Shape every host's link, in both directions, to a rate such as "1gbit"."""
        # The burst has to hold the largest segment that the kernel hands over at once.
        shape = ("root", "tbf", "rate", rate, "burst", "256kb", "latency", latency)
        for number, name in enumerate(self.names):
            _run("ip", "netns", "exec", name, "tc", "qdisc", "replace", "dev", "eth0", *shape)
            _run("ip", "netns", "exec", self._switch, "tc", "qdisc", "replace", "dev", f"p{number}", *shape)

    def cut(self, number: int) -> None:
        """Take a host off the switch: its packets vanish, nothing is refused."""
        _ip("-n", self._switch, "link", "set", f"p{number}", "down")

    def heal(self, number: int) -> None:
        _ip("-n", self._switch, "link", "set", f"p{number}", "up")

    def drop(self, sender: int, receiver: int) -> None:
        """Drop what `sender` sends to `receiver`, in this direction only."""
        _ip("-n", self.names[sender], "neigh", "replace", self.addresses[receiver], *_NOWHERE)

    def block(self, sender: int, receiver: int, ports: str) -> None:
        """Drop what `sender` sends to these TCP ports ("42000-42019") of `receiver`, as a firewall does."""
        name, void = self.names[sender], self._address(250)
        # By a separate routing table.
        _ip("-n", name, "neigh", "replace", void, *_NOWHERE)
        _ip("-n", name, "route", "replace", self.addresses[receiver], "via", void, "dev", "eth0", *_WALL)
        _ip("-n", name, *self._family, "rule", "add", *self._rule(receiver, ports))

    def unblock(self, sender: int, receiver: int, ports: str) -> None:
        """Undo `block`."""
        _ip("-n", self.names[sender], *self._family, "rule", "del", *self._rule(receiver, ports))

    def _rule(self, receiver: int, ports: str) -> tuple[str, ...]:
        return ("to", self.addresses[receiver], "ipproto", "tcp", "dport", ports, "lookup", _WALL[1])

    def lose_large(self, sender: int, receiver: int, size: int = 1000) -> None:
        """Make a black hole: packets of more than `size` bytes from `sender` to `receiver` vanish, for good.
        Smaller ones pass: such a link carries handshakes and heartbeats and no data."""
        if self._ipv6:
            raise UsageError("a black hole is made between IPv4 addresses", remedy="use Hosts(count)")
        tc = ("ip", "netns", "exec", self._switch, "tc")
        port, own = ("dev", f"p{receiver}"), f"1:{sender + 2}"
        shaped = _run(*tc, "qdisc", "show", *port)
        if "htb 1:" not in shaped:
            _run(*tc, "qdisc", "replace", *port, "root", "handle", "1:", "htb", "default", "1")
            _run(*tc, "class", "add", *port, "parent", "1:", "classid", "1:1", "htb", "rate", "10gbit")
        _run(*tc, "class", "add", *port, "parent", "1:", "classid", own, "htb", "rate", "10gbit")
        # A token bucket drops a packet that is larger than the bucket, also as part of a larger segment.
        bucket = ("tbf", "rate", "1gbit", "burst", str(size), "latency", "50ms")
        _run(*tc, "qdisc", "add", *port, "parent", own, *bucket)
        source = ("match", "ip", "src", f"{self.addresses[sender]}/32", "flowid", own)
        _run(*tc, "filter", "add", *port, "parent", "1:", "protocol", "ip", "u32", *source)

    def listeners(self, number: int) -> list[tuple[str, int]]:
        """Return where processes of a host listen: address and TCP port."""
        lines = _run("ip", "netns", "exec", self.names[number], "ss", "-Hltn").splitlines()
        found = [line.split()[3].rpartition(":") for line in lines]
        return [(address.strip("[]").partition("%")[0], int(port)) for address, _, port in found]

    def pids(self, number: int) -> list[int]:
        """Return the processes that run on a host."""
        return [int(pid) for pid in _run("ip", "netns", "pids", self.names[number]).split()]

    def sent_bytes(self, number: int) -> int:
        """Return the bytes that the host's interface has sent so far, all headers included."""
        counter = "/sys/class/net/eth0/statistics/tx_bytes"
        return int(_run("ip", "netns", "exec", self.names[number], "cat", counter))

    def enter(self, number: int) -> None:
        """Move the calling thread, and what it starts from now on, to a host."""
        with open(f"/run/netns/{self.names[number]}") as namespace:
            enter_namespace(namespace.fileno())

    def start(
        self, number: int, command: Sequence[str], *, env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[Any]:
        """Start a process on a host; it is killed when the block ends."""
        process = subprocess.Popen(
            ["ip", "netns", "exec", self.names[number], *command],
            env=None if env is None else dict(env),
            **options,
        )
        self._processes.append(process)
        return process

    def close(self) -> None:
        for process in self._processes:
            with process:  # closes its streams, and waits for it
                process.kill()
        self._processes.clear()
        existing = _run("ip", "netns", "list").split()
        for name in (*self.names, self._switch):
            if name in existing:
                self._end_all(name)
                _ip("netns", "del", name)

    def _end_all(self, name: str) -> None:
        """Kill what processes of a host left behind: a namespace lives as long as anything in it."""
        end = time.monotonic() + _END_SECONDS
        while pids := _run("ip", "netns", "pids", name).split():
            _run("kill", "-9", *pids, check=False)
            if time.monotonic() > end:
                raise ResourceError(f"processes {', '.join(pids)} in {name} do not end")
            time.sleep(0.01)


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(*command: str, check: bool = True) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if check and done.returncode:
        raise PlatformError(f"`{' '.join(command)}` failed: {done.stderr.strip()}", remedy=_REMEDY)
    return done.stdout
