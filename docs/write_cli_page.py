"""Write docs/cli.md, the reference of all commands, from the signatures of the commands themselves.

python docs/write_cli_page.py
"""

from __future__ import annotations

import inspect
import re
import types
import typing
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import typer
from typer.models import ArgumentInfo, OptionInfo

from paceline.cli.main import Commands
from paceline.frontends.launcher.launch_options import help_text

_HEAD = """\
# Commands

`paceline COMMAND --help` says the same. `python -m paceline` and `python -m paceline.cli` are the same
program. `train` starts a script once, and it starts its workers; `run` starts a script once per rank.

A RUN is a run's folder or its name below `runs/`; where it may be left out, the newest run below `runs/` is
meant. `eval "$(paceline completion bash)"` has the shell complete commands, options and runs. `--json`, where
a command has it as a flag, prints JSON for programs and nothing else.

Exit codes: 0 done; 1 it was looked at and something is wrong, or it could not be done; 2 a mistake in what
was asked for; 130 Ctrl-C. `train` ends with the script's own code, and with 75 when it was asked to stop and
saved. `status`, `scale` and `stop` say by their code what became of a run that cannot be asked: see
[runs](runs.md#stopping). An error is one message on stderr, with what to try; `paceline --debug` adds the
traceback, and `paceline --version` prints the version.

This page is written by `python docs/write_cli_page.py`.
"""
_KINDS = {int: "N", float: "X", Path: "PATH"}


def page() -> str:
    """Return all of it."""
    sections = ["\n".join(_section(path, function)) for path, function in _commands()]
    return "\n".join([_HEAD, *sections])


def _commands() -> Iterator[tuple[str, Callable[..., Any]]]:
    for name, (home, _) in Commands.table.items():
        module, _, attribute = home.partition(":")
        found = getattr(import_module(module), attribute)
        if not isinstance(found, typer.Typer):
            yield name, found
            continue
        if found.registered_callback is not None and found.registered_callback.callback is not None:
            yield name, found.registered_callback.callback
        for command in found.registered_commands:
            assert command.callback is not None
            own = command.name or command.callback.__name__
            yield name if own == name else f"{name} {own}", command.callback


def _section(path: str, function: Callable[..., Any]) -> Iterator[str]:
    text, _, example = inspect.cleandoc(function.__doc__ or "").partition("Example: ")
    yield f"{'###' if ' ' in path else '##'} paceline {path}\n"
    yield "\n\n".join(" ".join(part.split()) for part in re.split(r"\n\s*\n", text.strip())) + "\n"
    yield f"    {' '.join(example.split())}\n"
    if path == "run":  # which reads its options itself
        yield "\n".join(f"    {line}".rstrip() for line in help_text().splitlines()) + "\n"
    rows = [*_rows(function)]
    if rows:
        yield "| | | default |\n|---|---|---|"
        yield from rows
        yield ""


def _rows(function: Callable[..., Any]) -> Iterator[str]:
    hints = typing.get_type_hints(function, include_extras=True)
    for name, parameter in inspect.signature(function).parameters.items():
        if hints[name] is typer.Context:
            continue
        hint, *infos = typing.get_args(hints[name])
        info = next(info for info in infos if isinstance(info, ArgumentInfo | OptionInfo))
        if info.hidden:
            continue
        kind, several = _kind(hint)
        required = parameter.default in (inspect.Parameter.empty, ...)
        default = "" if parameter.default in (None, False) else str(parameter.default)
        if isinstance(info, ArgumentInfo):
            shown = name.upper() + ("..." if several else "")
        else:
            # Typer keeps the first name where a default would stand without `Annotated`.
            said = [info.default, *(info.param_decls or ())]
            names = [text for text in said if isinstance(text, str) and text.startswith("-")]
            shown = ", ".join(names or [f"--{name.replace('_', '-')}"])
            shown += "" if kind is bool else f" {info.metavar or _KINDS.get(kind, 'TEXT')}"
        what = f"{info.help} ".replace("|", "\\|")
        yield f"| `{shown}` | {what}| {'required' if required else default} |"


def _kind(hint: Any) -> tuple[Any, bool]:
    """Return the type of one value, and whether there may be several."""
    if isinstance(hint, types.UnionType):
        hint = next(one for one in typing.get_args(hint) if one is not type(None))
    if typing.get_origin(hint) is list:
        return typing.get_args(hint)[0], True
    return hint, False


if __name__ == "__main__":
    (Path(__file__).parent / "cli.md").write_text(page(), encoding="utf-8")
