"""What a contender says of its steps, and how it is read: one line of JSON for each step a process committed.

Each process writes a file of its own in one write per line, so that a killed one leaves whole lines. `group`
names the group of processes that made the step together: it is another one after every recovery. Imports
neither torch nor Paceline, since peers write it.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import final

FINAL = "final.json"


@dataclass(frozen=True)
class Line:
    """A step that a process has committed; `samples` counts those of the whole group."""

    step: int
    time: float
    samples: int
    pid: int
    rank: int
    group: str


@final
class StepLog:
    """The writing end, one per process."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder = folder
        self.rank = rank
        name = f"steps-{rank}-{os.getpid()}.jsonl"
        self._file = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def committed(self, step: int, samples: int, group: str) -> None:
        """Step `step`, counted from 1, is done and applied here."""
        line = Line(step, time.time(), samples, os.getpid(), self.rank, group)
        os.write(self._file, json.dumps(asdict(line)).encode() + b"\n")

    def finish(self, step: int, state_hash: str) -> None:
        """The end of the run as this process has it; the last one to say so stays."""
        path = self.folder / f"{FINAL}.{os.getpid()}"
        path.write_text(json.dumps({"step": step, "hash": state_hash}))
        path.replace(self.folder / FINAL)

    def close(self) -> None:
        os.close(self._file)


@final
class StepReader:
    """Follows the lines of all processes of a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._offsets: dict[Path, int] = {}
        self.lines: list[Line] = []

    def read(self) -> list[Line]:
        """All lines there are by now, in the order of their times."""
        known = len(self.lines)
        for path in self._folder.glob("steps-*.jsonl"):
            with path.open("rb") as file:
                file.seek(self._offsets.get(path, 0))
                data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._offsets[path] = self._offsets.get(path, 0) + len(whole)
            self.lines += [Line(**json.loads(line)) for line in whole.splitlines()]
        if len(self.lines) > known:
            self.lines.sort(key=lambda line: line.time)
        return self.lines

    def final_hash(self) -> str | None:
        path = self._folder / FINAL
        return str(json.loads(path.read_text())["hash"]) if path.exists() else None
