"""The settings of a run on Ray, each checked by itself; `ray_engine.Ray` says what they mean."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from paceline.core.errors import ConfigError

LOCAL: Final = "local"


@dataclass(frozen=True, kw_only=True)
class RaySettings:
    """What the parts of the engine read: below the class that users make, which calls these parts."""

    name: Literal["ray"] = "ray"
    address: str | None = None
    nodes: int = 1
    max_nodes: int | None = None
    workers_per_node: int = 1
    gpus_per_node: int = 0
    cpus_per_worker: float = 1.0
    resources: Mapping[str, float] = field(default_factory=dict)
    runtime_env: Mapping[str, Any] = field(default_factory=dict)
    share_nodes: bool = False
    autoscales: bool = False
    dashboard: str = ""
    python: str = ""

    def __post_init__(self) -> None:
        _check_count("nodes", self.nodes, 1)
        _check_count("workers_per_node", self.workers_per_node, 1)
        _check_count("gpus_per_node", self.gpus_per_node, 0)
        if self.max_nodes is not None:
            _check_count("max_nodes", self.max_nodes, self.nodes)
        _check_amount("cpus_per_worker", self.cpus_per_worker)
        for name, amount in self.resources.items():
            if name in ("CPU", "GPU"):
                remedy = "CPUs are cpus_per_worker, GPUs are gpus_per_node"
                raise ConfigError(f"resources has {name!r}", remedy=remedy, key="resources")
            _check_amount(f"resources[{name!r}]", amount)
        _check_address(self.address)


def _check_count(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        remedy = f"give a whole number, {least} or more"
        raise ConfigError(f"{name}={value!r} of the engine Ray", remedy=remedy, key=name)


def _check_amount(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        remedy = "give a number that is more than 0"
        raise ConfigError(f"{name}={value!r} of the engine Ray", remedy=remedy, key=name)


def _check_address(address: str | None) -> None:
    if address is None or address in ("auto", LOCAL):
        return
    host, _, port = address.removeprefix("ray://").rpartition(":")
    is_name = bool(host) and not set(host) & set("/:[]")
    is_ipv6 = host.startswith("[") and host.endswith("]")
    if not (is_name or is_ipv6) or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(
            f"address={address!r} is not the address of a Ray cluster",
            remedy='write "ray://HEAD:10001" (Ray client), "HEAD:6379" or "auto" (on a node of the cluster), '
            'an address of IPv6 in brackets: "[fd00::1]:6379"',
            key="address",
        )
