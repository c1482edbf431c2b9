"""Code of the user's own inside the loop: observers watch, modifiers take part.

The loop, with its hook points (marked `*`):

    * observers: on_start(run)
    * observers: on_workers(workers)                                    # whenever their number has changed
      for each epoch:
          for each step:
              for each shard of this rank:                              # seeded by (seed, epoch, step, shard)
                  for each micro batch of the shard:
    *                 batch = modifiers: change_batch(batch)            # the rank that runs the shard
                      loss = objective(model, batch, step); backward
              gradients = canonical sum over all shards, averaged       # the same bits on every rank
              not finite, with nonfinite="skip": no weight or buffer changes
              unscale (fp16); on overflow no weight changes
    *         modifiers: change_gradients(parameters)                   # every rank, not if it is skipped
              clip to clip_norm; schedule; optimizer.step()             # the one whose turn it is, or all
    *         modifiers: after_update(parameters, step)                 # every rank, not if it is skipped
              scheduler.step(), by step, unless it was skipped
              the step is committed
    *         observers: on_step(record)
    *         reason = modifiers: stop(record)                          # every rank; a reason ends the run
    *         observers: on_checkpoint(saved)                           # when one became durable
              evaluate, every evaluate_every steps:
    *             weights = modifiers: evaluation_weights()             # None: the model's own
    *             observers: on_evaluation(evaluation)
              begin a checkpoint in the background, every checkpoint.every_steps steps
          evaluate, if evaluate_every is not set:
    *         observers: on_evaluation(evaluation)
    *     observers: on_epoch(record)
          scheduler.step(), by epoch
          begin a checkpoint in the background, every checkpoint.every_epochs epochs (or as "auto" has it)
    * observers: on_end(history)                                        # also when stopped early
    * observers: on_failure(error)                                      # instead of on_end
    * observers: on_metric(metric)                                      # whenever metrics.report was called

An observer is called in one process only and is given frozen records, so it has nothing to change: in that of
the caller, a little behind, under a supervisor; else on the first rank. A modifier is
called on every rank and must do the same on each: it may depend on its arguments, its own state and the
seeded generators, never on time, rank or files. Its state is saved with every checkpoint. Imports no torch.
"""

from __future__ import annotations

import difflib
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, final

from paceline.core.errors import GROUP_FAILURES, UsageError
from paceline.core.events import MetricReported
from paceline.core.wording import with_article
from paceline.train.history import EpochRecord, Evaluation, EventView, History, StepRecord
from paceline.train.settings.train_config import TrainConfig
from paceline.train.step_info import StepInfo

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Parameter


@final
@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """A run that is about to start; `first_step` is more than 0 for one that resumes from a checkpoint.

    `total_steps` and `samples` are None where they cannot be known (iterable datasets, dynamic batches).
    """

    config: TrainConfig
    workers: int
    total_steps: int | None = None
    samples: int | None = None
    first_step: int = 0
    first_epoch: int = 0
    run_dir: str | None = None
    device: str = "cpu"


@final
@dataclass(frozen=True, kw_only=True)
class SavedCheckpoint(EventView):
    """A checkpoint that is durable; `seconds` is the time it took in the background."""

    version: int
    step: int
    epoch: int
    bytes: int = 0
    seconds: float = math.nan
    url: str = ""


class Observer:
    """Watches a run, in one process. Override what is of interest; nothing given here can be changed."""

    def grad_norm_every(self, config: TrainConfig) -> int:
        """Return in every how many steps the record shall have the gradient's norm; 0: as `log_grad_norm` in
        the config has it."""
        return 0

    def on_start(self, run: RunInfo) -> None:
        """Handle the start of the run, before its first step."""

    def on_workers(self, workers: int) -> None:
        """Handle another number of training workers: some joined, left or were lost."""

    def on_step(self, record: StepRecord) -> None:
        """Handle a committed step."""

    def on_evaluation(self, evaluation: Evaluation) -> None:
        """Handle a pass over the validation data, after it."""

    def on_epoch(self, record: EpochRecord) -> None:
        """Handle the end of an epoch, after its evaluation."""

    def on_checkpoint(self, saved: SavedCheckpoint) -> None:
        """Handle a checkpoint that has become durable."""

    def on_end(self, history: History) -> None:
        """Handle the end of the run, also when it was stopped; not when it failed."""

    def on_failure(self, error: BaseException | None) -> None:
        """Handle a run that ended without `on_end`, after `on_start`. What is raised here is only logged."""

    def on_metric(self, metric: MetricReported) -> None:
        """Handle a number that the user's code reported on some rank, with `paceline.metrics.report`."""


class Modifier:
    """Takes part in training on every rank, and does the same on each of them."""

    def change_batch(self, batch: Any) -> Any:
        """Return the micro batch that the objective gets."""
        return batch

    def change_gradients(self, parameters: Mapping[str, Parameter]) -> None:
        """Change `.grad` of parameters in place: averaged over the global batch, before clipping.

        The one hook that may communicate with the other ranks (`paceline.all_gather(...)`), on all of them
        alike. Where one of them is lost meanwhile, it is called again for the same step, with the state that
        this modifier had before it.
        """

    def after_update(self, parameters: Mapping[str, Parameter], step: StepInfo) -> None:
        """Look at the parameters after an update, the `step.step + 1`th of the run, and move what this
        modifier keeps. Do not change the parameters here: the step is decided."""

    def evaluation_weights(self) -> Mapping[str, Tensor] | None:
        """Return weights by parameter name that an evaluation uses in place of the model's, or None."""
        return None

    def stop(self, record: StepRecord) -> str | None:
        """Return a reason to end the run after this step, or None. `record.seconds` is 0 here."""
        return None

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint must keep: data for JSON, tensors, arrays of numbers, lists and dicts of
        them. Anything else is refused after the first step."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""


T = TypeVar("T")
_log = logging.getLogger(__name__)

_inside: ContextVar[bool] = ContextVar("paceline_inside_a_run", default=False)
_OBSERVER_HOOKS = tuple(name for name in vars(Observer) if name.startswith("on_"))
_MODIFIER_HOOKS = tuple(name for name in vars(Modifier) if not name.startswith("_"))
# Whatever comes of it can be undone: see state/repeatable_changes.py.
_MAY_COMMUNICATE = "change_gradients"


def as_list(callbacks: Iterable[Observer | Modifier]) -> tuple[Observer | Modifier, ...]:
    """Return the callbacks of a trainer; refuse one that is not in a list."""
    if not isinstance(callbacks, Iterable):
        raise UsageError(
            f"callbacks is {with_article(callbacks)}", remedy="give a list, also of one: callbacks=[...]"
        )
    return tuple(callbacks)


@final
class Callbacks:
    """Observers and modifiers, separated; each kind is called in the order of the list."""

    def __init__(self, callbacks: Iterable[Observer | Modifier] = ()) -> None:
        items = list(callbacks)
        for index, item in enumerate(items):
            _check(item, index)
        self.observers = [item for item in items if isinstance(item, Observer)]
        self.modifiers = [item for item in items if isinstance(item, Modifier)]
        # Called for every micro batch and step: those that change nothing are not asked.
        self._batch_changers = [item for item in self.modifiers if _overrides(item, "change_batch")]
        self._gradient_changers = [item for item in self.modifiers if _overrides(item, "change_gradients")]
        self._followers = [item for item in self.modifiers if _overrides(item, "after_update")]
        self._stoppers = [item for item in self.modifiers if _overrides(item, "stop")]
        self.may_stop, self.changes_gradients = bool(self._stoppers), bool(self._gradient_changers)
        # Averages say beforehand that evaluations are to use them: refused before anything is trained.
        _check_one_evaluates([item for item in self.modifiers if getattr(item, "evaluate", None) is True])

    def notify(self, hook: Callable[[Observer, T], None], record: T) -> None:
        """Call one hook of every observer: `notify(Observer.on_step, record)`."""
        for observer in self.observers:
            _call(observer, hook.__name__, record)

    def failed(self, error: BaseException | None) -> None:
        """Call `on_failure` of every observer. The error that ended the run is the one to show: what an
        observer raises is logged."""
        for observer in self.observers:
            try:
                observer.on_failure(error)
            except Exception as another:
                _log.warning("the observer %s raised in on_failure: %r", _name(observer), another)

    def change_batch(self, batch: Any) -> Any:
        for modifier in self._batch_changers:
            batch = _call(modifier, "change_batch", batch)
            if batch is None:
                raise UsageError(
                    f"{_name(modifier)}.change_batch returned None instead of a batch",
                    remedy="return the batch, also when it was changed in place",
                )
        return batch

    def change_gradients(self, parameters: Mapping[str, Parameter]) -> None:
        for modifier in self._gradient_changers:
            _call(modifier, "change_gradients", parameters)

    def after_update(self, parameters: Mapping[str, Parameter], step: StepInfo) -> None:
        for modifier in self._followers:
            _call(modifier, "after_update", parameters, step)

    def evaluation_weights(self) -> Mapping[str, Tensor] | None:
        """Return the weights of the one modifier that has some for evaluations."""
        given = [(item, _call(item, "evaluation_weights")) for item in self.modifiers]
        given = [(item, weights) for item, weights in given if weights is not None]
        _check_one_evaluates([item for item, _ in given])
        return given[0][1] if given else None

    def stop(self, record: StepRecord) -> str | None:
        """Return the first modifier's reason. All are asked, so that their states stay equal on every
        rank."""
        timeless = record.timeless()
        answers = [(modifier, _call(modifier, "stop", timeless)) for modifier in self._stoppers]
        for modifier, reason in answers:
            if reason is not None and not (isinstance(reason, str) and reason):
                raise UsageError(
                    f"{_name(modifier)}.stop returned {reason!r}; a reason is text, or None to continue",
                    remedy='return a sentence such as "the loss is low enough", or None',
                )
        return next((f"{_name(modifier)}: {reason}" for modifier, reason in answers if reason), None)

    def state_dict(self, *, of_gradient_changers: bool = False) -> dict[str, Any]:
        """Return the modifiers' states by position and class, or those of modifiers that change gradients;
        empty ones are left out."""
        chosen = self._gradient_changers if of_gradient_changers else self.modifiers
        states = {_key(self.modifiers.index(item), item): _call(item, "state_dict") for item in chosen}
        return {key: state for key, state in states.items() if state}

    def load_state_dict(self, states: Mapping[str, Any]) -> None:
        """Restore the state of every modifier; refuse a state that belongs to none of them."""
        known = {_key(i, item): item for i, item in enumerate(self.modifiers)}
        unknown = sorted(set(states) - set(known))
        if unknown:
            raise UsageError(
                f"the checkpoint holds the state of {', '.join(unknown)}, and the modifiers of this run are "
                f"{', '.join(known) or 'none'}",
                remedy="resume with the modifiers that the run was started with, in the same order",
            )
        for key, item in known.items():
            if key in states:
                _call(item, "load_state_dict", states[key])


def _check(item: object, index: int) -> None:
    if isinstance(item, type):
        raise UsageError(
            f"callbacks[{index}] is the class {item.__name__} itself, not an object of it",
            remedy=f"give {item.__name__}()",
        )
    watches, takes_part = isinstance(item, Observer), isinstance(item, Modifier)
    if watches and takes_part:
        raise UsageError(
            f"callbacks[{index}], {_name(item)}, is both an Observer and a Modifier: one is called in "
            "one process only and the other on every rank",
            remedy="split it into two classes",
        )
    if not watches and not takes_part:
        raise UsageError(
            f"callbacks[{index}] is a {_name(item)}, neither an Observer nor a Modifier",
            remedy="derive it from paceline.Observer to watch or from paceline.Modifier to change training",
        )
    hooks, others = (_OBSERVER_HOOKS, _MODIFIER_HOOKS) if watches else (_MODIFIER_HOOKS, _OBSERVER_HOOKS)
    # State of an observer's own is its own business; only what the loop would be expected to call is checked.
    foreign = set(others) - {"state_dict", "load_state_dict"}
    for name in dir(type(item)):
        if name in hooks or not (name.startswith("on_") or name in foreign):
            continue
        kind, other = ("observer", "Modifier") if watches else ("modifier", "Observer")
        remedy = f"derive it from paceline.{other}, or rename the method"
        if name not in foreign:
            near = difflib.get_close_matches(name, hooks, n=1, cutoff=0.4)
            remedy = (f"did you mean {near[0]}? " if near else "") + f"the hooks are {', '.join(hooks)}"
        raise UsageError(
            f"{_name(item)}.{name} would never be called: it is no hook of an {kind}", remedy=remedy
        )


def _call(item: Observer | Modifier, hook: str, *arguments: Any) -> Any:
    try:
        return getattr(item, hook)(*arguments)
    except Exception as error:
        remedy = f"fix {_name(item)}.{hook}, or leave this callback out"
        if isinstance(error, GROUP_FAILURES) and isinstance(item, Modifier):
            if hook == _MAY_COMMUNICATE:
                raise  # not this modifier's mistake: the group is repaired, and the step done again
            remedy = f"communicate in {_MAY_COMMUNICATE} alone, which is called again when a rank is lost"
        kind = "observer" if isinstance(item, Observer) else "modifier"
        first = arguments[0] if arguments else None
        at = f" at step {first.step}" if isinstance(first, StepRecord | Evaluation | SavedCheckpoint) else ""
        raise UsageError(
            f"the {kind} {_name(item)} raised {type(error).__name__} in {hook}{at}: {error}",
            remedy=remedy,
        ) from error


def _overrides(item: Modifier, hook: str) -> bool:
    return getattr(type(item), hook) is not getattr(Modifier, hook)


def _check_one_evaluates(modifiers: Sequence[Modifier]) -> None:
    """Refuse several modifiers with weights for evaluations."""
    if len(modifiers) > 1:
        raise UsageError(
            f"{' and '.join(map(_name, modifiers))} both give weights to evaluate with",
            remedy="leave evaluate=True to one of them",
        )


def _name(item: object) -> str:
    return type(item).__name__


def _key(index: int, item: Modifier) -> str:
    return f"{index}:{_name(item)}"


# no run inside of a run


@contextmanager
def inside_a_run() -> Iterator[None]:
    """Mark that this thread runs the user's code (objective, model, data, modifiers) on a worker."""
    token = _inside.set(True)
    try:
        yield
    finally:
        _inside.reset(token)


def refuse_inside(what: str) -> None:
    """Refuse a call that would begin a run inside of another."""
    if _inside.get():
        raise UsageError(
            f"{what} was called inside a run: in an objective, a model's forward, a dataset or a modifier, "
            "which run on its workers",
            remedy="call it before or after fit; to watch a run while it trains give fit validation data, or "
            "an Observer, which runs in the process that called fit",
        )
