"""The study of a search: Optuna samples and prunes, the study's file remembers.

    studies/NAME/
      study.log      the study, as `optuna-dashboard studies/NAME/study.log` reads it
      sampler.json   the sampler's generators before and after the last trial that was asked for
      trials/0007/   what trial 7 keeps, and its output

Whatever is lost, the process or the machine, the file holds each trial either as asked for or as over.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final, final

import optuna
from optuna.samplers import BaseSampler
from optuna.storages import JournalStorage
from optuna.trial import FrozenTrial, TrialState

from paceline.core import atomic_file
from paceline.core.clock import Clock, MonotonicClock
from paceline.core.errors import UsageError
from paceline.frontends.tuner import sampler_state
from paceline.frontends.tuner.search_space import ParameterDecoder, SearchSpace, differences
from paceline.frontends.tuner.study_log import ReadOnlyLog, StudyLog
from paceline.frontends.tuner.trial_record import TrialOutcome, TrialRecord
from paceline.train.state.run_lock import held

LOG_FILE: Final = "study.log"
PARENT: Final = "paceline:parent"
_SAMPLER_FILE: Final = "sampler.json"
_ERROR: Final = "error"
_SECONDS: Final = "paceline:seconds"
_SPACE: Final = "paceline:space"
_METRIC: Final = "paceline:metric"
_CLOCK: Final = MonotonicClock()
_STATES: Final[Mapping[TrialState, TrialOutcome]] = {
    TrialState.RUNNING: "running",
    TrialState.WAITING: "running",
    TrialState.COMPLETE: "complete",
    TrialState.PRUNED: "pruned",
    TrialState.FAIL: "failed",
}


@final
class StudyStorage(JournalStorage):
    """Optuna's storage, in which a sampler can be shown the first trials alone: later ones look as if they
    still ran, whether they do or not. So what it draws does not depend on which trial was faster."""

    first_trials: int | None = None

    def get_all_trials(self, study_id: int, deepcopy: bool = True, states: Any = None) -> list[FrozenTrial]:
        if self.first_trials is None:
            return super().get_all_trials(study_id, deepcopy, states)
        trials = [
            trial if trial.number < self.first_trials or not trial.state.is_finished() else _as_running(trial)
            for trial in super().get_all_trials(study_id, deepcopy)
        ]
        return [trial for trial in trials if states is None or trial.state in states]


@final
class _AskedStudy(optuna.Study):
    """Optuna's study. A sampler that has drawn everything stops it, which else only `optimize` allows."""

    was_stopped = False

    def stop(self) -> None:
        self.was_stopped = True


@final
class TuningStudy:
    """A study that this process alone continues. To be closed."""

    def __init__(
        self,
        folder: Path,
        space: SearchSpace,
        mode: str,
        metric: str | None,
        *,
        resume: bool,
        clock: Clock = _CLOCK,
    ) -> None:
        self.folder = folder
        self.space = space
        self._clock = clock
        self._begun: dict[int, float] = {}  # when the last attempt of a trial began
        self._closing = ExitStack()
        try:
            self._closing.enter_context(held(folder / ".lock", f"the study {folder}"))
            self._log = StudyLog(folder / LOG_FILE)
            self._closing.callback(self._log.close)
            self._name = folder.name
            self._was_stopped = False
            if not (self._log.is_empty or self._is_ours()):
                raise UsageError(
                    f"{folder / LOG_FILE} is not the study of a search of Paceline, and is left as it is",
                    remedy="give another name; optuna.load_study opens this one",
                )
            if self._log.has_trials and not resume:
                raise UsageError(
                    f"there is a study in {folder} already",
                    remedy="continue it with resume=True (--resume), or give another name",
                )
            if not self._log.has_trials:
                # Whatever else is there was left by a search that was refused, or killed, before its first
                # trial: this one may have another space. Generators are for one that goes on with it.
                self._log.clear()
                if not resume:
                    (folder / _SAMPLER_FILE).unlink(missing_ok=True)
                self._create(mode, metric)
            self._sampler: BaseSampler = optuna.samplers.RandomSampler()
            self._pruner: optuna.pruners.BasePruner = optuna.pruners.NopPruner()
            self._load()
            self._check(mode, metric)
        except BaseException:
            self._closing.close()
            raise

    def close(self) -> None:
        self._closing.close()

    def use(self, sampler: BaseSampler, pruner: optuna.pruners.BasePruner) -> str:
        """Sample and prune with these. The sampler's generators are set to where the study's last process
        left them, where it used the same kind of sampler; return what is to be said where that is lost."""
        self._sampler, self._pruner = sampler, pruner
        lost = self._continue_generators(len(self._trials))
        self._load()
        return lost

    @property
    def is_exhausted(self) -> bool:
        """Whether the sampler has drawn all that there is."""
        return self._was_stopped or self._study.was_stopped

    @property
    def asked(self) -> int:
        """The number of trials that were asked for."""
        return len(self._trials)

    @property
    def unfinished(self) -> list[int]:
        """Trials that were asked for and are not over."""
        return [trial.number for trial in self._trials if not trial.state.is_finished()]

    def ask(self, first_trials: int | None) -> int:
        """Ask the sampler for one more trial, which it may draw with the results of the `first_trials` only
        (None: all that are there); return its number."""
        number = self.asked
        before = sampler_state.capture(self._sampler)
        with self._log.one_write():
            self._storage.first_trials = first_trials
            try:
                self._study.ask(self.space.distributions)
            finally:
                self._storage.first_trials = None
            # Before the trial: a process that ends between the two asks for this trial again.
            self._save_state(number, before, sampler_state.capture(self._sampler))
        return number

    def params(self, number: int) -> dict[str, Any]:
        """Return a trial's parameters as plain data, for `space.decode`."""
        return dict(self._trials[number].params)

    def parent(self, number: int) -> int | None:
        """Return the trial whose checkpoint this one begins with; None: it begins anew."""
        parent = self._trials[number].system_attrs.get(PARENT)
        return None if parent is None else int(parent)

    def begin(self, number: int) -> None:
        """Note when an attempt of a trial begins: its seconds are those of the last one."""
        self._begun[number] = self._clock.now()

    def report(self, number: int, step: int, value: float) -> bool:
        """Take a report; return whether the trial is to be pruned."""
        trial = self._trials[number]
        self._storage.set_trial_intermediate_value(trial._trial_id, step, value)
        # Some pruners answer with a boolean of NumPy's, which JSON does not have.
        return bool(self._pruner.prune(self._study, self._storage.get_trial(trial._trial_id)))

    def finish(self, number: int, value: float) -> None:
        """Record that a trial came to its end."""
        self._end(number, TrialState.COMPLETE, value)

    def prune(self, number: int) -> None:
        """Record that a trial was pruned."""
        self._end(number, TrialState.PRUNED)

    @property
    def has_values(self) -> bool:
        """Whether a trial came to an end that can be judged."""
        return any(trial.state in (TrialState.COMPLETE, TrialState.PRUNED) for trial in self._trials)

    def fail(self, number: int, error: str) -> None:
        """Record that a trial failed by itself."""
        self._end(number, TrialState.FAIL, error=error)

    def forget_reports(self, number: int) -> None:
        """Forget what a trial has reported: its process was lost, and the trial is repeated."""
        self._log.forget(self._trials[number]._trial_id)
        self._was_stopped = self.is_exhausted
        self._load()

    def records(self) -> list[TrialRecord]:
        """Return all trials, by number."""
        return [record_of(trial, self.space.decode) for trial in self._trials]

    def _end(self, number: int, state: TrialState, value: float | None = None, error: str = "") -> None:
        trial = self._trials[number]
        with self._log.one_write(ending=trial._trial_id):
            if number in self._begun:
                seconds = self._clock.now() - self._begun.pop(number)
                self._storage.set_trial_user_attr(trial._trial_id, _SECONDS, seconds)
            if error:
                self._storage.set_trial_user_attr(trial._trial_id, _ERROR, error)
            self._study.tell(number, value, state)

    @property
    def _trials(self) -> list[FrozenTrial]:
        return self._storage.get_all_trials(self._study._study_id, deepcopy=False)

    def _is_ours(self) -> bool:
        studies = JournalStorage(self._log).get_all_studies()
        return len(studies) == 1 and _SPACE in studies[0].user_attrs

    def _create(self, mode: str, metric: str | None) -> None:
        direction = (
            optuna.study.StudyDirection.MAXIMIZE if mode == "max" else optuna.study.StudyDirection.MINIMIZE
        )
        with _quiet(), self._log.one_write():
            storage = JournalStorage(self._log)
            study = storage.create_new_study([direction], self._name)
            storage.set_study_user_attr(study, _SPACE, self.space.to_plain())
            storage.set_study_user_attr(study, _METRIC, metric)

    def _load(self) -> None:
        self._storage = StudyStorage(self._log)
        name = self._storage.get_all_studies()[0].study_name
        self._study = _AskedStudy(name, self._storage, self._sampler, self._pruner)

    def _check(self, mode: str, metric: str | None) -> None:
        attributes = self._study.user_attrs
        changed = differences(attributes.get(_SPACE, {}), self.space.to_plain())
        if changed:
            raise UsageError(
                f"the study {self.folder} has another search space: {changed}",
                remedy="resume it with its own search space, or begin another study",
            )
        before = "max" if self._study.direction == optuna.study.StudyDirection.MAXIMIZE else "min"
        if (before, attributes.get(_METRIC)) != (mode, metric):
            raise UsageError(
                f"the study {self.folder} has mode={before!r} and metric={attributes.get(_METRIC)!r}, not "
                f"{mode!r} and {metric!r}",
                remedy="resume it with its own, or begin another study",
            )

        if waiting := [trial.number for trial in self._trials if trial.state == TrialState.WAITING]:
            raise UsageError(
                f"trial {waiting[0]} of the study {self.folder} was enqueued by Optuna and not run yet",
                remedy="have Optuna run it (study.optimize), and resume the search then",
            )

    def _save_state(self, number: int, before: dict[str, Any], after: dict[str, Any]) -> None:
        state = {"sampler": _kind(self._sampler), "trial": number, "before": before, "after": after}
        atomic_file.replace_file(self.folder / _SAMPLER_FILE, json.dumps(state).encode())

    def _continue_generators(self, number: int) -> str:
        """Set the generators to the state in which trial `number` is to be asked for."""
        try:
            saved = json.loads((self.folder / _SAMPLER_FILE).read_bytes())
            if saved["sampler"] != _kind(self._sampler):
                return ""  # another sampler begins
            states = {saved["trial"]: saved["before"], saved["trial"] + 1: saved["after"]}
        except (OSError, ValueError, TypeError, KeyError):
            states = {}
        if number in states:
            sampler_state.restore(self._sampler, states[number])
        elif number:
            # A power cut may take the file, which is not flushed for each trial. From its seed the sampler
            # would ask for the first trials again.
            self._sampler.reseed_rng()
            return (
                f"{self.folder / _SAMPLER_FILE} is not that of trial {number}: the sampler continues with "
                "random numbers of its own, and not with those of the seed"
            )
        return ""


@final
class StoredStudy:
    """A study as its file holds it; nothing is locked or changed."""

    def __init__(self, folder: Path) -> None:
        if not (folder / LOG_FILE).is_file():
            raise UsageError(
                f"there is no study in {folder}", remedy="give a study's folder, or its name below studies/"
            )
        storage = JournalStorage(ReadOnlyLog(folder / LOG_FILE))
        studies = storage.get_all_studies()
        if not studies:
            raise UsageError(f"the study in {folder} has not begun", remedy="start it")
        (study, *_) = studies
        self.folder = folder
        self.mode = "max" if study.direction == optuna.study.StudyDirection.MAXIMIZE else "min"
        self.metric: str | None = study.user_attrs.get(_METRIC)
        self.trials = [record_of(trial) for trial in storage.get_all_trials(study._study_id)]

    @property
    def is_running(self) -> bool:
        """Whether a process continues it now."""
        from paceline.train.state.run_lock import is_held

        return is_held(self.folder / ".lock")


def record_of(trial: FrozenTrial, decode: ParameterDecoder | None = None) -> TrialRecord:
    """Return Optuna's trial as a record; without `decode`, values that JSON does not have are their texts."""
    parent = trial.system_attrs.get(PARENT)
    return TrialRecord(
        number=trial.number,
        params=decode(trial.params) if decode is not None else dict(trial.params),
        state=_STATES[trial.state],
        value=trial.value,
        error=str(trial.user_attrs.get(_ERROR, "")),
        reports=dict(sorted(trial.intermediate_values.items())),
        seconds=_seconds_of(trial),
        parent=None if parent is None else int(parent),
    )


def _seconds_of(trial: FrozenTrial) -> float | None:
    """Return what the trial's last attempt took. Optuna's own duration, of studies that others wrote, counts
    from when the trial was asked for, which may be days before."""
    if _SECONDS in trial.user_attrs:
        return float(trial.user_attrs[_SECONDS])
    return None if trial.duration is None else trial.duration.total_seconds()


def _kind(sampler: BaseSampler) -> str:
    return f"{type(sampler).__module__}.{type(sampler).__qualname__}"


def _as_running(trial: FrozenTrial) -> FrozenTrial:
    return FrozenTrial(
        number=trial.number,
        state=TrialState.RUNNING,
        value=None,
        datetime_start=trial.datetime_start,
        datetime_complete=None,
        params=trial.params,
        distributions=trial.distributions,
        user_attrs={},
        system_attrs=trial.system_attrs,
        intermediate_values={},
        trial_id=trial._trial_id,
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """Have Optuna not announce a study with an internal name."""
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        yield
    finally:
        optuna.logging.set_verbosity(before)
