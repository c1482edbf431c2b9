"""The folder through which agents get the job's secret and hand their output back. On a file system that
login and compute nodes share; its files can be read by their owner only.

It also says which process asked for which jobs: a caller that is killed cannot cancel those that have not
begun, and the next one in its place does (`abandoned`).
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, final

from paceline.core.atomic_file import replace_file
from paceline.core.errors import PlatformError, UsageError
from paceline.core.host import host_identity
from paceline.core.process_state import start_time
from paceline.core.untrusted import is_owned_by_user, read_regular
from paceline.engines.engine import LogLine

FOLDER: Final = ".paceline-slurm"
TOKEN: Final = "token"
_CALLER: Final = "caller.json"
_MOST_BYTES: Final = 1 << 20  # of one agent's output in one call


def folder_for(shared: str, run: str, address: tuple[str, int]) -> str:
    """Return the folder for the agents of a run: no other run has its supervisor at the same address."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", f"{Path(run).name}-{address[0]}-{address[1]}")
    return str(Path(shared).absolute() / FOLDER / name)


def abandoned(parent: Path) -> Iterator[tuple[Path, list[str]]]:
    """Return the folders beside each other in `parent` whose callers were killed on this host, and the jobs
    of their agents. Whether a caller on another login node lives is not known here."""
    try:
        folders = sorted(parent.iterdir())
    except OSError:
        return  # there is none, or its file server is away
    for path in folders:
        if (jobs := abandoned_jobs(path)) is not None:
            yield path, jobs


def abandoned_jobs(path: Path) -> list[str] | None:
    """Return the jobs in a folder whose caller was killed on this host; None for any other folder."""
    try:
        caller = json.loads(read_regular(path / _CALLER))
        on_this_host = caller["host"] == host_identity() and is_owned_by_user(path)
        if on_this_host and start_time(int(caller["pid"])) != caller["started"]:
            return [str(int(job)) for job in caller["jobs"]]
    except (OSError, ValueError, KeyError, TypeError):
        return None  # no folder of agents, or one that is just being made or removed
    return None


def remove_folder(path: Path) -> None:
    """Remove the folder of a run's agents. The folder above it goes with the last one."""
    # A network file system keeps a file that a node has open under another name: what is left is a log.
    (path / TOKEN).unlink(missing_ok=True)
    shutil.rmtree(path, ignore_errors=True)
    if path.parent.name == FOLDER:
        with suppress(OSError):  # another run has files in it, or has removed it
            path.parent.rmdir()


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
        # A caller that was killed may have had the same folder: from here on it is this one's.
        self.note_jobs([])
        replace_file(self.path / TOKEN, secret.hex().encode() + b"\n", mode=0o600)

    def note_jobs(self, jobs: Sequence[str]) -> None:
        """Record the jobs that this process has asked for."""
        caller = {"host": host_identity(), "pid": os.getpid(), "started": start_time(os.getpid())}
        record = json.dumps({**caller, "jobs": [*jobs]}).encode()
        with suppress(PlatformError):  # a full disk: only a killed caller needs the record
            replace_file(self.path / _CALLER, record, mode=0o600)

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
        """Remove the folder."""
        remove_folder(self.path)
