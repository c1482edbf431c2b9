"""`paceline completion`: the script with which a shell completes commands, options and runs."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from paceline.core.errors import UsageError

_SHELLS = ("bash", "zsh", "fish")
_HOW = {
    "bash": 'eval "$(paceline completion bash)"   # in ~/.bashrc',
    "zsh": 'eval "$(paceline completion zsh)"   # in ~/.zshrc, after compinit',
    "fish": "paceline completion fish | source   # in ~/.config/fish/config.fish",
}


def completion(
    shell: Annotated[
        str | None, typer.Argument(help="bash, zsh or fish; without one the shell of $SHELL.")
    ] = None,
) -> None:
    """Print the script that has a shell complete commands, options and the names of runs.

    Example: eval "$(paceline completion bash)"
    """
    from typer.completion import get_completion_script  # type: ignore[attr-defined]

    chosen = shell or os.path.basename(os.environ.get("SHELL", ""))
    if chosen not in _SHELLS:
        what = f"{chosen!r} is not a shell that can be completed in" if chosen else "$SHELL names no shell"
        raise UsageError(what, remedy=f"name one: paceline completion {'|'.join(_SHELLS)}")
    typer.echo(f"# {_HOW[chosen]}")
    typer.echo(get_completion_script(prog_name="paceline", complete_var="_PACELINE_COMPLETE", shell=chosen))
