"""An evaluation with metrics over whole sets, while workers die in it, leave and come: the same numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.frontends.supervised_runs import of, supervised
from tests.train.small_run import UNATTENDED, adam, build, data, settings
from torch import Tensor, nn

import paceline
from paceline.core import events
from paceline.core.errors import RankFailedError, UsageError

KILLED = "kill rank=0 step=6 phase=evaluation; kill rank=2 step=11 phase=evaluation"


def macro_f1(outputs: Tensor, targets: Tensor) -> Tensor:
    guess = outputs.argmax(1)
    hits, pairs = (
        torch.stack([((guess == one) & (targets == one)).sum() for one in range(3)]),
        torch.stack([(guess == one).sum() + (targets == one).sum() for one in range(3)]),
    )
    return (2 * hits / pairs.clamp(min=1)).mean()


def auc(outputs: Tensor, targets: Tensor) -> Tensor:
    """The share of pairs of a sample of class 0 and another that the first output has in order."""
    score, is_first = outputs[:, 0], targets == 0
    return (score[is_first].unsqueeze(1) > score[~is_first]).double().mean()


def fit(config: paceline.TrainConfig, **more: Any) -> paceline.History:
    x, y = data()
    how = paceline.EvaluationConfig(
        metrics={"f1": macro_f1, "auc": auc}, sets={"tail": (x[20:], y[20:])}, batch_size=5, **more
    )
    trainer = paceline.Trainer(build, nn.CrossEntropyLoss(), optimizer=adam, config=config, evaluation=how)
    history = trainer.fit((x, y), (x[:40], y[:40]))
    if config.workers == 1:
        assert trainer.evaluate((x[20:], y[20:]))["auc"] == history.evaluations[-1].metrics["tail/auc"]
    return history


def numbers(history: paceline.History) -> list[tuple[int, dict[str, float]]]:
    return [(evaluation.step, evaluation.metrics) for evaluation in history.evaluations]


def test_workers_killed_in_it_and_a_resume_on_another_number_leave_no_trace(tmp_path: Path) -> None:
    alone = fit(settings(tmp_path / "alone", 1, epochs=3, fault_tolerance=UNATTENDED))
    assert set(alone.evaluations[0].metrics) == {
        f"{prefix}{name}" for prefix in ("", "tail/") for name in ("loss", "accuracy", "f1", "auc")
    }
    killed = fit(supervised(tmp_path / "killed", 3, KILLED, epochs=3))
    assert len(of(events.FaultInjected, tmp_path / "killed")) == 2
    assert numbers(killed) == numbers(alone)
    assert killed.state_hash == alone.state_hash

    fit(supervised(tmp_path / "resized", 4, epochs=1))
    resumed = fit(supervised(tmp_path / "resized", 2, epochs=3, resume="auto"))
    assert numbers(resumed) == numbers(alone)
    assert resumed.state_hash == alone.state_hash


def test_an_error_of_a_metric_is_the_users_and_is_shown_once(tmp_path: Path) -> None:
    def no_positives(outputs: Tensor, targets: Tensor) -> float:
        raise ValueError("no positive samples")

    x, y = data()
    trainer = paceline.Trainer(
        build,
        nn.CrossEntropyLoss(),
        optimizer=adam,
        config=supervised(tmp_path / "run", 2, epochs=1),
        evaluation=paceline.EvaluationConfig(metrics={"ratio": no_positives}),
    )
    with pytest.raises(RankFailedError, match="raised ValueError: no positive samples") as raised:
        trainer.fit((x, y), (x, y))
    assert str(raised.value).count("in the evaluation after step 5") == 1


def test_early_stopping_that_watches_no_metric_of_the_evaluation_says_what_there_is(tmp_path: Path) -> None:
    stopping = paceline.EarlyStopping(metric="tail/recall", mode="max")
    with pytest.raises(UsageError, match=r"watches 'tail/recall', and the evaluation has .*tail/f1"):
        fit(settings(tmp_path / "run", 1, epochs=1, early_stopping=stopping, fault_tolerance=UNATTENDED))
