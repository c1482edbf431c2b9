"""A command group that imports a command when it is named: help needs only names and summaries."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any, ClassVar, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup


class LazyCommand(NamedTuple):
    """Location of a command, `module:name` of a function or of a `Typer`, and its line in the list."""

    home: str
    summary: str


class LazyGroup(TyperGroup):
    """A group over `table`, which a subclass sets."""

    table: ClassVar[Mapping[str, LazyCommand]]

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        # Empty commands stand in for those that are not imported: typer lists and suggests their names.
        self.commands.update({name: TyperCommand(name) for name in self.table})

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return the command itself, or None for an unknown name."""
        return load(cmd_name, self.table[cmd_name]) if cmd_name in self.table else None

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the list of commands; the inherited method would import each of them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in self.table.items()])


def load(name: str, command: LazyCommand) -> TyperCommand | TyperGroup:
    """Import a command and build its parameters from the signature."""
    module, _, attribute = command.home.partition(":")
    found = getattr(import_module(module), attribute)
    if not isinstance(found, typer.Typer):
        alone = typer.Typer(add_completion=False, rich_markup_mode=None)
        alone.command(name)(found)
        found = alone
    built = typer.main.get_command(found)
    assert isinstance(built, TyperCommand | TyperGroup)
    return built
