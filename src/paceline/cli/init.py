"""`paceline init`: a project to begin with. Imports no torch."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.output import echo
from paceline.core.errors import UsageError


def init(
    folder: Annotated[
        Path, typer.Argument(help="Where the project shall be; made where it is not there.")
    ] = Path("."),
    name: Annotated[
        str | None, typer.Option(help="Name of the project and of its runs; else that of the folder.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace files that are there.")] = False,
) -> None:
    """Write a project that trains: config.toml, config.json, train.py and README.md.

    Example: paceline init spirals && cd spirals && paceline train train.py
    """
    from paceline.cli.project_template import project_files
    from paceline.train.history import writing

    files = project_files(_checked_name(folder, name))
    there = [file for file in files if (folder / file).exists()]
    if there and not force:
        raise UsageError(
            f"{folder.absolute()} has {', '.join(there)} already",
            remedy="name another folder: paceline init NAME; or replace them with --force",
        )
    for file, text in files.items():
        with writing("project", folder / file):
            (folder / file).write_text(text, encoding="utf-8")
    echo(f"wrote {', '.join(files)} in {folder.absolute()}")
    where = "" if folder.absolute() == Path.cwd() else f"cd {shlex.quote(str(folder))} && "
    echo(f"next: {where}paceline train train.py")


def _checked_name(folder: Path, name: str | None) -> str:
    """Return a name that can be part of a run's folder."""
    if name is None:
        # Of a folder with any name: what is left of it that a run's folder can have.
        return re.sub(r"[^A-Za-z0-9._-]+", "-", folder.absolute().name).strip("-._") or "train"
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise UsageError(
            f"--name {name!r} cannot be part of a folder's name",
            remedy="use letters, digits, dots, dashes and underscores, beginning with a letter or digit",
        )
    return name
