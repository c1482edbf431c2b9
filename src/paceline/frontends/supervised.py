"""A training run that a supervisor looks after, as its caller has it: start, wait, scale, stop, result.

Joins the control plane (elastic/), which keeps workers alive, to the workers' training (train/). Observers
run here, in the caller's process. Must not import torch: a process that only waits never needs it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, final

from paceline.comm.cost import load_links
from paceline.core import own_records
from paceline.core.chaos import Chaos
from paceline.core.control.address import replace_file
from paceline.core.errors import PeerLostError, PlatformError
from paceline.core.foreign import without_credentials, without_secrets
from paceline.core.listening import Listening
from paceline.core.tls import Tls
from paceline.elastic.client import Supervised
from paceline.elastic.job import Job, Outcome
from paceline.elastic.model import Settings
from paceline.engines.local import call, payload, protocol
from paceline.engines.local.verdict import Raised, judge
from paceline.frontends import overrides, tensor_payload
from paceline.frontends.following import Following
from paceline.train.callbacks import Callbacks, Modifier, Observer, RunInfo
from paceline.train.config import TrainConfig
from paceline.train.run_folder import RunFolder
from paceline.train.run_lock import held
from paceline.train.schedule import total_steps
from paceline.train.signals import Stopped, saved_words

if TYPE_CHECKING:
    from paceline.train.worker import Trained, TrainJob

_log = logging.getLogger(__name__)

_ENTRY = "paceline.frontends.member_main:main"
_PRELOAD = (
    "torch",
    "paceline.frontends.member_main",
    "paceline.train.member_worker",
    # Optimizers and deterministic kernels import torch's compiler, hundreds of modules: once for all workers.
    "torch._inductor.config",
)
_LOOK_SECONDS = 0.25
_UNWATCHED_SECONDS = 1.0  # between two looks at the journal where nobody is told what is in it


def start(job: TrainJob, *, observers: tuple[Observer, ...] = ()) -> RunningFit:
    """Starts the workers of a job whose config is resolved, in its folder. Close what comes back."""
    return RunningFit(job, observers)


@final
class RunningFit:
    """A run under way. Use it from one thread, but for `stop`, `scale` and `kill`."""

    def __init__(self, job: TrainJob, observers: tuple[Observer, ...] = ()) -> None:
        from paceline.train.assembly import local_place

        assert job.folder is not None
        config = job.config
        self.folder = RunFolder(job.folder)
        self._closing = ExitStack()
        self._saves = config.checkpoint.enabled
        self._chaos = Chaos(config.fault_tolerance.chaos or "")
        self._outcome: Outcome | None = None
        self._raised: Exception | None = None  # by an observer
        self._read_at = 0.0
        self._started = time.perf_counter()
        self._job = job
        self._trained: Trained | None = None
        self._starts = 0
        watching = [*(item for item in job.callbacks if isinstance(item, Observer)), *observers]
        self._callbacks = Callbacks(watching)
        packed = self._pack(job)
        try:
            self._closing.enter_context(held(self.folder.lock_file, str(self.folder.path)))
            place = local_place(self.folder, config)
            if place is not None:
                self._closing.enter_context(held(place / ".run", f"checkpoint.url={str(place)!r}"))
            self._following = Following(
                self.folder.journal_file,
                self._callbacks,
                _info(config, job),
                self.folder.checkpoint_url(config),
            )
            self._launch(config, packed)
        except BaseException:
            self._closing.close()
            raise

    def _pack(self, job: TrainJob) -> int:
        from paceline.train.member_worker import train_member

        modifiers = tuple(item for item in job.callbacks if isinstance(item, Modifier))
        sent = dataclasses.replace(job, callbacks=modifiers)
        packed, self._call = call.pack(train_member, (sent,), tensor_payload.reducers())
        self._closing.callback(os.close, packed)
        return packed

    def _launch(self, config: TrainConfig, packed: int) -> None:
        self._starts += 1
        self._supervised = Supervised(_job(config, self.folder, packed))
        self._closing.callback(self._supervised.close)
        self._supervised.start()

    @property
    def address(self) -> tuple[str, int]:
        """Where `paceline join` finds the job."""
        return self._supervised.address

    def wait(self, timeout: float | None = None) -> bool:
        """Whether the run is over, after at most `timeout` seconds. Observers are told here."""
        until = None if timeout is None else time.monotonic() + timeout
        while self._outcome is None:
            left = _LOOK_SECONDS if until is None else min(_LOOK_SECONDS, until - time.monotonic())
            self._outcome = self._supervised.wait(max(0.0, left))
            if self._outcome is not None:
                files = [*(self._outcome.failure or ()), self._outcome.result]
                self._closing.callback(
                    protocol.close_all, [descriptor for descriptor in files if descriptor is not None]
                )
                self._trained = self._unpacked(self._outcome)
                if self._is_lost(self._outcome) and self._starts == 1:
                    self._start_again()
            now = time.monotonic()
            if self._callbacks.observers or self._outcome is not None or now >= self._read_at:
                self._follow()
                self._read_at = now + _UNWATCHED_SECONDS
            if until is not None and time.monotonic() >= until:
                break
        return self._outcome is not None

    def _unpacked(self, outcome: Outcome) -> Trained | None:
        if not outcome.ok or outcome.result is None:
            return None
        trained: Trained = call.unpack_result(outcome.result, self._call, outcome.rank or 0)
        return trained

    def _is_lost(self, outcome: Outcome) -> bool:
        """Whether the run came to its end and no worker was left to send what came out."""
        known = self._trained is not None and self._trained.history is not None
        return outcome.ok and outcome.stopped is None and not known

    def _start_again(self) -> None:
        """Have new workers load the run's last checkpoint and send the result from there: that the workers
        were killed after the last step must leave no trace either."""
        _log.warning("the workers were lost before they had sent the result: it is fetched from a checkpoint")
        care = dataclasses.replace(self._job.config.fault_tolerance, chaos=None)
        config = dataclasses.replace(self._job.config, resume="auto", fault_tolerance=care)
        self._outcome = None
        self._supervised.close()
        self._launch(config, self._pack(dataclasses.replace(self._job, config=config)))

    def _follow(self) -> None:
        """Tells the observers. One of the user's that raises ends the run, which saves first."""
        try:
            self._following.read()
        except Exception as error:
            self._raised = self._raised or error
            self._following.mute()
            self._supervised.stop(f"an observer raised {type(error).__name__}")
            self._following.read()

    def stop(self, reason: str) -> None:
        """Finish the step, save, and end."""
        self._supervised.stop(reason)

    def scale(self, workers: int) -> None:
        """From the next step boundary on so many workers train."""
        self._supervised.scale(workers)

    def kill(self) -> None:
        """Ends everything at once."""
        self._supervised.kill()

    @property
    def stopped_before_it_began(self) -> str | None:
        """Why the run was asked to stop, where that was so early that there is no result; after `wait`."""
        outcome = self._outcome
        assert outcome is not None
        return outcome.stopped if outcome.ok and outcome.result is None else None

    def result(self) -> Trained:
        """What the run gave, after `wait`; raises what ended it."""
        outcome = self._outcome
        assert outcome is not None
        if not outcome.ok:
            raise self._error(outcome)
        if self._raised is not None:
            self._raised.add_note(self.saved_words)
            raise self._raised
        trained = self._trained
        if trained is None or trained.history is None:
            if outcome.stopped is not None:
                # Between two views, or the workers were lost after they had saved: what was saved is there.
                raise Stopped(outcome.stopped, None)
            raise PeerLostError(
                f"the run ended ({outcome.reason}), and the workers with its result were lost after it",
                remedy=f"its last checkpoint holds the weights: paceline checkpoint ls {self.folder.path}",
            )
        told = (*trained.history.steps, *self._following.steps)
        steps = {record.step: record for record in told}
        history = dataclasses.replace(
            trained.history,
            steps=tuple(steps[step] for step in sorted(steps)),
            total_time=time.perf_counter() - self._started,
            workers=self._following.workers,
        )
        self._callbacks.end(history)
        self._warn_of_chaos(max(steps, default=0))
        return dataclasses.replace(trained, history=history)

    def close(self) -> None:
        """Ends what is still there; nothing is left behind."""
        self._closing.close()
        for page in self.folder.logs.glob("phase-*"):
            page.unlink(missing_ok=True)  # of workers that were killed

    def __enter__(self) -> RunningFit:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def saved_words(self) -> str:
        """What a run that is started again goes on from."""
        if self._following.saved is not None:
            return saved_words(*self._following.saved)
        if not self._saves:
            return "nothing is saved, because checkpoints are turned off"
        if self._job.config.resume is not None and not self._following.started:
            return "the run did not go on: what was saved before this start is as it was"
        return "no version is saved: a run that is started again begins anew"

    def _warn_of_chaos(self, last_step: int) -> None:
        """A test that tested nothing must not look like one that was passed."""
        unmet = self._chaos.unmet(self._following.injected, self._following.ranks, last_step)
        if unmet:
            _log.warning("chaos: these faults never came in this run: %s", "; ".join(unmet))

    def _error(self, outcome: Outcome) -> BaseException:
        if outcome.failure is not None:
            report = payload.load(outcome.failure[0])
            error: BaseException | None = None
            if len(outcome.failure) > 1:
                # Exceptions whose constructor wants other arguments than it stores cannot be rebuilt; the
                # text remains.
                with contextlib.suppress(Exception):
                    error = payload.load(outcome.failure[1], shared=self._call.classes)
            failed = Raised(outcome.rank or 0, outcome.pid or 0, 0.0, report, error)
            raised = judge([failed])
            raised.add_note(self.saved_words)
            return raised
        return PeerLostError(
            outcome.text or outcome.reason,
            rank=outcome.rank,
            remedy=f"the run's journal and logs/ say more; {self.saved_words}",
            pid=outcome.pid,
        )


def _job(config: TrainConfig, folder: RunFolder, packed: int) -> Job:
    care = config.fault_tolerance
    tls = None
    if care.certificate and care.key and care.authority:
        tls = Tls(Path(care.certificate), Path(care.key), Path(care.authority))
    settings = Settings(
        workers=config.workers,
        shards=config.shards or config.workers,
        min_workers=care.min_workers,
        # Where bits may differ, each worker is one slice of the batch, however many there are.
        most_workers=(config.shards or config.workers) if config.mode == "exact" else 0,
        max_worker_failures=care.max_worker_failures,
        max_preemptions=care.max_preemptions,
        backoff=care.backoff,
        seed=config.seed,
        heartbeat=care.heartbeat,
        stragglers=care.stragglers,
        saves_on_failure=config.checkpoint.enabled,
    )
    return Job(
        entry=_ENTRY,
        payload=packed,
        preload=_PRELOAD,
        settings=settings,
        folder=folder.path,
        threads=config.threads,
        options={
            "exact": config.mode == "exact",
            "patience": care.patience,
            "chaos": care.chaos,
            # Read once, here: ranks that chose algorithms by different links would disagree.
            "links": load_links().to_plain(),
            "folder": str(folder.path),
        },
        bind=care.bind,
        port=care.port,
        listening=Listening(care.ports or "", care.interface or ""),
        tls=tls,
    )


def _info(config: TrainConfig, job: TrainJob) -> RunInfo:
    samples = getattr(job.train, "size", None)
    return RunInfo(
        config=config,
        workers=config.workers,
        total_steps=total_steps(config, samples),
        samples=samples,
        run_dir=str(job.folder),
        device="cpu" if config.device != "cuda" else "cuda",
    )


def record_command(folder: RunFolder) -> None:
    """Which script made the run, for `paceline replay`."""
    command = overrides.command()
    if command is None:
        return
    # Not what names a secret: folders of runs are published. Who replays gives such arguments again.
    plain = {
        **command.to_plain(),
        "arguments": list(without_secrets(command.arguments)),
        "settings": [without_credentials(text) for text in command.settings],
    }
    with contextlib.suppress(PlatformError):  # a full disk: the run itself is not in danger
        record = json.dumps(own_records.tagged(plain)).encode()
        replace_file(folder.path / "command.json", record, mode=0o600)
