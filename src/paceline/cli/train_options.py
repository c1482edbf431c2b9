"""Options of `paceline train`, as typer reads them."""

from __future__ import annotations

from typing import Annotated

import typer

OptionalScript = Annotated[str | None, typer.Argument(help="The Python file that trains; or give --script.")]
TrainArguments = Annotated[
    list[str] | None, typer.Argument(help="Arguments of the script; put -- before those with dashes.")
]
ScriptFile = Annotated[
    str | None, typer.Option("--script", metavar="FILE", help="The Python file that trains.")
]
ConfigFile = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="Settings of TrainConfig or DistributedConfig: TOML, JSON or YAML. Options win over it.",
    ),
]
WorkerTotal = Annotated[int | None, typer.Option(help="How many workers compute.")]
NumGpus = Annotated[
    int | None,
    typer.Option(help="Workers, one per GPU; on the CPU where there is no GPU."),
]
NumNodes = Annotated[int | None, typer.Option(help="Machines; 1: others come by `paceline join`.")]
GpusPerNode = Annotated[int | None, typer.Option(help="GPUs of each machine.")]
BackendName = Annotated[
    str | None, typer.Option(help="pytorch-ddp, horovod, tensorflow, or ray, which is --engine ray.")
]
DryRun = Annotated[
    bool, typer.Option(help="With --engine: print what would be asked for, and start nothing.")
]
Epochs = Annotated[int | None, typer.Option(help="How many passes over the data.")]
RunDir = Annotated[str | None, typer.Option(help="The folder of the run.")]
Resume = Annotated[
    str | None, typer.Option(help="Go on with a run: auto, the number of a checkpoint, or a tag.")
]
ChaosText = Annotated[
    str | None,
    typer.Option(help='Faults to inject, such as "kill rank=2 step=20; slow rank=0 factor=3".'),
]
MinWorkers = Annotated[int | None, typer.Option(help="Stop with a verdict when fewer than these are left.")]
Assignments = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Any other setting of TrainConfig; repeatable."),
]
