"""Prepare a run: find the job that this process belongs to, resolve the config, make the run's folder.

Shared by `Trainer`, `session` and the orchestrator. Must not import torch: a script that only starts workers
never needs it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.control import liveness_lock, spool
from paceline.core import journal
from paceline.core.available_resources import cores
from paceline.core.errors import ConfigError, PacelineError, PlatformError, UsageError
from paceline.core.events import CheckpointSaved, RunResumed, RunStarted, StepCommitted
from paceline.core.time_limits import COLLECTIVE_SECONDS
from paceline.core.untrusted import redact_credentials
from paceline.core.wording import counted, listed, with_article
from paceline.elastic.supervised_folder import SUPERVISOR_FILES, recover_journal
from paceline.engines.engine import Engine
from paceline.frontends import launcher_link, mpi_calls
from paceline.frontends.caller_tools import profiler_is_active
from paceline.train.callbacks import Modifier, Observer, refuse_inside
from paceline.train.settings.run_length import asked_for, told
from paceline.train.settings.schedule import run_length
from paceline.train.settings.train_config import TrainConfig, shards_on_ranks
from paceline.train.state.run_folder import RunFolder
from paceline.train.state.run_lock import held

if TYPE_CHECKING:
    from paceline.comm.context import DistributedContext

_log = logging.getLogger(__name__)

_FILES_OF_A_START = (
    "config.toml",
    "config.toml.tmp",
    "logs",
    "stop",
    "command.json",
    *SUPERVISOR_FILES,
)
_LEAVE_SECONDS = 15.0  # to save, beyond the time that workers wait for a supervisor


def check_model(model: object) -> None:
    """Refuse a model that is neither a module nor a function that builds one; without importing torch."""
    if not callable(model):
        raise UsageError(
            f"the model is {with_article(model)}",
            remedy="pass a torch.nn.Module or a function that builds one",
        )


def check_optimizer(optimizer: object, remedy: str) -> None:
    """Refuse what is neither a function nor an optimizer, nor several of these; without importing torch."""
    several = list(optimizer) if isinstance(optimizer, Sequence) else [optimizer]
    built = bool(several) and all(hasattr(one, "param_groups") for one in several)
    if not callable(optimizer) and not built:
        raise UsageError(f"the optimizer is {optimizer!r:.60}", remedy=remedy)


def with_profile(
    config: TrainConfig, folder: str | os.PathLike[str] | None, context: DistributedContext | None
) -> TrainConfig:
    """Return the config with `folder` in place of its `profile`, as a path that every worker understands.

    Refuse one where a profiler of the caller's would watch the same process: there can be one only.
    """
    given = config.profile if folder is None else folder
    if given is None:
        return config
    if (context is not None or config.workers == 1) and profiler_is_active():
        raise UsageError(
            f"profile={os.fspath(given)!r}, and a torch.profiler is active already in this process, which "
            "computes the run",
            remedy="leave profile out: the active profiler sees all; or call fit outside of it",
        )
    return dataclasses.replace(config, profile=str(Path(given).absolute()))


def with_measurements(config: TrainConfig, callbacks: Sequence[Observer | Modifier]) -> TrainConfig:
    """Return the config with the gradient's norm measured in all steps in which an observer reads it."""
    asked = [one.grad_norm_every(config) for one in callbacks if isinstance(one, Observer)]
    if not any(asked):
        return config
    return dataclasses.replace(config, log_grad_norm=math.gcd(int(config.log_grad_norm), *asked))


def check_scheduler(scheduler: object) -> None:
    """Refuse what is neither a function of the optimizer nor a list of these; without importing torch."""
    several = scheduler if isinstance(scheduler, Sequence) and not isinstance(scheduler, str) else [scheduler]
    for one in several:
        kind = one if isinstance(one, type) else type(one)
        if isinstance(one, type) or (hasattr(one, "step") and hasattr(one, "state_dict")):
            what = (
                f"the class {kind.__name__}" if isinstance(one, type) else f"a {kind.__name__} that is built"
            )
            raise UsageError(
                f"the scheduler is {what}: each worker builds its own, over its own optimizer",
                remedy="pass a function that builds it: "
                f"scheduler=lambda optimizer: {kind.__name__}(optimizer, ...)",
            )
        if callable(one):
            asked_for(one, "scheduler")
        elif one is not None:
            raise UsageError(
                f"the scheduler is {with_article(one)}",
                remedy="pass a function from the optimizer to a torch scheduler: "
                "scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 10)",
            )


def check_length(scheduler: object, config: TrainConfig, samples: int | None) -> None:
    """Refuse functions that build schedulers and ask for what is not known of this run."""
    several = scheduler if isinstance(scheduler, Sequence) else [scheduler]
    for one in several:
        if callable(one):
            told(one, run_length(config, samples), "scheduler")


def running_job(what: str = "fit") -> DistributedContext | None:
    """Return the group that this process belongs to, or None; join the one that a launcher's environment
    describes. Refuse `what` if it is called inside the loop of a run."""
    refuse_inside(what)
    from paceline.comm import default_group
    from paceline.comm.rendezvous.environment import find_launch_info

    context = default_group.current()
    if context is None and find_launch_info(os.environ).world_size > 1:
        from paceline.frontends.process_group import init_process_group

        context = init_process_group()
    return context


def prepare(
    config: TrainConfig,
    context: DistributedContext | None,
    check: Callable[[TrainConfig], None] | None = None,
) -> tuple[TrainConfig, RunFolder]:
    """Return the resolved config and the run's folder, which is made here.

    In a job the first rank decides and the others follow; a run that it refuses is refused on every rank.
    `check` refuses a config that does not go with the data; without it the caller does that later.
    """
    if context is None:
        settled = as_recorded(_continued(config))
        folder = _make_folder(settled, check)
        _announce(folder, settled)
        return settled, folder
    if config.workers != context.world_size:
        if config.workers != 1 and context.is_master:
            _log.warning(
                "workers=%d, and this job has %d: it trains with those", config.workers, context.world_size
            )
        shards = shards_on_ranks(config, context.world_size)
        config = dataclasses.replace(config, workers=context.world_size, shards=shards)

    if config.run_dir is False and config.checkpoint.enabled and context.transport.topology.hosts > 1:
        raise ConfigError(
            "run_dir=False on several hosts: a temporary folder is that of one host, and its checkpoints "
            "are written by all",
            remedy="give a folder that every host of the job shares, or save nothing: "
            "checkpoint=CheckpointConfig(enabled=False)",
            key="run_dir",
        )
    decided: list[Any] = []
    refused: PacelineError | None = None
    if context.is_master:
        try:
            settled = as_recorded(_continued(config))
            _refuse_chaos(settled)
            folder = _make_folder(settled, check)
            _announce(folder, settled)
            changed = {name: getattr(settled, name) for name in ("shards", "threads", "run_dir", "resume")}
            decided = [changed, str(folder.path)]
        except PacelineError as error:
            refused = error
            decided = [None, error.message, error.remedy]
    # The first rank may have waited for an earlier start to leave.
    decided = context.broadcast(decided, timeout=COLLECTIVE_SECONDS + config.fault_tolerance.patience)
    if refused is not None:
        raise refused
    if decided[0] is None:
        raise UsageError(f"rank 0 refuses the run: {decided[1]}", remedy=decided[2])
    changed, path = decided
    settled = dataclasses.replace(config, **changed).resolved(cores())
    if not context.is_master and owns_folder(settled, context):
        return settled, RunFolder.for_config(settled)
    return settled, RunFolder(Path(path))


def owns_folder(config: TrainConfig, context: DistributedContext | None) -> bool:
    """Return whether this rank makes a temporary folder, and deletes it: the first rank does, and each rank
    on another host than the first one's, which does not see that folder."""
    if config.run_dir is not False or context is None or context.is_master:
        return config.run_dir is False
    host_of = context.transport.topology.host_of
    return host_of[context.rank] != host_of[0]


def _continued(config: TrainConfig) -> TrainConfig:
    """Return the config such that a run goes on which ranks of `paceline run` had begun before all of them
    were started again."""
    folder = launcher_link.folder_before_restart()
    if not folder or not config.checkpoint.enabled:
        return config
    return dataclasses.replace(config, run_dir=folder, resume="auto")


def _announce(folder: RunFolder, config: TrainConfig) -> None:
    if config.run_dir is not False:
        launcher_link.announce_folder(str(folder.path))
        mpi_calls.announce_folder(str(folder.path))


def as_recorded(config: TrainConfig) -> TrainConfig:
    """Return the resolved config. Shards and threads that the resumed run had recorded stay as they were; in
    fast mode a shard is a worker, and their number may change."""
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
            "fault_tolerance.chaos inside a job (a launcher's, or a session): faults are injected only into "
            "supervised workers",
            remedy="leave chaos out, or call Trainer.fit outside of the job",
            key="fault_tolerance.chaos",
        )


def _make_folder(config: TrainConfig, check: Callable[[TrainConfig], None] | None) -> RunFolder:
    if check is not None:
        check(config)
    if isinstance(config.engine, Engine):
        config.engine.check()  # before anything is made: an engine that refuses leaves no empty run behind
    if config.resume is None and config.checkpoint.enabled and config.checkpoint.url is not None:
        _check_empty(config.checkpoint.url)
    if config.resume is None and config.run_dir:
        _clear_failed_start(RunFolder(Path(config.run_dir).absolute()))
    folder = RunFolder.for_config(config)
    if config.resume == "auto":
        _check_not_lost(folder, config)
    if liveness_lock.was_ever_held(folder.path) or spool.has_spool(folder.path):
        with held(folder.lock_file, str(folder.path)):
            wait_for_earlier_start(folder, config.fault_tolerance.patience)
            recover_journal(folder.path)
    return folder


def wait_for_earlier_start(folder: RunFolder, patience: float) -> None:
    """Wait until the processes of an earlier start, whose caller was killed, have saved and exited: this
    start continues from what they saved."""

    def say(pids: list[int]) -> None:
        asked = "it is" if len(pids) == 1 else "they are"
        _log.warning("%s in %s: %s asked to save and exit", _still_run(pids), folder.path, asked)

    left = liveness_lock.wait_until_free(folder.path, patience + _LEAVE_SECONDS, say)
    if left is not None:
        raise UsageError(
            f"{_still_run(left)} in {folder.path}, and did not exit within {patience + _LEAVE_SECONDS:g} s",
            remedy=f"end {'it' if len(left) == 1 else 'them'} (kill -TERM, then -KILL), and start again",
        )


def _still_run(pids: list[int]) -> str:
    """Format as "process 12 of an earlier start of this run still runs", "processes 12 and 13 ... still run".
    No pid is known where the processes are on another host."""
    if not pids:
        return "processes of an earlier start of this run, perhaps on another host, still run"
    if len(pids) == 1:
        return f"process {pids[0]} of an earlier start of this run still runs"
    return f"processes {listed(pids)} of an earlier start of this run still run"


def _check_not_lost(folder: RunFolder, config: TrainConfig) -> None:
    """Refuse to begin a run anew that has saved versions where none are found: the disk is not mounted, or
    `checkpoint.url` is another. Versions from before the last RunStarted do not count: a group that restored
    a state before its first version has begun again."""
    from paceline.checkpoint.store import CheckpointStore

    url = folder.checkpoint_url(config)
    try:
        if not folder.journal_file.is_file() or CheckpointStore(url).versions():
            return
    except PacelineError:
        return  # the worker that resumes reports why it cannot
    saved: CheckpointSaved | None = None
    for event in journal.iterate(folder.journal_file):
        if isinstance(event, RunStarted | CheckpointSaved):
            saved = event if isinstance(event, CheckpointSaved) else None
    if saved is not None:
        raise UsageError(
            f"the journal in {folder.path} says that version {saved.version} of step {saved.step} was saved, "
            f"and {redact_credentials(url)} holds no version at all: the run would begin anew",
            remedy="mount or bring back the place of the checkpoints, or set checkpoint.url to where they "
            "are; to begin anew, choose another run_dir",
        )


def _check_empty(url: str) -> None:
    """Refuse a new run among the versions of another: it would continue their numbers and mix with them."""
    from paceline.checkpoint.store import CheckpointStore

    store = CheckpointStore(url)
    versions = store.versions()
    if versions:
        # Versions that cannot be read here count too: those of another user, or of another Paceline.
        newest = next(iter(reversed(store.manifests(lambda damage: None))), None)
        of_step = "" if newest is None else f" of step {newest.info.step}"
        raise ConfigError(
            f"checkpoint.url={store.url!r} already holds {counted(len(versions), 'version')} "
            f"of another run, up to version {newest.version if newest else versions[-1]}{of_step}",
            remedy='give a new run another place, or continue that one: resume="auto"',
            key="checkpoint.url",
        )


def _clear_failed_start(folder: RunFolder) -> None:
    """Move the files of an attempt that failed before its first step to `failed-N/`, where its log can still
    be read: a typo in the objective must not use up the name of a run. A run that committed a step, saved a
    version or still runs is not touched."""
    if not folder.holds_run() or _has_begun(folder):
        return
    try:
        with held(folder.lock_file, str(folder.path)):
            if not _has_begun(folder):
                _move_aside(folder.path)
    except PacelineError as error:
        # It is still running, or the folder cannot be changed: the new run is refused later.
        _log.debug("%s is left as it is: %s", folder.path, error.message)


def _has_begun(folder: RunFolder) -> bool:
    """Return whether the folder holds a step, a version, spooled messages or a running process."""
    if spool.has_spool(folder.path) or (
        liveness_lock.was_ever_held(folder.path) and not liveness_lock.is_free(folder.path)
    ):
        return True
    with contextlib.suppress(FileNotFoundError):
        if any(not name.startswith(".") for name in os.listdir(folder.checkpoints)):
            return True
    if not folder.journal_file.exists():
        return False
    kept = StepCommitted | CheckpointSaved | RunResumed
    return any(isinstance(event, kept) for event in journal.iterate(folder.journal_file))


def _move_aside(path: Path) -> None:
    aside = next(
        folder for number in itertools.count(1) if not (folder := path / f"failed-{number}").exists()
    )
    try:
        aside.mkdir()
        for name in _FILES_OF_A_START:
            with contextlib.suppress(FileNotFoundError):
                (path / name).rename(aside / name)
    except OSError as error:
        raise PlatformError(
            f"{path} cannot be cleared for a new start: {error.strerror}", remedy="choose another run_dir"
        ) from error
    _log.warning(
        "%s holds an attempt that failed before its first step: it was put aside in %s, and the run begins "
        "anew",
        path,
        aside.name,
    )
