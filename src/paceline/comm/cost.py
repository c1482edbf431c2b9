"""Cost model: the time of each algorithm for a message, by an alpha-beta model of the links, and the choice
that it leads to, with its reason.

A link costs `latency + bytes * per_byte`. Defaults are those of an ordinary machine; `paceline bench comm`
measures this one and saves the result, which later groups load. Rank 0's links are used by the whole group,
so that all ranks choose alike. Predicts only; moves nothing.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from paceline.core import atomic_file
from paceline.core.errors import UsageError
from paceline.core.wording import counted


@dataclass(frozen=True)
class LinkCost:
    """Seconds to start a message and seconds per byte."""

    latency: float
    per_byte: float

    @classmethod
    def fit(cls, small: tuple[int, float], large: tuple[int, float]) -> LinkCost:
        """Return the line through two measurements (bytes, seconds)."""
        slope = max((large[1] - small[1]) / (large[0] - small[0]), 1e-13)
        return cls(max(small[1] - small[0] * slope, 1e-7), slope)


@dataclass(frozen=True)
class LinkCosts:
    """Costs of the links: the window of shared memory, messages inside a host and between hosts."""

    window: LinkCost = LinkCost(40e-6, 0.35e-9)
    inside: LinkCost = LinkCost(60e-6, 0.8e-9)
    between: LinkCost = LinkCost(200e-6, 8e-9)
    overhead: float = 20e-6  # handling of one more message in a round
    source: str = "defaults"

    def message(self, crosses_hosts: bool) -> LinkCost:
        return self.between if crosses_hosts else self.inside

    def to_plain(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> LinkCosts:
        try:
            links = {
                name: LinkCost(float(plain[name]["latency"]), float(plain[name]["per_byte"]))
                for name in ("window", "inside", "between")
            }
            overhead = float(plain["overhead"])
            costs = [overhead, *(cost for link in links.values() for cost in (link.latency, link.per_byte))]
            if not all(math.isfinite(cost) and cost >= 0 for cost in costs):
                raise ValueError("costs are finite numbers from 0")
            return cls(**links, overhead=overhead, source=str(plain["source"]))
        except (KeyError, TypeError, ValueError) as error:
            raise UsageError(
                f"not a table of links: {error!r}", remedy="measure again with `paceline bench comm`"
            ) from error


@dataclass(frozen=True)
class Situation:
    """All that the choice of an algorithm depends on."""

    nbytes: int
    ranks: int
    hosts: int = 1
    has_window: bool = False
    native: str = ""  # torch's own backend where there is one
    on_gpu: bool = False
    compressed: bool = False
    window_inside: bool = False  # a window among the ranks of each host

    @property
    def crosses_hosts(self) -> bool:
        return self.hosts > 1


@dataclass(frozen=True)
class Choice:
    """The chosen algorithm and the reason."""

    algorithm: str
    seconds: float
    reason: str
    predictions: Mapping[str, float] = field(default_factory=dict)


def decide(situation: Situation, predictions: Mapping[str, float], links: LinkCosts) -> Choice:
    """Return the cheapest of the predicted algorithms."""
    best = min(predictions, key=lambda name: predictions[name])
    ranking = ", ".join(
        f"{name} {seconds * 1e3:.3f} ms"
        for name, seconds in sorted(predictions.items(), key=lambda item: item[1])
        if math.isfinite(seconds)
    )
    where = f"{counted(situation.ranks, 'rank')} on {counted(situation.hosts, 'host')}"
    reason = f"{best} for {situation.nbytes} bytes, {where}: predicted {ranking} (links: {links.source})"
    return Choice(best, predictions[best], reason, dict(predictions))


def links_file() -> Path:
    base = os.environ.get("PACELINE_LINKS")
    if base:
        return Path(base)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "paceline" / "links.json"


def save_links(links: LinkCosts, path: Path | None = None) -> Path:
    target = path or links_file()
    target.parent.mkdir(parents=True, exist_ok=True)
    atomic_file.replace(target, [json.dumps(links.to_plain(), indent=2).encode() + b"\n"], durable=False)
    return target


def load_links(path: Path | None = None) -> LinkCosts:
    """Return the saved measurement, or the defaults where there is none."""
    source = path or links_file()
    try:
        return LinkCosts.from_plain(json.loads(source.read_bytes()))
    except FileNotFoundError:
        return LinkCosts()
    except ValueError as error:
        raise UsageError(
            f"{source} is damaged: {error}", remedy="delete it, or measure again with `paceline bench comm`"
        ) from error
