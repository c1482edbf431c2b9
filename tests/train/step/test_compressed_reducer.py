"""Compressed gradients: in exact mode the same bits for any number of workers, across resumes too; in fast
mode training still converges."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from tests.train.running import hashes, job, mlp, regression, train
from torch import nn

from paceline.train.callbacks import Modifier
from paceline.train.history import StepRecord
from paceline.train.settings.train_config import CheckpointConfig, GradientCompression, LossScaling

Kind = Literal["fp16", "bf16", "int8", "int4", "top-k"]
KINDS: list[Kind] = ["fp16", "bf16", "int8", "int4", "top-k"]
DATA = regression(29)


def compression(kind: Kind) -> GradientCompression:
    return GradientCompression(kind=kind, keep=0.3) if kind == "top-k" else GradientCompression(kind=kind)


class AsksToStop(Modifier):
    def __init__(self, after: int, request: Path) -> None:
        self._after, self._request, self._step = after, request, 0

    def change_batch(self, batch: Any) -> Any:
        if self._step + 1 == self._after:
            self._request.touch()
        return batch

    def stop(self, record: StepRecord) -> str | None:
        self._step = record.step
        return None


@pytest.mark.parametrize("kind", KINDS)
def test_same_bits_and_residuals_survive_a_resume(kind: Kind, tmp_path: Path) -> None:
    given = job(mlp(hidden=32), DATA, epochs=3, compression=compression(kind))
    expected = hashes(given, (1, 2, 3))
    assert len(set(expected)) == 1
    assert expected[0] != train(job(mlp(hidden=32), DATA, epochs=3)).hash, "something was lost on the way"

    request = tmp_path / "please"
    resumed = None
    for workers, resume in ((3, None), (2, "auto")):
        part = job(
            mlp(hidden=32),
            DATA,
            epochs=3,
            compression=compression(kind),
            run_dir=tmp_path / "run",
            resume=resume,
            checkpoint=CheckpointConfig(every_epochs=None),
        )
        part = dataclasses.replace(part, stop_file=request)
        callbacks = (lambda: [AsksToStop(4, request)]) if resume is None else list
        resumed = train(part, workers, callbacks)
        request.unlink(missing_ok=True)
    assert resumed is not None
    assert resumed.history.stopped is None
    assert resumed.hash == expected[0]


def test_doubles_and_complex_numbers_are_compressed_too() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.accurate = nn.Parameter(torch.linspace(-1, 1, 10, dtype=torch.float64).view(5, 2))
            self.phase = nn.Parameter(torch.ones(2, dtype=torch.complex64))

        def forward(self, x: torch.Tensor) -> Any:
            return (x.double() @ self.accurate).float() * self.phase.abs()

    given = job(Odd(), DATA, epochs=2, compression=compression("int8"))
    assert len(set(hashes(given, (1, 2, 3)))) == 1


def test_residuals_do_not_depend_on_the_loss_scale() -> None:
    """With powers of two as scales, what is owed is owed in the unit of the loss."""
    made = [
        train(
            job(
                mlp(hidden=32),
                DATA,
                epochs=3,
                precision="fp16",
                loss_scaling=LossScaling(initial=256.0, growth_interval=interval),
                compression=compression("top-k"),
            ),
            2,
        ).hash
        for interval in (2000, 1)
    ]
    assert made[0] == made[1]


@pytest.mark.parametrize("kind", KINDS)
def test_an_overflow_is_forgotten_with_its_step(kind: Kind) -> None:
    """One infinite gradient spoils neither residuals nor the memory that later steps use."""
    given = job(
        mlp(hidden=32),
        DATA,
        epochs=4,
        precision="fp16",
        loss_scaling=LossScaling(initial=2.0**20),
        compression=compression(kind),
    )
    outcomes = [train(given, workers) for workers in (1, 3)]
    skipped = [record.skipped for record in outcomes[0].history.steps]
    assert skipped[0]
    assert not any(skipped[-4:])
    assert len({outcome.hash for outcome in outcomes}) == 1
    assert all(parameter.isfinite().all() for parameter in outcomes[0].module.parameters())


@pytest.mark.parametrize("kind", [None, "bf16", "fp16"])
def test_fast_mode_converges(kind: Literal["bf16", "fp16"] | None) -> None:
    settings = None if kind is None else GradientCompression(kind=kind, error_feedback=False)
    data = regression(64)
    for workers in (1, 3):
        given = job(
            mlp(hidden=16),
            data,
            mode="fast",
            workers=workers,
            shards=workers,
            global_batch=16,
            epochs=25,
            compression=settings,
            optimizer=lambda p: torch.optim.Adam(p, 0.02),
        )
        outcome = train(given, workers)
        assert outcome.losses[-1] < 0.25 * outcome.losses[0]
        assert sum(record.samples for record in outcome.history.steps) == 25 * 64
