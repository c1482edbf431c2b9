"""Settings of `paceline train` for a trainer on another framework: they hold, or they are refused."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import paceline
from paceline.core.available_resources import cores
from paceline.core.errors import ConfigError
from paceline.frontends import overrides
from paceline.frontends.framework_trainers.framework_run import FrameworkRun, FrameworkWorker
from paceline.frontends.framework_trainers.framework_settings import FrameworkSettings, progress_shown
from paceline.train.settings.train_config import to_toml


def made(
    *texts: str, otherwise: dict[str, str] | None = None, given: Any = None, **options: Any
) -> paceline.TrainConfig:
    """Return what a trainer of two workers with 8 samples each trains with."""
    with overrides.in_force(overrides.Overrides(options, texts)):
        settings = FrameworkSettings(given, "horovod", checkpoint_dir=None, resume=False)
        settings.refuse(otherwise or {})
        return settings.train_config(2, 8, None)


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("precision=bf16", "in the model"),
        ("schedule=cosine", "the script's optimizer"),
        ("warmup_steps=2", "the script's optimizer"),
        ("limit_batches=2", "a setting of paceline.Trainer"),
        ("global_batch=40", "the script's data"),
        ("shuffle=false", "a setting of paceline.Trainer"),
        ("nonfinite=stop", "a setting of paceline.Trainer"),
        ("early_stopping={patience=2}", "a setting of paceline.Trainer"),
        ("dry_run=true", "a setting of paceline.Trainer"),
        ("seed=7", "a setting of paceline.Trainer"),
        ("mode=exact", "a setting of paceline.Trainer"),
        ("micro_batch=4", "gradient_accumulation_steps"),
        ("fault_tolerance.chaos=kill rank=0 step=2", "the framework and its launcher decide"),
        ("fault_tolerance.min_workers=2", "the framework and its launcher decide"),
        ("clip_norm=1.0", "it is the optimizer's"),
    ],
)
def test_a_setting_without_a_meaning_is_refused(text: str, remedy: str) -> None:
    otherwise = {"mixed_precision": "choose it in the model", "gradient_clipping": "it is the optimizer's"}
    with pytest.raises(ConfigError) as caught:
        made(text, otherwise=otherwise)
    name = text.partition("=")[0]
    assert caught.value.message.startswith(f"{name}=")
    assert caught.value.message.endswith("has no meaning under horovod")
    assert caught.value.facts["key"] == name
    assert remedy in caught.value.remedy


def test_settings_of_the_record_and_of_the_length_hold(tmp_path: Path) -> None:
    found = made(
        "max_steps=7",
        "clip_norm=0.5",
        "checkpoint.every_steps=2",
        "log_every=3",
        "progress=false",
        "timeout=9",
        "run_dir_access=group",
        "name=other",
        epochs=3,
        run_dir=str(tmp_path),
        resume="auto",
    )
    assert (found.epochs, found.max_steps, found.clip_norm) == (3, 7, 0.5)
    assert (found.checkpoint.every_steps, found.log_every, found.progress) == (2, 3, False)
    assert (found.timeout, found.run_dir_access, found.name) == (9.0, "group", "other")
    assert (found.run_dir, found.resume) == (str(tmp_path), "auto")


def test_what_says_no_more_than_holds_already_is_taken() -> None:
    """As a queue starts a run of a fixed size, and a pod any script."""
    made(
        "fault_tolerance.min_workers=2",
        "fault_tolerance.max_workers=2",
        "fault_tolerance.bind=10.0.0.1",
        "fault_tolerance.port=4000",
        "fault_tolerance.token_file=token",
        "global_batch=16",
        "mode=fast",
        "shards=2",
        workers=2,
    )


def test_the_settings_that_a_run_recorded_are_taken(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text(to_toml(dataclasses.replace(made(), run_dir=str(tmp_path)).resolved(2)))
    threads = made().resolved(cores()).threads
    with overrides.in_force(overrides.Overrides({"threads": threads}, file=str(file))):
        settings = FrameworkSettings(None, "horovod", checkpoint_dir=None, resume=False)
        assert settings.train_config(2, 8, None).run_dir == str(tmp_path)


def test_progress_and_the_trackers_steps_are_set_too(tmp_path: Path) -> None:
    chosen = overrides.Overrides({}, ("progress=false", "log_every=3"))
    with overrides.in_force(chosen):
        with progress_shown(True) as shown:
            assert shown == ()
        (tracker,) = FrameworkSettings(
            {"tensorboard": True, "log_every_n_steps": 9}, "horovod", checkpoint_dir=None, resume=False
        ).trackers()
    assert tracker.every == 3


def test_a_loss_that_is_not_finite_recommends_no_setting_that_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = paceline.TrainConfig(run_dir=str(tmp_path / "run"), mode="fast", epochs=1)
    with FrameworkRun.open(config, "other 1.0") as run, caplog.at_level(logging.WARNING):
        run.start([FrameworkWorker(0, 1, "here")], lambda: ({"model/weight": torch.zeros(1)}, {}))
        run.step(loss=float("nan"), samples=4)
        run.end_epoch()
        run.finish("the hash")
    assert "the loss of step 1 is nan" in caplog.text
    assert "nonfinite" not in caplog.text
