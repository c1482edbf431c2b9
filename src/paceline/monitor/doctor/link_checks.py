"""Judge the links between hosts: can each reach each, how fast, and do their clocks agree."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from paceline.core.errors import UsageError
from paceline.monitor.doctor.finding import DoctorFinding, ok, warning, wrong
from paceline.monitor.doctor.link_probe import DEFAULT_PORT, MOST_BYTES, LinkMeasure, measure, measure_from

_SLOW: Final = 10e6  # bytes a second: a gradient of 100 MB takes ten seconds
_FAR: Final = 0.05
_SKEW: Final = 2.0
_SERVE: Final = "start `paceline doctor --serve --token-file FILE` there, and let a firewall pass its port"


def parse_hosts(text: str) -> list[tuple[str, int]]:
    """Return the hosts and ports of a text such as a,b:42000."""
    found = []
    for part in text.split(","):
        host, colon, port = part.strip().rpartition(":")
        if not colon or "]" in port or (":" in host.strip("[]") and not host.startswith("[")):
            host, port = part.strip(), str(DEFAULT_PORT)  # a name alone, or an IPv6 address alone
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise UsageError(
                f"--hosts {text!r}: {part!r} is no host", remedy="write it like 10.0.0.5,10.0.0.6:42000"
            )
        found.append((host.strip("[]"), int(port)))
    return found


def look_at_links(
    hosts: Sequence[tuple[str, int]], secret: bytes, most: int = MOST_BYTES
) -> Iterator[DoctorFinding]:
    """Measure from here to each host, and then between all of them, one link at a time: two at once would
    share what they measure."""
    reached = []
    for host in hosts:
        found = measure(*host, secret, most)
        yield judge_link("here", _name(host), found)
        if not found.problem:
            yield judge_clock(_name(host), found)
            reached.append(host)
    for source in reached:
        for target in reached:
            if source != target:
                yield judge_link(_name(source), _name(target), measure_from(source, target, secret, most))


def judge_link(source: str, target: str, found: LinkMeasure) -> DoctorFinding:
    topic = f"{source} -> {target}"
    if found.problem:
        return wrong(topic, found.problem, _SERVE)
    text = f"{found.round_trip * 1e3:.2f} ms, {found.bytes_per_second / 1e6:,.0f} MB/s"
    if found.bytes_per_second < _SLOW:
        return warning(
            topic,
            f"{text}: gradients of 100 MB take {100e6 / found.bytes_per_second:.0f} s",
            "use another network between them, compress gradients, or train on one of them",
        )
    if found.round_trip > _FAR:
        return warning(topic, f"{text}: each step waits for several round trips", "use hosts of one site")
    return ok(topic, text)


def judge_clock(target: str, found: LinkMeasure) -> DoctorFinding:
    topic = f"clock of {target}"
    if abs(found.skew) > _SKEW + found.round_trip:
        direction = "ahead" if found.skew > 0 else "behind"
        return warning(
            topic,
            f"{abs(found.skew):.1f} s {direction}: times in journals and logs do not compare",
            "set both by NTP: timedatectl set-ntp true",
        )
    return ok(topic, f"within {max(abs(found.skew), found.round_trip / 2) * 1e3:.1f} ms of this one")


def _name(host: tuple[str, int]) -> str:
    return host[0] if host[1] == DEFAULT_PORT else f"{host[0]}:{host[1]}"
