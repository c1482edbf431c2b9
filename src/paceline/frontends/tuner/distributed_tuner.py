"""`DistributedTuner`: search for good parameters with many trials at once; a failure leaves no trace."""

from __future__ import annotations

import os
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, final

from paceline.core.available_resources import cores, visible_gpus
from paceline.core.errors import ConfigError, RankFailedError, UnavailableError, UsageError
from paceline.core.wording import counted, with_article
from paceline.frontends.error_folding import folding_errors
from paceline.frontends.tuner import trial_slots, trial_table
from paceline.frontends.tuner.search_loop import SearchLoop
from paceline.frontends.tuner.trial_engine import TrialCall, TrialEngine
from paceline.frontends.tuner.trial_record import TrialRecord, best_of
from paceline.frontends.tuner.trial_schedule import TrialSchedule

if TYPE_CHECKING:
    from optuna.pruners import BasePruner
    from optuna.samplers import BaseSampler

    from paceline.frontends.tuner.tuning_study import TuningStudy

STUDIES: Final = "studies"
_ENGINES: Final = ("local", "ray")


@final
@dataclass
class DistributedTuner:
    """A search for the parameters with which `train_fn` does best.

        tuner = paceline.DistributedTuner(train, {"lr": paceline.tune.loguniform(1e-4, 1e-1)}, num_gpus=4)
        best = tuner.tune(num_samples=100)

    train_fn        called with a dict of parameters in a process of its own; returns a number, or a dict with
                    `metric`, or None after `paceline.tune.report(step, value)`
    search_space    parameters by name: paceline.tune.choice, uniform, loguniform, randint, a list, Optuna's
                    distributions, objects of ray.tune
    num_gpus        GPUs to use (None: all); without a GPU, trials at once on the CPU (None: one per core)
    trials_per_gpu  num_gpus x trials_per_gpu trials run at once; 0.5: a trial has two GPUs
    sampler         "tpe" (None), "random", "grid", "qmc", "cmaes", "gp", one of Optuna's, or
                    paceline.tune.PopulationTraining
    pruner          "asha", "median", "hyperband", one of Optuna's, or None: no trial is pruned
    study           name below studies/, or a folder; None: a new one
    seed            of the sampler. With one, trials are drawn from the results of the trials up to a fixed
                    number before them, so that the same are asked for whichever was faster; in_order=False
                    has a free slot never wait for that
    engine          "local", "ray" or paceline.Ray(address=..., runtime_env=..., autoscales=...)
    ray_address     "auto", "ray://HOST:10001" or "HOST:6379"; None: a local cluster that ends with the
                    search. A process that is connected to Ray already stays connected to that
    max_attempts    a trial whose process is killed so often is recorded as failed
    preload         modules that are imported once, ahead of all trials; not on Ray
    """

    train_fn: Callable[[dict[str, Any]], Any]
    search_space: Mapping[str, Any]
    num_gpus: int | None = None
    trials_per_gpu: float = 1
    metric: str | None = None
    mode: str = "max"
    sampler: Any = None
    pruner: Any = None
    study: str | os.PathLike[str] | None = None
    seed: int | None = None
    engine: Any = "local"
    ray_address: str | None = None
    in_order: bool | None = None
    max_attempts: int = 3
    preload: Sequence[str] = ()
    verbose: bool = True
    _trials: list[TrialRecord] = field(init=False, repr=False, default_factory=list)
    _folder: Path | None = field(init=False, repr=False, default=None)
    _total: int = field(init=False, repr=False, default=0)

    def __post_init__(self) -> None:
        if not callable(self.train_fn):
            raise ConfigError(
                f"train_fn is {with_article(self.train_fn)}, which cannot be called",
                remedy="give the function itself: DistributedTuner(train, ...)",
                key="train_fn",
            )
        if self.mode not in ("max", "min"):
            raise ConfigError(
                f"mode={self.mode!r}", remedy='give mode="max" (more is better) or mode="min"', key="mode"
            )
        if self.metric is not None and (not isinstance(self.metric, str) or not self.metric):
            raise ConfigError(f"metric={self.metric!r}", remedy="name a key of what train_fn returns")
        if self.seed is not None and (
            isinstance(self.seed, bool) or not isinstance(self.seed, int) or self.seed < 0
        ):
            raise ConfigError(
                f"seed={self.seed!r}", remedy="give a whole number from 0 up, or None", key="seed"
            )
        if (
            isinstance(self.max_attempts, bool)
            or not isinstance(self.max_attempts, int)
            or self.max_attempts < 1
        ):
            raise ConfigError(
                f"max_attempts={self.max_attempts!r}", remedy="give 1 or more", key="max_attempts"
            )
        if isinstance(self.preload, str):
            raise ConfigError(f"preload={self.preload!r}", remedy='write preload=("name",)', key="preload")
        if self._engine_name not in _ENGINES:
            raise ConfigError(
                f"engine={self.engine!r}",
                remedy="trials run on the engines 'local' and 'ray'; a trial itself may use others",
                key="engine",
            )
        if self.ray_address is not None and self._engine_name != "ray":
            raise ConfigError(
                f"ray_address={self.ray_address!r} (--address) means nothing to the engine "
                f"{self._engine_name!r}",
                remedy='add engine="ray" (--engine ray), or leave it out',
                key="ray_address",
            )
        if self.num_gpus is not None:
            trial_slots.slots_at_once(self.num_gpus, self.trials_per_gpu)

    @folding_errors
    def tune(self, num_samples: int = 100, *, resume: bool = False) -> dict[str, Any]:
        """Run trials until the study has `num_samples` of them, and return the best parameters.

        `resume=True` continues a study that was begun before, by this process or by one that was killed:
        trials that are over are kept, those that were under way are repeated, the rest is asked for.
        """
        if isinstance(num_samples, bool) or not isinstance(num_samples, int) or num_samples < 1:
            raise UsageError(f"num_samples={num_samples!r}", remedy="ask for at least 1 trial")
        require_optuna()
        from paceline.frontends.tuner import sampler_choice
        from paceline.frontends.tuner.search_space import SearchSpace
        from paceline.frontends.tuner.tuning_study import TuningStudy

        space = SearchSpace.of(self.search_space)
        sampler = sampler_choice.choose_sampler(self.sampler, space, self.seed, self.mode)
        pruner = sampler_choice.choose_pruner(self.pruner)
        # A second call of one tuner goes on with its study.
        again = self._folder is not None
        folder = self._folder or study_folder(self.study)
        study = TuningStudy(folder, space, self.mode, self.metric, resume=resume or again)
        self._folder = folder
        with closing(study):
            self._total = num_samples
            self._trials = study.records()
            try:
                self._search(study, sampler, pruner, num_samples)
            finally:
                self._trials = study.records()
        return self.best_params

    @property
    def folder(self) -> Path | None:
        """The folder of the study; None before it has begun."""
        return self._folder

    @property
    def trials(self) -> list[TrialRecord]:
        """All trials of the study, by number: number, params, value, state, error."""
        return list(self._trials)

    @property
    def best_trial(self) -> TrialRecord:
        """The best complete trial."""
        best = best_of(self._trials, self.mode)
        if best is not None:
            return best
        if not self._trials:
            raise UsageError("there are no trials yet", remedy="call tune() first")
        failed = next((trial for trial in self._trials if trial.error), None)
        raise RankFailedError(
            f"none of {counted(len(self._trials), 'trial')} has a value"
            + ("" if failed is None else f"; trial {failed.number} failed:"),
            traceback_text="" if failed is None else failed.error,
            remedy=f"the output of each trial is below {self._folder}",
        )

    @property
    def best_params(self) -> dict[str, Any]:
        """The parameters of the best trial."""
        return dict(self.best_trial.params)

    @property
    def best_value(self) -> float:
        """The value of the best trial."""
        value = self.best_trial.value
        assert value is not None
        return value

    def table(self) -> str:
        """Return the trials as a table."""
        return trial_table.table(self._trials, self.mode, self.metric)

    def plot(self, path: str | os.PathLike[str]) -> Path:
        """Draw the values of the trials and their reports; PNG, SVG or PDF by the suffix."""
        return trial_table.plot(self._trials, self.mode, self.metric, Path(path))

    @property
    def _engine_name(self) -> str:
        """The engine by its name; paceline.Ray(...) and its like have one."""
        return str(self.engine if isinstance(self.engine, str) else getattr(self.engine, "name", self.engine))

    def _search(self, study: TuningStudy, sampler: BaseSampler, pruner: BasePruner, total: int) -> None:
        from paceline.frontends.tuner import sampler_choice

        if lost := study.use(sampler, pruner):
            self._say(lost)
        in_order = self.seed is not None if self.in_order is None else self.in_order
        answers = sampler_choice.prunes(pruner)
        call = TrialCall(self.train_fn, self.metric, study.space.decode, answers)
        with self._opened(call) as (engine, slots):
            schedule = TrialSchedule(
                total=min(total, sampler_choice.most_trials(sampler) or total),
                slots=slots,
                asked=study.asked,
                unfinished=study.unfinished,
                needs=sampler_choice.trials_needed(sampler, slots, in_order=in_order),
                max_attempts=self.max_attempts,
            )
            search = SearchLoop(
                study=study,
                engine=engine,
                schedule=schedule,
                answers=answers,
                sees_only_first=sampler_choice.sees_only_first(sampler, in_order=in_order),
                on_end=lambda number: self._say_end(study, number),
                on_loss=self._say_loss,
            )
            try:
                search.run()
            except KeyboardInterrupt:
                raise KeyboardInterrupt(
                    f"stopped; the study in {self._folder} goes on with tune(..., resume=True) or --resume"
                ) from None

    @contextmanager
    def _opened(self, call: TrialCall) -> Iterator[tuple[TrialEngine, int]]:
        """Open the engine; yield it and the number of trials that it runs at once."""
        if self._engine_name == "ray":
            from paceline.frontends.tuner.ray_trials import open_ray, settings_of

            settings = settings_of(self.engine, self.ray_address)
            if self.preload:
                self._say("preload has no effect on Ray, whose workers import what a trial imports")
            with open_ray(call, settings, self.num_gpus, self.trials_per_gpu, self._say) as (engine, slots):
                yield engine, slots
            return
        from paceline.frontends.tuner.local_trials import LocalTrials

        gpus = visible_gpus()
        number = self.num_gpus if self.num_gpus is not None else gpus or cores()
        slots_here = trial_slots.local_slots(
            number, self.trials_per_gpu, cores(), gpus, os.environ.get("CUDA_VISIBLE_DEVICES")
        )
        if sentence := trial_slots.describe_slots(number, len(slots_here), gpus):
            self._say(sentence)
        with closing(LocalTrials(call, slots_here, tuple(self.preload))) as trials:
            yield trials, len(slots_here)

    def _say_end(self, study: TuningStudy, number: int) -> None:
        self._trials = study.records()
        trial, best = self._trials[number], best_of(self._trials, self.mode)
        over = sum(one.is_over for one in self._trials)
        value = trial.state if trial.state == "failed" else trial_table.value_text(trial.value)
        if trial.state == "pruned":
            value += " pruned"
        so_far = "" if best is None else f", best {trial_table.value_text(best.value)} (trial {best.number})"
        self._say(
            f"{over}/{self._total} trial {number}: {value}{so_far}, {trial_table.params_text(trial.params)}"
        )

    def _say_loss(self, number: int, how: str) -> None:
        self._say(f"trial {number} is repeated: {how}")

    def _say(self, text: str) -> None:
        if self.verbose:
            print(text, file=sys.stderr, flush=True)


def study_folder(study: str | os.PathLike[str] | None) -> Path:
    """Return the folder of a study: a path, a name below studies/, or for None a new one there."""
    if study is None:
        return Path(STUDIES, f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}")
    text = os.fspath(study) if isinstance(study, str | os.PathLike) else ""
    if not isinstance(text, str) or not text.strip():
        raise ConfigError(
            f"study is {study!r}", remedy="give a name below studies/, or the path of a folder", key="study"
        )
    if "://" in text:
        raise ConfigError(
            f"study={text!r} is an address; a study is a folder, whose study.log Optuna's dashboard reads",
            remedy="give a name below studies/, or the path of a folder",
            key="study",
        )
    return Path(text) if os.sep in text or isinstance(study, os.PathLike) else Path(STUDIES, text)


def require_optuna() -> None:
    """Raise UnavailableError where Optuna is not installed."""
    try:
        import optuna as optuna
    except ImportError as error:
        raise UnavailableError(
            "trials are sampled by Optuna, which is not installed", remedy="pip install 'paceline[tune]'"
        ) from error
