"""Which duties are due between two steps, in which order, and what each of them does; without a run."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from paceline.core import events
from paceline.core.errors import UsageError
from paceline.data.batch_plan import DataPosition
from paceline.train.callbacks import Callbacks
from paceline.train.history import Evaluation
from paceline.train.loop.duties import Duties
from paceline.train.phases import Phases
from paceline.train.settings.train_config import TrainConfig
from paceline.train.state.duty_progress import Agenda, Duty
from paceline.train.state.recorder import PendingStep, Recorder
from paceline.train.state.schedulers import TorchSchedulers
from paceline.train.step.step_counters import ReducedStep
from paceline.train.step_info import StepInfo
from paceline.train.stop_signals import StopRequest


class NotedCheckpointer:
    """What was asked of a checkpointer; the attributes say what is due."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.begun_step = -1
        self.written = self.due_after_this_step = self.due_after_this_epoch = False
        self.recent = self.best = False
        self.checked: list[dict[str, float]] = []

    def all_written(self, written: int, failed: int) -> bool:
        return self.written

    def due_after_step(self, step: int) -> bool:
        return self.due_after_this_step

    def due_after_epoch(self, epochs: int) -> bool:
        return self.due_after_this_epoch

    def commit(self, written: int, failed: int) -> None:
        self.calls.append(("commit", written, failed))

    def drain(self) -> None:
        self.calls.append("drain")

    def save_again(self) -> None:
        self.calls.append("save again")

    def digests(self, contents: object) -> list[str]:
        return ["a", "b"]

    def begin(
        self, position: DataPosition, contents: object, metrics: dict[str, float], shares: list[str]
    ) -> None:
        self.calls.append(("begin", position.step, metrics, shares))

    def check_metric(self, metrics: dict[str, float]) -> None:
        self.checked.append(metrics)

    def is_recent(self) -> bool:
        return self.recent

    def is_best(self, evaluations: Sequence[Evaluation]) -> bool:
        return self.best

    def unsaved(self, step: int) -> str | None:
        return "the disk is full"


class Rank:
    """A rank at step 4 of epoch 1, with everything that duties touch."""

    def __init__(self, *, every: int | None = None, saves: bool = True) -> None:
        self.told: list[events.Event] = []
        self.compared: list[str] = []
        self.saver = NotedCheckpointer()
        self.evaluations = 0
        context = SimpleNamespace(
            world_size=1, all_gather=lambda value: [value], broadcast=lambda value: value
        )
        self.parts = SimpleNamespace(
            config=SimpleNamespace(
                evaluate_every=every,
                checkpoint=SimpleNamespace(at_end=True, every_epochs="auto", metric="loss"),
                epochs=None,
            ),
            checkpointer=self.saver if saves else None,
            recorder=Recorder(Callbacks([]), self.told.append, torch.device("cpu")),
            callbacks=Callbacks([]),
            phases=Phases(),
            team=SimpleNamespace(context=context),
            stop=StopRequest(),
            evaluate=self.evaluate,
            course=StepInfo(),
            schedulers=TorchSchedulers([], TrainConfig()),
            update=SimpleNamespace(watch=lambda: None),
            transaction=SimpleNamespace(trained={}),
            early=None,
        )
        self.state = SimpleNamespace(
            agenda=Agenda(),
            position=DataPosition(epoch=1, offset=12, step=4),
            ended=None,
            at_boundary=True,
            stopped_on_request=False,
            loop_left=False,
            evaluated_step=None,
            final_hashes=[],
            export=dict,
            weights_hash=lambda: "weights",
            step_to_restore=lambda: None,
        )
        replicas = SimpleNamespace(compare=lambda kind, digest: self.compared.append(kind))
        self.duties = Duties(cast(Any, self.parts), cast(Any, self.state), cast(Any, replicas))

    def evaluate(self, info: StepInfo) -> tuple[dict[str, float], int]:
        self.evaluations += 1
        assert info == StepInfo(step=4, epoch=1)
        return {"loss": 0.5}, 8

    def commit(self, step: int) -> None:
        event = events.StepCommitted(time=0.0, step=step, epoch=1, loss=0.0, samples=3)
        self.parts.recorder.commit(PendingStep(event, torch.tensor([2.0]), False, ()))

    @property
    def planned(self) -> list[Any]:
        return [Duty(name) if not numbers else (Duty(name), *numbers) for name, *numbers in self.plain]

    @property
    def plain(self) -> list[list[Any]]:
        agenda: list[list[Any]] = self.state.agenda.state_dict()["agenda"]
        return agenda


def reduced(stops: int = 0, written: int = 0, failed: int = 0) -> ReducedStep:
    made = SimpleNamespace(stops=stops, parts_written=written, parts_failed=failed)
    return cast(ReducedStep, made)


# the plan


def test_after_most_steps_nothing_is_due():
    rank = Rank(every=3)
    rank.state.agenda.add(Duty.SAVE)  # of the step before
    rank.duties.plan_after_step(reduced())
    assert rank.planned == []


def test_after_a_step_all_that_can_be_due_is_in_order():
    """The evaluation before the save, which keeps its metrics; the stop before it, too: the end saves."""
    rank = Rank(every=2)
    rank.saver.written = rank.saver.due_after_this_step = True
    rank.duties.plan_after_step(reduced(stops=1, written=2, failed=1))
    assert rank.planned == [(Duty.COMMIT_CHECKPOINT, 2, 1), Duty.EVALUATE, Duty.STOP, Duty.SAVE]


@pytest.mark.parametrize(("every", "evaluates"), [(None, [Duty.EVALUATE]), (2, [])])
def test_an_epoch_is_evaluated_unless_steps_are(every, evaluates):
    rank = Rank(every=every)
    rank.duties.plan_end_of_epoch()
    assert rank.planned == [*evaluates, Duty.CLOSE_EPOCH]


def test_an_epoch_is_saved_after_it_was_closed():
    rank = Rank(every=2)
    rank.saver.due_after_this_epoch = True
    rank.duties.plan_end_of_epoch()
    assert rank.planned == [Duty.CLOSE_EPOCH, Duty.SAVE_EPOCH]


def test_an_epoch_without_a_step_is_refused():
    rank = Rank()
    rank.state.position = DataPosition(epoch=1, step=4)
    with pytest.raises(UsageError, match="epoch 1 has no full step"):
        rank.duties.plan_end_of_epoch()


def test_a_run_ends_with_all_it_has():
    rank = Rank()
    rank.commit(4)
    rank.duties.plan_conclusion()
    assert rank.state.agenda.concluding
    assert rank.planned == [
        Duty.COMPARE_MODIFIERS,
        Duty.EVALUATE_AT_END,
        Duty.SAVE_LAST,
        Duty.DRAIN_CHECKPOINTS,
        Duty.CLOSE_LAST_EPOCH,
        Duty.COMPARE_WEIGHTS,
    ]


def test_a_run_that_is_stopped_saves_and_stays_in_its_epoch():
    rank = Rank()
    rank.commit(4)
    rank.parts.config.checkpoint.at_end = False
    rank.state.stopped_on_request = True
    rank.duties.plan_conclusion()
    assert rank.planned == [
        Duty.COMPARE_MODIFIERS,
        Duty.SAVE_LAST,
        Duty.DRAIN_CHECKPOINTS,
        Duty.COMPARE_WEIGHTS,
    ]


def test_a_loop_that_was_left_without_checkpoints_only_compares():
    rank = Rank(saves=False)
    rank.state.loop_left = True
    rank.duties.do(Duty.EVALUATE, ())
    rank.duties.plan_conclusion()
    assert rank.planned == [Duty.COMPARE_WEIGHTS]


# the table


@pytest.mark.parametrize("duty", Duty)
@pytest.mark.parametrize("saves", [True, False])
def test_every_duty_can_be_done(duty, saves):
    Rank(saves=saves).duties.do(duty, (2, 0) if duty is Duty.COMMIT_CHECKPOINT else ())


def test_a_commit_has_the_numbers_of_the_exchange():
    rank = Rank()
    rank.duties.do(Duty.COMMIT_CHECKPOINT, (2, 1))
    assert rank.saver.calls == [("commit", 2, 1)]


def test_a_step_is_evaluated_once():
    rank = Rank()
    rank.duties.do(Duty.EVALUATE, ())
    rank.duties.do(Duty.EVALUATE, ())
    rank.duties.do(Duty.EVALUATE_AT_END, ())
    assert rank.evaluations == 1
    assert rank.saver.checked == [{"loss": 0.5}]
    (event,) = rank.told
    assert isinstance(event, events.Evaluated)
    assert (event.step, event.epoch, event.samples, event.metrics) == (4, 1, 8, {"loss": 0.5})


def test_only_an_evaluation_of_the_plan_takes_part_in_early_stopping():
    """A longer run would not have the one at the end."""
    rank = Rank()
    seen: list[dict[str, float]] = []
    checked: list[dict[str, float]] = []

    def observe(metrics: dict[str, float]) -> str:
        seen.append(metrics)
        return "no longer better"

    rank.parts.early = SimpleNamespace(observe=observe, restores=False, check=checked.append)
    rank.duties.do(Duty.EVALUATE_AT_END, ())
    assert (seen, checked, rank.state.ended, rank.state.evaluated_step) == ([], [], None, None)
    rank.duties.do(Duty.EVALUATE, ())
    assert checked == [{"loss": 0.5}]
    assert (seen, rank.state.ended, rank.state.evaluated_step) == ([{"loss": 0.5}], "no longer better", 4)


@pytest.mark.parametrize(
    ("recent", "evaluated", "best", "every", "epochs", "saves"),
    [
        (False, True, False, "auto", None, True),
        (True, True, False, "auto", None, False),
        (True, True, True, "auto", None, True),
        (True, False, True, "auto", None, False),  # the best evaluation is not of these weights
        (True, True, False, 1, None, True),
        (True, True, False, "auto", 2, False),
        (True, True, False, "auto", 1, True),  # the last epoch
    ],
)
def test_an_epoch_that_ends_soon_after_a_version_gets_none(recent, evaluated, best, every, epochs, saves):
    rank = Rank()
    rank.saver.recent, rank.saver.best = recent, best
    rank.parts.config.checkpoint.every_epochs, rank.parts.config.epochs = every, epochs
    if evaluated:
        rank.duties.do(Duty.EVALUATE, ())
    rank.duties.do(Duty.SAVE_EPOCH, ())
    assert [call[0] for call in rank.saver.calls] == (["begin"] if saves else [])


def test_an_error_in_an_evaluation_says_where():
    rank = Rank()

    def broken(info: StepInfo) -> Any:
        raise ValueError("no such class")

    rank.parts.evaluate = broken
    with pytest.raises(ValueError, match="no such class") as caught:
        rank.duties.do(Duty.EVALUATE, ())
    assert caught.value.__notes__ == ["in the evaluation after step 4"]


def test_a_stop_ends_a_run_that_has_not_ended():
    rank = Rank()
    rank.parts.stop.ask("SIGTERM")
    rank.duties.do(Duty.STOP, ())
    assert (rank.state.ended, rank.state.stopped_on_request) == ("SIGTERM", True)
    ended = Rank()
    ended.state.ended = "early stopping"
    ended.duties.do(Duty.STOP, ())
    assert (ended.state.ended, ended.state.stopped_on_request) == ("early stopping", False)


def test_what_is_saved_was_compared_and_has_the_metrics_of_these_weights():
    rank = Rank()
    rank.commit(4)
    rank.duties.do(Duty.SAVE, ())
    assert rank.compared == ["saved"]
    assert rank.saver.calls == [("begin", 4, {"train_loss": 2.0}, ["a", "b"])]
    rank.duties.do(Duty.EVALUATE, ())
    rank.duties.do(Duty.SAVE, ())
    assert rank.saver.calls[-1] == ("begin", 4, {"loss": 0.5}, ["a", "b"])


def test_a_step_is_saved_once_and_only_at_the_end_of_a_run_that_ended():
    rank = Rank()
    rank.saver.begun_step = 4
    rank.duties.do(Duty.SAVE, ())
    assert rank.saver.calls == []
    rank.saver.begun_step, rank.state.ended = -1, "early stopping"
    rank.duties.do(Duty.SAVE, ())
    assert rank.saver.calls == []
    rank.duties.do(Duty.SAVE_LAST, ())
    assert [call[0] for call in rank.saver.calls] == ["begin"]


@pytest.mark.parametrize(
    ("due", "ended", "calls"),
    [(True, None, ["save again"]), (False, None, []), (True, "early stopping", [])],
)
def test_a_version_of_a_closed_epoch_is_another_one(due, ended, calls):
    rank = Rank()
    rank.saver.due_after_this_epoch, rank.state.ended = due, ended
    rank.duties.do(Duty.EVALUATE, ())
    rank.duties.do(Duty.CLOSE_EPOCH, ())
    assert (rank.state.position.epoch, rank.state.position.offset, rank.state.position.step) == (2, 0, 4)
    assert rank.saver.calls == calls
    assert rank.parts.recorder.epochs[-1].validation == {"loss": 0.5}


def test_the_last_epoch_is_closed_where_it_stands():
    rank = Rank()
    rank.duties.do(Duty.CLOSE_LAST_EPOCH, ())
    assert (rank.state.position.epoch, len(rank.parts.recorder.epochs)) == (1, 1)


def test_the_end_gathers_hashes_stops_and_why_the_last_save_failed():
    rank = Rank()
    rank.duties.do(Duty.COMPARE_WEIGHTS, ())
    assert rank.state.final_hashes == [["weights", False, "the disk is full"]]
    assert rank.compared == ["end"]


def test_the_hash_of_a_run_that_restores_its_best_weights_is_theirs():
    rank = Rank()
    rank.state.step_to_restore, rank.state.best = lambda: 2, SimpleNamespace(hash=lambda: "best")
    rank.duties.do(Duty.COMPARE_WEIGHTS, ())
    assert (rank.state.final_hashes[0][0], rank.state.restored) == ("best", 2)
