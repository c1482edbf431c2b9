"""Host files: a host per line, `[user@]host[:port] [slots=N]`, as mpirun and ssh tools read them.

    # rack 3
    node1
    root@10.0.0.2:2222
    [fd77::2]:22
    node4 slots=2

Empty lines and what follows a # are skipped. Any other word is an error: a setting that is not understood is
not left out silently.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

from paceline.core.errors import UsageError

_FORM = "write [user@]host[:port] [slots=N], one host per line"


@final
@dataclass(frozen=True)
class HostLine:
    """One host. `port` 0 and an empty `user`: those of the ssh configuration; `slots` 0: not said."""

    host: str
    user: str = ""
    port: int = 0
    slots: int = 0

    @property
    def shown(self) -> str:
        """The host as a person writes it."""
        where = f"[{self.host}]:{self.port}" if ":" in self.host and self.port else self.host
        where = f"{where}:{self.port}" if self.port and ":" not in self.host else where
        return f"{self.user}@{where}" if self.user else where


def read_host_file(path: Path) -> tuple[HostLine, ...]:
    """Return the hosts of a file, in its order."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise UsageError(
            f"the host file {path} cannot be read: {reason}", remedy=f"give a text file; {_FORM}"
        ) from error
    return parse_hosts(text.splitlines(), str(path))


def parse_hosts(lines: Iterable[str], source: str) -> tuple[HostLine, ...]:
    """Return the hosts of lines; `source` is named in errors."""
    found: list[HostLine] = []
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        parsed = _parse(words, f"{source}, line {number}")
        if any((parsed.host, parsed.port) == (other.host, other.port) for other in found):
            raise UsageError(
                f"{source}, line {number} names the host {parsed.shown} a second time",
                remedy="name each host once: one agent runs on it, with workers_per_node workers",
            )
        found.append(parsed)
    if not found:
        raise UsageError(f"{source} names no host", remedy=_FORM)
    return tuple(found)


def check_room(hosts: Sequence[HostLine], nodes: int, workers_per_node: int) -> None:
    """Refuse more nodes than there are hosts, and more workers than the slots of a host."""
    if nodes > len(hosts):
        raise UsageError(
            f"{nodes} nodes are asked for, and {len(hosts)} hosts are named",
            remedy="name more hosts, or ask for fewer nodes",
        )
    for line in hosts:
        if 0 < line.slots < workers_per_node:
            raise UsageError(
                f"{line.shown} has slots={line.slots}, and workers_per_node is {workers_per_node}",
                remedy="give fewer workers per node, or correct the host file",
            )


def _parse(words: list[str], place: str) -> HostLine:
    user, _, where = words[0].rpartition("@")
    host, port = where, ""
    if where.startswith("["):
        host, closing, rest = where[1:].partition("]")
        port = rest.removeprefix(":")
        if not closing or (rest and not rest.startswith(":")):
            raise UsageError(f"{place}: {words[0]!r} is not a host", remedy=_FORM)
    elif where.count(":") == 1:
        host, _, port = where.partition(":")
    # A host that begins with a dash would be read as an option of ssh.
    if not host or host.startswith("-") or user.startswith("-") or (port and not _is_port(port)):
        raise UsageError(f"{place}: {words[0]!r} is not a host", remedy=_FORM)
    slots = 0
    for word in words[1:]:
        key, _, value = word.partition("=")
        if key not in ("slots", "max_slots", "max-slots") or not value.isdecimal() or int(value) < 1:
            raise UsageError(f"{place}: {word!r} is not understood", remedy=_FORM)
        slots = int(value)
    return HostLine(host, user, int(port or 0), slots)


def _is_port(text: str) -> bool:
    return text.isdecimal() and 0 < int(text) < 65536
