"""`paceline bench`: measure this machine. Imports torch when a measurement starts."""

from __future__ import annotations

import re
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.output import AsJson, echo_json
from paceline.core.errors import UsageError
from paceline.core.wording import counted

if TYPE_CHECKING:
    from paceline.comm.benchmark import Row
    from paceline.comm.cost import LinkCosts

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode=None)

_UNITS = {"B": 1, "KB": 1 << 10, "MB": 1 << 20, "GB": 1 << 30}


@app.callback()
def bench() -> None:
    """Measure this machine.

    Example: paceline bench comm --ranks 2
    """


@app.command()
def comm(
    ranks: Annotated[
        list[int] | None, typer.Option("--ranks", "-n", help="Number of ranks; repeat for several.")
    ] = None,
    sizes: Annotated[
        list[str] | None,
        typer.Option("--size", help="Message size, such as 4KB or 25MB; repeat for several."),
    ] = None,
    rounds: Annotated[int, typer.Option(help="Interleaved rounds; medians are over all of them.")] = 5,
    save: Annotated[bool, typer.Option(help="Save the measured links for algorithm='auto'.")] = True,
    as_json: AsJson = False,
) -> None:
    """Time all-reduce against Gloo, calibrate the cost model, and say which algorithm 'auto' will choose.

    Example: paceline bench comm --ranks 2 --ranks 4 --size 4KB --size 25MB
    """
    counts = ranks or [2, 4]
    if any(count < 2 for count in counts):
        raise UsageError(
            f"--ranks {min(counts)}: an all-reduce needs at least 2 ranks", remedy="pass --ranks 2 or more"
        )
    if rounds < 1:
        raise UsageError(f"--rounds {rounds}", remedy="pass --rounds 1 or more")
    nbytes = [parse_size(text) for text in sizes] if sizes else [4096, 1 << 20, 25 << 20, 100 << 20]

    from paceline.comm import benchmark
    from paceline.comm.algorithms import choose
    from paceline.comm.cost import Situation, save_links
    from paceline.frontends.spawn import spawn

    rows: list[Row] = []
    for count in counts:
        rows += spawn(benchmark.compare, nbytes, benchmark.METHODS, rounds, workers=count, threads=1)[0]
    links: LinkCosts = spawn(benchmark.calibrate, workers=max(counts), threads=1)[0]
    path = save_links(links) if save else None
    choices = [choose(Situation(size, count, has_window=True), links) for count in counts for size in nbytes]
    if as_json:
        plain = {
            "rows": [row.to_plain() for row in rows],
            "links": links.to_plain(),
            "saved": str(path) if path else None,
            "auto": [choice.reason for choice in choices],
        }
        echo_json(plain)
        return
    _print(rows)
    for choice in choices:
        typer.echo(f"auto: {choice.reason}")
    if path is not None:
        typer.echo(f"links saved to {path}")


@app.command()
def scaling(
    workers: Annotated[
        str,
        typer.Option(help="Numbers of workers, such as 1,2,4; the least is what others are compared with."),
    ] = "1,2",
    min_efficiency: Annotated[
        float, typer.Option(help="Exit code 1 where one is below; 1.0: twice the workers, twice as fast.")
    ] = 0.0,
    steps: Annotated[int, typer.Option(help="Measured steps of each.", min=1)] = 30,
    batch: Annotated[int, typer.Option(help="Samples in a step, over all workers.", min=1)] = 256,
    rounds: Annotated[int, typer.Option(help="Turns; the best of each number counts.", min=1)] = 2,
    as_json: AsJson = False,
) -> None:
    """Train a small built-in model with several numbers of workers, and say how efficient each is.

    Example: paceline bench scaling --workers 1,2 --min-efficiency 0.85 --json
    """
    counts = parse_counts(workers)
    if batch < max(counts):
        raise UsageError(
            f"--batch {batch} cannot be shared by {max(counts)} workers", remedy="give a larger --batch"
        )

    from paceline.core.available_resources import cores
    from paceline.frontends.scaling_benchmark import measure_scaling

    rows = measure_scaling(counts, steps=steps, batch=batch, rounds=rounds)
    enough = all(row.efficiency >= min_efficiency for row in rows)
    crowded = max(counts) > cores()
    if as_json:
        echo_json(
            {
                "cores": cores(),
                "min_efficiency": min_efficiency,
                "enough": enough,
                "rows": [asdict(row) for row in rows],
            }
        )
    else:
        typer.echo("workers  samples/s  ms a step  efficiency")
        for row in rows:
            low = "" if row.efficiency >= min_efficiency else f"  below {min_efficiency}"
            typer.echo(
                f"{row.workers:>7}  {row.samples_per_second:>9,.0f}  {row.step_seconds * 1e3:>9.2f}  "
                f"{row.efficiency:>10.2f}{low}"
            )
        if crowded:
            typer.echo(f"note: {max(counts)} workers share {counted(cores(), 'core')}")
    if not enough:
        raise typer.Exit(1)


def parse_counts(text: str) -> list[int]:
    """Return the numbers of a text such as 1,2,4, each once."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise UsageError(f"--workers {text!r} is no list of numbers", remedy="write it like 1,2,4")
    return sorted({int(part) for part in parts})


def parse_size(text: str) -> int:
    """Return the bytes of a text such as 4096, 4KB or 25MB; a multiple of 4, for the numbers are fp32."""
    match = re.fullmatch(r"(\d+)\s*([KMG]?B)?", text.strip().upper())
    nbytes = int(match[1]) * _UNITS[match[2] or "B"] if match else 0
    if nbytes == 0 or nbytes % 4:
        raise UsageError(
            f"--size {text!r} is not a size", remedy="write bytes (a multiple of 4), or 4KB, 25MB, 1GB"
        )
    return nbytes


def size_text(nbytes: int) -> str:
    for unit in ("GB", "MB", "KB"):
        if nbytes >= _UNITS[unit] and nbytes % _UNITS[unit] == 0:
            return f"{nbytes // _UNITS[unit]} {unit}"
    return f"{nbytes} B"


def _print(rows: list[Row]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="all-reduce, fp32, medians of the slowest rank")
    for name in ("ranks", "size", "method", "time", "Gloo", "faster", "of copy speed"):
        table.add_column(name, justify="left" if name == "method" else "right")
    for row in rows:
        table.add_row(
            str(row.ranks),
            size_text(row.nbytes),
            row.method,
            f"{row.seconds * 1e3:.3f} ms",
            f"{row.gloo_seconds * 1e3:.3f} ms",
            f"{row.speedup:.1f}x",
            f"{row.copy_fraction:.0%}",
        )
    Console().print(table)
