"""Record which script made a run; compute parts of it again, with a `Trainer` or with that script.

Shared by `Trainer.replay`, `paceline replay` and `paceline verify`.

A folder from elsewhere belongs, once it is unpacked, to the user who unpacked it. The owner of a file is
no evidence of its author, so the record of a script that will be run carries a tag by a key that only the
user has. The key is in the user's own folder for state (XDG_STATE_HOME, else ~/.local/state), never in a
run's folder. Where there can be no key nothing is tagged, and no command trusts such a record.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hmac
import json
import os
import secrets
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar, cast, final

from paceline.core import journal, traceback_filter, untrusted
from paceline.core.atomic_file import create_once, replace_file
from paceline.core.errors import ConfigError, PacelineError, PlatformError, UsageError
from paceline.core.user_state import state_folder
from paceline.frontends import overrides
from paceline.frontends.run_preparation import as_recorded
from paceline.monitor import journal_index
from paceline.train.settings.train_config import TrainConfig
from paceline.train.state.run_folder import RunFolder

if TYPE_CHECKING:
    from paceline.train.callbacks import Modifier, Observer
    from paceline.train.loop.recompute import ReplayedShard, VerifiedRun
    from paceline.train.loop.worker_jobs import TrainJob

T = TypeVar("T")

_COMMAND_FILE = "command.json"
_TAG: Final = "tag"
_KEY_BYTES: Final = 32
_PLACE: Final = "engine"  # where a run ran, which no result depends on
_OF_ONE_START: Final = (_PLACE, "run_dir", "resume", "workers", "fault_tolerance")


class FitParts(Protocol):
    """Parts of a `Trainer`."""

    model: Any
    objective: Callable[..., Any]
    optimizer: Any
    scheduler: Any
    config: TrainConfig
    callbacks: tuple[Observer | Modifier, ...]


@final
class _ScriptResult(BaseException):
    """Leaves the script with the result. Not an Exception, which scripts may catch."""

    def __init__(self, result: Any) -> None:
        super().__init__()
        self.result = result


def replay_fit(
    trainer: FitParts, run: str | os.PathLike[str], step: int, shard: int, train_data: Any
) -> ReplayedShard:
    """Compute one shard of the run that `trainer.fit(train_data)` made, in this process."""
    from paceline.train.loop.recompute import replay_shard

    return replay_shard(_job(trainer, run, train_data), run, read_record(run), step, shard)


def verify_fit(
    trainer: FitParts, run: str | os.PathLike[str], steps: int | None, train_data: Any
) -> VerifiedRun:
    """Compute steps of the run that `trainer.fit(train_data)` made, in this process; None: all of them."""
    from paceline.train.loop.recompute import verify_run

    return verify_run(_job(trainer, run, train_data), run, read_record(run), steps)


def read_record(run: str | os.PathLike[str]) -> journal_index.AuditRecord:
    """Read and index the journal of the run in this folder."""
    return journal_index.read(journal.iterate(RunFolder.open(run).journal_file))


def _job(trainer: FitParts, run: str | os.PathLike[str], train_data: Any) -> TrainJob:
    from paceline.data.sources import as_source
    from paceline.train.loop.worker_jobs import TrainJob

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
        scheduler=trainer.scheduler,
    )


def record_command(folder: RunFolder) -> None:
    """Record which script made the run, for `paceline replay`."""
    command = overrides.command()
    if command is None:
        return
    # Without secrets: folders of runs are published. `paceline replay` asks for such arguments again. An
    # engine has secrets in any of its settings, such as the environment of its workers.
    settings = [text for text in command.settings if not text.startswith(_PLACE)]
    plain = {
        **command.to_plain(),
        "arguments": list(untrusted.redact_secrets(command.arguments)),
        "settings": [untrusted.redact_credentials(text) for text in settings],
    }
    with contextlib.suppress(PlatformError):  # a full disk: the run itself is not in danger
        record = json.dumps(signed(plain)).encode()
        replace_file(folder.path / _COMMAND_FILE, record, mode=0o600)


def recorded_command(run: str | os.PathLike[str]) -> tuple[overrides.Command | None, bool]:
    """Return the command that made the run, and whether this user recorded it; None where it was not known
    (a notebook)."""
    folder = RunFolder.open(run).path
    file = folder / _COMMAND_FILE
    try:
        plain = json.loads(untrusted.read_regular(file))
        command = overrides.Command(
            script=str(plain["script"]),
            arguments=tuple(map(str, plain["arguments"])),
            folder=str(plain["folder"]),
            settings=tuple(map(str, plain.get("settings", ()))),
        )
        return command, is_signed_by_user(plain) and all(map(untrusted.is_owned_by_user, (folder, file)))
    except FileNotFoundError:
        return None, False
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UsageError(
            f"{file} does not say what made the run: {error}", remedy="give the script with --script"
        ) from error


def signed(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record with the user's tag."""
    key = _key(make=True)
    return {**record, _TAG: _tag(key, record)} if key else dict(record)


def is_signed_by_user(record: Mapping[str, Any]) -> bool:
    """Return whether this user made the record as it is."""
    key, tag = _key(make=False), record.get(_TAG)
    body = {name: value for name, value in record.items() if name != _TAG}
    return bool(key) and isinstance(tag, str) and hmac.compare_digest(tag.encode(), _tag(key, body).encode())


def _tag(key: bytes, record: Mapping[str, Any]) -> str:
    return hmac.digest(key, json.dumps(record, sort_keys=True).encode(), "sha256").hex()


def _key(*, make: bool) -> bytes:
    """Return the user's key; empty where there is none, or where another user can read it."""
    try:
        path = state_folder() / "records.key"
        if make and not path.exists():
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            create_once(path, secrets.token_bytes(_KEY_BYTES), mode=0o600)
        if not untrusted.is_owned_by_user(path) or os.lstat(path).st_mode & 0o077:
            return b""
        key = untrusted.read_regular(path)
        return key if len(key) == _KEY_BYTES else b""
    except (OSError, PlatformError):
        return b""  # no home, or none that can be written to


def command_to_run(
    run: str | os.PathLike[str], script: str | None, arguments: Sequence[str], name: str
) -> overrides.Command:
    """Return the command to run for this folder: the given parts, and for the others the recorded ones, if
    this user made the record. A folder from elsewhere is data: the scripts and arguments that it names are
    not run. Unpacked, its files belong to this user, so own records are recognised by their tag."""
    try:
        recorded, own = recorded_command(run)
    except UsageError:
        if script is None:
            raise
        recorded, own = None, False
    if script is not None:
        script = os.path.abspath(script)  # it runs in the folder of the recorded command
    else:
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
    for path in (folder, folder / _COMMAND_FILE):
        if not untrusted.is_owned_by_user(path):
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
            f"{folder / _COMMAND_FILE} was not written by this user on this machine (or by an older "
            "version), and the folder may come from elsewhere: the script that it names is not run unasked",
            remedy=look,
        )


def compute_in_script(command: overrides.Command, compute: Callable[[FitParts, Any], T]) -> T:
    """Run the script up to the `fit` that made the run, and compute with its trainer and training data.

    A `fit` of other settings is skipped: it returns None, and the script continues.
    """
    refused: list[PacelineError] = []

    def replace_fit(trainer: FitParts, train_data: Any, val_data: Any) -> None:
        try:
            raise _ScriptResult(compute(trainer, train_data))
        except ConfigError as error:
            refused.append(error)

    how = "ended without Trainer.fit"
    folder = command.folder if os.path.isdir(command.folder) else "."
    settings = overrides.Overrides(
        assignments=_repeatable(command.settings), command=command, replaces_fit=replace_fit
    )
    try:
        with overrides.in_force(settings), contextlib.chdir(folder):
            overrides.run_script(command.script, command.arguments)
    except _ScriptResult as found:
        return cast(T, found.result)
    except SystemExit as end:
        if end.code:
            how = f"called sys.exit({end.code!r}) before Trainer.fit"
    except PacelineError:
        raise
    except Exception as error:
        # Where a fit was skipped, the script needed its result.
        if not refused and traceback_filter.is_bug(error):
            raise
        how = f"raised:\n\n{overrides.traceback_of_script(error, command.script)}"
    if refused:
        raise refused[0]
    raise UsageError(
        f"{command.script} {how}",
        remedy="give the script and the arguments that made the run: paceline ... RUN ... -- arguments",
    )


def _repeatable(settings: Sequence[str]) -> tuple[str, ...]:
    """Return the overrides of the recorded command, without those that are about that start only."""
    return tuple(
        text for text in settings if not text.startswith(_OF_ONE_START) and untrusted.REDACTED not in text
    )
