"""Observers and modifiers: told apart, called in order, named when they fail, saved and loaded."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

from paceline.core.errors import PeerLostError, UsageError
from paceline.train import callbacks as module
from paceline.train.callbacks import Callbacks, Modifier, Observer, RunInfo, SavedCheckpoint
from paceline.train.history import EpochRecord, Evaluation, History, StepRecord
from paceline.train.settings.train_config import TrainConfig

RUN = RunInfo(config=TrainConfig(), workers=1)
STEP = StepRecord(step=3, epoch=0, loss=1.0, samples=8, seconds=2.5)
EVALUATION = Evaluation(step=3, epoch=0, metrics={"loss": 1.0})
EPOCH = EpochRecord(epoch=0, steps=3, samples=24, loss=1.0)
SAVED = SavedCheckpoint(version=1, step=3, epoch=0)
HISTORY = History(total_time=1.0, state_hash="00")


class Watching(Observer):
    def __init__(self, seen, name="a"):
        self.seen, self.name = seen, name

    def on_start(self, run):
        self.seen.append((self.name, "start", run))

    def on_step(self, record):
        self.seen.append((self.name, "step", record))

    def on_evaluation(self, evaluation):
        self.seen.append((self.name, "evaluation", evaluation))

    def on_epoch(self, record):
        self.seen.append((self.name, "epoch", record))

    def on_checkpoint(self, saved):
        self.seen.append((self.name, "checkpoint", saved))

    def on_end(self, history):
        self.seen.append((self.name, "end", history))


class Adding(Modifier):
    def __init__(self, amount):
        self.amount, self.calls = amount, 0

    def change_batch(self, batch):
        self.calls += 1
        return [value + self.amount for value in batch]

    def change_gradients(self, parameters):
        for name in parameters:
            parameters[name].append(self.amount)

    def state_dict(self):
        return {"calls": self.calls}

    def load_state_dict(self, state):
        self.calls = state["calls"]


class StopsAt(Modifier):
    def __init__(self, step):
        self.step, self.seen = step, []

    def stop(self, record):
        self.seen.append(record)
        return f"step {record.step} is enough" if record.step >= self.step else None


def test_observers_see_every_hook_in_the_order_of_the_list():
    seen: list = []
    both = Callbacks([Watching(seen, "a"), Watching(seen, "b")])
    calls: list[tuple[Any, Any]] = [
        (Observer.on_start, RUN),
        (Observer.on_step, STEP),
        (Observer.on_evaluation, EVALUATION),
        (Observer.on_epoch, EPOCH),
        (Observer.on_checkpoint, SAVED),
        (Observer.on_end, HISTORY),
    ]
    for hook, argument in calls:
        both.notify(hook, argument)
    assert [(name, what) for _, name, what in seen][:4] == [("start", RUN)] * 2 + [("step", STEP)] * 2
    assert [who for who, *_ in seen] == ["a", "b"] * 6


def test_an_observer_that_overrides_nothing_is_fine():
    plain = Callbacks([Observer(), Modifier()])
    plain.notify(Observer.on_start, RUN)
    plain.notify(Observer.on_step, STEP)
    plain.notify(Observer.on_end, HISTORY)
    assert plain.change_batch([1]) == [1]
    assert plain.stop(STEP) is None
    assert not plain.changes_gradients
    assert plain.state_dict() == {}


def test_modifiers_build_on_each_other_in_order():
    gradients: dict = {"w": []}
    both = Callbacks([Adding(1), Adding(10)])
    assert both.change_batch([0]) == [11]
    both.change_gradients(gradients)
    assert gradients == {"w": [1, 10]}
    assert both.changes_gradients


def test_the_first_reason_ends_the_run_and_all_are_asked_without_times():
    first, second = StopsAt(3), StopsAt(2)
    both = Callbacks([first, second])
    assert both.may_stop
    assert both.stop(StepRecord(step=1, epoch=0, loss=1.0, samples=1)) is None
    assert both.stop(STEP) == "StopsAt: step 3 is enough"
    assert len(first.seen) == len(second.seen) == 2
    assert second.seen[-1].seconds == 0.0


def test_states_go_through_a_checkpoint():
    before = Callbacks([Adding(1), StopsAt(2), Adding(2)])
    before.change_batch([0])
    after = Callbacks([Adding(1), StopsAt(2), Adding(2)])
    after.load_state_dict(before.state_dict())
    assert before.state_dict() == {"0:Adding": {"calls": 1}, "2:Adding": {"calls": 1}} == after.state_dict()
    with pytest.raises(
        UsageError, match=r"holds the state of 2:Adding, and the modifiers of this run are 0:Adding"
    ):
        Callbacks([Adding(1)]).load_state_dict(before.state_dict())


@pytest.mark.parametrize(
    "hook", ["on_start", "on_step", "on_evaluation", "on_epoch", "on_checkpoint", "on_end"]
)
def test_an_observer_that_raises_is_named_with_its_hook(hook):
    def fail(self, argument):
        raise KeyError("nothing here")

    broken = type("Broken", (Observer,), {hook: fail})()
    argument = {"on_start": RUN, "on_end": HISTORY, "on_epoch": EPOCH}.get(hook, STEP)
    with pytest.raises(UsageError, match=f"the observer Broken raised KeyError in {hook}") as raised:
        Callbacks([broken]).notify(getattr(Observer, hook), argument)
    assert isinstance(raised.value.__cause__, KeyError)
    assert f"fix Broken.{hook}" in raised.value.remedy


def test_a_lost_rank_is_no_mistake_of_a_modifier_that_may_communicate():
    class Lonely(Modifier):
        def change_gradients(self, parameters):
            raise PeerLostError("rank 1 was lost", rank=1)

        def stop(self, record):
            raise PeerLostError("rank 1 was lost", rank=1)

    lonely = Callbacks([Lonely()])
    with pytest.raises(PeerLostError):
        lonely.change_gradients({})
    with pytest.raises(UsageError, match="modifier Lonely raised PeerLostError in stop at step 3") as raised:
        lonely.stop(STEP)
    assert "communicate in change_gradients alone" in raised.value.remedy


def test_a_modifier_that_raises_is_named_and_interrupts_pass_through():
    class Broken(Modifier):
        def stop(self, record):
            raise ZeroDivisionError

    with pytest.raises(UsageError, match=r"the modifier Broken raised ZeroDivisionError in stop at step 3"):
        Callbacks([Broken()]).stop(STEP)

    class Interrupted(Observer):
        def on_step(self, record):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Callbacks([Interrupted()]).notify(Observer.on_step, STEP)


@pytest.mark.parametrize(
    ("method", "value", "message"),
    [("change_batch", None, "returned None instead of a batch"), ("stop", True, "a reason is text")],
)
def test_a_wrong_answer_of_a_modifier_is_refused(method, value, message):
    wrong = type("Wrong", (Modifier,), {method: lambda self, argument: value})()
    with pytest.raises(UsageError, match=message):
        getattr(Callbacks([wrong]), method)(STEP)


class Both(Observer, Modifier):
    pass


class Typo(Observer):
    def on_epoch_end(self, record):
        pass


class Misplaced(Observer):
    def change_gradients(self, parameters):
        pass


class MisplacedHook(Modifier):
    def on_step(self, record):
        pass


@pytest.mark.parametrize(
    ("item", "message", "remedy"),
    [
        (print, "neither an Observer nor a Modifier", "paceline.Observer"),
        (Observer, "the class Observer itself", "give Observer()"),
        (Both(), "both an Observer and a Modifier", "split it"),
        (Typo(), "Typo.on_epoch_end would never be called", "did you mean on_epoch"),
        (Misplaced(), "Misplaced.change_gradients would never be called", "paceline.Modifier"),
        (MisplacedHook(), "MisplacedHook.on_step would never be called", "paceline.Observer"),
    ],
)
def test_what_would_never_be_called_is_refused(item, message, remedy):
    with pytest.raises(UsageError, match=message) as raised:
        Callbacks([item])
    assert remedy in raised.value.remedy


def test_every_hook_stands_in_the_pseudocode():
    text = inspect.getdoc(module) or ""
    hooks = [name for name in vars(Observer) if name.startswith("on_")]
    for hook in [*hooks, "change_batch", "change_gradients", "stop"]:
        assert f"{hook}(" in text


def test_the_documentation_shows_the_same_pseudocode():
    text = inspect.getdoc(module) or ""
    loop = text[text.index("    * observers: on_start") : text.index("An observer is called")].rstrip()
    page = Path(__file__).parents[2] / "docs" / "callbacks.md"
    assert loop in page.read_text(encoding="utf-8")
