"""Whether this process is part of a job already, and what a run's settings become there.

Shared by `Trainer` and `session`. Must not import torch: a script that only starts workers never needs it.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.core import journal
from paceline.core.control import address, crew, unheard
from paceline.core.errors import ConfigError, PacelineError, UsageError
from paceline.core.events import CheckpointSaved, RunStarted
from paceline.core.foreign import without_credentials
from paceline.core.machine import cores
from paceline.frontends import unused
from paceline.train.config import TrainConfig
from paceline.train.nesting import refuse_inside
from paceline.train.run_folder import RunFolder
from paceline.train.run_lock import held

if TYPE_CHECKING:
    from paceline.comm.context import DistributedContext

_log = logging.getLogger(__name__)

_LEAVE_SECONDS = 15.0  # beyond the time that workers wait for a supervisor: to save


def running_job(what: str = "fit") -> DistributedContext | None:
    """The group that this process belongs to, if it does: a launcher's is joined here. `what` asks for it,
    and is refused where a run's own loop called it."""
    refuse_inside(what)
    from paceline.comm import default_group
    from paceline.comm.environment import find_place

    context = default_group.current()
    if context is None and find_place(os.environ).world_size > 1:
        from paceline.frontends.process_group import init_process_group

        init_process_group()
        context = default_group.current()
    return context


def prepare(
    config: TrainConfig,
    context: DistributedContext | None,
    check: Callable[[TrainConfig], None] | None = None,
) -> tuple[TrainConfig, RunFolder]:
    """The config with nothing left open, and the run's folder: the first rank decides, the others follow.

    `check` sees the config before a folder is made. What the first rank refuses, all refuse.
    """
    if context is not None and config.workers != context.world_size:
        if config.workers != 1 and context.is_master:
            _log.warning(
                "workers=%d, and this job has %d: it trains with those", config.workers, context.world_size
            )
        shards = config.workers if config.shards is None and config.workers != 1 else config.shards
        config = dataclasses.replace(config, workers=context.world_size, shards=shards)
    if context is None:
        settled = as_recorded(config)
        return settled, _make_folder(settled, check)

    from paceline.comm.context import DEFAULT_TIMEOUT

    told: list[Any] = []
    refused: PacelineError | None = None
    if context.is_master:
        try:
            settled = as_recorded(config)
            _refuse_chaos(settled)
            told = [settled.shards, settled.threads, str(_make_folder(settled, check).path)]
        except PacelineError as error:
            refused = error
            told = [error.message, error.remedy]
    # The first rank may have waited for an earlier start to leave.
    told = context.broadcast(told, timeout=DEFAULT_TIMEOUT + config.fault_tolerance.patience)
    if refused is not None:
        raise refused
    if len(told) == 2:
        raise UsageError(f"rank 0 refuses the run: {told[0]}", remedy=told[1])
    shards, threads, path = told
    settled = dataclasses.replace(config, shards=shards, threads=threads).resolved(cores())
    return settled, RunFolder(Path(path))


def as_recorded(config: TrainConfig) -> TrainConfig:
    """The config with nothing left open. What the run that it goes on with had recorded (shards, threads)
    stays as it was; in fast mode a shard is a worker, and their number may change."""
    folder = RunFolder.to_resume(config)
    if folder is not None and (
        config.shards is None or config.threads is None or config.micro_batch == "auto"
    ):
        recorded = folder.recorded()
        if config.micro_batch == "auto" and isinstance(recorded.get("micro_batch"), int):
            config = dataclasses.replace(config, micro_batch=_count(folder, recorded, "micro_batch"))
        shards = None if config.mode == "fast" else _count(folder, recorded, "shards")
        config = dataclasses.replace(
            config,
            shards=shards if config.shards is None else config.shards,
            threads=_count(folder, recorded, "threads") if config.threads is None else config.threads,
        )
    return config.resolved(cores())


def _count(folder: RunFolder, recorded: dict[str, Any], name: str) -> int | None:
    value = recorded.get(name)
    if value is not None and (type(value) is not int or value < 1):
        raise ConfigError(
            f"{folder.config_file} is damaged: {name}={value!r} is not a count",
            remedy=f"set {name} in the TrainConfig to what it was",
            key=name,
        )
    return value


def _refuse_chaos(config: TrainConfig) -> None:
    if config.fault_tolerance.chaos is not None:
        raise ConfigError(
            "fault_tolerance.chaos inside a job (a launcher's, or a session): only workers that a supervisor "
            "looks after meet faults",
            remedy="leave chaos out, or call Trainer.fit outside of the job",
            key="fault_tolerance.chaos",
        )


def _make_folder(config: TrainConfig, check: Callable[[TrainConfig], None] | None) -> RunFolder:
    if check is not None:
        check(config)
    if config.resume is None and config.checkpoint.enabled and config.checkpoint.url is not None:
        _check_empty(config.checkpoint.url)
    if config.resume is None and config.run_dir is not None:
        unused.clear(RunFolder(Path(config.run_dir).absolute()), config)
    folder = RunFolder.for_config(config)
    if config.resume == "auto":
        _check_not_lost(folder, config)
    if crew.is_known(folder.path) or unheard.is_there(folder.path):
        with held(folder.lock_file, str(folder.path)):
            _wait_for_earlier_start(folder, config.fault_tolerance.patience)
            if unheard.is_there(folder.path):
                _complete_journal(folder)
    return folder


def _wait_for_earlier_start(folder: RunFolder, patience: float) -> None:
    """Where only the caller of a run was killed, what it had started saves and leaves before this start goes
    on from what they saved."""

    def say(pids: list[int]) -> None:
        _log.warning(
            "an earlier start of this run is still at work in %s (%s): it is asked to save and leave",
            folder.path,
            _processes(pids),
        )

    left = crew.wait_until_gone(folder.path, patience + _LEAVE_SECONDS, say)
    if left is not None:
        raise UsageError(
            f"an earlier start of this run is still at work in {folder.path} ({_processes(left)}), and did "
            f"not leave within {patience + _LEAVE_SECONDS:g} seconds",
            remedy="end it (kill -TERM, then -KILL), and start again",
        )


def _processes(pids: list[int]) -> str:
    return f"process {', '.join(map(str, pids))}" if pids else "on another machine, perhaps"


def _complete_journal(folder: RunFolder) -> None:
    """What workers left there when their supervisor had stayed away is written before this start begins."""
    from paceline.elastic.shell.chronicle import Chronicle
    from paceline.elastic.shell.unheard import take_in

    try:
        secret = address.read_secret(folder.path)
    except PacelineError as error:
        # Nobody knows whose words they are; the run itself can go on.
        _log.warning("the journal lacks what workers left in %s: %s", folder.path / unheard.FOLDER, error)
        return
    chronicle = Chronicle(folder.journal_file)
    try:
        take_in(chronicle, folder.path, secret)
    finally:
        chronicle.close()


def _check_not_lost(folder: RunFolder, config: TrainConfig) -> None:
    """A run that has saved does not begin anew where the place of its versions is empty: that is a disk which
    is not mounted, or another `checkpoint.url`. What was saved before the last beginning does not count: a
    group that went back behind its first version has begun again."""
    from paceline.checkpoint.store import CheckpointStore

    url = folder.checkpoint_url(config)
    try:
        if not folder.journal_file.is_file() or CheckpointStore(url).versions():
            return
    except PacelineError:
        return  # the worker that looks for the version to go on from says why it cannot
    saved: CheckpointSaved | None = None
    for event in journal.iterate(folder.journal_file):
        if isinstance(event, RunStarted):
            saved = None
        elif isinstance(event, CheckpointSaved):
            saved = event
    if saved is not None:
        raise UsageError(
            f"the journal in {folder.path} says that version {saved.version} of step {saved.step} was saved, "
            f"and {without_credentials(url)} holds no version at all: the run would begin anew",
            remedy="mount or bring back the place of the checkpoints, or set checkpoint.url to where they "
            "are; to begin anew, choose another run_dir",
        )


def _check_empty(url: str) -> None:
    """A new run among the versions of another would go on counting after them and mix with them."""
    from paceline.checkpoint.store import CheckpointStore

    store = CheckpointStore(url)
    versions = store.versions()
    if versions:
        # Also those that cannot be read here: a run of another user, or of another Paceline.
        newest = next(iter(reversed(store.manifests(lambda damage: None))), None)
        of_step = "" if newest is None else f" of step {newest.info.step}"
        raise ConfigError(
            f"checkpoint.url={store.url!r} already holds {len(versions)} "
            f"version{'s' if len(versions) > 1 else ''} "
            f"of another run, up to version {newest.version if newest else versions[-1]}{of_step}",
            remedy='give a new run a place of its own, or go on with that one: resume="auto"',
            key="checkpoint.url",
        )
