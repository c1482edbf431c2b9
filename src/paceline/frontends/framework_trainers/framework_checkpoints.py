"""Versions of a run whose loop is another framework's: written by its chief alone, while the loop goes on.

The parts are those of Paceline's own loop (train/state/checkpointing.py) in a group of one rank: a copy into
memory, a thread that writes it, a manifest with the checksum of each file, retention. A version holds tensors
under "model/..." and "optimizer/..." and plain data, so that `paceline checkpoint` shows, verifies and
exports it like any other.
"""

from __future__ import annotations

import dataclasses
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, final

from torch import Tensor

from paceline.checkpoint.loader import Checkpoint
from paceline.checkpoint.store import CheckpointStore
from paceline.comm.context import DistributedContext
from paceline.comm.rendezvous.transport_setup import single_rank
from paceline.core.errors import PacelineError, UsageError
from paceline.data.batch_plan import DataPosition
from paceline.train.callbacks import SavedCheckpoint
from paceline.train.history import Evaluation
from paceline.train.settings.train_config import TrainConfig, recorded_toml
from paceline.train.state.checkpointing import Checkpointer, RunContents
from paceline.train.state.recorder import Tell
from paceline.train.state.run_folder import RunFolder
from paceline.train.team import Team

_log = logging.getLogger(__name__)

FORMAT = 1

StateContents = Callable[[], tuple[Mapping[str, Tensor], dict[str, Any]]]
"""Tensors by name ("model/...", "optimizer/...") and plain data of the state as it is now."""
OnSaved = Callable[[SavedCheckpoint], None]


@final
class FrameworkCheckpoints:
    """The chief's versions. `resumed`: the one that this start goes on from, verified."""

    def __init__(
        self, config: TrainConfig, folder: RunFolder, framework: str, tell: Tell, on_saved: OnSaved
    ) -> None:
        self._config, self._folder, self._framework = config, folder, framework
        self._store = CheckpointStore(folder.checkpoint_url(config))
        self._run = secrets.token_hex(8)
        self.contents: StateContents = lambda: ({}, {})
        self.resumed: Checkpoint | None = None
        self.position = DataPosition()  # of `resumed`
        with ExitStack() as stack:
            context = stack.enter_context(DistributedContext.from_transport(single_rank()))
            self._versions = Checkpointer(
                config.checkpoint,
                self._store,
                Team(context, 1),
                run=self._run,
                patience=config.timeout,
                tell=tell,
                on_saved=on_saved,
            )
            stack.callback(self._versions.close)
            self._closing = stack.pop_all()
        self._versions.begin_from(None, 0, self._run)

    @property
    def newest(self) -> int | None:
        """The newest version that this process saved, or resumed from."""
        return self._versions.newest

    def resume(self, which: str | int) -> None:
        """Find the version to go on from: the newest that verifies for "auto", else the one that is named."""
        found = self._store.newest_good() if which == "auto" else self._store.open(which)
        if found is None:
            return
        saved = str(found.state.get("framework", "Paceline's own loop"))
        if saved.partition(" ")[0] != self._framework.partition(" ")[0]:
            raise UsageError(
                f"version {found.version} in {self._store.url} was written by {saved}, and this trainer runs "
                f"on {self._framework}",
                remedy="choose another folder, or continue the run with the trainer that began it",
            )
        self.resumed, self.position = found, DataPosition(**found.state["position"])
        info = found.manifest.info
        self._run = info.run or self._run
        self._versions.begin_from(found.version, info.step, self._run)

    def after_step(self, position: DataPosition, metrics: Mapping[str, float]) -> None:
        """Make a version valid whose files are written, which waits for nothing; begin one that is due."""
        written, failed = self._versions.written
        self._versions.commit(int(written), int(failed))
        if self._versions.due_after_step(position.step):
            self.save(position, metrics)

    def after_epoch(
        self, position: DataPosition, metrics: Mapping[str, float], evaluations: Sequence[Evaluation]
    ) -> None:
        """Begin a version where one is due after an epoch. `evaluations`: the last is of these weights, or it
        is empty."""
        if not self._versions.due_after_epoch(position.epoch):
            return
        chosen = self._config.checkpoint.every_epochs != "auto" or not self._versions.is_recent()
        if chosen or self._versions.is_best(evaluations):
            self._versions.save_again()  # a version of this step does not have that the epoch has turned
            self.save(position, metrics)

    def save(self, position: DataPosition, metrics: Mapping[str, float]) -> None:
        """Begin a version of the state as it is, unless this step has one."""
        if self._versions.begun_step == position.step:
            return
        tensors, own = self.contents()
        state = {
            "format": FORMAT,
            "framework": self._framework,
            "config": recorded_toml(self._config),
            "position": dataclasses.asdict(position),
            **own,
        }
        self._versions.begin(position, RunContents(tensors, {}, state), dict(metrics))

    def finish(self, position: DataPosition, metrics: Mapping[str, float], *, is_stopped: bool) -> None:
        """Save the last state where the settings ask for it or the run was stopped before its end; wait until
        nothing is under way."""
        if is_stopped or self._config.checkpoint.at_end:
            self.save(position, metrics)
        self._versions.drain()

    def settle(self) -> None:
        """Make a version valid that is being written: where the run has failed since, it is the newest."""
        try:
            self._versions.drain()
        except PacelineError as error:
            _log.warning("a version under way could not be completed: %s", str(error))

    def close(self) -> None:
        self._closing.close()
