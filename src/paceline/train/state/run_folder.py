"""The folder of a run: where its settings, journal, checkpoints and logs lie, and how the newest is found.

    runs/20250314-150926-train/           UTC, so that names sort by time everywhere
        config.toml     the settings as they were resolved
        journal.jsonl   events, one per line
        checkpoints/    unless checkpoint.url points elsewhere
        logs/           the workers' output
        lock            held by the run until it ends; see run_lock.py

A run with run_dir=False has the same in a temporary folder, which is deleted when it ends.

Folders are made with one atomic mkdir, so that runs started in the same second get `+2`, `+3`, ... and never
share one. A folder that holds a run is never overwritten. It holds weights, logs and arguments: only its
owner can enter one that is made here, unless `run_dir_access` widens it. One that was there may come from
elsewhere: before a run writes to it, nothing in it may lead outside.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from paceline.core import untrusted
from paceline.core.atomic_file import replace_file
from paceline.core.clock import Clock, WallClock
from paceline.core.errors import ConfigError, PlatformError, UsageError
from paceline.train.settings.train_config import TrainConfig, recorded_toml

RUNS = "runs"
_WRITTEN = frozenset(
    {"config.toml", "journal.jsonl", "command.json", "control.json", "control.secret", "supervisor.json"}
    | {"crew", "leave", "lock", "stop", "logs", "unheard"}
    | {"metrics.csv", "mlflow-run.json", "tensorboard", "wandb", "wandb-run.json"}
)
_MODES = {"owner": 0o700, "group": 0o750, "all": 0o755}
_DEFAULT_NAME = re.compile(r"(?P<time>\d{8}-\d{6})-(?P<name>[A-Za-z0-9._-]+)(?:\+(?P<copy>\d+))?")


@final
@dataclass(frozen=True)
class RunFolder:
    """Paths of one run; made by `create`, `open` or `for_config`."""

    path: Path

    @property
    def config_file(self) -> Path:
        return self.path / "config.toml"

    def holds_run(self) -> bool:
        """Return whether a run was started here; PlatformError where the folder is closed to this user."""
        try:
            return self.config_file.is_file()
        except OSError as error:
            raise PlatformError(
                f"{self.path} cannot be read: {error.strerror}",
                remedy="check its permissions, run the command as its owner, or choose another folder",
            ) from error

    @property
    def journal_file(self) -> Path:
        return self.path / "journal.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def lock_file(self) -> Path:
        return self.path / "lock"

    @property
    def stop_file(self) -> Path:
        """File by which a launcher that was signalled asks its workers to stop."""
        return self.path / "stop"

    def checkpoint_url(self, config: TrainConfig) -> str:
        """Return where the run's checkpoints are: `checkpoint.url`, else its own folder."""
        return str(self.checkpoints) if config.checkpoint.url is None else config.checkpoint.url

    @staticmethod
    def create(
        config: TrainConfig, *, root: str | os.PathLike[str] = RUNS, clock: Clock | None = None
    ) -> RunFolder:
        """Return a new run's folder: `config.run_dir`, else a fresh one below `root`; a temporary one for a
        run that keeps nothing."""
        if config.run_dir is False:
            folder = RunFolder(_temporary())
        elif config.run_dir is not None:
            folder = RunFolder(Path(config.run_dir).absolute())
            _make(folder.path, _MODES[config.run_dir_access])
            folder.check_no_links()
            if folder.config_file.exists() or folder.journal_file.exists():
                if config.resume is not None:
                    raise UsageError(
                        f"{folder.path} holds a run that cannot continue: its config.toml is missing",
                        remedy="put config.toml back from a copy (every checkpoint's state has it as "
                        "`config`: paceline checkpoint show), or choose another run_dir",
                    )
                raise UsageError(
                    f"{folder.path} already holds a run",
                    remedy='continue it with resume="auto", or choose another run_dir',
                )
        else:
            now, mode = (clock or WallClock()).now(), _MODES[config.run_dir_access]
            folder = RunFolder(_fresh(Path(root).absolute(), config.name, now, mode))
        _make(folder.checkpoints)
        _make(folder.logs)
        folder.save_config(config)
        return folder

    @staticmethod
    def open(path: str | os.PathLike[str]) -> RunFolder:
        """Return the folder of a run that was started before."""
        folder = RunFolder(Path(path).absolute())
        if not folder.holds_run():
            what = "is a file" if folder.path.exists() else "does not exist"
            what = "has no config.toml" if folder.path.is_dir() else what
            raise UsageError(
                f"{folder.path} is not the folder of a run: it {what}",
                remedy="give the folder that TrainConfig(run_dir=...) or the default runs/ made",
            )
        _make(folder.checkpoints)
        _make(folder.logs)
        return folder

    @staticmethod
    def for_config(
        config: TrainConfig, *, root: str | os.PathLike[str] = RUNS, clock: Clock | None = None
    ) -> RunFolder:
        """Return the folder that `config` means: the one to resume in, else a new one.

        With resume="auto" and nothing to resume a new run begins; a version or a tag needs a run.
        """
        found = RunFolder.to_resume(config, root=root)
        if found is not None:
            found.check_no_links()
            return RunFolder.open(found.path)
        if config.resume is None or config.resume == "auto":
            return RunFolder.create(config, root=root, clock=clock)
        place = config.run_dir or f"{root}/*-{config.name}"
        raise ConfigError(
            f"resume={config.resume!r}, and there is no run at {place}",
            remedy='give the run\'s folder as run_dir, or use resume="auto" to start where there is none',
        )

    @staticmethod
    def to_resume(config: TrainConfig, *, root: str | os.PathLike[str] = RUNS) -> RunFolder | None:
        """Return the folder of the run that `config` resumes, if there is one; creates nothing."""
        if config.resume is None:
            return None
        if not config.run_dir:
            return find_latest(config.name, root=root)
        folder = RunFolder(Path(config.run_dir).absolute())
        return folder if folder.holds_run() else None

    def check_no_links(self) -> None:
        """Raise UsageError where a file that a run writes leads elsewhere. `checkpoints` may be a link to
        another disk: a store touches nothing below it but its versions."""
        untrusted.check_no_links(self.path, _WRITTEN)
        for inner in ("logs", "unheard"):
            untrusted.check_no_links(self.path / inner)

    def recorded(self) -> dict[str, Any]:
        """Return the settings of the first start as plain data; a damaged file is named."""
        try:
            return tomllib.loads(untrusted.read_regular(self.config_file).decode())
        except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ConfigError(
                f"{self.config_file} is damaged: {error}",
                remedy="put it back from a copy (every checkpoint's state has it as `config`: "
                "paceline checkpoint show), or set shards and threads and delete the file's broken lines",
            ) from error
        except OSError as error:
            raise PlatformError(
                f"{self.config_file} cannot be read: {error.strerror}", remedy="check its permissions"
            ) from error

    def save_config(self, config: TrainConfig) -> None:
        """Write config.toml in one piece."""
        replace_file(self.config_file, recorded_toml(config).encode())

    def discard(self) -> None:
        """Delete the folder of a run that keeps nothing; what cannot be deleted stays in the system's folder
        for temporary files."""
        shutil.rmtree(self.path, ignore_errors=True)


def find_latest(name: str, *, root: str | os.PathLike[str] = RUNS) -> RunFolder | None:
    """Return the newest run called `name` below `root`, by the time in its folder's name."""
    try:
        entries = os.listdir(root)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise PlatformError(
            f"{root} cannot be searched for runs: {error.strerror}", remedy="give the run's folder as run_dir"
        ) from error
    found = []
    for entry in entries:
        match = _DEFAULT_NAME.fullmatch(entry)
        if match is None or match["name"] != name:
            continue
        folder = RunFolder(Path(root).absolute() / entry)
        # A folder whose creator died before it wrote the settings never was a run; one that is closed to this
        # user is another's.
        with contextlib.suppress(PlatformError):
            if folder.holds_run():
                found.append((match["time"], int(match["copy"] or 1), folder))
    return max(found, key=lambda run: run[:2])[2] if found else None


def _fresh(root: Path, name: str, now: float, mode: int) -> Path:
    stem = f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime(now))}-{name}"
    _make(root)
    copy = 1
    while True:
        path = root / (stem if copy == 1 else f"{stem}+{copy}")
        try:
            path.mkdir(mode)
        except FileExistsError:
            copy += 1
        except OSError as error:
            raise _cannot(path, error) from error
        else:
            return path


def _temporary() -> Path:
    try:
        return Path(tempfile.mkdtemp(prefix="paceline-run-"))
    except OSError as error:
        raise _cannot(Path(tempfile.gettempdir()), error) from error


def _make(path: Path, mode: int = 0o777) -> None:
    try:
        path.mkdir(mode, parents=True, exist_ok=True)
    except OSError as error:
        raise _cannot(path, error) from error


def _cannot(path: Path, error: OSError) -> PlatformError:
    return PlatformError(
        f"{path} cannot be written: {error.strerror}",
        remedy="check the path, its permissions and the disk's space, or choose another run_dir",
    )
