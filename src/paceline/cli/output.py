"""Common arguments of commands, and printing of what may come from a run of another user."""

from __future__ import annotations

import json
import os
from typing import Annotated

import typer

from paceline.core.type_conversion import finite
from paceline.core.untrusted import printable

_RUNS = "runs"


def complete_run(incomplete: str) -> list[str]:
    """Return the folders below runs/ that begin so, newest first: for the shell's completion."""
    try:
        names = sorted(os.listdir(_RUNS), reverse=True)
    except OSError:
        return []
    return [path for name in names if (path := f"{_RUNS}/{name}").startswith(incomplete)]


AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
OptionalRun = Annotated[
    str | None,
    typer.Argument(
        help="A run's folder, or its name below runs/; without one the newest run below runs/.",
        autocompletion=complete_run,
        show_default=False,
    ),
]
ScriptArguments = Annotated[
    list[str] | None,
    typer.Argument(help="After --: arguments of the script, in the place of the recorded ones."),
]
Script = Annotated[
    str | None, typer.Option(help="The script that made the run, where it was moved or not recorded.")
]


def size_text(nbytes: int) -> str:
    """Return a number of bytes as people say it: 9.3 kB."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= size:
            return f"{nbytes / size:.1f} {unit}"
    return f"{nbytes} B"


def echo(text: object, *, err: bool = False) -> None:
    """Print a line; control characters of a folder from elsewhere do not reach the terminal."""
    typer.echo(printable(text), err=err)


def echo_json(value: object) -> None:
    """Print JSON: NaN and infinities as strings, values without a JSON type by their repr."""
    echo(json.dumps(finite(value), indent=2, allow_nan=False, default=repr))
