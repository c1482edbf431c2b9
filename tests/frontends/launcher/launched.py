"""Start scripts with the launcher, from this process: its fork server is warm after the first."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from paceline import DistributedLauncher, LaunchConfig


class Launched(NamedTuple):
    code: int
    out: list[str]
    err: list[str]

    def of(self, rank: int) -> list[str]:
        """What a rank printed to standard output."""
        prefix = f"[rank {rank}] "
        return [line.removeprefix(prefix) for line in self.out if line.startswith(prefix)]

    @property
    def said(self) -> list[str]:
        """What the launcher itself said."""
        return [line for line in self.err if not line.startswith("[rank ")]


def write(folder: Path, source: str, name: str = "train.py") -> Path:
    script = folder / name
    script.write_text(textwrap.dedent(source))
    return script


def launched(
    capfd: pytest.CaptureFixture[str],
    script: str | Path,
    *args: object,
    module: bool = False,
    **settings: Any,
) -> Launched:
    """Launch, and return what came of it."""
    capfd.readouterr()
    code = DistributedLauncher(LaunchConfig(**settings)).launch(script, *args, module=module)
    out, err = capfd.readouterr()
    return Launched(code, out.splitlines(), err.splitlines())
