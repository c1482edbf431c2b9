"""What a run recorded, computed again with a `Trainer`'s own parts or with those that a script makes.

`Trainer.replay`, `paceline replay` and `paceline verify` meet here. Must not know how it is computed, nor
print.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast, final

from paceline.core import foreign, own_records
from paceline.core.errors import ConfigError, PacelineError, UsageError
from paceline.frontends import overrides
from paceline.frontends.joining import as_recorded
from paceline.frontends.script import run_script
from paceline.train.run_folder import RunFolder

if TYPE_CHECKING:
    from paceline.frontends.trainer import Trainer
    from paceline.train.replay import Replayed
    from paceline.train.verify import Verified
    from paceline.train.worker import TrainJob

T = TypeVar("T")


@final
class _Found(BaseException):
    """Leaves the script: what is asked for is there. Not an Exception, which scripts may catch."""

    def __init__(self, result: Any) -> None:
        super().__init__()
        self.result = result


def replay_fit(
    trainer: Trainer, run: str | os.PathLike[str], step: int, shard: int, train_data: Any
) -> Replayed:
    """One shard of the run that `trainer.fit(train_data)` made, in this process."""
    from paceline.train.replay import replay_shard

    return replay_shard(_job(trainer, run, train_data), run, step, shard)


def verify_fit(trainer: Trainer, run: str | os.PathLike[str], steps: int | None, train_data: Any) -> Verified:
    """Steps of the run that `trainer.fit(train_data)` made, in this process; None: all of them."""
    from paceline.train.verify import verify_run

    return verify_run(_job(trainer, run, train_data), run, steps)


def _job(trainer: Trainer, run: str | os.PathLike[str], train_data: Any) -> TrainJob:
    from paceline.data.sources import as_source
    from paceline.train.worker import TrainJob

    folder = RunFolder.open(run)
    config = overrides.current().apply(trainer.config)
    config = as_recorded(dataclasses.replace(config, run_dir=str(folder.path), resume="auto"))
    return TrainJob(
        model=trainer.model,
        objective=trainer.objective,
        optimizer=trainer.optimizer,
        config=config,
        train=as_source(train_data),
        callbacks=trainer.callbacks,
    )


def recorded_command(run: str | os.PathLike[str]) -> tuple[overrides.Command | None, bool]:
    """What made the run, as it was recorded then, and whether the caller recorded it; None where that could
    not be known (a notebook)."""
    folder = RunFolder.open(run).path
    file = folder / "command.json"
    try:
        plain = json.loads(foreign.read_regular(file))
        command = overrides.Command(
            script=str(plain["script"]),
            arguments=tuple(map(str, plain["arguments"])),
            folder=str(plain["folder"]),
            settings=tuple(map(str, plain.get("settings", ()))),
        )
        return command, own_records.is_own(plain) and all(map(foreign.is_own, (folder, file)))
    except FileNotFoundError:
        return None, False
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UsageError(
            f"{file} does not say what made the run: {error}", remedy="give the script with --script"
        ) from error


def command_to_run(
    run: str | os.PathLike[str], script: str | None, arguments: Sequence[str] = (), name: str = "replay"
) -> overrides.Command:
    """What may be run for this folder: what was given, and of what was not given what is recorded, where the
    caller made that record. A folder from elsewhere names scripts and arguments of its maker: it is data, and
    runs nothing. Unpacked, it belongs to the caller, so a record is known by its tag (`own_records`)."""
    recorded, own = recorded_command(run)
    if script is None:
        if recorded is None:
            raise UsageError(
                f"{run} does not say which script made it (a notebook, or an older version)",
                remedy="give the script, and its arguments after --: "
                f"paceline {name} RUN ... --script train.py",
            )
        _check_own(Path(run).absolute(), recorded, own)
    given = tuple(arguments)
    if recorded is None or not own:
        # Not its settings and its folder either: a script reads files of the folder it is started in.
        return overrides.Command(script or "", given, ".")
    return dataclasses.replace(
        recorded, script=script or recorded.script, arguments=given or recorded.arguments
    )


def _check_own(folder: Path, recorded: overrides.Command, own: bool) -> None:
    look = f"look at it, and name it yourself: --script {shlex.quote(recorded.script)}"
    if recorded.arguments:
        look += f" -- {shlex.join(recorded.arguments)}"
    for path in (folder, folder / "command.json"):
        if not foreign.is_own(path):
            raise UsageError(
                f"{path} belongs to another user: the script that it names is not run unasked", remedy=look
            )
    made = Path(recorded.folder, recorded.script).resolve()
    if made.is_relative_to(folder.resolve()):
        raise UsageError(
            f"the script {recorded.script} lies in the run's own folder, which may come from elsewhere: it "
            "is not run unasked",
            remedy=look,
        )
    if not own:
        raise UsageError(
            f"{folder / 'command.json'} was not written by this user on this machine (or by an older "
            "version), and the folder may come from elsewhere: the script that it names is not run unasked",
            remedy=look,
        )


def replay_script(
    run: str | os.PathLike[str], step: int, shard: int, script: str, command: overrides.Command
) -> Replayed:
    """Replays the shard with what the script gives to the `fit` that made the run."""
    path = Path(run).absolute()
    return _compute(script, command, lambda trainer, data: replay_fit(trainer, path, step, shard, data))


def verify_script(
    run: str | os.PathLike[str], steps: int | None, script: str, command: overrides.Command
) -> Verified:
    """Computes steps again with what the script gives to the `fit` that made the run."""
    path = Path(run).absolute()
    return _compute(script, command, lambda trainer, data: verify_fit(trainer, path, steps, data))


def _compute(script: str, command: overrides.Command, compute: Callable[[Trainer, Any], T]) -> T:
    """Runs the script up to the `fit` that made the run, and computes with what that was given.

    A `fit` of other settings is passed over: it returns None, and the script goes on.
    """
    refused: list[PacelineError] = []

    def look(trainer: Trainer, train_data: Any, val_data: Any) -> None:
        try:
            raise _Found(compute(trainer, train_data))
        except ConfigError as error:
            refused.append(error)

    settings = overrides.Overrides(assignments=_safe(command.settings), command=command)
    try:
        with overrides.in_force(settings), overrides.intercept(look), _inside(command.folder):
            run_script(script, command.arguments)
    except _Found as found:
        return cast(T, found.result)
    except SystemExit:
        _refuse(script, refused)
    except PacelineError:
        raise
    except Exception:
        # The script missed what a fit that was passed over would have returned.
        if refused:
            raise refused[0] from None
        raise
    _refuse(script, refused)
    raise AssertionError("unreachable")


def _refuse(script: str, refused: Sequence[PacelineError]) -> None:
    if refused:
        raise refused[0] from None
    raise UsageError(
        f"{script} ended without Trainer.fit",
        remedy="give the script and the arguments that made the run: paceline ... RUN ... -- arguments",
    )


def _safe(settings: Sequence[str]) -> tuple[str, ...]:
    """What won over the script then, without what is about that start only."""
    about_the_start = ("run_dir", "resume", "workers", "fault_tolerance")
    return tuple(
        text for text in settings if not text.startswith(about_the_start) and foreign.REDACTED not in text
    )


def _inside(folder: str) -> contextlib.AbstractContextManager[None]:
    return contextlib.chdir(folder) if os.path.isdir(folder) else contextlib.nullcontext()
