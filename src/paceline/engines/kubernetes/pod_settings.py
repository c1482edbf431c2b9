"""What a user sets for pods: the fields of `paceline.Kubernetes`, checked."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from paceline.core.errors import ConfigError

SUPERVISOR_PORT: Final = 29577
_QUANTITY: Final = re.compile(r"\d+(\.\d+)?(m|[kKMGTPE]i?)?")
_LABEL: Final = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_SUBDOMAIN: Final = re.compile(
    r"(?=.{1,253}\Z)[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*"
)
_PORTS: Final = range(1, 65536)


@dataclass(frozen=True, kw_only=True)
class PodSettings:
    """Fields of `Kubernetes` (kubernetes_engine.py), whose docstring explains them."""

    name: Literal["kubernetes"] = "kubernetes"
    image: str = ""
    nodes: int = 1
    workers_per_node: int = 1
    gpus_per_node: int = 0
    namespace: str = ""
    kind: Literal["job", "statefulset", "jobset"] = "job"
    kubeconfig: str = ""
    context: str = ""
    address: str = ""
    port: int = SUPERVISOR_PORT
    cpus: str = ""
    memory: str = ""
    shared_memory: str = "1Gi"
    volumes: Mapping[str, str] = field(default_factory=dict)
    user: int = 1000
    grace_seconds: int = 60
    retries: int = 6
    service_account: str = ""
    image_pull_secret: str = ""
    node_selector: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    folder: str = ""
    python: str = "python3"

    def __post_init__(self) -> None:
        if self.kind not in ("job", "statefulset", "jobset"):
            raise ConfigError(
                f"kind={self.kind!r}", remedy='kind is "job", "statefulset" or "jobset"', key="kind"
            )
        for name, least in (("nodes", 1), ("workers_per_node", 1), ("user", 1), ("grace_seconds", 1)):
            if getattr(self, name) < least:
                raise ConfigError(
                    f"{name}={getattr(self, name)}", remedy=f"give {name}={least} or more", key=name
                )
        if self.gpus_per_node < 0 or self.retries < 0:
            raise ConfigError("gpus_per_node and retries are 0 or more", remedy="give 0 or more")
        for name in ("cpus", "memory", "shared_memory"):
            value = getattr(self, name)
            if value and not _QUANTITY.fullmatch(value):
                raise ConfigError(
                    f"{name}={value!r} is no quantity of Kubernetes", remedy='write "4" or "16Gi"', key=name
                )
        if self.port not in _PORTS:
            raise ConfigError(f"port={self.port}", remedy="give a port from 1 to 65535", key="port")
        claims = [("volumes", claim, _SUBDOMAIN) for claim in self.volumes.values()]
        for name, value, form in (("namespace", self.namespace, _LABEL), *claims):
            if value and not form.fullmatch(value):
                raise ConfigError(
                    f"{name}: {value!r} is no name of Kubernetes",
                    remedy="use lower-case letters, digits and dashes",
                    key=name,
                )
        if wrong := next((path for path in self.volumes if not path.startswith("/")), None):
            raise ConfigError(
                f"volumes: {wrong!r} is no folder of a pod", remedy='write volumes={"/runs": "CLAIM"}'
            )
