"""Options of sbatch as a table, and as the `#SBATCH` lines of a script. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Final

from paceline.core.errors import ConfigError

LEFT_OUT: Final = "no"
_NAME: Final = re.compile(r"[A-Za-z][A-Za-z0-9-]*")


def options_from_texts(texts: Iterable[str]) -> dict[str, str]:
    """Return the options in `--slurm key=value` and `--slurm key`."""
    return check_options(dict(_pair(text) for text in texts))


def _pair(text: str) -> tuple[str, str]:
    name, _, value = text.partition("=")
    return name.strip().removeprefix("--"), value.strip()


def check_options(options: Mapping[str, str]) -> dict[str, str]:
    """Return the options; ConfigError for what could not be a line of a script."""
    for name, value in options.items():
        if not _NAME.fullmatch(name):
            raise ConfigError(
                f"{name!r} is not the long name of an option of sbatch",
                remedy="write it like qos=high, as in `man sbatch`; without a value it is the name alone",
                key=f"options.{name}",
            )
        if any(ord(character) < 32 for character in value):
            raise ConfigError(
                f"the option {name} has a line break or a control character in its value",
                remedy="give it in one line",
                key=f"options.{name}",
            )
    return dict(options)


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
