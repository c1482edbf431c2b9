"""Options of sbatch as a table, and as the `#SBATCH` lines of a script. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from paceline.core.errors import ConfigError

LEFT_OUT: Final = "no"
_NAME: Final = re.compile(r"[A-Za-z][A-Za-z0-9-]*")


def check_options(options: Mapping[str, str]) -> None:
    """Raise ConfigError for what could not be a line of a script."""
    for name, value in options.items():
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ConfigError(
                f"{name!r} is not the long name of an option of sbatch",
                remedy="write it like qos=high, as in `man sbatch`, and one without a value like hold=",
                key=f"options.{name}",
            )
        if not isinstance(value, str):
            raise ConfigError(
                f"the option {name} is {value!r}, and not text",
                remedy=f'give it as text: {{"{name}": "{value}"}}',
                key=f"options.{name}",
            )
        if any(ord(character) < 32 for character in value):
            raise ConfigError(
                f"the option {name} has a line break or a control character in its value",
                remedy="give it in one line",
                key=f"options.{name}",
            )


def least_nodes(options: Mapping[str, str]) -> int:
    """Return the nodes that the option `nodes` asks for, of a range the least; 0 where it is not given."""
    return _nodes(options)[0]


def check_nodes(options: Mapping[str, str], nodes: int) -> None:
    """Raise ConfigError where the option `nodes` says something else than the engine."""
    least, most = _nodes(options)
    if least and not least <= nodes <= most:
        raise ConfigError(
            f"nodes={nodes} and the option nodes={options['nodes']} contradict each other",
            remedy="give one of them",
            key="options.nodes",
        )


def _nodes(options: Mapping[str, str]) -> tuple[int, int]:
    text = options.get("nodes", LEFT_OUT)
    if text == LEFT_OUT:
        return 0, 0
    match = re.fullmatch(r"([1-9]\d*)(?:-(\d+))?", text)
    if match is None:
        raise ConfigError(
            f"the option nodes={text} is no number of nodes",
            remedy="write it like nodes=4, or nodes=2-4 for a run that is handed over",
            key="options.nodes",
        )
    return int(match[1]), int(match[2] or match[1])


def merged(defaults: Mapping[str, str], options: Mapping[str, str]) -> dict[str, str]:
    """Return the defaults with a user's options over them; the value "no" leaves a default out."""
    table = {**defaults, **options}
    return {name: value for name, value in table.items() if value != LEFT_OUT}


def lines(table: Mapping[str, str]) -> list[str]:
    """Return the table as lines of a script."""
    return [
        f"#SBATCH --{name}={_quoted(value)}" if value else f"#SBATCH --{name}"
        for name, value in table.items()
    ]


def arguments(table: Mapping[str, str]) -> list[str]:
    """Return the table as arguments of a command."""
    return [f"--{name}={value}" if value else f"--{name}" for name, value in table.items()]


def _quoted(value: str) -> str:
    # sbatch splits these lines at spaces, and takes quotes and backslashes as a shell does.
    return (
        value
        if re.fullmatch(r"[\w@%+=:,./\[\]*&|!-]+", value)
        else '"' + re.sub(r'(["\\])', r"\\\1", value) + '"'
    )
