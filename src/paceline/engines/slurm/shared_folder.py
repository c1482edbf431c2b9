"""The folder through which agents get the job's secret and hand their output back. On a file system that
login and compute nodes share; its files can be read by their owner only.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final, final

from paceline.core.atomic_file import replace_file
from paceline.core.errors import PlatformError, UsageError
from paceline.core.untrusted import is_owned_by_user
from paceline.engines.engine import LogLine

FOLDER: Final = ".paceline-slurm"
TOKEN: Final = "token"
_MOST_BYTES: Final = 1 << 20  # of one agent's output in one call


def folder_for(shared: str, run: str, address: tuple[str, int]) -> str:
    """Return the folder for the agents of a run: no other run has its supervisor at the same address."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", f"{Path(run).name}-{address[0]}-{address[1]}")
    return str(Path(shared).absolute() / FOLDER / name)


@final
class SharedFolder:
    """A folder that was made for a run, and its log files."""

    def __init__(self, path: str, secret: bytes) -> None:
        self.path = Path(path)
        self._logs: dict[Path, tuple[int, int]] = {}  # file to node and bytes that were read
        self._rest: dict[Path, bytes] = {}  # the part of a line at the end of what was read
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not is_owned_by_user(self.path):
                raise UsageError(
                    f"{self.path} belongs to another user",
                    remedy="choose another folder with Slurm(folder=...)",
                )
            self.path.chmod(0o700)
        except OSError as error:
            raise PlatformError(
                f"{self.path} cannot be made: {error.strerror}",
                remedy="start in a folder that you can write to and nodes share, or give Slurm(folder=...)",
            ) from error
        replace_file(self.path / TOKEN, secret.hex().encode() + b"\n", mode=0o600)

    def watch(self, node: int, name: str) -> Path:
        """Read what this agent writes to the file `name`, which may not exist yet."""
        file = self.path / name
        self._logs.setdefault(file, (node, 0))
        return file

    def lines(self, *, whole: bool = False) -> Iterator[LogLine]:
        """Return the lines that were written since the last call; with `whole` also those without an end."""
        for file, (node, offset) in list(self._logs.items()):
            try:
                with open(file, "rb") as opened:
                    opened.seek(offset)
                    data = opened.read(_MOST_BYTES)
            except OSError:
                continue  # the agent has not begun
            self._logs[file] = node, offset + len(data)
            *lines, rest = (self._rest.get(file, b"") + data).split(b"\n")
            if whole and rest:
                lines, rest = [*lines, rest], b""
            self._rest[file] = rest
            for line in lines:
                yield LogLine(node, line.decode(errors="replace"))

    def remove(self) -> None:
        """Remove the folder. The folder above it goes with the last one."""
        # A network file system keeps a file that a node has open under another name: what is left is a log.
        (self.path / TOKEN).unlink(missing_ok=True)
        shutil.rmtree(self.path, ignore_errors=True)
        if self.path.parent.name == FOLDER and self.path.parent.is_dir() and not os.listdir(self.path.parent):
            shutil.rmtree(self.path.parent, ignore_errors=True)
