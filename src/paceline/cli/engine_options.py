"""Options of `paceline train` and `paceline submit` that say where a run runs. Imports no torch."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, cast, final

import typer

from paceline.core import config as core_config, engine_registry
from paceline.core.engine_registry import EngineSettings
from paceline.core.errors import ConfigError, UsageError
from paceline.core.listen_address import ListenAddress
from paceline.core.wording import counted, listed
from paceline.engines.engine import Engine

if TYPE_CHECKING:
    from paceline.frontends.overrides import Overrides

T = TypeVar("T")

EngineName = Annotated[
    str | None, typer.Option(metavar="NAME", help="Where workers run: ray, slurm, kubernetes, mpi or ssh.")
]
Nodes = Annotated[int | None, typer.Option(help="Machines of the engine.")]
WorkersPerNode = Annotated[int | None, typer.Option(help="Workers of each machine of the engine.")]
RayAddress = Annotated[str | None, typer.Option(help="Of Ray: ray://HOST:10001, or auto.")]
Image = Annotated[str | None, typer.Option(help="Of Kubernetes: the container image.")]
Kind = Annotated[
    str | None, typer.Option(help="Of Kubernetes: what holds the pods: job, statefulset or jobset.")
]
SlurmOptions = Annotated[
    list[str] | None, typer.Option("--slurm", metavar="KEY=VALUE", help="An #SBATCH option; repeatable.")
]
EngineAssignments = Annotated[
    list[str] | None,
    typer.Option("--engine-set", metavar="KEY=VALUE", help="Any setting of the engine; repeatable."),
]


@final
@dataclass(frozen=True)
class EngineOptions:
    """What the options say. `settings`: texts KEY=VALUE for the engine; `slurm`: KEY=VALUE for sbatch."""

    engine: str | None = None
    nodes: int | None = None
    workers_per_node: int | None = None
    gpus_per_node: int | None = None
    address: str | None = None
    image: str | None = None
    settings: list[str] = field(default_factory=list)
    slurm: list[str] = field(default_factory=list)
    kind: str | None = None

    def chosen(self) -> Engine | None:
        """Return the engine that the options ask for; None: the run stays on this machine."""
        if self.engine is None:
            self._refuse_without_engine()
            return None
        cls = engine_registry.engine_class(self.engine)
        known = {each.name for each in dataclasses.fields(cls) if each.init}  # type: ignore[arg-type]
        given = {
            "nodes": self.nodes,
            "workers_per_node": self.workers_per_node,
            "gpus_per_node": self.gpus_per_node,
            "address": self.address,
            "image": self.image,
            "kind": self.kind,
        }
        table: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        if self.slurm:
            table["options"] = dict(_pair(text, "--slurm") for text in self.slurm)
            if self.nodes is not None and "nodes" in table["options"]:
                one_of(str(self.nodes), table["options"]["nodes"], "--nodes", "--slurm nodes")
        for name in table:
            if name not in known:
                raise UsageError(
                    f"{_option(name)} means nothing to the engine {self.engine}",
                    remedy=f"leave it out; it has {listed(sorted(known - {'name'}))}",
                )
        for option, value, why in (
            ("--nodes", self.nodes, "a run needs a node"),
            ("--workers-per-node", self.workers_per_node, "a node needs a worker"),
        ):
            if value is not None and value < 1:
                raise UsageError(f"{option} {value}: {why}", remedy=f"give {option} 1 or more")
        return cast(Engine, _loaded(cls, {"name": self.engine, **table}, self.settings))

    def _refuse_without_engine(self) -> None:
        for option, value in (
            ("--nodes", self.nodes),
            ("--workers-per-node", self.workers_per_node),
            ("--image", self.image),
            ("--kind", self.kind),
            ("--engine-set", self.settings),
            ("--slurm", self.slurm),
        ):
            if value is not None and value != []:
                raise UsageError(
                    f"{option} is about an engine, and none is chosen",
                    remedy=f"add --engine with one of {listed(engine_registry.NAMES)}",
                )


def one_of(first: T | None, second: T | None, first_option: str, second_option: str) -> T | None:
    """Return the value that one of two options gives; UsageError where both do, and differ."""
    if first is not None and second is not None and first != second:
        raise UsageError(
            f"{first_option} {first} and {second_option} {second} contradict each other",
            remedy="give one of them",
        )
    return second if first is None else first


def check_size_and_backend(
    engine: Engine, workers: int | None, num_gpus: int | None, backend: str | None
) -> None:
    """Refuse options that say something else than the engine about how many workers there are, or that name
    another trainer."""
    most = engine.nodes * engine.workers_per_node
    for option, value in (("--workers", workers), ("--num-gpus", num_gpus)):
        if value is not None and value != most:
            raise UsageError(
                f"{option} {value} with --engine {engine.name}: {counted(engine.nodes, 'node')} of "
                f"{counted(engine.workers_per_node, 'worker')} have {most}",
                remedy=f"leave {option} out, and give --nodes and --workers-per-node",
            )
    if backend not in (None, "pytorch-ddp"):
        raise UsageError(
            f"--backend {backend} and --engine {engine.name}: an engine runs Paceline's own workers",
            remedy="give one of them",
        )


def _loaded(cls: type[EngineSettings], table: dict[str, Any], texts: list[str]) -> EngineSettings:
    """Return the settings of the options and of --engine-set, whose lists may be written a,b."""
    lists = {each.name for each in dataclasses.fields(cls) if "tuple[" in str(each.type)}  # type: ignore[arg-type]
    assigned = []
    for name, value in (_pair(text, "--engine-set") for text in texts):
        is_plain = name in lists and not value.startswith("[")
        words = [word.strip() for word in value.split(",") if word.strip()]
        assigned.append(f"{name}={json.dumps(words) if is_plain else value}")
    try:
        return core_config.load(cls, table, overrides=tuple(assigned))
    except ConfigError as error:
        message = error.message.removeprefix("the settings: ")
        raise ConfigError(
            f"--engine {table['name']}: {message.replace('--set ', '--engine-set ', 1)}", remedy=error.remedy
        ) from None


def request_text(engine: Engine, settings: Overrides) -> str:
    """Return what a run in the foreground would ask the engine for, as YAML. `settings`: those of the command
    line and its file, `engine` among them; what the script itself sets is not known. Without a port in them
    any free one is taken, which only the run itself knows: 0 stands for it."""
    import yaml

    from paceline.frontends.engine_nodes import agent_spec, supervisor_bind
    from paceline.train.settings.train_config import TrainConfig

    config = settings.apply(TrainConfig())
    engine.check()
    address = ListenAddress(interface=config.fault_tolerance.interface or "").address(supervisor_bind(config))
    agents = agent_spec(config, (address, config.fault_tolerance.port))
    request = dict(engine.request(agents))
    return str(yaml.safe_dump(request, sort_keys=False, width=110, default_flow_style=False))


def _option(name: str) -> str:
    return "--slurm" if name == "options" else f"--{name.replace('_', '-')}"


def _pair(text: str, option: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        raise UsageError(
            f"{option} {text}: not of the form key=value", remedy=f"write it like {option} partition=short"
        )
    return name.strip(), value.strip()
