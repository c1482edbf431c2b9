"""Folders of runs that never ran, for commands that read them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from paceline.cli import main
from paceline.core import engine_registry
from paceline.core.events import Event
from paceline.core.journal import Journal
from paceline.train.settings.train_config import TrainConfig
from paceline.train.state.run_folder import RunFolder


def write_run(path: Path, journal: Iterable[Event], **settings: object) -> Path:
    """Write the folder of a run with this journal; return its path."""
    folder = RunFolder.create(TrainConfig(run_dir=str(path), **settings).resolved(1))  # type: ignore[arg-type]
    with Journal(folder.journal_file) as file:
        for event in journal:
            file.append(event)
    return folder.path


def write_log(run: Path, rank: int, *lines: str) -> None:
    with (run / "logs" / f"rank-{rank}.log").open("a") as file:
        file.writelines(f"{line}\n" for line in lines)


def register_process_engine(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Register the engine whose nodes are processes of this machine by the name `process`, as another package
    would: by an entry point."""
    entry = folder / "process_engine-1.dist-info"
    entry.mkdir(parents=True)
    (entry / "METADATA").write_text("Metadata-Version: 2.1\nName: process-engine\nVersion: 1\n")
    (entry / "entry_points.txt").write_text(
        f"[{engine_registry.ENTRY_POINTS}]\nprocess = paceline.testing.process_engine:ProcessEngine\n"
    )
    monkeypatch.syspath_prepend(folder)


class Command:
    """The whole program in this process: exit code, what it printed, what it complained of."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *arguments: object) -> tuple[int, str, str]:
        code = main.invoke(main.app, [str(argument) for argument in arguments])
        said = self._capsys.readouterr()
        return code, said.out, said.err
