"""`paceline run`: start a script once for every rank, in place of torchrun.

Reads no option itself: the launcher's may stand behind the script, and the script's may look like anything.
"""

from __future__ import annotations

import os
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

app = typer.Typer(add_completion=False, rich_markup_mode=None)

_HELP = """Start a script on every rank, in place of torchrun: the same variables, the same scripts.

    Those of the first block may stand before the script or after it, the others before it; what is not known
    here, and all after --, is the script's. Scripts that use paceline.Trainer are repaired in place; those of
    other kinds are started again, on all ranks, from a process that has imported torch already.

    Exit codes: 0, or that of the first rank that failed (128 and the signal for one that was killed).

    Example: paceline run train.py --nproc-per-node 4 --epochs 3

    \b
    {options}
    """


class LaunchTyperCommand(TyperCommand):
    """A command whose words are all left as they are."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        from paceline.frontends.launcher.launch_options import asks_for_help

        if asks_for_help(args):
            return super().parse_args(ctx, ["--help"])
        return super().parse_args(ctx, ["--", *args])

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [str(self.options_metavar)]  # the words are no argument of their own

    def format_help_text(self, ctx: Any, formatter: Any) -> None:
        # Made here: only help needs the list of options.
        from paceline.frontends.launcher.launch_options import help_text

        self.help = _HELP.format(options=help_text().replace("\n", "\n    "))
        super().format_help_text(ctx, formatter)


@app.command("run", cls=LaunchTyperCommand, options_metavar="[OPTIONS] SCRIPT [OPTIONS] [--] [ARGS]...")
def run(arguments: Annotated[list[str] | None, typer.Argument(metavar="", hidden=True)] = None) -> None:
    """Start a script on every rank.

    Example: paceline run train.py --nproc-per-node 4
    """
    from paceline.frontends.launcher import launch_options
    from paceline.frontends.launcher.distributed_launcher import DistributedLauncher

    command = launch_options.parse(arguments or [], os.environ)
    if command.note:
        typer.echo(command.note, err=True)
    code = DistributedLauncher(command.config).run(command.program)
    if code:
        raise typer.Exit(code)
